from .api import sparse_attn

__all__ = ["sparse_attn"]
