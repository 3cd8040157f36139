"""How an expert's tokens split over its copies: the lever that moves no weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._check import Floats, Ints, as_array, as_loads, as_map, as_rows, as_shares, check, check_ranks
from ._flow import Flow, row_sums
from .maps import logical_maps

ENTRIES = 64


def water_fill(
    weight: ArrayLike,
    physical_to_logical: ArrayLike,
    num_gpus: int,
    *,
    start: Floats | None = None,
    sweeps: int = 20,
    tolerance: float = 1e-3,
    compiled: bool | None = None,
) -> Floats:
    """The share of its expert's load that each slot should take, to level the ranks of a fixed map.

        minimise sum over ranks g of load[g]**2,   load[g] = sum over slots p of g of weight[expert(p)] *
        share[p]

    By block descent: each replicated expert in turn is poured over its ranks to a common level. Squares
    rather than the maximum, because a min-max vertex loads many ranks to the brim, where the noise of a step
    spills over.

    Args:
        weight: [layers, experts] loads, finite, >= 0.
        physical_to_logical: [layers, slots] integers, every expert present.
        num_gpus: ranks; divides ``slots``.
        start: [layers, slots] shares to start from, such as the previous result; None for equal
            shares. An expert's must add up to 1.
        sweeps: at most this many passes over the experts.
        tolerance: a layer stops once no slot changed by this many mean rank loads in a sweep; 0 for all
            sweeps.
        compiled: use loops compiled by numba: True, False, or None for "where it is installed". The same
            bytes either way; the first compiled call of a process loads numba, that of an installation also
            compiles.

    Returns:
        [layers, slots] float64, >= 0, adding up to 1 over the copies of each expert. An idle expert, and an
        expert's copies on one rank, share equally.

    Contract: the largest rank load never exceeds that of ``start`` (rounding aside). Deterministic; layers
    independent.
    """
    op = "water_fill"
    loads = as_loads(op, weight)
    p2l = as_map(op, "physical_to_logical", physical_to_logical, *loads.shape)
    check_ranks(op, p2l.shape[1], num_gpus)
    check(sweeps >= 0 and tolerance >= 0, op, "sweeps >= 0 and tolerance >= 0", (sweeps, tolerance))
    if start is not None:
        start = as_shares(op, "start", start, p2l.shape)
        total = row_sums(p2l, start, loads.shape[1])
        off = float(total.flat[np.abs(total - 1).argmax()])
        check(abs(off - 1) < 1e-6, op, "start of an expert to add up to 1", off)
    flow = Flow(loads, p2l, num_gpus, start, compiled)
    flow.level(np.arange(len(loads)), sweeps, tolerance)
    return flow_shares(flow)


def flow_shares(flow: Flow) -> Floats:
    """A flow as shares per slot."""
    copies = row_sums(flow.main, np.ones(flow.p2l.shape), flow.slots)
    part = np.take_along_axis(flow.x, flow.main, 1) / np.take_along_axis(copies, flow.main, 1)
    total = np.take_along_axis(row_sums(flow.p2l, part, flow.w.shape[1]), flow.p2l, 1)
    even = 1.0 / np.take_along_axis(flow.counts, flow.p2l, 1)
    return np.where(total > 0, part / np.where(total > 0, total, 1.0), even)


def equal_shares(physical_to_logical: ArrayLike, num_experts: int) -> Floats:
    """``1 / count`` for every slot of ``physical_to_logical`` [layers, slots]: float64, the same shape."""
    p2l = as_rows("equal_shares", "physical_to_logical", physical_to_logical)
    counts = logical_maps(p2l, num_experts)[1]
    return 1.0 / np.take_along_axis(counts, p2l, 1)


def to_table(
    shares: Floats, physical_to_logical: ArrayLike, num_experts: int, entries: int = ENTRIES
) -> NDArray[np.int16]:
    """Shares as a table that ``dispatch`` indexes: every expert's slots, each as often as its share says,
    interleaved.

    Shares become whole numbers of entries by largest remainders (ties to the lower slot); entry ``j`` of a
    slot with ``n`` entries is ordered at ``(2 j + 1) / n``, so every run of entries is close to the shares.

    Args:
        shares: [layers, slots] float64, >= 0, adding up to 1 over the copies of each expert.
        physical_to_logical: [layers, slots] integers, at most 32768 slots.
        num_experts: experts per layer.
        entries: entries per expert, a power of two.

    Returns:
        [layers, experts, entries] int16 slot numbers. A slot's frequency is less than ``1 / entries`` from
        its share.
    """
    op = "to_table"
    given = as_rows(op, "physical_to_logical", physical_to_logical)
    p2l = as_map(op, "physical_to_logical", given, len(given), num_experts)
    layers, slots = p2l.shape
    share = as_array(op, "shares", shares).astype(np.float64)
    check(share.shape == p2l.shape, op, f"shares: [{layers}, {slots}]", list(share.shape))
    check(slots <= 1 << 15, op, "at most 32768 slots", slots)
    check(entries >= 1 and entries & (entries - 1) == 0, op, "entries a power of two", entries)
    l2p, counts = logical_maps(p2l, num_experts)
    check(bool((share >= 0).all()), op, "shares >= 0", float(share.min()))
    table = np.repeat(l2p[..., :1], entries, axis=-1)
    n, e = np.nonzero(counts > 1)
    copies = l2p[n, e]
    quota = np.where(copies < 0, 0.0, share[n[:, None], copies])
    total = np.cumsum(quota, axis=1)[:, -1:]
    if len(n):
        wrong = np.abs(total[:, 0] - 1).argmax()
        check(
            abs(total[wrong, 0] - 1) < 1e-6, op, "shares of an expert to add up to 1", float(total[wrong, 0])
        )
    table[n, e] = _interleave(copies, _whole(quota / total * entries, copies >= 0, entries), entries)
    return table.astype(np.int16)


def _whole(quota: Floats, real: NDArray[np.bool_], entries: int) -> Ints:
    """Quotas rounded to integers that add up to ``entries`` in each row, by largest remainders."""
    whole = np.floor(quota)
    left = entries - whole.sum(1)
    order = np.argsort(np.where(real, whole - quota, 2.0), axis=1, kind="stable")
    bonus = np.zeros_like(whole)
    np.put_along_axis(bonus, order, (np.arange(quota.shape[1]) < left[:, None]) * 1.0, 1)
    return (whole + bonus).astype(np.int64)


def _interleave(copies: Ints, number: Ints, entries: int) -> Ints:
    """``number[i]`` entries of each copy of a row, evenly mixed: [rows, entries]."""
    rows, most = copies.shape
    which = np.repeat(np.tile(np.arange(most), rows), number.ravel()).reshape(rows, entries)
    first = np.cumsum(number, axis=1) - number
    turn = np.arange(entries) - np.take_along_axis(first, which, 1)
    order = (2 * turn + 1) / np.take_along_axis(number, which, 1)
    by = np.argsort(order, axis=1, kind="stable")
    return np.take_along_axis(copies, np.take_along_axis(which, by, 1), 1)
