"""Runs the cells of docs/notebook.ipynb and writes the notebook with their outputs, in minutes.

python -m tests.notebook.build
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent.parent / "docs/notebook.ipynb"
_SECONDS = 600
_NOISE = re.compile(r"^(\S*Tqdm\w*Warning|.*IProgress not found|\S*/ld: )", re.M)
"""Of a machine without Jupyter's widgets, or without a library that DeepSpeed looks for."""


def execute(notebook: nbformat.NotebookNode, docs: Path) -> None:
    """As if it lay in `docs`, beside which it makes a folder of runs. Raises CellExecutionError."""
    place = {"metadata": {"path": str(docs)}}
    limits = dict.fromkeys(("timeout", "startup_timeout", "iopub_timeout"), _SECONDS)
    NotebookClient(notebook, resources=place, **limits).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran: another file each time
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _NOISE.search(output.get("text", ""))]
    notebook.metadata.pop("language_info", None)


def main() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(folder) / "docs"
        docs.mkdir()
        execute(notebook, docs)
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
