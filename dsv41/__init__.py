"""dsv41: the building blocks of DeepSeek-V4.1-Flash. Sub-packages load on first use; importing runs
nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._op import Target, Unsupported, batch_invariant, explain, no_compile, use
from ._version import __version__
from .config import V41FlashConfig

if TYPE_CHECKING:
    from . import cache, eplb, formats, layers, ops, replay, spec
    from .memory import plan_memory
    from .warm import prepare

_HOMES = {"plan_memory": "memory", "prepare": "warm"}  # functions whose modules load on first use
_SUBPACKAGES = ("cache", "eplb", "formats", "layers", "ops", "replay", "spec")
__all__ = [
    "Target",
    "Unsupported",
    "V41FlashConfig",
    "__version__",
    "batch_invariant",
    "cache",
    "eplb",
    "explain",
    "formats",
    "layers",
    "no_compile",
    "ops",
    "plan_memory",
    "prepare",
    "replay",
    "spec",
    "use",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
