"""How the reference computes: one accumulation dtype, one rounding to the stored dtype.

Every function of the reference widens its stored operands to the accumulation dtype, computes, and rounds
each result once to the dtype that the specification stores. The default is float32. Inside
``accumulate(torch.float64)`` results no longer depend on how rows are batched, chunked or ordered:

* products of bf16, E4M3 and E2M1 operands are exact in float64 unless their exponents spread over more than
  about 28 bits, so their sums do not depend on the order;
* everything else differs by one float64 unit at most before it is rounded to 8 or 24 bits.

For rows whose values spread wider than that (heavy tails), a float64 product still depends on the row count
because the matrix library picks its kernel by shape: ``accumulate(torch.float64, row_at_a_time=True)``
multiplies one row at a time and is independent by construction, at the price of a Python loop.
"""

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

_WIDEN_ROWS = 4096
_state: contextvars.ContextVar[tuple[torch.dtype, bool]] = contextvars.ContextVar(
    "dsv41_reference_accumulate", default=(torch.float32, False)
)


@contextlib.contextmanager
def accumulate(dtype: torch.dtype, *, row_at_a_time: bool = False) -> Iterator[None]:
    """Inside the context the reference computes in ``dtype`` (float32 or float64).

    Errors: ValueError for another dtype.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"accumulate: expected dtype: float32 or float64, got {dtype}")
    token = _state.set((dtype, row_at_a_time))
    try:
        yield
    finally:
        _state.reset(token)


_kept: contextvars.ContextVar[dict[tuple[Any, ...], tuple[Any, torch.Tensor]] | None] = (
    contextvars.ContextVar("dsv41_reference_keep_weights", default=None)
)


@contextlib.contextmanager
def keep_weights() -> Iterator[None]:
    """Inside the context a weight is dequantised once and kept in the accumulation dtype.

    Saves most of the time of small steps, for eight bytes a parameter in float64. Weights must not change
    inside.
    """
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def weight(decode: Callable[..., torch.Tensor], *stored: torch.Tensor) -> torch.Tensor:
    """``decode(*stored, accumulation dtype)``, or what an earlier call in `keep_weights` made of it."""
    kept = _kept.get()
    if kept is None:
        return decode(*stored, accumulator())
    key = (decode, accumulator(), *((t.data_ptr(), t.shape, t.stride()) for t in stored))
    if key not in kept:
        kept[key] = (
            stored,
            decode(*stored, accumulator()),
        )  # holding the operands keeps their addresses theirs
    return kept[key][1]


def accumulator() -> torch.dtype:
    """The dtype that the reference computes in."""
    return _state.get()[0]


def wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the accumulation dtype."""
    return x.to(accumulator())


def narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to ``dtype`` once, to nearest even.

    PyTorch casts float64 to the 8- and 16-bit formats through float32, which rounds twice: a value that the
    first rounding moves onto a tie of the second may go the wrong way.
    """
    if x.dtype != torch.float64 or dtype in (torch.float32, torch.float64):
        return x.to(dtype)
    near = x.to(torch.float32).contiguous()
    if dtype != torch.bfloat16:
        return _to_odd(x, near).to(dtype)
    # Only a tie of the second rounding can be wrong, and ties are rare: mend those alone.
    out = near.to(dtype)
    low = near.view(-1).view(torch.int16).view(-1, 2)[:, 0 if sys.byteorder == "little" else 1]
    tie = low == -0x8000
    if tie.numel() and bool(tie.view(torch.uint8).max()):
        at = tie.nonzero()[:, 0]
        out.view(-1)[at] = _to_odd(x.reshape(-1)[at], near.view(-1)[at]).to(dtype)
    return out


def _to_odd(x: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
    """float64 ``x``, nearest float32 ``near``, to float32 rounded to odd: the last bit tells that it is
    inexact.

    A later rounding to a shorter format then is the only one.
    """
    back = near.to(torch.float64)
    bits = near.view(torch.int32)
    # Toward zero first (one bit pattern down when the cast rounded away), then set the last bit if inexact.
    bits = bits - (back.abs() > x.abs()).to(torch.int32)
    bits = bits | ((back != x) & x.isfinite()).to(torch.int32)
    return bits.view(torch.float32)


def bf16(x: torch.Tensor) -> torch.Tensor:
    """Round once to bfloat16."""
    return narrow(x, torch.bfloat16)


def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``x @ w.T`` in the accumulation dtype, not rounded.

    Args:
        x: [..., rows, in] any float dtype.
        w: [..., out, in] any float dtype.

    Returns:
        [..., rows, out] in the accumulation dtype.
    """
    x = wide(x)
    if _state.get()[1] and x.shape[-2] > 1:
        w = wide(w)
        return torch.cat([x[..., i : i + 1, :] @ w.transpose(-1, -2) for i in range(x.shape[-2])], -2)
    # A large weight (the head) is widened in parts: what a part takes stays in the processor's cache.
    parts = [x @ wide(part).transpose(-1, -2) for part in w.split(_WIDEN_ROWS, -2)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x). torch.sigmoid gives other bits in a vector's tail than in its body; exp does not."""
    return 1 / (1 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + e^-x), from exp for the reason of `sigmoid`."""
    return x / (1 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x), linear above 20, from exp and log1p for the reason of `sigmoid`."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, keeping it.

    In the row-at-a-time form the sum halves the row again and again, so that its order is fixed: torch.sum
    splits one long row over threads, but not many rows.
    """
    if not _state.get()[1]:
        return x.sum(-1, keepdim=True)
    width = x.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        x = torch.cat([x[..., : width - half] + x[..., half:width], x[..., width - half : half]], -1)
        width = half
    return x


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """Mean of squares over the last dimension, keeping it, in the accumulation dtype."""
    return row_sum(wide(x).square()) / x.shape[-1]
