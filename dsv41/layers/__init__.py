"""The model as modules. `V41Flash` and `V41State` load on first use; ``weights`` and ``engram`` are
modules.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import V41Flash
    from .state import V41State

_HOMES = {"V41Flash": "model", "V41State": "state"}
__all__ = ["V41Flash", "V41State"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
