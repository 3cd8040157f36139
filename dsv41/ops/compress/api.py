"""The compressor at ratio 2, and the writers of every cache."""

from typing import Any

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
from ...cache import PagedKV
from ..norm_rope.api import check_rope_table


def _apart(x: Any, *multiples: int) -> bool:
    """Whether a tensor starts, and its rows lie, at multiples of so many elements."""
    size = x.element_size()
    starts = x.data_ptr() % (multiples[0] * size) == 0
    return starts and all(s % m == 0 for s, m in zip(x.stride()[:-1], multiples, strict=False))


def _pairs_hopper(kv_gate: Any, requests: Any, positions: Any, carry: Any, out: Any) -> str | None:
    if out.shape[1] % 4 or not (_apart(kv_gate, 4) and _apart(carry, 4, 4) and _apart(out, 4)):
        return "rows of a multiple of 4 channels, 16 bytes apart"
    return (
        None
        if requests.is_contiguous() and positions.is_contiguous()
        else "contiguous request_ids and positions"
    )


def _write_hopper(
    x: Any, weight: Any, eps: Any, cos: Any, sin: Any, slots: Any, rounded: Any, layout: Any, pages: Any
) -> str | None:
    dim = x.shape[1]
    if dim not in (128, 512) or (layout == "v4" and dim != 512) or cos.shape[1] % 4:
        return (
            f"rows of 128 or 512 values (v4: 512), RoPE on a multiple of 8, got {dim} and {2 * cos.shape[1]}"
        )
    if not _apart(x, 8) or (weight is not None and weight.data_ptr() % 16):
        return "rows of x and norm_weight at multiples of 16 bytes"
    least = 16 if layout == "bf16" else 8
    within = pages.shape[2] if layout in ("mxfp8", "bf16") else 0
    if pages.stride(0) % least or pages.data_ptr() % least or within % least:
        return f"pages {least} bytes apart, got {pages.stride(0)} bytes"
    return None if slots.is_contiguous() else "contiguous slots"


def _copy_hopper(source: Any, source_slots: Any, slots: Any, pages: Any) -> str | None:
    return None if source_slots.is_contiguous() and slots.is_contiguous() else "contiguous slots"


def _kernels(supports: Any) -> tuple[Kernel, ...]:
    return (
        Kernel("tilelang_cuda", "cuda", needs=("tilelang",), supports=supports),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu")),
    )


_PAIRS = Op(
    "compress_pairs(Tensor kv_gate, Tensor request_ids, Tensor positions, Tensor(a!) carry,"
    " Tensor(b!) out) -> ()",
    reference="dsv41_reference.compress:compress_pairs",
    package=__package__,
    kernels=_kernels(_pairs_hopper),
)
_WRITE = Op(
    "write_cache(Tensor x, Tensor? norm_weight, float eps, Tensor cos, Tensor sin, Tensor slots,"
    " bool round_rope, str layout, Tensor(a!) pages) -> ()",
    reference="dsv41_reference.cache:write_cache",
    package=__package__,
    kernels=_kernels(_write_hopper),
)
_COPY = Op(
    "copy_records(Tensor source, Tensor source_slots, Tensor slots, Tensor(a!) pages) -> ()",
    reference="dsv41_reference.cache:copy_records",
    package=__package__,
    kernels=_kernels(_copy_hopper),
)


