"""The notebook of docs/, made of source.py and run.

python -m tests.notebook.build      # writes docs/notebook.ipynb with its outputs, in minutes
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

SOURCE = Path(__file__).parent / "source.py"
NOTEBOOK = Path(__file__).parent.parent.parent / "docs/notebook.ipynb"
_SECONDS = 600
_NOISE = re.compile(r"^(\S*Tqdm\w*Warning|.*IProgress not found|\S*/ld: )", re.M)
"""Of a machine without Jupyter's widgets, or without a library that DeepSpeed looks for."""


def build() -> nbformat.NotebookNode:
    """Cells of the percent format; without outputs."""
    notebook = nbformat.v4.new_notebook()
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for number, part in enumerate(re.split(r"^# %%", SOURCE.read_text(), flags=re.M)[1:]):
        kind, _, text = part.partition("\n")
        if "[markdown]" in kind:
            cell = nbformat.v4.new_markdown_cell(re.sub(r"^# ?", "", text, flags=re.M).strip())
        else:
            cell = nbformat.v4.new_code_cell(text.strip())
        cell.id = f"cell-{number:02d}"
        notebook.cells.append(cell)
    return notebook


def execute(notebook: nbformat.NotebookNode, docs: Path) -> None:
    """As if it lay in `docs`, beside which it makes a folder of runs. Raises CellExecutionError."""
    place = {"metadata": {"path": str(docs)}}
    NotebookClient(notebook, timeout=_SECONDS, resources=place).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran: another file each time
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _NOISE.search(output.get("text", ""))]
    notebook.metadata.pop("language_info", None)


def main() -> None:
    notebook = build()
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(folder) / "docs"
        docs.mkdir()
        execute(notebook, docs)
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
