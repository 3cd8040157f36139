"""Expert maps: from physical to logical and back, where copies live, how balanced a map is and could be.

Slot ``p`` of ``slots`` lives on rank ``p // (slots / num_gpus)``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ._check import (
    Floats,
    Ints,
    as_loads,
    as_map,
    as_rows,
    as_shares,
    check,
    check_ranks,
    exact,
    replica_counts,
)
from ._place import replicate


def logical_maps(physical_to_logical: Ints, num_experts: int) -> tuple[Ints, Ints]:
    """The slots of each expert, and how many there are.

    Args:
        physical_to_logical: [layers, slots] integers, the expert in each slot.
        num_experts: experts per layer; each must be present.

    Returns:
        ``logical_to_physical`` [layers, experts, max count] int64, slots ascending, then -1; ``counts``
        [layers, experts] int64.

    Contract: one stable sort, no loop over slots.
    """
    given = as_rows("logical_maps", "physical_to_logical", physical_to_logical)
    layers = len(given)
    p2l = as_map("logical_maps", "physical_to_logical", given, layers, num_experts)
    counts = replica_counts(p2l, num_experts)
    by = np.argsort(p2l, axis=1, kind="stable")
    expert = np.take_along_axis(p2l, by, 1)
    first = np.cumsum(counts, axis=1) - counts
    copy = np.arange(p2l.shape[1]) - np.take_along_axis(first, expert, 1)
    l2p = np.full((layers, num_experts, int(counts.max())), -1, np.int64)
    l2p[np.arange(layers)[:, None], expert, copy] = by
    return l2p, counts


def rank_loads(
    weight: ArrayLike, physical_to_logical: Ints, num_gpus: int, shares: Floats | None = None
) -> Floats:
    """Load of each rank: ``sum over its slots of weight[expert] * share``, the share being ``1 / count`` by
    default.

    Args:
        weight: [layers, experts] loads, finite, >= 0.
        physical_to_logical: [layers, slots] integers.
        num_gpus: ranks; divides ``slots``.
        shares: [layers, slots] float64, finite, >= 0: the part of its expert's load that each slot takes; or
            None for equal parts.

    Returns:
        [layers, num_gpus] float64, in the unit of ``weight``. Added slot by slot in order: the same bits
        everywhere.
    """
    op = "rank_loads"
    loads = as_loads(op, weight)
    p2l = as_map(op, "physical_to_logical", physical_to_logical, *loads.shape)
    size = check_ranks(op, p2l.shape[1], num_gpus)
    part = np.take_along_axis(loads, p2l, 1)
    if shares is None:
        part = part / np.take_along_axis(replica_counts(p2l, loads.shape[1]), p2l, 1)
    else:
        part = part * as_shares(op, "shares", shares, p2l.shape)
    part = part.reshape(len(p2l), num_gpus, size)
    total = np.zeros(part.shape[:2])
    for slot in range(size):
        total += part[..., slot]
    return total


def peak_over_mean(loads: Floats) -> Floats:
    """Largest over mean along the last axis, 1.0 where all are zero; summed in order."""
    total = np.cumsum(loads, axis=-1)[..., -1]
    idle = total == 0
    return np.where(idle, 1.0, loads.max(-1) * loads.shape[-1] / np.where(idle, 1.0, total))


def imbalance(
    weight: ArrayLike, physical_to_logical: Ints, num_gpus: int, shares: Floats | None = None
) -> Floats:
    """Largest rank load over mean rank load of each layer, [layers] float64; arguments as ``rank_loads``.

    1.0 is perfect balance, and an idle layer counts as balanced. A step waits for the slowest rank in every
    layer, so average this over layers; never add layers up first.
    """
    return peak_over_mean(rank_loads(weight, physical_to_logical, num_gpus, shares))


def duplicates(physical_to_logical: Ints, num_gpus: int) -> Ints:
    """Slots of each layer that repeat an expert already on their rank: [layers] int64.

    ``physical_to_logical`` [layers, slots] is the map; ValueError when ``num_gpus`` does not divide slots.
    """
    p2l = as_rows("duplicates", "physical_to_logical", physical_to_logical)
    size = check_ranks("duplicates", p2l.shape[1], num_gpus)
    by = np.sort(p2l.reshape(len(p2l), num_gpus, size), -1)
    return (by[..., 1:] == by[..., :-1]).sum((1, 2), dtype=np.int64)


def count_transfers(old: ArrayLike, new: ArrayLike, num_gpus: int) -> Ints:
    """Experts a rank must receive to go from one map to another, per layer: [layers] int64.

    ``old`` and ``new`` are maps [layers, slots] of the same shape; ValueError otherwise.
    A copy that only changes its slot within a rank costs nothing, and further copies on one rank count once.
    """
    op = "count_transfers"
    was, now = np.asarray(old), np.asarray(new)
    check(was.shape == now.shape and was.ndim == 2, op, f"new: {list(was.shape)}", list(now.shape))
    for name, array in (("old", was), ("new", now)):
        check(array.dtype.kind in "iu", op, f"{name} of integers", array.dtype)
        check(
            array.size == 0 or int(array.min()) >= 0,
            op,
            f"{name} to hold expert ids >= 0",
            array.min(initial=0),
        )
    size = check_ranks(op, was.shape[1], num_gpus)
    was = was.reshape(len(was), num_gpus, size)
    now = np.sort(now.reshape(was.shape), -1)
    first = np.ones(now.shape, bool)
    first[..., 1:] = now[..., 1:] != now[..., :-1]
    arrives = np.stack([(was != now[..., i : i + 1]).all(-1) for i in range(size)], -1)
    return (arrives & first).sum((1, 2), dtype=np.int64)


def lower_bound(weight: ArrayLike, num_replicas: int, num_gpus: int, distinct: bool = True) -> Floats:
    """A bound below which no map with equal splits can bring ``imbalance``: [layers] float64.

    The largest of 1; the smallest possible largest slice (Adams' divisor rule, at most ``num_gpus`` copies
    when ``distinct``) over the mean; and, without spare slots, the heaviest expert with the lightest ones
    that must join it.

    Args:
        weight: [layers, experts] loads, finite, >= 0.
        num_replicas: slots per layer, >= experts.
        num_gpus: ranks; divides ``num_replicas``.
        distinct: whether an expert may sit on a rank only once.

    Source: Balinski and Young, Fair Representation (divisor methods).
    """
    op = "lower_bound"
    loads = as_loads(op, weight)
    size = check_ranks(op, num_replicas, num_gpus)
    experts = loads.shape[1]
    check(num_replicas >= experts, op, f"num_replicas >= {experts} experts", num_replicas)
    w = exact(loads)
    floor = peak_bound(w, replicate(w, num_replicas - experts, num_gpus if distinct else num_replicas), size)
    total = w.sum(1)
    return np.where(total == 0, 1.0, np.maximum(1.0, floor * num_gpus / np.where(total == 0, 1.0, total)))


def peak_bound(w: Floats, counts: Ints, size: int) -> Floats:
    """Bound on the largest rank load given exact loads and the minimax ``counts``: [rows], unit of ``w``."""
    slice_bound = (w / counts).max(1)
    if counts.sum(1)[0] > w.shape[1]:
        return slice_bound
    by = np.sort(w, axis=1)
    return by[:, -1] + by[:, : size - 1].sum(1)
