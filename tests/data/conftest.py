"""A cache of its own for each test, and modules of a user's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DINO_DS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """Write a module into the current folder, which is not on Python's path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])

    def write(name: str, text: str) -> None:
        sys.modules.pop(name, None)
        (tmp_path / f"{name}.py").write_text(text)

    return write
