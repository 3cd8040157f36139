from .api import index_query, index_topk, index_topk_scratch, topk, topk_scratch

__all__ = ["index_query", "index_topk", "index_topk_scratch", "topk", "topk_scratch"]
