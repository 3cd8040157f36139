from .api import mxfp4_moe, mxfp4_moe_scratch, pack_experts

__all__ = ["mxfp4_moe", "mxfp4_moe_scratch", "pack_experts"]
