from .api import block_linear, block_linear_scratch, grouped_linear, linear, pack_linear

__all__ = ["block_linear", "block_linear_scratch", "grouped_linear", "linear", "pack_linear"]
