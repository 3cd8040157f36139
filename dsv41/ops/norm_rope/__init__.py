from .api import rms_norm, rope

__all__ = ["rms_norm", "rope"]
