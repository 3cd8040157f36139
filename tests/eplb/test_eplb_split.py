"""Splits, tables and dispatch: optimality, quantisation, and that no pair is lost on the way."""

from __future__ import annotations

import numpy as np
import pytest
from eplb_cases import problems
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from dsv41.eplb import (
    dispatch,
    equal_shares,
    imbalance,
    logical_maps,
    rank_loads,
    rebalance_experts,
    to_table,
    water_fill,
)
from dsv41.eplb._mix import mix

quick = settings(deadline=None, max_examples=50)


def drift(w: np.ndarray, seed: int) -> np.ndarray:
    return w * np.random.default_rng(seed).uniform(0.5, 2.0, w.shape)


def settled(w: np.ndarray, p2l: np.ndarray, ranks: int) -> np.ndarray:
    return water_fill(w, p2l, ranks, sweeps=3000, tolerance=1e-12)


def linear_optimum(w: np.ndarray, p2l: np.ndarray, ranks: int) -> float:
    """Least possible largest rank load of one layer under any split (HiGHS)."""
    slots, size = len(p2l), len(p2l) // ranks
    equal = np.zeros((len(w), slots + 1))
    equal[p2l, np.arange(slots)] = 1
    upper = np.zeros((ranks, slots + 1))
    upper[np.arange(slots) // size, np.arange(slots)] = 1
    upper[:, -1] = -1
    cost = np.zeros(slots + 1)
    cost[-1] = 1
    return float(linprog(cost, A_ub=upper, b_ub=np.zeros(ranks), A_eq=equal, b_eq=w, method="highs").fun)


@quick
@given(problems(), st.integers(0, 99))
def test_shares_are_shares(problem: tuple[np.ndarray, int, int], seed: int) -> None:
    w, slots, ranks = problem
    p2l = rebalance_experts(w, slots, 1, 1, ranks)[0]
    v = drift(w, seed)
    shares = water_fill(v, p2l, ranks)
    assert (shares >= 0).all()
    total = np.zeros(w.shape)
    np.add.at(total, (np.arange(len(w))[:, None], p2l), shares)
    np.testing.assert_allclose(total, 1.0, rtol=1e-12)
    assert (imbalance(v, p2l, ranks, shares) <= imbalance(v, p2l, ranks) * (1 + 1e-12)).all()
    for layer in range(len(w)):
        alone = water_fill(v[layer : layer + 1], p2l[layer : layer + 1], ranks)
        np.testing.assert_array_equal(alone[0], shares[layer])


@quick
@given(problems(spare=True), st.integers(0, 99))
def test_hosts_in_use_share_a_level_and_others_are_not_below(
    problem: tuple[np.ndarray, int, int], seed: int
) -> None:
    w, slots, ranks = problem
    p2l = rebalance_experts(w, slots, 1, 1, ranks)[0]
    v = drift(w, seed)
    shares = settled(v, p2l, ranks)
    loads = rank_loads(v, p2l, ranks, shares)
    rank = np.arange(slots) * ranks // slots
    for layer in range(len(v)):
        tolerance = 1e-6 * loads[layer].mean()
        for e in np.nonzero(v[layer] > 0)[0]:
            own = np.nonzero(p2l[layer] == e)[0]
            level = loads[layer][rank[own]]
            used = shares[layer, own] > 1e-9
            assert np.ptp(level[used]) <= tolerance
            assert (level[~used] >= level[used].max() - tolerance).all()


@quick
@given(problems(spare=True), st.integers(0, 99))
def test_settled_peak_is_the_linear_optimum(problem: tuple[np.ndarray, int, int], seed: int) -> None:
    w, slots, ranks = problem
    p2l = rebalance_experts(w, slots, 1, 1, ranks)[0]
    v = drift(w, seed)
    v = v / max(v.max(), 1e-300)
    peak = rank_loads(v, p2l, ranks, settled(v, p2l, ranks)).max(1)
    for layer in range(len(v)):
        best = linear_optimum(v[layer], p2l[layer], ranks)
        assert peak[layer] <= best * (1 + 1e-3) + 1e-9


def test_another_copy_never_raises_the_peak() -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        w = np.exp(rng.normal(0, 1, (1, 12)))
        p2l = rebalance_experts(w, 16, 1, 1, 4)[0]
        counts = logical_maps(p2l, 12)[1][0]
        slot = int(np.argmax(counts[p2l[0]] > 1))  # a surplus copy; leave it unused, then use it
        surplus = p2l[0, slot]
        v = drift(w, 7)
        with_it = rank_loads(v, p2l, 4, settled(v, p2l, 4)).max()
        without = p2l[0].tolist()
        rest = [i for i in range(16) if i != slot]
        # Without the copy: the linear optimum over the other slots.
        equal = np.zeros((12, 17))
        equal[[without[i] for i in rest], rest] = 1
        upper = np.zeros((4, 17))
        upper[[i // 4 for i in rest], rest] = 1
        upper[:, -1] = -1
        cost = np.eye(17)[-1]
        best = linprog(cost, A_ub=upper, b_ub=np.zeros(4), A_eq=equal, b_eq=v[0], method="highs").fun
        assert counts[surplus] > 1 and with_it <= best * (1 + 1e-6)


def test_copies_on_one_rank_act_as_one() -> None:
    w = np.array([[8.0, 2.0]])
    p2l = np.array([[0, 0, 1, 0]])
    shares = water_fill(w, p2l, 2)
    np.testing.assert_allclose(rank_loads(w, p2l, 2, shares), [[5.0, 5.0]])
    np.testing.assert_allclose(shares, [[5 / 16, 5 / 16, 1.0, 3 / 8]])


def test_starting_from_the_last_split_needs_fewer_sweeps() -> None:
    rng = np.random.default_rng(0)
    w = np.exp(rng.normal(0, 0.5, (3, 48)))
    p2l = rebalance_experts(w, 64, 1, 1, 16)[0]
    v = drift(w, 1)
    good = settled(v, p2l, 16)
    again = water_fill(v, p2l, 16, start=good, sweeps=1, tolerance=0.0)
    np.testing.assert_allclose(again, good, atol=1e-6)


# Tables.


@quick
@given(problems(), st.integers(0, 99), st.sampled_from([8, 64]))
def test_table_entries_follow_the_shares(
    problem: tuple[np.ndarray, int, int], seed: int, entries: int
) -> None:
    w, slots, ranks = problem
    experts = w.shape[1]
    p2l = rebalance_experts(w, slots, 1, 1, ranks)[0]
    shares = water_fill(drift(w, seed), p2l, ranks)
    table = to_table(shares, p2l, experts, entries)
    assert table.dtype == np.int16 and table.shape == (len(w), experts, entries)
    for layer in range(len(w)):
        np.testing.assert_array_equal(
            p2l[layer][table[layer]], np.broadcast_to(np.arange(experts)[:, None], table[layer].shape)
        )
        used = np.bincount(table[layer].ravel(), minlength=slots) / entries
        assert (np.abs(used - shares[layer]) < 1 / entries + 1e-12).all()
        assert (used[shares[layer] >= 1 / entries] > 0).all()


@pytest.mark.parametrize("copies", [1, 2, 4, 8])
def test_runs_of_an_even_table_hit_every_copy_equally(copies: int) -> None:
    p2l = np.zeros((1, copies), np.int64)
    row = to_table(equal_shares(p2l, 1), p2l, 1)[0, 0]
    for start in range(64):
        for k in (1, 2, 3):
            run = np.take(row, np.arange(start, start + k * copies), mode="wrap")
            assert (np.bincount(run, minlength=copies) == k).all()


def test_table_of_three_quarters_and_one() -> None:
    p2l = np.zeros((1, 2), np.int64)
    assert to_table(np.array([[0.75, 0.25]]), p2l, 1, 8)[0, 0].tolist() == [0, 0, 1, 0, 0, 0, 1, 0]


def test_runs_of_an_uneven_table_stay_close_to_the_shares() -> None:
    p2l = np.zeros((1, 3), np.int64)
    shares = np.array([[0.5, 0.3, 0.2]])
    row = to_table(shares, p2l, 1)[0, 0]
    for start in range(64):
        for length in range(1, 65):
            run = np.bincount(np.take(row, np.arange(start, start + length), mode="wrap"), minlength=3)
            assert (np.abs(run - length * shares[0]) <= 2).all()


def test_table_costs_little_balance_on_production_loads() -> None:
    rng = np.random.default_rng(0)
    w = np.exp(rng.normal(0, 0.5, (4, 384)))
    p2l = rebalance_experts(w, 448, 1, 1, 64)[0]
    v = w * np.exp(0.1 * rng.normal(size=w.shape))
    shares = water_fill(v, p2l, 64)
    used = np.stack([np.bincount(t.ravel(), minlength=448) for t in to_table(shares, p2l, 384)]) / 64
    assert imbalance(v, p2l, 64, used).mean() <= imbalance(v, p2l, 64, shares).mean() + 0.005


# Dispatch.


@quick
@given(problems(), st.integers(0, 99), st.integers(0, 40), st.integers(0, 5))
def test_every_pair_reaches_a_copy_of_its_expert(
    problem: tuple[np.ndarray, int, int], seed: int, tokens: int, step: int
) -> None:
    w, slots, ranks = problem
    p2l = rebalance_experts(w, slots, 1, 1, ranks)[0]
    table = to_table(water_fill(drift(w, seed), p2l, ranks), p2l, w.shape[1])[0]
    ids = np.random.default_rng(seed).integers(-1, w.shape[1], (tokens, 6))
    out = dispatch(ids, table, seed, step)
    assert out.dtype == np.int32 and out.shape == ids.shape
    assert ((out == -1) == (ids == -1)).all()
    np.testing.assert_array_equal(p2l[0][out[ids >= 0]], ids[ids >= 0])


def test_dispatch_follows_its_formula_pair_by_pair() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(-1, 5, (30, 4)).astype(np.int32)
    table = rng.integers(0, 100, (5, 16)).astype(np.int16)
    seen = dict.fromkeys(range(5), 0)
    want = np.full(ids.shape, -1)
    for t, j in np.ndindex(*ids.shape):
        e = int(ids[t, j])
        if e < 0:
            continue
        x = (9 * 0x9E3779B1 + e * 0x85EBCA77 + 4 * 0xC2B2AE3D) % 2**32
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        x ^= x >> 16
        want[t, j] = table[e, (seen[e] + x) % 16]
        seen[e] += 1
    np.testing.assert_array_equal(dispatch(ids, table, 9, 4), want)


def test_sources_do_not_all_start_at_the_same_copy() -> None:
    """One pair a source and expert: with a common start, one copy of four would get everything."""
    sources, experts = 256, 40
    p2l = np.repeat(np.arange(experts), 4)[None]
    table = to_table(equal_shares(p2l, experts), p2l, experts)[0]
    ids = np.arange(experts)[None]
    hits = np.zeros(4 * experts, np.int64)
    for source in range(sources):
        np.add.at(hits, dispatch(ids, table, source).ravel(), 1)
    sigma = np.sqrt(sources * 0.25 * 0.75)
    assert np.abs(hits - sources / 4).max() < 4.5 * sigma
    steps = np.stack([dispatch(ids, table, 0, s).ravel() for s in range(sources)])
    assert np.abs(np.bincount(steps.ravel(), minlength=4 * experts) - sources / 4).max() < 4.5 * sigma


def test_mix_spreads_low_bits() -> None:
    bits = mix(np.arange(4096)) & 63
    assert np.bincount(bits, minlength=64).min() > 30


# Errors.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: water_fill([[1.0, 1.0]], [[0, 0]], 2), "none of expert 1 in layer 0"),
        (lambda: water_fill([[1.0, 1.0]], [[0, 1]], 3), "2 slots over 3 GPUs"),
        (lambda: water_fill([[1.0, -1.0]], [[0, 1]], 2), "finite loads >= 0, got -1.0"),
        (lambda: water_fill([[1.0, 1.0]], [[0, 1]], 2, sweeps=-1), "sweeps >= 0"),
        (lambda: water_fill([[1.0, 1.0]], [[0, 1]], 2, start=np.ones((1, 3))), r"expected start: \[1, 2\]"),
        (lambda: to_table(np.ones((1, 3)), [[0, 1]], 2), r"expected shares: \[1, 2\]"),
        (lambda: to_table(np.ones((1, 2)), [[0, 1]], 2, 48), "a power of two, got 48"),
        (lambda: to_table(np.ones((1, 2)), [[0, 0]], 1), "add up to 1, got 2.0"),
        (lambda: to_table(np.array([[1.5, -0.5]]), [[0, 0]], 1), "expected shares >= 0, got -0.5"),
        (lambda: dispatch([[0.5]], np.zeros((1, 4), int), 0), "of integers, got"),
        (lambda: dispatch([[0]], np.zeros((1, 3), int), 0), "entries a power of two"),
        (lambda: dispatch([[4]], np.zeros((1, 4), int), 0), "expected ids below 1, got 4"),
        (lambda: dispatch([[0]], np.zeros((1, 4), int), -1), "expected source >= 0"),
    ],
)
def test_wrong_calls_get_a_sentence(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
