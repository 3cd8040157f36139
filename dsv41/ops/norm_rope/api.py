"""RMSNorm and rotary embedding."""

import torch

from ..._op import Kernel, Op, check, check_apart, check_flags, check_numbers, check_tensor, output
from ...formats import MXFP8
from ..quant.api import quantised_output, unaligned


def _rows_fit(x: torch.Tensor, weight: torch.Tensor, eps: float, *outputs: torch.Tensor) -> str | None:
    if x.shape[1] % 8 or x.shape[1] > 32768:
        return "dim: no multiple of 8, or above 32,768"
    return unaligned(x=x, weight=weight, **{f"out {i}": out for i, out in enumerate(outputs)})


def _norm_quantize_fits(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    floor: float,
    norm: torch.Tensor | None,
    values: torch.Tensor,
    scale: torch.Tensor,
) -> str | None:
    return _rows_fit(x, weight, eps, values, *(() if norm is None else (norm,)))


_NPU = Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu"))


def _rope_fits(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool, out: torch.Tensor
) -> str | None:
    if cos.shape[1] % 4 or x.shape[2] % 8:
        return "dim: no multiple of 8, or rope_dim no multiple of 8"
    return unaligned(x=x, cos=cos, sin=sin, out=out)


_RMS_NORM = Op(
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!) out) -> ()",
    reference="dsv41_reference.norm_rope:rms_norm",
    package=__package__,
    kernels=(
        Kernel("tilelang_cuda", "cuda", needs=("tilelang",), supports=_rows_fit),
        _NPU,
    ),
)
NORM_QUANTIZE = Op(
    "rms_norm_quantize(Tensor x, Tensor weight, float eps, float floor, Tensor(a!)? norm, Tensor(b!) values,"
    " Tensor(c!) scale) -> ()",
    reference="dsv41_reference.norm_rope:rms_norm_quantize",
    package=__package__,
    kernels=(
        Kernel("tilelang_cuda", "cuda", needs=("tilelang",), supports=_norm_quantize_fits),
        _NPU,
    ),
)
_ROPE = Op(
    "rope(Tensor x, Tensor cos, Tensor sin, bool inverse, Tensor(a!) out) -> ()",
    reference="dsv41_reference.norm_rope:rope",
    package=__package__,
    kernels=(
        Kernel("tilelang_cuda", "cuda", needs=("tilelang",), supports=_rope_fits),
        _NPU,
    ),
)


def check_rope_table(
    name: str, cos: torch.Tensor, sin: torch.Tensor, tokens: int, dim: int, like: torch.Tensor
) -> None:
    """Check cos and sin: [tokens, rope_dim/2] f32 with rope_dim at most ``dim``."""
    check_tensor(name, "cos", cos, (tokens, None), torch.float32, like=like)
    check_tensor(name, "sin", sin, (tokens, cos.shape[1]), torch.float32, like=like)
    check(2 * cos.shape[1] <= dim, name, f"cos: at most {dim // 2} angles", cos)


def warps(width: int) -> int:
    """Warps a row on Hopper: four turns of 8 values a lane at most; the order of the sum."""
    return -(-width // 1024)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Root-mean-square normalisation of each row.

        out = weight * (x * rsqrt(mean(x^2) + eps)), computed in f32, rounded once

    Args:
        x: [num_tokens, dim] bf16; rows may be strided.
        weight: [dim] bf16.
        eps: added to the mean square (1e-20 in V4.1).
        out: [num_tokens, dim] bf16 to write into.

    Returns:
        [num_tokens, dim] bf16; ``out`` itself when it was given. A row of zeros is zero where eps is at
        least 2^-126; above about 1e19 squares overflow, and a row becomes zero.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run.
    Reference: dsv41_reference.norm_rope.rms_norm
    """
    check_tensor("rms_norm", "x", x, (None, None), torch.bfloat16)
    check_tensor("rms_norm", "weight", weight, (x.shape[1],), torch.bfloat16, like=x)
    check_numbers("rms_norm", eps=eps)
    out = output("rms_norm", out, tuple(x.shape), torch.bfloat16, x)
    _RMS_NORM(x, weight, eps, out)
    return out


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    floor: float = 1e-4,
    norm: torch.Tensor | None = None,
    out: MXFP8 | None = None,
) -> MXFP8:
    """RMSNorm and the quantisation of its result in one pass over the rows.

        out = quantize_mxfp8(rms_norm(x, weight)), the norm rounded to bf16 in between

    Args:
        x: [num_tokens, dim] bf16, dim a multiple of 32; rows may be strided.
        weight: [dim] bf16.
        eps: added to the mean square (1e-20 in V4.1).
        floor: smallest block maximum that a scale is chosen for.
        norm: [num_tokens, dim] bf16 to write the rounded norm into too, or None.
        out: MXFP8 view to write into: values [num_tokens, dim] e4m3, scale [num_tokens, dim/32] e8m0.

    Returns:
        MXFP8; ``out`` itself when it was given. No tokens give empty tensors.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run and for every
        batch a row is in. A NaN spoils its own row only.
    Reference: dsv41_reference.norm_rope.rms_norm_quantize
    """
    name = "rms_norm_quantize"
    check_tensor(name, "x", x, (None, None), torch.bfloat16)
    check(x.shape[1] % 32 == 0, name, "x: [num_tokens, dim] with dim a multiple of 32", x)
    check_tensor(name, "weight", weight, (x.shape[1],), torch.bfloat16, like=x)
    check_numbers(name, eps=eps)
    check_numbers(name, above=True, floor=floor)
    if norm is not None:
        check_tensor(name, "norm", norm, tuple(x.shape), torch.bfloat16, like=x)
        check_apart(name, "norm", norm)
    out = quantised_output(name, MXFP8, out, tuple(x.shape), x)
    NORM_QUANTIZE(x, weight, eps, floor, norm, *out.flat())
    return out


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    inverse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate interleaved pairs of the last ``2 * cos.shape[1]`` dimensions of every head.

        (a, b) -> (a cos - b sin, b cos + a sin), computed in f32, rounded once; inverse negates the angle

    Args:
        x: [num_tokens, num_heads, dim] bf16.
        cos: [num_tokens, rope_dim/2] f32, rows of `dsv41_reference.rope.rope_table`.
        sin: [num_tokens, rope_dim/2] f32.
        inverse: rotate back.
        out: [num_tokens, num_heads, dim] bf16 to write into; may be ``x``.

    Returns:
        [num_tokens, num_heads, dim] bf16; ``out`` itself when it was given.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run.
    Reference: dsv41_reference.norm_rope.rope
    """
    check_tensor("rope", "x", x, (None, None, None), torch.bfloat16)
    check_rope_table("rope", cos, sin, x.shape[0], x.shape[2], x)
    check_flags("rope", inverse=inverse)
    out = output("rope", out, tuple(x.shape), torch.bfloat16, x)
    _ROPE(x, cos, sin, inverse, out)
    return out
