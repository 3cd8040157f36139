from .api import rms_norm, rms_norm_quantize, rope

__all__ = ["rms_norm", "rms_norm_quantize", "rope"]
