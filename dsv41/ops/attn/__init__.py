from .api import sparse_attn, sparse_attn_scratch

__all__ = ["sparse_attn", "sparse_attn_scratch"]
