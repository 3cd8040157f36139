from .api import mxfp4_moe

__all__ = ["mxfp4_moe"]
