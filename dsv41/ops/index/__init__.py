from .api import index_query, index_topk, topk

__all__ = ["index_query", "index_topk", "topk"]
