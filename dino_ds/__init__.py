"""DINO self-supervised pre-training of Vision Transformers on DeepSpeed."""

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dino_ds.api import Run, curate, embed, evaluate, find, plan, report, train
    from dino_ds.commands.model import load

__version__ = "0.1.0"
__all__ = ["Run", "curate", "embed", "evaluate", "find", "load", "plan", "report", "train"]


def __getattr__(name: str) -> Any:
    """Import the Python API on first use: most commands need no torch."""
    if name == "load":
        from dino_ds.commands.model import load

        return load
    if name.startswith("_") or (name not in __all__ and find_spec(f"{__name__}.{name}")):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dino_ds import api

    return getattr(api, name) if name in __all__ else api.__getattr__(name)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # `dino_ds.train` stays the function: an import of the module dino_ds.train would set the attribute to it.
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*(name for name in super().__dir__() if name.startswith("__")), *__all__})


sys.modules[__name__].__class__ = _Package
