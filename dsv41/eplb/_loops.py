"""The loops of ``_flow`` compiled by numba, an optional package: layer after layer instead of all at once.

Bit for bit what the NumPy path computes: the same additions, divisions and comparisons on each number in the
same order, without ``fastmath``, so the compiler may neither reorder nor fuse them. Compiled when this module
is first imported (some seconds, then kept in numba's cache); ``_flow`` imports it when it first needs it.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ._check import Floats, Ints


@njit(
    "void(f8[:,::1], f8[:,::1], f8[:,::1], i8[:,:,::1], i8[:,::1], i8[:,::1], i8, i8[::1], i8, f8[::1])",
    cache=True,
    nogil=True,
)
def level(
    x: Floats,
    load: Floats,
    w: Floats,
    hosts: Ints,
    width: Ints,
    colour: Ints,
    size: int,
    layers: Ints,
    sweeps: int,
    limit: Floats,
) -> None:
    """``Flow.level``: ``x`` and ``load`` change in place; layer ``n`` stops when no slot changed by more than
    ``limit[n]`` in a sweep."""
    order = np.empty(width.shape[1], np.int64)
    base, low = np.empty(hosts.shape[2]), np.empty(hosts.shape[2])
    for n in layers:
        count = 0
        for c in range(colour[n].max() + 1):
            for e in range(width.shape[1]):
                if colour[n, e] == c:
                    order[count] = e
                    count += 1
        for _ in range(sweeps):
            change = 0.0
            for e in order[:count]:
                for k in range(width[n, e]):  # what others put on its ranks, in place and sorted
                    slot = hosts[n, e, k]
                    base[k] = value = load[n, slot // size] - x[n, slot]
                    at = k
                    while at > 0 and low[at - 1] > value:
                        low[at] = low[at - 1]
                        at -= 1
                    low[at] = value
                below, top = w[n, e], np.inf
                for k in range(width[n, e]):
                    below += low[k]
                    top = min(top, below / (k + 1))
                for k in range(width[n, e]):
                    slot = hosts[n, e, k]
                    new = max(top - base[k], 0.0)
                    change = max(change, abs(new - x[n, slot]))
                    x[n, slot] = new
                    load[n, slot // size] = base[k] + new
            if change <= limit[n]:
                break


@njit("void(i8[:,::1], i8[:,:,::1], i8[:,::1], i8, i8, i8[:,::1])", cache=True, nogil=True)
def paint(order: Ints, hosts: Ints, width: Ints, size: int, ranks: int, colour: Ints) -> None:
    """``Flow._paint``: in ``order``, the lowest colour that no earlier expert has on any of its ranks.

    That is what the NumPy path's maximal sets come to, whose members are first in line on all their ranks.
    """
    seen = np.empty((ranks, size), np.int64)  # colours of each rank so far
    count = np.empty(ranks, np.int64)
    taken = np.empty(order.shape[1] + 1, np.int64)
    for n in range(len(order)):
        count[:] = 0
        taken[:] = -1
        for e in order[n]:
            if width[n, e] < 2:
                continue
            for k in range(width[n, e]):
                rank = hosts[n, e, k] // size
                for i in range(count[rank]):
                    taken[seen[rank, i]] = e
            c = 0
            while taken[c] == e:
                c += 1
            colour[n, e] = c
            for k in range(width[n, e]):
                rank = hosts[n, e, k] // size
                seen[rank, count[rank]] = c
                count[rank] += 1
