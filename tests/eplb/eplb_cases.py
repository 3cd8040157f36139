"""Loads and shapes for the property tests, and the plain greedy written out once more, item by item."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

KINDS = ("random", "equal", "zero", "one hot", "half zero", "few integers", "steep", "tiny and huge")


def make_loads(kind: str, layers: int, experts: int, seed: int) -> np.ndarray:
    """[layers, experts] float64 loads of a named kind."""
    rng = np.random.default_rng(seed)
    if kind == "equal":
        return np.full((layers, experts), 3.0)
    if kind == "zero":
        return np.zeros((layers, experts))
    if kind == "one hot":
        w = np.zeros((layers, experts))
        w[:, seed % experts] = 17.0
        return w
    if kind == "half zero":
        return rng.integers(0, 2, (layers, experts)) * rng.exponential(1.0, (layers, experts))
    if kind == "few integers":
        return rng.integers(0, 4, (layers, experts)).astype(np.float64)
    if kind == "steep":
        return 1000.0 / (1 + np.argsort(rng.random((layers, experts)), axis=1)) ** 1.5
    if kind == "tiny and huge":
        return 10.0 ** rng.integers(-300, 290, (layers, experts))
    return np.exp(rng.normal(0.0, 1.0, (layers, experts)))


@st.composite
def problems(draw: st.DrawFn, spare: bool = False) -> tuple[np.ndarray, int, int]:
    """Loads, slots and ranks for which a distinct plan exists; with ``spare`` at least one slot to spare."""
    ranks = draw(st.integers(1, 9))
    size = draw(st.integers(1, 7))
    slots = ranks * size
    lowest = max(size, 1)  # fewer experts than slots on a rank cannot be distinct
    highest = slots - 1 if spare and slots > lowest else slots
    experts = draw(st.integers(lowest, max(lowest, highest)))
    layers = draw(st.integers(1, 3))
    return make_loads(draw(st.sampled_from(KINDS)), layers, experts, draw(st.integers(0, 99))), slots, ranks


def plain_greedy(w: np.ndarray, slots: int, ranks: int, distinct: bool) -> tuple[list[list[int]], bool]:
    """One layer: copies to the largest w / c, then heaviest first to the lightest rank; did that work?"""
    experts = len(w)
    counts = [1] * experts
    for _ in range(slots - experts):
        open_ = [e for e in range(experts) if not distinct or counts[e] < ranks]
        e = max(open_, key=lambda e: (max(w[e], 0.0) / counts[e], -counts[e], -e))
        counts[e] += 1
    items = sorted((-w[e] / counts[e], e) for e in range(experts) for _ in range(counts[e]))
    where: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for value, e in items:
        free = [
            g for g in range(ranks) if len(where[g]) < slots // ranks and not (distinct and e in where[g])
        ]
        if not free:
            return where, False
        g = min(free, key=lambda g: (load[g], g))
        where[g].append(e)
        load[g] -= value
    return where, True
