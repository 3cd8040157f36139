"""Renumber the ranks and slots of a new map so that few experts change place."""

from __future__ import annotations

import numpy as np

from ._check import Ints


def align(new: Ints, old: Ints, experts: int) -> Ints:
    """Which rank of ``new`` should become rank ``g``, to keep many experts in place: [rows, ranks] int64.

    The largest overlap first, then pairwise exchanges until none helps: a few per cent short of an exact
        assignment.

    Args:
        new, old: [rows, ranks, slots] expert ids.
        experts: ids are below this.
    """
    rows, ranks, _ = new.shape
    hot = np.zeros((2, rows, ranks, experts), np.float32)
    for which, slots in enumerate((old, new)):
        np.put_along_axis(hot[which], slots, 1.0, 2)
    overlap = hot[0] @ hot[1].transpose(
        0, 2, 1
    )  # [rows, old rank, new rank]: small integers, exact in any order
    n = np.arange(rows)
    choice = np.empty((rows, ranks), np.int64)
    free = overlap.copy()
    for _ in range(ranks):
        x, y = np.divmod(free.reshape(rows, -1).argmax(1), ranks)
        choice[n, x] = y
        free[n, x, :] = free[n, :, y] = -1
    act = n
    for _ in range(4 * ranks):
        if not len(act):
            break
        # Entry [x, y]: overlap of old rank x with the new rank now given to y.
        table = np.take_along_axis(overlap[act], choice[act][:, None], 2)
        own = np.diagonal(table, axis1=1, axis2=2)
        gain = table + table.transpose(0, 2, 1) - own[:, :, None] - own[:, None, :]
        flat = gain.reshape(len(act), -1)
        best = flat.argmax(1)
        x, y = np.divmod(best, ranks)
        act, x, y = (a[flat[np.arange(len(best)), best] > 0] for a in (act, x, y))
        choice[act, x], choice[act, y] = choice[act, y], choice[act, x]
    return choice


def keep_slots(new: Ints, old: Ints) -> Ints:
    """Each row of ``new`` reordered so that an expert also in that row of ``old`` keeps its slot there.

    Newcomers fill the slots left over, in order. Both are [rows, slots]; multiplicities are respected.
    """
    rows, size = new.shape
    out = np.full_like(old, -1)
    placed = np.zeros(new.shape, bool)
    n = np.arange(rows)
    for i in range(size):
        match = (old == new[:, i : i + 1]) & (out < 0)
        j = match.argmax(1)
        hit = match[n, j]
        out[n[hit], j[hit]] = new[n[hit], i]
        placed[hit, i] = True
    out[out < 0] = new[~placed]
    return out
