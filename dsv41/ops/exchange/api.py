"""What a rank does with its own rows around an exchange: plan, pack, unpack, combine. The way between ranks
is in `transport`, both together in `handle`.
"""

from typing import Any

import torch

from ..._op import (
    Kernel,
    Op,
    check,
    check_apart,
    check_sizes,
    check_tensor,
    check_values,
    given_outputs,
    output,
)
from ...formats import E4M3, E8M0, MXFP8
from ..quant.api import mxfp8_operand

__all__ = [
    "exchange_combine",
    "exchange_pack",
    "exchange_pack_fixed",
    "exchange_plan",
    "exchange_unpack",
    "record_bytes",
]


def record_bytes(hidden: int) -> int:
    """Bytes of one row on its way: 16, the values, the scales, padded to a multiple of 16."""
    check_sizes("record_bytes", 1, hidden=hidden)
    return -(-(16 + hidden + hidden // 32) // 16) * 16


def _words(x: torch.Tensor, *_: Any) -> str | None:
    hidden = x.shape[1]
    if hidden % 128:
        return f"hidden must be a multiple of 128, got {hidden}"
    good = x.stride(0) % 4 == 0 and x.data_ptr() % 4 == 0
    return None if good else f"takes rows at multiples of 4 bytes, strides {tuple(x.stride())}"


def _pack_words(x: torch.Tensor, x_scale: torch.Tensor, *_: Any) -> str | None:
    whole = x_scale.stride(0) % 4 == 0 and x_scale.data_ptr() % 4 == 0
    return _words(x) if whole else f"takes scales at multiples of 4 bytes, strides {tuple(x_scale.stride())}"


def _unpack_words(records: torch.Tensor, values: torch.Tensor, *_: Any) -> str | None:
    return _words(values)


_PLAN = Op(
    "exchange_plan(Tensor slots, int num_ranks, int slots_per_rank, int capacity, Tensor(a!) place,"
    " Tensor(b!) source, Tensor(c!) counts) -> ()",
    reference="dsv41_reference.exchange:exchange_plan",
    package=__package__,
    kernels=(Kernel("triton_cuda", "cuda", needs=("triton",)),),
)
_PACK = Op(
    "exchange_pack(Tensor x, Tensor x_scale, Tensor weights, Tensor slots, Tensor source,"
    " int slots_per_rank, Tensor(a!) records) -> ()",
    reference="dsv41_reference.exchange:exchange_pack",
    package=__package__,
    kernels=(Kernel("triton_cuda", "cuda", needs=("triton",), supports=_pack_words),),
)
_PACK_FIXED = Op(
    "exchange_pack_fixed(Tensor x, Tensor x_scale, Tensor weights, Tensor slots, int num_ranks,"
    " int slots_per_rank, int capacity, Tensor(a!) place, Tensor(b!) lost, Tensor(c!) records) -> ()",
    reference="dsv41_reference.exchange:exchange_pack_fixed",
    package=__package__,
    kernels=(Kernel("triton_cuda", "cuda", needs=("triton",), supports=_pack_words),),
)
_UNPACK = Op(
    "exchange_unpack(Tensor records, Tensor(a!) values, Tensor(b!) scale, Tensor(c!) slots,"
    " Tensor(d!) weights) -> ()",
    reference="dsv41_reference.exchange:exchange_unpack",
    package=__package__,
    kernels=(Kernel("triton_cuda", "cuda", needs=("triton",), supports=_unpack_words),),
)
_COMBINE = Op(
    "exchange_combine(Tensor rows, Tensor place, Tensor? shared, Tensor(a!) out) -> ()",
    reference="dsv41_reference.exchange:exchange_combine",
    package=__package__,
    kernels=(Kernel("triton_cuda", "cuda", needs=("triton",)),),
)


def exchange_plan(
    slots: torch.Tensor,
    *,
    num_ranks: int,
    slots_per_rank: int,
    capacity: int | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each routed pair goes: its row in the buffer that is sent.

        rank = slots[t, j] // slots_per_rank                pairs of a rank keep their row-major order
        place[t, j] = begin of the rank + its earlier pairs
        begin = rank * capacity; without a capacity, the pairs of all lower ranks

    Args:
        slots: [num_tokens, top_k] int32, physical experts of all ranks; below 0 means none.
        num_ranks: ranks.
        slots_per_rank: physical experts of a rank.
        capacity: rows from this rank to one other (fixed form), or None to place rows without gaps (exact
            form).
        out: place, source and counts to write into, see below.

    Returns:
        place [num_tokens, top_k] int32, -1 for none and for pairs past the capacity; source [rows] int32, the
        pair of each row or -1, with num_ranks * capacity rows, or num_tokens * top_k in the exact form;
        counts [num_ranks] int64, pairs that want to go to each rank, also those past the capacity.

    Contract: no host sync unless DSV41_CHECK=1; graph-safe; allocates only what is None; integer arithmetic
        only.
    Reference: dsv41_reference.exchange.exchange_plan
    """
    name = "exchange_plan"
    check_tensor(name, "slots", slots, (None, None), torch.int32, contiguous=True)
    check_sizes(name, 1, num_ranks=num_ranks, slots_per_rank=slots_per_rank)
    if capacity is not None:
        check_sizes(name, 1, capacity=capacity)
    _check_below(name, "slots", slots, num_ranks * slots_per_rank)
    given = given_outputs(name, out, 3)
    rows = slots.numel() if capacity is None else num_ranks * capacity
    out = (
        output(name, given[0], tuple(slots.shape), torch.int32, slots, "out place"),
        output(name, given[1], (rows,), torch.int32, slots, "out source"),
        output(name, given[2], (num_ranks,), torch.int64, slots, "out counts"),
    )
    _PLAN(slots, num_ranks, slots_per_rank, capacity or 0, *out)
    return out


def exchange_pack(
    x: torch.Tensor | MXFP8,
    weights: torch.Tensor,
    slots: torch.Tensor,
    source: torch.Tensor,
    *,
    slots_per_rank: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows that are sent, each one record: routing weight, slot on its rank, values, scales.

    bytes 0-3 weight f32; 4-7 local slot int32, -1 in an unused row; from 16 values, then scales; padded to a
    multiple of 16.

    Args:
        x: [num_tokens, hidden] bf16, quantised here, or an MXFP8 view of values [num_tokens, hidden] e4m3.
        weights: [num_tokens, top_k] f32, routing weights.
        slots: [num_tokens, top_k] int32, as ``exchange_plan`` took them.
        source: [rows] int32, from ``exchange_plan``.
        slots_per_rank: physical experts of a rank.
        out: [rows, record_bytes(hidden)] uint8 to write into.

    Returns:
        [rows, record_bytes(hidden)] uint8; the values of unused rows mean nothing.

    Contract: no host sync; graph-safe; allocates only what is None (and the quantised x); the same bits on
        every run.
    Reference: dsv41_reference.exchange.exchange_pack
    """
    name = "exchange_pack"
    x = _rows(name, x, weights, slots)
    check_tensor(name, "source", source, (None,), torch.int32, like=slots)
    check_sizes(name, 1, slots_per_rank=slots_per_rank)
    _check_below(name, "source", source, slots.numel())
    out = output(name, out, (source.shape[0], record_bytes(x.values.shape[1])), torch.uint8, slots)
    _PACK(*x.flat(), weights, slots, source, slots_per_rank, out)
    return out


def _rows(name: str, x: torch.Tensor | MXFP8, weights: torch.Tensor, slots: torch.Tensor) -> MXFP8:
    """Checks what is packed; returns the operand."""
    check_tensor(name, "slots", slots, (None, None), torch.int32, contiguous=True)
    check_tensor(name, "weights", weights, tuple(slots.shape), torch.float32, like=slots, contiguous=True)
    check(isinstance(x, torch.Tensor | MXFP8), name, "x: bf16 tensor or MXFP8", x)
    hidden = (x if isinstance(x, torch.Tensor) else x.values).shape[-1]
    check(hidden % 32 == 0, name, "x: [num_tokens, hidden], hidden a multiple of 32", x)
    x = mxfp8_operand(name, x, hidden, slots)
    check(x.values.shape[0] == slots.shape[0], name, f"x: [{slots.shape[0]}, {hidden}]", x.values)
    return x


def exchange_pack_fixed(
    x: torch.Tensor | MXFP8,
    weights: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_ranks: int,
    slots_per_rank: int,
    capacity: int,
    lost: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan and pack of the fixed form in one launch: ``exchange_plan`` and ``exchange_pack`` for decode.

    Args:
        x: [num_tokens, hidden] bf16, quantised here, or an MXFP8 view of values [num_tokens, hidden] e4m3.
        weights: [num_tokens, top_k] f32, routing weights.
        slots: [num_tokens, top_k] int32, physical experts of all ranks; below 0 means none.
        num_ranks: ranks.
        slots_per_rank: physical experts of a rank.
        capacity: rows from this rank to one other.
        lost: [num_ranks] int64 that the pairs past the capacity are added to, by the rank they wanted.
        out: place and records to write into, see below.

    Returns:
        place [num_tokens, top_k] int32, as of ``exchange_plan``; records [num_ranks * capacity,
        record_bytes(hidden)] uint8, as of ``exchange_pack``.

    Contract: no host sync unless DSV41_CHECK=1; graph-safe; allocates only what is None (and the quantised
        x); the same bits on every run. Every pair looks at those before it: time grows with the square of
        their number, which is felt from some thousands on.
    Reference: dsv41_reference.exchange.exchange_pack_fixed
    """
    name = "exchange_pack_fixed"
    x = _rows(name, x, weights, slots)
    check_sizes(name, 1, num_ranks=num_ranks, slots_per_rank=slots_per_rank, capacity=capacity)
    _check_below(name, "slots", slots, num_ranks * slots_per_rank)
    check_tensor(name, "lost", lost, (num_ranks,), torch.int64, like=slots, contiguous=True)
    given, shape = given_outputs(name, out, 2), (num_ranks * capacity, record_bytes(x.values.shape[1]))
    place = output(name, given[0], tuple(slots.shape), torch.int32, slots, "out place")
    records = output(name, given[1], shape, torch.uint8, slots, "out records")
    _PACK_FIXED(*x.flat(), weights, slots, num_ranks, slots_per_rank, capacity, place, lost, records)
    return place, records


def _check_below(name: str, label: str, x: torch.Tensor, count: int) -> None:
    if check_values() and x.numel():
        high = int(x.max())
        check(high < count, name, f"{label}: at most {count - 1}", high)


def exchange_unpack(
    records: torch.Tensor,
    *,
    hidden: int,
    out: tuple[MXFP8, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[MXFP8, torch.Tensor, torch.Tensor]:
    """Received records as the arguments of ``mxfp4_moe`` with one expert a row.

    Args:
        records: [rows, record_bytes(hidden)] uint8.
        hidden: width of a row.
        out: MXFP8 view of [rows, hidden], slots [rows, 1] int32 and weights [rows, 1] f32 to write into.

    Returns:
        MXFP8 of [rows, hidden]; slots [rows, 1] int32 of this rank, -1 in unused rows; weights [rows, 1] f32.

    Contract: no host sync; graph-safe; allocates only what is None; a copy.
    Reference: dsv41_reference.exchange.exchange_unpack
    """
    name = "exchange_unpack"
    check_sizes(name, 32, hidden=hidden)
    check(hidden % 32 == 0, name, "hidden: a multiple of 32", hidden)
    check_tensor(name, "records", records, (None, record_bytes(hidden)), torch.uint8, contiguous=True)
    rows, given = records.shape[0], given_outputs(name, out, 3)
    view = given[0]
    check(view is None or isinstance(view, MXFP8), name, "out: MXFP8, slots and weights", view)
    if view is None:
        scale = torch.empty((rows, hidden // 32), dtype=torch.uint8, device=records.device)
        values = torch.empty((rows, hidden), dtype=E4M3, device=records.device)
        view = MXFP8(values, scale.view(E8M0))
    check_tensor(name, "out.values", view.values, (rows, hidden), E4M3, like=records, contiguous=True)
    check_apart(name, "out.scale", view.scale)
    out = (
        view,
        output(name, given[1], (rows, 1), torch.int32, records, "out slots"),
        output(name, given[2], (rows, 1), torch.float32, records, "out weights"),
    )
    _UNPACK(records, *view.flat(), *out[1:])
    return out


def exchange_combine(
    rows: torch.Tensor,
    place: torch.Tensor,
    *,
    shared: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum of the experts' rows that came back, in top-k order whatever rank they are from.

        out[t] = sum over j of rows[place[t, j]] in f32, plus ``shared[t]``, rounded once

    Args:
        rows: [rows, hidden] bf16, row i being the result for row i that was sent.
        place: [num_tokens, top_k] int32, from ``exchange_plan``; -1 adds nothing.
        shared: [num_tokens, hidden] bf16 added before the rounding, or None.
        out: [num_tokens, hidden] bf16 to write into; may be ``shared``.

    Returns:
        [num_tokens, hidden] bf16; ``out`` itself when it was given. A row whose places are all -1 is
        ``shared`` or 0.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run, those that
        ``mxfp4_moe`` gives for all experts in one place.
    Reference: dsv41_reference.exchange.exchange_combine
    """
    name = "exchange_combine"
    check_tensor(name, "rows", rows, (None, None), torch.bfloat16)
    check_tensor(name, "place", place, (None, None), torch.int32, like=rows, contiguous=True)
    _check_below(name, "place", place, rows.shape[0])
    shape = (place.shape[0], rows.shape[1])
    if shared is not None:
        check_tensor(name, "shared", shared, shape, torch.bfloat16, like=rows)
    out = output(name, out, shape, torch.bfloat16, rows)
    _COMBINE(rows, place, shared, out)
    return out
