"""Quantise activations to the block formats of `dsv41.formats`."""

from collections.abc import Mapping
from typing import TypeVar

import torch

from ..._op import (
    Kernel,
    Op,
    check,
    check_apart,
    check_flags,
    check_numbers,
    check_tensor,
    check_values,
    output,
)
from ...formats import E4M3, E8M0, MXFP4, MXFP8, NVFP4

_View = TypeVar("_View", MXFP8, MXFP4, NVFP4)


def unaligned(**rows: torch.Tensor) -> str | None:
    """Why kernels that access 16 bytes (8 or 4 of a result) at a time do not take these rows, or None."""
    for label, x in rows.items():
        unit = 16 if x.dtype in (torch.bfloat16, torch.float32) else 8 if x.dtype == E4M3 else 4
        strides = x.stride()[:-1]
        if x.data_ptr() % unit or any(s * x.element_size() % unit for s in strides):
            return f"{label}: start or row stride is no multiple of {unit} bytes"
        if x.numel() >= 2**31:
            return f"{label}: 2^31 elements or more"
    return None


def _rows_fit(x: torch.Tensor, floor: float, values: torch.Tensor, scale: torch.Tensor) -> str | None:
    return unaligned(x=x, values=values)


def _swiglu_fits(
    gate_up: torch.Tensor,
    weight: torch.Tensor | None,
    limit: float,
    round_bf16: bool,
    values: torch.Tensor,
    scale: torch.Tensor,
) -> str | None:
    return unaligned(gate_up=gate_up, values=values)


_KERNELS = (
    Kernel("tilelang_cuda", "cuda", needs=("tilelang",), supports=_rows_fit),
    Kernel("triton_cuda", "cuda", needs=("triton",)),
    Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu")),
)
_MXFP8 = Op(
    "quantize_mxfp8(Tensor x, float floor, Tensor(a!) values, Tensor(b!) scale) -> ()",
    reference="dsv41_reference.quant:quantize_mxfp8",
    package=__package__,
    kernels=_KERNELS,
)
_MXFP4 = Op(
    "quantize_mxfp4(Tensor x, float floor, Tensor(a!) values, Tensor(b!) scale) -> ()",
    reference="dsv41_reference.quant:quantize_mxfp4",
    package=__package__,
    kernels=_KERNELS,
)
_NVFP4 = Op(
    "quantize_nvfp4(Tensor x, float floor, Tensor(a!) values, Tensor(b!) scale) -> ()",
    reference="dsv41_reference.quant:quantize_nvfp4",
    package=__package__,
    kernels=_KERNELS,
)
_SWIGLU = Op(
    "swiglu_quantize(Tensor gate_up, Tensor? weight, float limit, bool round_bf16, Tensor(a!) values,"
    " Tensor(b!) scale) -> ()",
    reference="dsv41_reference.quant:swiglu_quantize",
    package=__package__,
    kernels=(
        Kernel("tilelang_cuda", "cuda", needs=("tilelang",), supports=_swiglu_fits),
        Kernel("triton_cuda", "cuda", needs=("triton",)),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu")),
    ),
)


