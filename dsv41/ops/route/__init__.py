from .api import physical_experts, topk_route

__all__ = ["physical_experts", "topk_route"]
