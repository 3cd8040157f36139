"""Linears: block-scaled, grouped block-scaled, and plain."""

import torch

from .numerics import accumulator, bf16, matmul, narrow, weight
from .quant import coarsen_mxfp8, from_fp8_tiles, from_mxfp8, from_mxfp8_tiles


def block_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    numerics: str,
    out: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.block_linear``."""
    unpack = from_mxfp8_tiles
    if numerics == "fp8":
        unpack = from_fp8_tiles
        x, x_scale = coarsen_mxfp8(x, x_scale)
    out.copy_(bf16(matmul(from_mxfp8(x, x_scale, accumulator()), weight(unpack, w, w_scale))))


def grouped_linear(
    x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Reference of ``dsv41.ops.grouped_linear``."""
    groups = x.shape[1]
    stacked = weight(from_mxfp8_tiles, w, w_scale).unflatten(0, (groups, -1))
    out.copy_(bf16(matmul(x.transpose(0, 1), stacked)).transpose(0, 1))


def linear(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
    """Reference of ``dsv41.ops.linear``."""
    out.copy_(narrow(matmul(x, w), out.dtype))
