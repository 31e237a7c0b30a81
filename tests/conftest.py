"""Fast tests first; all are of the CPU but those marked "gpu"."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lists of images that tests make do not stay in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DINO_DS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Beside a GPU the others must not see it: two ranks would share it, and tensors of the CPU meet its own."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` and `-m "numerical ..."` import no file without such a test: that takes long, and some need packages
    that an image for GPUs lacks."""
    mark = config.option.markexpr.partition(" ")[0]
    if mark not in ("gpu", "numerical") or not collection_path.name.startswith("test_"):
        return None
    return f"mark.{mark}" not in collection_path.read_text() or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU, and pytest -m gpu"))
