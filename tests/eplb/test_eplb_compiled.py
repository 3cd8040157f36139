"""The loops compiled by numba give the bytes of the NumPy path, and nobody needs or loads numba unasked."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from eplb_cases import problems
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.bench.eplb import drifted, probabilities, window_counts
from dsv41.eplb import Balancer, equal_shares, greedy_map, rebalance_experts, repair, water_fill
from dsv41.eplb._flow import compiled_loops

quick = settings(deadline=None, max_examples=80)
has_numba = importlib.util.find_spec("numba") is not None
needs_numba = pytest.mark.skipif(not has_numba, reason="numba is an optional package")


def same_bytes(w: np.ndarray, old: np.ndarray, ranks: int, **options: Any) -> None:
    """Splits and repairs of both paths are equal to the last bit."""
    for start in (None, equal_shares(old, w.shape[1])):
        one, two = (water_fill(w, old, ranks, start=start, compiled=c, **options) for c in (False, True))
        assert one.tobytes() == two.tobytes()
    one, two = (repair(w, old, ranks, target=1.005, compiled=c) for c in (False, True))
    assert one.moves == two.moves and one.gains == two.gains
    for name in ("physical_to_logical", "shares", "before", "after"):
        assert getattr(one, name).tobytes() == getattr(two, name).tobytes(), name


@needs_numba
@quick
@given(
    problems(spare=True),
    st.integers(0, 99),
    st.booleans(),
    st.integers(0, 25),
    st.sampled_from((0.0, 1e-3, 0.1)),
)
def test_both_paths_give_the_same_bytes(
    problem: tuple[np.ndarray, int, int], seed: int, plan: bool, sweeps: int, tolerance: float
) -> None:
    w, slots, ranks = problem
    # The greedy's maps may hold an expert twice on a rank.
    old = rebalance_experts(w, slots, 1, 1, ranks)[0] if plan else greedy_map(w, slots, ranks)
    v = w * np.exp(np.random.default_rng(seed).normal(0, 0.7, w.shape))
    same_bytes(v, old, ranks, sweeps=sweeps, tolerance=tolerance)
    same_bytes(np.asfortranarray(v), np.asfortranarray(old), ranks)


@needs_numba
@pytest.mark.parametrize(("ranks", "name"), [(64, "zipf .8"), (64, "lognormal .5"), (128, "zipf 1.0")])
def test_both_paths_give_the_same_bytes_in_production(ranks: int, name: str) -> None:
    rng = np.random.default_rng(ranks)
    p = probabilities(name, 4, 384, rng)
    old = rebalance_experts(window_counts(p, ranks, rng), 384 + ranks, 1, 1, ranks)[0]
    same_bytes(window_counts(drifted(p, 0.2, rng), ranks, rng), old, ranks)


def test_numba_is_loaded_only_when_asked() -> None:
    script = """
import sys, numpy as np, dsv41.eplb as e
old = np.array([[0, 1, 2, 0]])
e.repair([[3.0, 1.0, 1.0]], old, 2, compiled=False)
e.water_fill([[3.0, 1.0, 1.0]], old, 2, compiled=False)
e.Balancer(old, 3, 2, compiled=False).decide([[3.0, 1.0, 1.0]])
e.rebalance_experts([[3.0, 1.0, 1.0]], 4, 1, 1, 2)
assert "numba" not in sys.modules
e.water_fill([[3.0, 1.0, 1.0]], old, 2)
print("numba" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str(has_numba)


def test_without_numba_the_numpy_path_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    w, old = np.array([[3.0, 1.0, 1.0]]), np.array([[0, 1, 2, 0]])
    want = water_fill(w, old, 2, compiled=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    compiled_loops.cache_clear()
    try:
        assert compiled_loops(None) is None
        np.testing.assert_array_equal(water_fill(w, old, 2), want)
        for call in (
            lambda: water_fill(w, old, 2, compiled=True),
            lambda: repair(w, old, 2, compiled=True),
            lambda: Balancer(old, 3, 2, compiled=True),
        ):
            with pytest.raises(ValueError, match="expected numba for compiled=True, got no such package"):
                call()
    finally:
        compiled_loops.cache_clear()
