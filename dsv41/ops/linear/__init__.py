from .api import (
    block_linear,
    block_linear_scratch,
    grouped_linear,
    grouped_linear_scratch,
    linear,
    linear_scratch,
    pack_linear,
)

__all__ = [
    "block_linear",
    "block_linear_scratch",
    "grouped_linear",
    "grouped_linear_scratch",
    "linear",
    "linear_scratch",
    "pack_linear",
]
