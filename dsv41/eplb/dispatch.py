"""From logical to physical experts: one table lookup per routed pair."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._check import check
from ._mix import mix


def dispatch(ids: ArrayLike, table: ArrayLike, source: int, step: int = 0) -> NDArray[np.int32]:
    """The physical expert of every routed pair of one layer, on one source rank.

        physical[t, j] = table[e, (k + mix(source, e, step)) & (entries - 1)],   e = ids[t, j]
        k = number of pairs before (t, j), in row-major order of this call, with the same expert

        mix(a, b, c):  x = a * 0x9E3779B1 + b * 0x85EBCA77 + c * 0xC2B2AE3D
                       x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16

    All of ``mix`` is uint32 with wrap-around. The hash starts every source and expert elsewhere in the table:
    sources that all started at entry 0 would send their first token of a step to the same copies. A new
    ``step`` starts elsewhere again, so that over many steps each copy gets its share from each source.

    Args:
        ids: [tokens, top_k] integers, logical experts; below 0 means none (padding).
        table: [experts, entries] slot numbers, ``entries`` a power of two: one layer of ``to_table``.
        source: rank of the sender, >= 0.
        step: step number, >= 0; or always 0.

    Returns:
        [tokens, top_k] int32; -1 where ``ids`` is below 0. A pair is never dropped, and its slot holds its
        expert.

    Contract: integer arithmetic only; a kernel that numbers pairs in row-major order repeats it bit for bit.
    """
    op = "dispatch"
    chosen, slots = np.asarray(ids), np.asarray(table)
    if chosen.size == 0 and not hasattr(ids, "dtype"):  # an empty list has no integers to tell its type by
        chosen = chosen.astype(np.int64)
    want = "ids: [tokens, top_k] of integers"
    check(chosen.ndim == 2 and chosen.dtype.kind in "iu", op, want, f"{list(chosen.shape)} {chosen.dtype}")
    want = "table: [experts, entries] of integers, entries a power of two"
    fits = slots.ndim == 2 and slots.dtype.kind in "iu" and slots.shape[1] > 0
    fits = fits and slots.shape[1] & (slots.shape[1] - 1) == 0
    check(fits, op, want, f"{list(slots.shape)} {slots.dtype}")
    check(source >= 0 and step >= 0, op, "source >= 0 and step >= 0", (source, step))
    experts, entries = slots.shape
    check(chosen.size == 0 or int(chosen.max()) < experts, op, f"ids below {experts}", chosen.max(initial=0))
    flat = chosen.astype(np.int64).ravel()
    valid = flat >= 0
    e = np.where(valid, flat, 0)
    at = (earlier_pairs(flat) + mix(source, e, step)) & (entries - 1)
    return np.where(valid, slots[e, at], -1).astype(np.int32).reshape(chosen.shape)


def earlier_pairs(flat: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many earlier entries equal each entry: [pairs] int64."""
    by = np.argsort(flat, kind="stable")
    ordered = flat[by]
    first = np.searchsorted(ordered, ordered, side="left")
    out = np.empty(len(flat), np.int64)
    out[by] = np.arange(len(flat)) - first
    return out
