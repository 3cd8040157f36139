"""Counts, packing and local search, batched over independent rows (a row is a layer, a node of it, or one of
its trials).

Array names: ``w [rows, experts]`` exact loads (see ``_check.exact``), ``counts [rows, experts]`` copies,
``slots [rows, ranks, slots_per_rank]`` expert ids, ``part`` the same shape, the load ``floor(w / counts)`` of
each slot. Every choice is the first minimum or maximum of an exact array, so ties go to the lowest index
everywhere.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np

from ._check import Bools, Floats, Ints

# Up to this many slots per rank every partition of a pair of ranks is tried (126 of them for 5 slots), above
# it every single swap. A round of swaps is cheaper, but leaves rows of 5 slots stuck above their goal, which
# costs further trials.
FULL_PARTITION = 5
PAIRS = 32  # pairs of ranks looked at per row and round: enough for a NumPy call, small enough for the cache
SLOWLY = 2  # rounds between halvings of the hot ranks treated at once, down to a sixteenth of all
TIE = 2.0**45  # more than the exact load of any row


@dataclass
class Packing:
    """Rows being packed: ``slots`` and ``part`` as above; ``tied`` is ``part`` plus ``TIE`` where kinds must
    match."""

    slots: Ints
    part: Floats
    tied: Floats
    distinct: bool


def replicate(w: Floats, extra: int, cap: int, offset: float | Floats = 0.0) -> Ints:
    """Give ``extra`` copies, each to the expert with the largest ``w / (count + offset)`` that has fewer than
    ``cap``.

    Offset 0 minimises the largest slice (Adams' divisor rule); larger offsets favour heavy experts. Idle
    experts count as a vanishing load, so spare copies spread evenly instead of piling up on expert 0.
    """
    rows = np.arange(len(w))
    w = np.maximum(w, 2.0**-20)
    counts = np.ones(w.shape, np.int64)
    divisor = np.broadcast_to(np.asarray(offset, np.float64).reshape(-1, 1), (len(w), 1))[:, 0]
    key = w / (1 + divisor[:, None]) if cap > 1 else np.full_like(w, -1.0)
    for _ in range(extra):
        best = key.argmax(1)
        count = counts[rows, best] + 1
        counts[rows, best] = count
        key[rows, best] = np.where(count < cap, w[rows, best] / (count + divisor), -1.0)
    return counts


def sorted_items(w: Floats, counts: Ints, first: Bools | None = None) -> tuple[Ints, Floats]:
    """All replicas as ``(expert, part)``, heaviest part first, then lowest expert id; ``first`` experts lead.

    Copies of one expert are neighbours in this order, which ``lightest_first`` and ``deal`` rely on.
    """
    part = np.floor(w / counts)
    by = np.argsort(-part, axis=1, kind="stable")
    if first is not None:
        lead = np.take_along_axis(first, by, 1)
        by = np.take_along_axis(by, np.argsort(~lead, axis=1, kind="stable"), 1)
    repeat = np.take_along_axis(counts, by, 1)
    total = int(repeat[0].sum())
    expert = np.repeat(by.ravel(), repeat.ravel()).reshape(len(w), total)
    return expert, np.take_along_axis(part, expert, 1)


def lightest_first(expert: Ints, part: Floats, ranks: int, distinct: bool) -> tuple[Ints, Bools]:
    """The usual greedy: each item to the lightest rank with a free slot (and, if ``distinct``, without that
    expert).

    Returns slots and, per row, whether every item found such a rank.
    """
    rows, items = expert.shape
    size = items // ranks
    base = np.arange(rows) * ranks
    load, used = part[:, :ranks].ravel().copy(), np.ones(rows * ranks, np.int64)
    last = expert[:, :ranks].copy()
    rank = np.empty((items, rows), np.int64)
    rank[:ranks] = np.arange(ranks)[:, None]  # the first ``ranks`` items all find an empty rank
    if size == 1:
        load[:] = np.inf
    again = np.zeros(items, bool)
    again[1:] = (expert[:, 1:] == expert[:, :-1]).any(0)
    found = np.ones(rows, bool)
    table, experts, parts = load.reshape(rows, ranks), expert.T.copy(), part.T.copy()
    for i in range(ranks, items):
        # Copies are neighbours, so a rank holds this expert exactly when it was the last one to land there.
        closed = distinct and again[i]
        choice = np.where(last == experts[i][:, None], np.inf, table).argmin(1) if closed else table.argmin(1)
        at = base + choice
        if closed:
            found &= last.ravel()[at] != experts[i]
        rank[i] = choice
        last.ravel()[at] = experts[i]
        found &= used[at] < size
        used[at] += 1
        load[at] = np.where(used[at] < size, load[at] + parts[i], np.inf)
    by = np.argsort(rank.T, axis=1, kind="stable")
    return np.take_along_axis(expert, by, 1).reshape(rows, ranks, size), found


def deal(expert: Ints, part: Floats, ranks: int) -> Ints:
    """Deal the items in rounds, one per rank and round: the heaviest left to the lightest rank. Returns
    slots.

    Never puts an expert twice on a rank when no expert has more than ``ranks`` copies: only an expert that
    straddles two rounds could, and its remaining copies are offered to the ranks without it first.
    """
    rows, items = expert.shape
    size = items // ranks
    slots = np.empty((rows, ranks, size), np.int64)
    load = np.zeros((rows, ranks))
    place = np.arange(ranks)
    for i in range(size):
        now, value = expert[:, i * ranks : (i + 1) * ranks], part[:, i * ranks : (i + 1) * ranks]
        straddling = expert[:, i * ranks - 1] if i else np.full(rows, -1)
        left = np.cumprod(now == straddling[:, None], axis=1).sum(1)[:, None]
        holds = (slots[:, :, i - 1] == straddling[:, None]) if i else np.zeros((rows, ranks), bool)
        by = np.argsort(np.where(holds, np.inf, load), axis=1, kind="stable")
        rest = np.where(place < left, -1.0, np.take_along_axis(load, by, 1))
        by = np.take_along_axis(by, np.argsort(rest, axis=1, kind="stable"), 1)
        heavy = np.argsort(np.where(place < left, -np.inf, -value), axis=1, kind="stable")
        np.put_along_axis(slots[:, :, i], by, np.take_along_axis(now, heavy, 1), 1)
        gain = np.empty_like(load)
        np.put_along_axis(gain, by, np.take_along_axis(value, heavy, 1), 1)
        load += gain
    return slots


@functools.cache
def _exchanges(size: int) -> tuple[Ints, Floats | None]:
    """Ways to share the ``2 * size`` slots of two ranks anew: ``[ways, 2 * size]`` indices, the first half
    for one rank.

    Every partition for small ranks (slot 0 stays put: the ranks are interchangeable), with a 0/1 matrix
    ``[2 * size, ways]`` that sums the first half; every single swap, row-major, for larger ranks.
    """
    both = range(2 * size)
    if size <= FULL_PARTITION:
        ways = [
            (0, *rest, *sorted(set(both) - {0, *rest})) for rest in itertools.combinations(both[1:], size - 1)
        ]
        table = np.array(ways, np.int64)
        return table, (table[:, :size, None] == np.arange(2 * size)).any(1).T.astype(np.float64)
    table = np.tile(np.arange(2 * size), (size * size, 1))
    way, i, j = np.arange(size * size), *np.divmod(np.arange(size * size), size)
    table[way, i], table[way, size + j] = size + j, i
    return table, None


def _repeats(slots: Ints) -> Bools:
    """Whether an expert occurs twice along the last axis."""
    by = np.sort(slots, -1)
    return (by[..., 1:] == by[..., :-1]).any(-1)


def _round(pack: Packing, act: Ints, width: int, partners: int, turn: int, tries: int) -> Bools:
    """One round of exchanges: each of the ``width`` hottest ranks with the best of its own ``partners``.

    Hot ranks and all their partners are disjoint, so every exchange of the round stands. Returns which rows
    of ``act`` changed. A hot rank whose best ``tries`` exchanges would all put an expert twice on a rank is
    left alone.
    """
    load = pack.part[act].sum(-1)
    count, ranks, size = pack.slots[act].shape
    n = np.arange(count)[:, None]
    by = np.argsort(load, axis=1, kind="stable")
    hot = by[:, : ranks - width - 1 : -1]
    step = np.arange(partners) * width + np.arange(width)[:, None]
    cold = by[:, (step + turn * width * partners) % (ranks - width)]
    top, low = load[n, hot][..., None], load[n[..., None], cold]
    tied = pack.tied[act]
    value = np.empty((*cold.shape, 2 * size))
    value[..., :size] = tied[n, hot][:, :, None]
    value[..., size:] = tied[n[..., None], cold]
    table, sums = _exchanges(size)
    # ``tied`` adds a huge constant to replicated experts of degree-balanced rows, so that only exchanges that
    # keep their number on the rank can come near the wanted sum.
    if sums is not None:
        peak = (value.reshape(-1, 2 * size) @ sums).reshape(*cold.shape, -1)
        peak -= (value[..., :size].sum(-1) - (top - low) / 2)[..., None]
    else:
        peak = value[..., :size, None] - value[..., None, size:]
        peak = peak.reshape(*cold.shape, -1)
        peak -= ((top - low) / 2)[..., None]
    np.abs(peak, out=peak)
    peak += ((top + low) / 2)[..., None]
    ways = peak.shape[-1]
    peak = peak.reshape(count, width, -1)
    h = np.arange(width)
    for _ in range(tries):
        best = peak.argmin(-1)
        other = cold[n, h, best // ways]
        good = peak[n, h, best] < top[..., 0]
        if not pack.distinct:
            break
        experts = np.concatenate((pack.slots[act[:, None], hot], pack.slots[act[:, None], other]), -1)
        moved = np.take_along_axis(experts, table[best % ways], -1)
        wrong = good & (_repeats(moved[..., :size]) | _repeats(moved[..., size:]))
        good &= ~wrong
        if not wrong.any():
            break
        peak[(*np.nonzero(wrong), best[wrong])] = np.inf
    r, h = np.nonzero(good)
    order = table[best[r, h] % ways]
    x, y = (act[r], hot[r, h]), (act[r], other[r, h])
    for array in (pack.slots, pack.part, pack.tied):
        new = np.take_along_axis(np.concatenate((array[x], array[y]), -1), order, -1)
        array[x], array[y] = new[:, :size], new[:, size:]
    return good.any(1)


def exchange_search(pack: Packing, goal: Floats, limit: int, early: int = 0, hope: float = 0.0) -> None:
    """Exchange slots in place until a row's hottest rank is at or below ``goal [rows]`` or no exchange lowers
    it.

    The largest load of a row never rises. With ``early``, a row still above ``hope * goal`` after so many
    rounds stops.
    """
    act = np.nonzero(pack.part.sum(-1).max(1) > goal)[0]
    ranks = pack.slots.shape[1]
    if ranks < 2:
        return
    for turn in range(limit):
        if not len(act):
            return
        # The schedule depends on the round alone, so that a row's result does not depend on its neighbours.
        width = max(1, ranks // 16, ranks // 2 >> 1 + turn // SLOWLY)
        partners = int(np.clip(PAIRS // width, 1, (ranks - width) // width))
        moved = _round(pack, act, width, partners, turn, 1)
        still = np.nonzero(~moved)[0]
        if len(still):
            moved[still] = _round(pack, act[still], 1, ranks - 1, 0, 4)
        peak = pack.part[act].sum(-1).max(1)
        moved &= peak > goal[act]
        if turn + 1 == early:
            moved &= peak <= hope * goal[act]
        act = act[moved]
