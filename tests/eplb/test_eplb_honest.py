"""What a repair claims is what its shares do, and its moves are the transfers its map needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.eplb import Balancer, Repair, apply_moves, count_transfers, imbalance, rebalance_experts, repair


def honest(w: Any, old: Any, ranks: int, fix: Repair) -> None:
    """The books of a repair, from its outputs alone."""
    old = np.asarray(old)
    np.testing.assert_array_equal(fix.after, imbalance(w, fix.physical_to_logical, ranks, fix.shares))
    assert (fix.after <= fix.before).all()
    gained = np.zeros(len(old))
    for move, gain in zip(fix.moves, fix.gains, strict=True):
        gained[move.layer] += gain
        assert move.src_slot != move.dst_slot
    np.testing.assert_allclose(gained, fix.before - fix.after, atol=1e-9)
    size, now = old.shape[1] // ranks, old.copy()
    for move in fix.moves:
        first = move.dst_rank * size
        assert move.expert not in now[move.layer, first : first + size]
        assert now[move.layer, move.src_slot] == move.expert
        now = apply_moves(now, [move])
        assert set(now[move.layer]) == set(old[move.layer])
    np.testing.assert_array_equal(now, fix.physical_to_logical)
    moves = np.bincount([move.layer for move in fix.moves], minlength=len(old))
    np.testing.assert_array_equal(moves, count_transfers(old, now, ranks))


@st.composite
def any_maps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Loads and a map that may hold anything, experts twice on a rank among it."""
    ranks, size, layers = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    slots = ranks * size
    experts = draw(st.integers(1, slots))
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    p2l = np.concatenate(
        (np.tile(np.arange(experts), (layers, 1)), rng.integers(0, experts, (layers, slots - experts))), 1
    )
    return rng.integers(0, 20, (layers, experts)).astype(float), rng.permuted(p2l, axis=1), ranks


@settings(deadline=None, max_examples=150)
@given(any_maps(), st.sampled_from((None, 0, 1, 2, 3)), st.sampled_from((None, 1)))
def test_a_repair_of_any_map_keeps_its_word(
    problem: tuple[np.ndarray, np.ndarray, int], budget: int | None, per_rank: int | None
) -> None:
    w, old, ranks = problem
    honest(w, old, ranks, repair(w, old, ranks, target=1.0, budget=budget, per_rank=per_rank, compiled=False))


@pytest.mark.parametrize(
    ("w", "old", "ranks"),
    [
        ([[9, 7]], [[1, 1, 1, 1, 1, 0]], 2),
        ([[9, 5, 2]], [[0, 1, 2, 2]], 2),
        ([[8, 8, 2]], [[2, 0, 2, 0, 1, 0]], 3),
    ],
)
def test_reported_maps(w: list[list[int]], old: list[list[int]], ranks: int) -> None:
    honest(w, old, ranks, repair(w, old, ranks, target=1.0, compiled=False))


def test_budgets_that_cut_the_list_report_what_they_reach() -> None:
    rng = np.random.default_rng(5)
    w = np.exp(rng.normal(0, 1, (3, 96)))
    old = rebalance_experts(w, 112, 1, 1, 16)[0]
    for turn in range(6):
        v = w * np.exp(rng.normal(0, 0.6, w.shape))
        whole = repair(v, old, 16, compiled=False)
        for budget in (1, 3, 10):
            part = repair(v, old, 16, budget=budget, compiled=False)
            honest(v, old, 16, part)
            assert part.moves == whole.moves[:budget]
        decision = Balancer(old, 96, 16, budget=10, compiled=False).decide(v, turn)
        served = imbalance(v, decision.physical_to_logical, 16, decision.shares).mean()
        assert decision.action == "repair" and decision.repaired == pytest.approx(served, rel=1e-12)
