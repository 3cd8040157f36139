"""Linears: E4M3 weights with 32 x 32 scale tiles, the grouped output projection, and plain bf16."""

import torch

from ..._op import Op, check, check_tensor, output
from ...formats import MXFP8
from ..quant.api import mxfp8_operand

_BLOCK = Op(
    "block_linear(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, Tensor(a!) out) -> ()",
    reference="dsv41_reference.linear:block_linear",
    package=__package__,
)
_GROUPED = Op(
    "grouped_linear(Tensor x, Tensor w, Tensor w_scale, Tensor(a!) out) -> ()",
    reference="dsv41_reference.linear:grouped_linear",
    package=__package__,
)
_LINEAR = Op(
    "linear(Tensor x, Tensor w, Tensor(a!) out) -> ()",
    reference="dsv41_reference.linear:linear",
    package=__package__,
)


def _check_weight(name: str, w: MXFP8) -> None:
    check(
        isinstance(w, MXFP8) and w.tile_rows == 32 and w.values.dim() == 2,
        name,
        "w: MXFP8 of 32 x 32 tiles",
        w,
    )


def block_linear(x: torch.Tensor | MXFP8, w: MXFP8, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Linear with E4M3 weights in 32 x 32 tiles and MXFP8 activations.

        out = dequantize(x) @ dequantize(w).T, accumulated in f32, rounded once

    Args:
        x: [num_tokens, in] bf16, quantised here, or an MXFP8 view of values [num_tokens, in] e4m3.
        w: MXFP8 tiles: values [out, in] e4m3, scale [out/32, in/32] e8m0.
        out: [num_tokens, out] bf16 to write into.

    Returns:
        [num_tokens, out] bf16; ``out`` itself when it was given.

    Contract: no host sync; graph-safe; allocates only what is None (and the quantised x); the same bits on
        every run.
    Reference: dsv41_reference.linear.block_linear
    """
    name = "block_linear"
    _check_weight(name, w)
    x = mxfp8_operand(name, x, w.values.shape[1], w.values)
    shape = (x.values.shape[0], w.values.shape[0])
    out = output(name, out, shape, torch.bfloat16, w.values)
    _BLOCK(*x.flat(), *w.flat(), out)
    return out


def grouped_linear(x: torch.Tensor, w: MXFP8, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """One linear a group (``wo_a``): bf16 activations, not quantised, and E4M3 weights in 32 x 32 tiles.

        out[t, g] = dequantize(w)[g] @ x[t, g], w viewed as [groups, rank, in]

    Args:
        x: [num_tokens, groups, in] bf16.
        w: MXFP8 tiles: values [groups * rank, in] e4m3, any rank that fills whole tiles in all.
        out: [num_tokens, groups, rank] bf16 to write into.

    Returns:
        [num_tokens, groups, rank] bf16; ``out`` itself when it was given.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run.
    Reference: dsv41_reference.linear.grouped_linear
    """
    name = "grouped_linear"
    _check_weight(name, w)
    check_tensor(name, "x", x, (None, None, w.values.shape[1]), torch.bfloat16, like=w.values)
    groups = x.shape[1]
    check(groups > 0 and w.values.shape[0] % groups == 0, name, "w: [groups * rank, in]", w.values)
    shape = (x.shape[0], groups, w.values.shape[0] // groups)
    out = output(name, out, shape, torch.bfloat16, x)
    _GROUPED(x, *w.flat(), out)
    return out


def linear(
    x: torch.Tensor, w: torch.Tensor, *, dtype: torch.dtype | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Plain linear with f32 accumulation: router, compressor, index projections, logits.

        out = x @ w.T, rounded once to the output type

    Args:
        x: [num_tokens, in] bf16.
        w: [out, in] bf16.
        dtype: output type, float32 or bfloat16 (default).
        out: [num_tokens, out] of that type to write into.

    Returns:
        [num_tokens, out]; ``out`` itself when it was given.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run.
    Reference: dsv41_reference.linear.linear
    """
    check_tensor("linear", "w", w, (None, None), torch.bfloat16)
    check_tensor("linear", "x", x, (None, w.shape[1]), torch.bfloat16, like=w)
    dtype = dtype or (out.dtype if out is not None else torch.bfloat16)
    check(dtype in (torch.float32, torch.bfloat16), "linear", "dtype: float32 or bfloat16", dtype)
    shape = (x.shape[0], w.shape[0])
    out = output("linear", out, shape, dtype, x)
    _LINEAR(x, w, out)
    return out
