"""docs/notebook.ipynb is what source.py says, has been run, and runs on a teacher that it has never seen."""

from __future__ import annotations

import base64
import io

import nbformat
import pytest
from PIL import Image

from dino_ds.weights.export import FORMATS
from tests.notebook.build import NOTEBOOK, build, execute
from tests.training.harness import REPOSITORY
from tests.weights.test_weights import _backbone


def _pictures(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    data = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    return [Image.open(io.BytesIO(base64.b64decode(text))) for text in data]


def test_the_notebook_in_docs_is_the_source_and_has_been_run():
    """If not: python -m tests.notebook.build RUN."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in build().cells
    ]
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert len(_pictures(notebook)) == 3
    assert NOTEBOOK.stat().st_size < 300_000


@pytest.mark.slow
def test_it_runs_from_docs_after_the_quickstart(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    (tmp_path / "docs").mkdir()
    (tmp_path / "runs/quickstart").mkdir(parents=True)
    FORMATS["safetensors"][0](_backbone(), tmp_path / "runs/quickstart/teacher.safetensors")
    notebook = build()
    execute(notebook, tmp_path / "docs")
    assert all(picture.width > 100 for picture in _pictures(notebook))
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "64 features, images of 32 pixels, patches of 8" in said