def quantised_output(
    name: str, kind: type[_View], out: _View | None, shape: tuple[int, ...], like: torch.Tensor
) -> _View:
    """The caller's view after a check, or a new one for values of logical ``shape``."""
    *rows, width = shape
    packed = width if kind is MXFP8 else width // 2
    dtype = E4M3 if kind is MXFP8 else torch.uint8
    if out is not None:
        rowwise = isinstance(out, kind) and getattr(out, "tile_rows", 1) == 1
        check(rowwise, name, f"out: {kind.__name__} with a scale a row block", type(out).__name__)
    values = output(name, None if out is None else out.values, (*rows, packed), dtype, like, "out.values")
    if out is not None:
        check_apart(name, "out.scale", out.scale)
        return out
    groups, scale_dtype = (width // 16, E4M3) if kind is NVFP4 else (width // 32, E8M0)
    scale = torch.empty((*rows, groups), dtype=torch.uint8, device=like.device).view(scale_dtype)
    return kind(values, scale)


def _check_rows(name: str, x: torch.Tensor, block: int, floor: float) -> None:
    check_tensor(name, "x", x, (None, None), torch.bfloat16, torch.float32)
    check(x.shape[1] % block == 0, name, f"x: [num_tokens, K] with K a multiple of {block}", x)
    check_numbers(name, above=True, floor=floor)


def check_scales(name: str, scales: Mapping[str, torch.Tensor]) -> None:
    """Under DSV41_CHECK=1, refuse E8M0 scales with a byte of 255, which is NaN; waits for the device."""
    if check_values():
        for label, scale in scales.items():
            bad = (scale.view(torch.uint8) == 255).nonzero()[:1].tolist()
            check(not bad, name, f"{label}: no byte 255 (NaN)", f"one at {bad}")


def mxfp8_operand(name: str, x: torch.Tensor | MXFP8, width: int, like: torch.Tensor) -> MXFP8:
    """An op's activations [num_tokens, width]: bf16 that is quantised here, or MXFP8 of 1 x 32 blocks."""
    if isinstance(x, torch.Tensor):
        check_tensor(name, "x", x, (None, width), torch.bfloat16, like=like)
        return quantize_mxfp8(x)
    check(isinstance(x, MXFP8), name, "x: bf16 tensor or MXFP8", type(x).__name__)
    check(x.tile_rows == 1, name, "x: MXFP8 of 1 x 32 blocks", x.tile_rows)
    check_tensor(name, "x.values", x.values, (None, width), E4M3, like=like)
    check_scales(name, {"x.scale": x.scale})
    return x


def quantize_mxfp8(x: torch.Tensor, *, floor: float = 1e-4, out: MXFP8 | None = None) -> MXFP8:
    """Quantise rows to E4M3 with one UE8M0 scale a 32 values.

        scale  = smallest power of two >= max(|block|, floor) / 448
        values = nearest-even E4M3 of block / scale, saturating

    Args:
        x: [num_tokens, K] bf16 or f32, K a multiple of 32; rows may be strided.
        floor: smallest block maximum that the scale is chosen for.
        out: MXFP8 view to write into: values [num_tokens, K] e4m3, scale [num_tokens, K/32] e8m0.

    Returns:
        MXFP8; ``out`` itself when it was given. No tokens give empty tensors.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run and for every
        batch a row is in. A NaN stays an E4M3 NaN, does not count in the maximum and changes no other value;
        an infinity becomes 448 under the largest scale.
    Reference: dsv41_reference.quant.quantize_mxfp8
    """
    _check_rows("quantize_mxfp8", x, 32, floor)
    out = quantised_output("quantize_mxfp8", MXFP8, out, tuple(x.shape), x)
    _MXFP8(x, floor, *out.flat())
    return out


def quantize_mxfp4(x: torch.Tensor, *, floor: float = 6 * 2.0**-126, out: MXFP4 | None = None) -> MXFP4:
    """Quantise rows to E2M1 with one UE8M0 scale a 32 values.

        scale  = smallest power of two >= max(|block|, floor) / 6
        values = nearest-even E2M1 of block / scale, saturating, even element in the low nibble

    Args:
        x: [num_tokens, K] bf16 or f32, K a multiple of 32; rows may be strided.
        floor: smallest block maximum that the scale is chosen for.
        out: MXFP4 view to write into: values [num_tokens, K/2] uint8, scale [num_tokens, K/32] e8m0.

    Returns:
        MXFP4; ``out`` itself when it was given. No tokens give empty tensors.

    Contract: as `quantize_mxfp8`, but E2M1 has no NaN: one becomes 0 and does not count in the maximum; an
        infinity becomes 6 under the largest scale.
    Reference: dsv41_reference.quant.quantize_mxfp4
    """
    _check_rows("quantize_mxfp4", x, 32, floor)
    out = quantised_output("quantize_mxfp4", MXFP4, out, tuple(x.shape), x)
    _MXFP4(x, floor, *out.flat())
    return out


def quantize_nvfp4(x: torch.Tensor, *, floor: float = 6 * 2.0**-9, out: NVFP4 | None = None) -> NVFP4:
    """Quantise rows to E2M1 with one E4M3 scale a 16 values and no global scale.

        scale  = nearest-even E4M3 of max(|block|, floor) / 6
        values = nearest-even E2M1 of block / scale (true division), saturating

    Args:
        x: [num_tokens, K] bf16 or f32, K a multiple of 16; rows may be strided.
        floor: smallest block maximum that the scale is chosen for.
        out: NVFP4 view to write into: values [num_tokens, K/2] uint8, scale [num_tokens, K/16] e4m3.

    Returns:
        NVFP4; ``out`` itself when it was given. No tokens give empty tensors.

    Contract: as `quantize_mxfp8`, but E2M1 has no NaN: one becomes 0 and does not count in the maximum; an
        infinity becomes 6 under the scale 448.
    Reference: dsv41_reference.quant.quantize_nvfp4
    """
    _check_rows("quantize_nvfp4", x, 16, floor)
    out = quantised_output("quantize_nvfp4", NVFP4, out, tuple(x.shape), x)
    _NVFP4(x, floor, *out.flat())
    return out


def swiglu_quantize(
    gate_up: torch.Tensor,
    *,
    limit: float,
    weight: torch.Tensor | None = None,
    round_bf16: bool = True,
    out: MXFP8 | None = None,
) -> MXFP8:
    """Clamped SwiGLU, times the routing weight, quantised to MXFP8.

        y = silu(min(gate, limit)) * clamp(up, -limit, limit) * weight
        out = MXFP8 of y, rounded to bf16 first unless ``round_bf16`` is off

    Args:
        gate_up: [num_tokens, 2 * inter] bf16, gate first; inter a multiple of 32.
        limit: clamp; the gate from above only.
        weight: [num_tokens] f32, or None for 1.
        round_bf16: the model's order of rounding; off is the fused kernels' of other libraries.
        out: MXFP8 view to write into: values [num_tokens, inter] e4m3, scale [num_tokens, inter/32] e8m0.

    Returns:
        MXFP8; ``out`` itself when it was given. No tokens give empty tensors.

    Contract: as `quantize_mxfp8`.
    Reference: dsv41_reference.quant.swiglu_quantize
    """
    name = "swiglu_quantize"
    check_tensor(name, "gate_up", gate_up, (None, None), torch.bfloat16)
    tokens, inter = gate_up.shape[0], gate_up.shape[1] // 2
    check(
        gate_up.shape[1] % 64 == 0, name, "gate_up: [num_tokens, 2 * inter], inter a multiple of 32", gate_up
    )
    if weight is not None:
        check_tensor(name, "weight", weight, (tokens,), torch.float32, like=gate_up)
    check_numbers(name, above=True, limit=limit)
    check_flags(name, round_bf16=round_bf16)
    out = quantised_output(name, MXFP8, out, (tokens, inter), gate_up)
    _SWIGLU(gate_up, weight, limit, round_bf16, *out.flat())
    return out
