"""Linears through PyTorch's libraries: any GPU, any size. Weights are expanded to bf16 for the call."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from dsv41_reference.quant import coarsen_mxfp8, from_fp8_tiles, from_mxfp8, from_mxfp8_tiles


@contextmanager
def _full_sums() -> Iterator[None]:
    """Inside, the library adds partial sums in f32."""
    flags = torch.backends.cuda.matmul
    kept = flags.allow_bf16_reduced_precision_reduction
    flags.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        flags.allow_bf16_reduced_precision_reduction = kept


def block_linear(x, x_scale, w, w_scale, numerics, out, scratch):
    """``dsv41.ops.block_linear``; scale codes 3 to 246 are exact in bf16."""
    unpack = from_mxfp8_tiles
    if numerics == "fp8":
        unpack = from_fp8_tiles
        x, x_scale = coarsen_mxfp8(x, x_scale)
    linear(from_mxfp8(x, x_scale).bfloat16(), unpack(w, w_scale).bfloat16(), out, None)


def grouped_linear(x, w, w_scale, out, scratch):
    """``dsv41.ops.grouped_linear``."""
    groups = x.shape[1]
    weights = from_mxfp8_tiles(w, w_scale, torch.bfloat16).unflatten(0, (groups, -1))
    with _full_sums():
        torch.bmm(x.transpose(0, 1), weights.transpose(1, 2), out=out.transpose(0, 1))


def linear(x, w, out, scratch):
    """``dsv41.ops.linear``."""
    if 0 in (*x.shape, *w.shape):
        out.zero_()
        return
    with _full_sums():
        if out.dtype == x.dtype:
            torch.mm(x, w.t(), out=out)
        else:
            torch.mm(x, w.t(), out.dtype, out=out)