def compress_pairs(
    kv_gate: torch.Tensor,
    request_ids: torch.Tensor,
    positions: torch.Tensor,
    carry: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pool each pair of tokens (2j, 2j+1) per channel, and keep the rows for pairs that are still open.

        out[t] = sum over the pair of softmax(gate) * kv, rounded once, at the token that closes the pair

    Args:
        kv_gate: [num_tokens, 2 * dim] f32, kv then gate. Rows of one request are consecutive and in order.
        request_ids: [num_tokens] int32, rows of the carry ring; -1 is a padding row.
        positions: [num_tokens] int32, position of each row in its request.
        carry: [num_requests, slots, 2 * dim] f32, the row of position p at p % slots; read before it is
            written. After a rollback of up to slots - 1 tokens it still holds what is needed.
        out: [num_tokens, dim] bf16 to write into.

    Returns:
        [num_tokens, dim] bf16; rows at even positions and padding rows are zero.

    Contract: no host sync on accelerators; graph-safe; allocates only what is None; the same bits on every
        run and for every way to cut a request into chunks.
    Reference: dsv41_reference.compress.compress_pairs
    """
    name = "compress_pairs"
    check_tensor(name, "kv_gate", kv_gate, (None, None), torch.float32)
    tokens, width = kv_gate.shape
    check(width % 2 == 0, name, "kv_gate: [num_tokens, 2 * dim]", kv_gate)
    check_tensor(name, "request_ids", request_ids, (tokens,), torch.int32, like=kv_gate)
    check_tensor(name, "positions", positions, (tokens,), torch.int32, like=kv_gate)
    check_tensor(name, "carry", carry, (None, None, width), torch.float32, like=kv_gate)
    check(carry.shape[1] >= 1, name, "carry: at least one slot", carry)
    check_apart(name, "carry", carry)
    if check_values() and tokens:
        low, high = int(request_ids.min()), int(request_ids.max())
        good = low >= -1 and high < carry.shape[0]
        check(good, name, f"request_ids: -1 to {carry.shape[0] - 1}", f"{low} to {high}")
        live = request_ids >= 0
        ids, place = request_ids[live], positions[live]
        check(bool((place >= 0).all()), name, "positions of 0 or more", positions.tolist())
        next_row = ids[1:] == ids[:-1]
        runs = len(ids[1:]) - int(next_row.sum()) + 1 if len(ids) else 0
        check(runs == ids.unique().numel(), name, "rows of one request side by side", request_ids.tolist())
        steps = (place[1:] - place[:-1])[next_row]
        check(bool((steps == 1).all()), name, "positions one after the other", positions.tolist())
    out = output(name, out, (tokens, width // 2), torch.bfloat16, kv_gate)
    _PAIRS(kv_gate, request_ids, positions, carry, out)
    return out


def _check_slots(name: str, label: str, slots: torch.Tensor, count: int | None, cache: PagedKV) -> None:
    check_tensor(name, label, slots, (count,), torch.int32, like=cache.pages)
    if check_values() and slots.numel():
        low, high = int(slots.min()), int(slots.max())
        good = low >= -1 and high < cache.num_slots
        check(good, name, f"{label}: -1 to {cache.num_slots - 1}", f"{low} to {high}")
        used = slots[slots >= 0]
        distinct = label != "slots" or used.unique().numel() == used.numel()
        check(distinct, name, f"{label}: distinct", "the same slot twice")


def write_cache(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    cache: PagedKV,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    round_rope: bool = True,
) -> None:
    """Normalise, rotate, quantise and store rows: window rows, compressed entries and index keys.

        row = rms_norm(x) when a weight is given, rounded; RoPE on the last dimensions, rounded; then the
        record

    Args:
        x: [num_tokens, dim] bf16.
        cos: [num_tokens, rope_dim/2] f32, of the position that the entry rotates at.
        sin: [num_tokens, rope_dim/2] f32.
        slots: [num_tokens] int32, where each row goes; -1 writes nothing. Slots of one call are distinct.
        cache: PagedKV to write into.
        norm_weight: [dim] bf16, or None for no normalisation.
        eps: added to the mean square; with a weight and 0, a row of zeros is NaN.
        round_rope: round the rotated row to bf16 before it is quantised.

    Contract: no host sync on accelerators; graph-safe; allocates nothing; writes the records at ``slots`` and
        no other byte; the same bits on every run. A NaN stays one in the record, but nvfp4 and mxfp4 records
        have none: it becomes 0.
    Reference: dsv41_reference.cache.write_cache
    """
    name = "write_cache"
    check(isinstance(cache, PagedKV), name, "cache: PagedKV", cache)
    check_tensor(name, "x", x, (None, cache.record.dim), torch.bfloat16, like=cache.pages)
    check_rope_table(name, cos, sin, x.shape[0], x.shape[1], x)
    _check_slots(name, "slots", slots, x.shape[0], cache)
    if norm_weight is not None:
        check_tensor(name, "norm_weight", norm_weight, (x.shape[1],), torch.bfloat16, like=x)
    check_numbers(name, eps=eps)
    check_flags(name, round_rope=round_rope)
    _WRITE(x, norm_weight, eps, cos, sin, slots, round_rope, cache.record.layout, cache.pages)


def copy_records(source: PagedKV, source_slots: torch.Tensor, cache: PagedKV, slots: torch.Tensor) -> None:
    """Copy whole records from one cache to another (ring to workspace and back).

    Args:
        source: PagedKV to read; its layout keeps a record's bytes together (mxfp8, nvfp4 or bf16).
        source_slots: [n] int32, -1 skips the pair.
        cache: PagedKV to write, of the same record.
        slots: [n] int32, -1 skips the pair; distinct.

    Contract: no host sync on accelerators; graph-safe; allocates nothing; the two must not overlap.
    Reference: dsv41_reference.cache.copy_records
    """
    name = "copy_records"
    check(isinstance(source, PagedKV), name, "source: PagedKV", source)
    check(isinstance(cache, PagedKV), name, "cache: PagedKV", cache)
    check(source.record == cache.record, name, f"cache: records {source.record}", cache.record)
    check(
        source.record.layout not in ("mxfp4", "v4", "fp8"),
        name,
        "an interleaved record",
        source.record.layout,
    )
    _check_slots(name, "source_slots", source_slots, None, source)
    _check_slots(name, "slots", slots, source_slots.shape[0], cache)
    _COPY(source.pages, source_slots, slots, cache.pages)
