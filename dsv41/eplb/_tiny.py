"""The best map of a tiny layer, by branch and bound over replica counts and placements.

Python integers throughout, so the same bytes everywhere. Work is bounded: a search that meets its limit
returns the best map so far.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ._check import Floats, Ints

SLOTS = 16  # layers with at most this many slots are searched
COUNTS = 4000  # vectors of counts looked at
NODES = 25_000  # placements tried for a layer
FIRST = 150  # placements tried for each vector of counts before any gets more
CLOSE = 0.998  # a map must be this much better to count: what the search proves is the optimum to 0.2 %


def best_placement(w: Floats, slots: int, ranks: int, peak: float, goal: float) -> Ints | None:
    """A distinct map of one layer with a largest rank load below ``CLOSE * peak``; None if none was found.

    The unit is that of ``w`` [experts], exact loads, each slot carrying ``floor(w / count)``. Stops at
    ``goal``. Returns [ranks, slots per rank].
    """
    order = np.argsort(-w, kind="stable")
    loads = [int(w[e]) for e in order]
    search = _Tiny(loads, slots // ranks, ranks, int(peak), int(goal))
    vectors = []
    for counts in _counts(loads, slots - len(loads), ranks, search.limit):
        vectors.append((max(load // c for load, c in zip(loads, counts, strict=True)), counts))
        if len(vectors) == COUNTS:
            break
    vectors.sort()
    for allowance in (FIRST, NODES):
        open_ = []
        for counts in vectors:
            if search.spent >= NODES or search.peak <= search.goal:
                break
            if counts[0] <= search.limit and not search.place(counts[1], allowance):
                open_.append(counts)
        vectors = open_
    if search.best is None:
        return None
    return order[np.array(search.best)]


def _counts(loads: list[int], extra: int, cap: int, limit: int) -> Iterator[tuple[int, ...]]:
    """All ways to give out ``extra`` copies so that no slice exceeds ``limit``, most to the heavy experts
    first."""
    least = [min(cap + 1, max(1, -(-load // (limit + 1)))) for load in loads]
    counts = [0] * len(loads)

    def give(e: int, left: int) -> Iterator[tuple[int, ...]]:
        if e == len(loads):
            if not left:
                yield tuple(counts)
            return
        later = len(loads) - e - 1
        for more in range(min(left, cap - least[e]), -1, -1):
            if left - more > later * (cap - 1):
                return
            counts[e] = least[e] + more
            yield from give(e + 1, left - more)

    left = len(loads) + extra - sum(least)
    if left >= 0 and max(least) <= cap:
        yield from give(0, left)


class _Tiny:
    """Depth first, the heaviest slices first, each to the lightest ranks first; ``best`` lists the ranks."""

    def __init__(self, loads: list[int], size: int, ranks: int, peak: int, goal: int) -> None:
        self.loads, self.size, self.ranks, self.goal = loads, size, ranks, goal
        self.peak, self.limit = peak, int(peak * CLOSE)
        self.spent = 0
        self.best: list[list[int]] | None = None

    def place(self, counts: tuple[int, ...], allowance: int) -> bool:
        """Look for a better placement of these counts; whether all were looked at."""
        by = sorted(range(len(counts)), key=lambda e: (-(self.loads[e] // counts[e]), e))
        self.items = [(e, self.loads[e] // counts[e], counts[e]) for e in by]
        self.rest = [0] * (len(by) + 1)
        for i in range(len(by) - 1, -1, -1):
            self.rest[i] = self.rest[i + 1] + self.items[i][1] * self.items[i][2]
        self.load, self.where = [0] * self.ranks, [[] for _ in range(self.ranks)]
        self.stop = min(self.spent + allowance, NODES)
        self._expert(0)
        return self.spent < self.stop

    def _expert(self, i: int) -> None:
        if i == len(self.items):
            self.peak = max(self.load)
            self.limit = int(self.peak * CLOSE)
            self.best = [list(own) for own in self.where]
            return
        room = sum(
            self.limit - load for load, own in zip(self.load, self.where, strict=True) if len(own) < self.size
        )
        if room >= self.rest[i]:
            order = sorted(range(self.ranks), key=lambda g: (self.load[g], len(self.where[g]), g))
            self._copy(i, self.items[i][2], order, 0)

    def _copy(self, i: int, left: int, order: list[int], start: int) -> None:
        if not left:
            self._expert(i + 1)
            return
        e, part, _ = self.items[i]
        seen = None
        for k in range(start, self.ranks - left + 1):
            g = order[k]
            own, load = self.where[g], self.load[g]
            state = (load, len(own))
            if load + part > self.limit:
                return
            if state == seen or len(own) == self.size:
                continue
            seen = state
            self.spent += 1
            if self.spent >= self.stop or self.peak <= self.goal:
                return
            own.append(e)
            self.load[g] = load + part
            self._copy(i, left - 1, order, k + 1)
            own.pop()
            self.load[g] = load
