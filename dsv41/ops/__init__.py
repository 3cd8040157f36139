"""Every op, flat: ``dsv41.ops.quantize_mxfp8``, ``dsv41.ops.sparse_attn``, ..."""

from .quant import quantize_mxfp4, quantize_mxfp8, quantize_nvfp4, swiglu_quantize

__all__ = ["quantize_mxfp4", "quantize_mxfp8", "quantize_nvfp4", "swiglu_quantize"]
