from .api import topk_route

__all__ = ["topk_route"]
