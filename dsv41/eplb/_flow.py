"""How a layer's tokens flow from experts to the ranks that hold them, levelled by pouring one expert at a
time.

Everything is elementwise float64, sorts and running sums, so results do not depend on SIMD width or threads;
layers are rows that never influence each other. The two loops that take most of the time, ``level`` and
``_paint``, exist once more in ``_loops`` for numba, with the same bytes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

import numpy as np

from ._check import Bools, Floats, Ints, check
from .maps import duplicates, logical_maps


@functools.cache
def compiled_loops(compiled: bool | None) -> ModuleType | None:
    """``_loops``, or None for NumPy: None takes it where numba is installed, True insists on it."""
    there = importlib.util.find_spec("numba") is not None
    check(there or not compiled, "eplb", "numba for compiled=True", "no such package")
    if not there or compiled is False:
        return None
    return importlib.import_module("._loops", __package__)


def row_sums(index: Ints, values: Floats, length: int) -> Floats:
    """``values`` of each row added up by ``index``, in order: [rows, length]."""
    flat = index + np.arange(len(index))[:, None] * length
    sums: Floats = np.bincount(flat.ravel(), values.ravel(), len(index) * length).astype(
        np.float64, copy=False
    )
    return sums.reshape(len(index), length)


class Flow:
    """Loads ``x`` on every slot of a map, the rank totals, and who can pour where.

    Arrays have one dummy slot and one dummy rank at the end, of infinite load: padding needs no masks, since
    nothing ever flows there. ``hosts [layers, experts, most copies]`` lists one slot per rank that holds the
    expert, and the dummy; ``main [layers, slots]`` is the slot that stands for all copies of its expert on
    its rank.
    """

    def __init__(
        self, w: Floats, p2l: Ints, ranks: int, shares: Floats | None = None, compiled: bool | None = None
    ) -> None:
        layers, slots = p2l.shape
        self.loops = compiled_loops(compiled)
        w = np.ascontiguousarray(w)
        self.w, self.p2l, self.ranks, self.slots, self.size = w, p2l.copy(), ranks, slots, slots // ranks
        l2p, self.counts = logical_maps(p2l, w.shape[1])
        self.main = np.tile(np.arange(slots), (layers, 1))
        self.hosts = np.where(l2p < 0, slots, l2p)
        if duplicates(p2l, ranks).any():  # only maps made elsewhere; copies of one rank are neighbours in l2p
            rank = np.where(l2p < 0, -1, l2p // self.size)
            second = np.zeros(l2p.shape, bool)
            second[..., 1:] = (rank[..., 1:] == rank[..., :-1]) & (rank[..., 1:] >= 0)
            for n, e, k in np.argwhere(second):
                self.main[n, l2p[n, e, k]] = self.main[n, l2p[n, e, k - 1]]
            self.hosts = np.sort(np.where(second, slots, self.hosts), axis=-1)
        self.width = (self.hosts < slots).sum(-1)
        self.mean = np.cumsum(w, axis=1)[:, -1] / ranks
        part = np.take_along_axis(w, p2l, 1)
        part = part / np.take_along_axis(self.counts, p2l, 1) if shares is None else part * shares
        self.x = row_sums(self.main, part, slots + 1)
        self.load = np.full((layers, ranks + 1), np.inf)
        self.load[:, :ranks] = 0.0
        for slot in range(self.size):
            self.load[:, :ranks] += self.x[:, slot : slots : self.size]
        self.colour = self._paint()

    def peak(self) -> Floats:
        """Largest rank load of each layer."""
        return self.load[:, : self.ranks].max(1)

    def _paint(self) -> Ints:
        """A colour for every replicated expert, different from those it shares a rank with; -1 for the
        others.

        Experts of one colour touch disjoint ranks, so they can be poured in one NumPy step.
        """
        colour = np.full(self.w.shape, -1, np.int64)
        order = np.lexsort((-self.w, -self.width))
        if self.loops is not None:
            self.loops.paint(order, self.hosts, self.width, self.size, self.ranks, colour)
            return colour
        turn = np.empty_like(order)
        np.put_along_axis(turn, order, np.arange(order.shape[1])[None], 1)
        n, e = np.nonzero(self.width > 1)
        hosts = self.hosts[n, e]
        pad = hosts == self.slots
        at, turn = n[:, None] * (self.ranks + 1) + hosts // self.size, turn[n, e]
        open_, c = np.arange(len(n)), 0
        while len(open_):
            # A maximal set of experts that share no rank: again and again those first in line on all of their
            # ranks.
            taken = np.zeros(self.load.size, bool)
            left = open_
            while len(left):
                first = np.full(self.load.size, self.slots)
                np.minimum.at(first, at[left], turn[left, None])
                won = left[((first[at[left]] == turn[left, None]) | pad[left]).all(1)]
                colour[n[won], e[won]] = c
                taken[at[won]] = True
                left = left[~(taken[at[left]] & ~pad[left]).any(1)]
            open_, c = open_[colour[n[open_], e[open_]] < 0], c + 1
        return colour

    def drop_host(self, n: Ints, e: Ints, slot: Ints) -> None:
        """Slot ``slot[i]`` of layer ``n[i]`` no longer holds ``e[i]``; the layers are distinct."""
        row = self.hosts[n, e]
        row[row == slot[:, None]] = self.slots
        self.hosts[n, e] = np.sort(row, 1)
        self._recolour(n, e)

    def add_host(self, n: Ints, e: Ints, slot: Ints) -> None:
        """Slot ``slot[i]`` of layer ``n[i]`` now holds ``e[i]``, on a rank without it; the layers are
        distinct."""
        if (self.width[n, e] == self.hosts.shape[2]).any():
            self.hosts = np.concatenate((self.hosts, np.full((*self.w.shape, 1), self.slots)), 2)
        self.hosts[n, e, self.width[n, e]] = slot
        self.hosts[n, e] = np.sort(self.hosts[n, e], 1)
        self._recolour(n, e)

    def _recolour(self, n: Ints, e: Ints) -> None:
        """Count the hosts of ``e[i]`` anew and give it the lowest colour that is free on all its ranks."""
        hosts = self.hosts[n, e]
        self.width[n, e] = (hosts < self.slots).sum(1)
        self.colour[n, e] = -1
        first = hosts // self.size * self.size
        near = first[..., None] + np.arange(self.size)
        there = self.p2l[n[:, None, None], np.minimum(near, self.slots - 1)]
        near = np.where(first[..., None] < self.slots, self.colour[n[:, None, None], there], -1)
        free = np.ones((len(n), int(self.colour.max(initial=-1)) + 3), bool)
        free[np.arange(len(n))[:, None], near.reshape(len(n), -1)] = False  # -1 is the last column
        free[:, -1] = False
        self.colour[n, e] = np.where(self.width[n, e] > 1, free.argmax(1), -1)

    def level(self, layers: Ints, sweeps: int, tolerance: float) -> None:
        """Pour every replicated expert of ``layers`` up to ``sweeps`` times, stopping a layer once steady.

        Steady: no slot changed by more than ``tolerance`` times the mean rank load in a sweep.
        """
        if self.loops is not None:
            limit = tolerance * self.mean
            self.loops.level(
                self.x,
                self.load,
                self.w,
                self.hosts,
                self.width,
                self.colour,
                self.size,
                layers,
                sweeps,
                limit,
            )
            return
        groups = self._groups(layers)
        for _ in range(sweeps):
            change = np.zeros(len(self.w))
            for group in groups:
                group.pour(self.x.ravel(), self.load.ravel(), change)
            steady = change <= tolerance * self.mean
            if steady[layers].any():
                layers = layers[~steady[layers]]
                groups = [kept for group in groups if (kept := group.without(steady)) is not None]
            if not len(layers):
                return

    def _groups(self, layers: Ints) -> list[_Group]:
        """The replicated experts of ``layers`` by colour, narrow and wide ones apart to keep padding
        small."""
        colour = self.colour[layers]
        groups = []
        for c in range(int(colour.max(initial=-1)) + 1):
            row, e = np.nonzero(colour == c)
            wide = self.width[layers[row], e]
            for low, high in ((2, 2), (3, 4), (5, 8), (9, self.ranks)):
                pick = (wide >= low) & (wide <= high)
                if pick.any():
                    n, width = layers[row[pick]], int(wide[pick].max())
                    hosts = self.hosts[n, e[pick], :width].T
                    flat = n * (self.slots + 1) + hosts
                    at = n * (self.ranks + 1) + hosts // self.size
                    groups.append(_Group(n, self.w[n, e[pick]], flat, at))
        return groups


class _Group:
    """Experts on disjoint ranks, poured together: ``flat``, ``at`` [width, experts] index all slots and
    ranks."""

    def __init__(self, n: Ints, w: Floats, flat: Ints, at: Ints) -> None:
        self.n, self.w, self.flat, self.at = n, w, np.ascontiguousarray(flat), np.ascontiguousarray(at)
        self.first = np.flatnonzero(np.r_[True, n[1:] != n[:-1]])

    def without(self, steady: Bools) -> _Group | None:
        """The same group less the experts of steady layers; None when nothing is left."""
        keep = ~steady[self.n]
        if keep.all():
            return self
        return (
            _Group(self.n[keep], self.w[keep], self.flat[:, keep], self.at[:, keep]) if keep.any() else None
        )

    def pour(self, x: Floats, load: Floats, change: Floats) -> None:
        """Spread each expert's load over its ranks to a common level; raises ``change`` to the largest step
        of a layer.

        The level is ``min over k of (w + the k lowest loads of others) / k``.
        """
        old = x[self.flat]
        base = load[self.at] - old
        below, level = self.w, np.full(len(self.w), np.inf)
        for k, low in enumerate(_ascending(base)):
            below = below + low
            level = np.minimum(level, below / (k + 1))
        new = np.maximum(level - base, 0.0)
        x[self.flat] = new
        load[self.at] = base + new
        step = np.abs(new - old).max(0)
        layer = self.n[self.first]
        change[layer] = np.maximum(change[layer], np.maximum.reduceat(step, self.first))


def _ascending(base: Floats) -> list[Floats] | Floats:
    """The rows of ``base`` sorted along axis 0; a few long vectors are quicker to exchange than to sort."""
    if len(base) > 4:
        return np.sort(base, axis=0)
    rows = list(base)
    for end in range(len(rows) - 1, 0, -1):
        for i in range(end):
            rows[i], rows[i + 1] = np.minimum(rows[i], rows[i + 1]), np.maximum(rows[i], rows[i + 1])
    return rows
