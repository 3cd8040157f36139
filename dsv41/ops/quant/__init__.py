from .api import quantize_mxfp4, quantize_mxfp8, quantize_nvfp4, swiglu_quantize

__all__ = ["quantize_mxfp4", "quantize_mxfp8", "quantize_nvfp4", "swiglu_quantize"]
