"""docs/notebook.ipynb has been run, and runs: the Python API in a kernel.

python -m tests.notebook.test_notebook      # runs its cells and writes it with their outputs, in minutes
"""

from __future__ import annotations

import base64
import io
import re
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

from tests.run.harness import REPOSITORY

NOTEBOOK = REPOSITORY / "docs/notebook.ipynb"
_NOISE = re.compile(r"^(\S*Tqdm\w*Warning|.*IProgress not found|\S*/ld: )", re.M)
"""Of a machine without Jupyter's widgets, or without a library that DeepSpeed looks for."""


def execute(notebook: nbformat.NotebookNode, docs: Path) -> None:
    """As if it lay in a new folder `docs`, beside which it makes a folder of runs. Raises CellExecutionError."""
    docs.mkdir()
    place = {"metadata": {"path": str(docs)}}
    limits = dict.fromkeys(("timeout", "startup_timeout", "iopub_timeout"), 600)
    NotebookClient(notebook, resources=place, **limits).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran: another file each time
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _NOISE.search(output.get("text", ""))]
    notebook.metadata.pop("language_info", None)


def _pictures(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    data = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    return [Image.open(io.BytesIO(base64.b64decode(text))) for text in data]


def test_the_notebook_in_docs_has_been_run():
    """If not: python -m tests.notebook.test_notebook."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == [*range(1, len(counts) + 1)]
    assert len(_pictures(notebook)) == 4
    assert NOTEBOOK.stat().st_size < 300_000


_FEW = '"data.workers": "0", "data.global_batch": "8"'
SMALLER = {
    "max_steps=300": "max_steps=2", '"150 steps"': f'"0 steps", {_FEW}', '"25 steps"': f'"0 steps", {_FEW}',
    "3200 images": "16 images", "dino_ds.embed(run)\n": "dino_ds.embed(run, workers=0)\n",
    "k=10)": "k=10, images=400, workers=0)", "len(source), 4)": "len(source), 40)", "labels[::4]": "labels[::40]",
    "epochs=30": "epochs=1", "epochs=5": "epochs=1",
}  # fmt: skip
"""Than the run that is shown, and no processes that load images."""


@pytest.mark.slow
def test_it_trains_looks_embeds_and_evaluates(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for shown, small in SMALLER.items():
        (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and shown in cell.source)
        cell.source = cell.source.replace(shown, small)
    execute(notebook, tmp_path / "docs")
    assert all(picture.width > 100 for picture in _pictures(notebook))
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "notebook: 1 lines of metrics, the last: {'step': 2" in said
    assert "knn_10" in said and "by chance 5.6 %" in said
    assert all((tmp_path / "runs" / run / "teacher.safetensors").exists() for run in ("notebook", "continued"))


if __name__ == "__main__":
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder) / "docs")
    nbformat.write(notebook, NOTEBOOK)
