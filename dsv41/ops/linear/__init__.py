from .api import block_linear, grouped_linear, linear

__all__ = ["block_linear", "grouped_linear", "linear"]
