"""DINO self-supervised pre-training of Vision Transformers on DeepSpeed."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`dino_ds.load`, imported when it is asked for: most commands need no torch."""
    if name == "load":
        from dino_ds.weights.load import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
