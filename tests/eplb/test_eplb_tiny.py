"""Tiny layers reach their optimum, by a brute force of its own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from eplb_cases import make_loads
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.eplb import duplicates, imbalance, rebalance_experts


def brute_force(w: list[float], slots: int, ranks: int) -> float:
    """Smallest possible imbalance of a distinct map: all sets of experts for all ranks, with all counts."""
    sets = list(itertools.combinations(range(len(w)), slots // ranks))
    best = np.inf
    for way in itertools.combinations_with_replacement(sets, ranks):
        counts = [sum(e in own for own in way) for e in range(len(w))]
        if all(counts):
            best = min(best, max(sum(w[e] / counts[e] for e in own) for own in way))
    return best * ranks / sum(w) if sum(w) else 1.0


@pytest.mark.parametrize(
    ("w", "slots", "ranks", "best"),
    [
        ([4, 4, 4, 2, 3], 8, 4, 18 / 17),
        ([0, 3, 3, 2, 3], 12, 3, 1.0),
        ([75, 67, 13, 61, 55], 12, 4, None),
        ([2, 2, 1], 4, 2, None),
    ],
)
def test_reported_layers(w: list[float], slots: int, ranks: int, best: float | None) -> None:
    want = brute_force(w, slots, ranks)
    assert best is None or want == pytest.approx(best)
    p2l = rebalance_experts([w], slots, 1, 1, ranks)[0]
    assert duplicates(p2l, ranks)[0] == 0
    assert imbalance([w], p2l, ranks)[0] <= want * 1.0041


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([(2, 2), (3, 2), (4, 2), (5, 2), (2, 3), (3, 3), (4, 3), (2, 4), (3, 4)]),
    st.integers(0, 2),
    st.sampled_from(["random", "few integers", "steep", "half zero", "one hot"]),
    st.integers(0, 999),
)
def test_tiny_layers_are_within_half_a_per_cent(
    shape: tuple[int, int], more: int, kind: str, seed: int
) -> None:
    ranks, size = shape
    experts = min(size + more, ranks * size)
    w = make_loads(kind, 1, experts, seed)
    got = imbalance(w, rebalance_experts(w, ranks * size, 1, 1, ranks)[0], ranks)[0]
    assert got <= brute_force(w[0].tolist(), ranks * size, ranks) * 1.0041  # 0.2 % target, 0.2 % pruning
