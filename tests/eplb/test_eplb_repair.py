"""Repairs and the transfers that carry them out, on maps and on a small mixture of experts in mid-stream."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from eplb_cases import problems
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.bench.eplb import drifted, probabilities, window_counts
from dsv41.eplb import (
    InMemory,
    Move,
    Repair,
    apply_moves,
    dispatch,
    duplicates,
    greedy_map,
    imbalance,
    rebalance_experts,
    repair,
    to_table,
    transfer,
    water_fill,
)
from dsv41.eplb._flow import Flow
from dsv41.eplb.repair import _Search

quick = settings(deadline=None, max_examples=50)


def drift(w: np.ndarray, seed: int) -> np.ndarray:
    return w * np.exp(np.random.default_rng(seed).normal(0, 0.7, w.shape))


def level(w: np.ndarray, p2l: np.ndarray, ranks: int) -> np.ndarray:
    return imbalance(w, p2l, ranks, water_fill(w, p2l, ranks, sweeps=2000, tolerance=1e-10))


@quick
@given(problems(spare=True), st.integers(0, 99))
def test_replaying_the_moves_gives_the_map_and_every_prefix_is_one(
    problem: tuple[np.ndarray, int, int], seed: int
) -> None:
    w, slots, ranks = problem
    old = rebalance_experts(w, slots, 1, 1, ranks)[0]
    fix = repair(drift(w, seed), old, ranks)
    now = old.copy()
    for move in fix.moves:
        assert now[move.layer, move.src_slot] == move.expert == old[move.layer, move.src_slot]
        assert move.src_slot * ranks // slots == move.src_rank != move.dst_rank
        assert move.dst_slot * ranks // slots == move.dst_rank
        now = apply_moves(now, [move])
        assert all(len(np.unique(row)) == w.shape[1] for row in now)  # no expert is ever lost
        assert not duplicates(now, ranks).any()
    np.testing.assert_array_equal(now, fix.physical_to_logical)
    moved = {(m.layer, m.dst_slot) for m in fix.moves}
    assert len(moved) == len(fix.moves)  # no slot is written twice
    same = np.ones(old.shape, bool)
    for layer, slot in moved:
        same[layer, slot] = False
    np.testing.assert_array_equal(now[same], old[same])


@quick
@given(problems(spare=True), st.integers(0, 99))
def test_repairs_never_make_a_layer_worse(problem: tuple[np.ndarray, int, int], seed: int) -> None:
    w, slots, ranks = problem
    old = rebalance_experts(w, slots, 1, 1, ranks)[0]
    v = drift(w, seed)
    fix = repair(v, old, ranks)
    served = imbalance(v, fix.physical_to_logical, ranks, fix.shares)
    np.testing.assert_allclose(fix.after, served, rtol=1e-9)
    assert (fix.after <= fix.before + 1e-12).all()
    assert (level(v, fix.physical_to_logical, ranks) <= level(v, old, ranks) * (1 + 2e-3)).all()
    quiet = fix.before <= 1.02
    assert not {m.layer for m in fix.moves} & set(np.nonzero(quiet)[0])
    for layer in {m.layer for m in fix.moves}:
        assert fix.after[layer] < fix.before[layer]
    assert all(gain > 0 for gain in fix.gains)


@quick
@given(problems(spare=True), st.integers(0, 99), st.integers(0, 6))
def test_small_budgets_give_prefixes(problem: tuple[np.ndarray, int, int], seed: int, budget: int) -> None:
    w, slots, ranks = problem
    old = rebalance_experts(w, slots, 1, 1, ranks)[0]
    v = drift(w, seed)
    whole, part = repair(v, old, ranks), repair(v, old, ranks, budget=budget)
    assert part.moves == whole.moves[:budget] and part.gains == whole.gains[:budget]
    np.testing.assert_array_equal(part.physical_to_logical, apply_moves(old, part.moves))
    assert (part.after <= part.before + 1e-12).all()
    capped = repair(v, old, ranks, per_rank=1)
    assert max(Counter((m.layer, m.dst_rank) for m in capped.moves).values(), default=0) <= 1


@quick
@given(problems(spare=True), st.integers(0, 99))
def test_layers_are_repaired_alone(problem: tuple[np.ndarray, int, int], seed: int) -> None:
    w, slots, ranks = problem
    old = rebalance_experts(w, slots, 1, 1, ranks)[0]
    v = drift(w, seed)
    whole = repair(v, old, ranks)
    for layer in range(len(w)):
        alone = repair(v[layer : layer + 1], old[layer : layer + 1], ranks)
        np.testing.assert_array_equal(alone.physical_to_logical[0], whole.physical_to_logical[layer])
        np.testing.assert_array_equal(alone.shares[0], whole.shares[layer])


def _production(ranks: int, size: float, layers: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([ranks, int(100 * size)])
    p = probabilities("lognormal .5", layers, 384, rng)
    old = rebalance_experts(window_counts(p, ranks, rng), 384 + ranks, 1, 1, ranks)[0]
    return window_counts(drifted(p, size, rng), ranks, rng), old


@pytest.mark.parametrize(("ranks", "size", "most"), [(64, 0.05, 0.01), (64, 0.2, 0.04), (128, 0.2, 0.07)])
def test_drift_moves_few_experts(ranks: int, size: float, most: float) -> None:
    w, old = _production(ranks, size)
    fix = repair(w, old, ranks)
    assert len(fix.moves) <= most * old.size
    assert fix.after.mean() <= 1.025
    assert max(Counter((m.layer, m.dst_rank) for m in fix.moves).values(), default=0) <= 3
    again = repair(w, fix.physical_to_logical, ranks, target=1.05)
    assert len(again.moves) <= len(fix.moves) // 4  # what is done is done


@quick
@given(problems(spare=True), st.integers(0, 99))
def test_the_search_keeps_its_books(problem: tuple[np.ndarray, int, int], seed: int) -> None:
    w, slots, ranks = problem
    old = rebalance_experts(w, slots, 1, 1, ranks)[0]
    search = _Search(drift(w, seed), old, ranks, None)
    search.run(1.0)
    flow = search.flow
    sums = np.zeros(w.shape)
    np.add.at(sums, (np.arange(len(w))[:, None], flow.p2l), flow.x[:, :-1])
    np.testing.assert_allclose(sums, flow.w, rtol=1e-9, atol=1e-9 * flow.w.max())
    totals = flow.x[:, :-1].reshape(len(w), ranks, -1).sum(-1)
    np.testing.assert_allclose(flow.load[:, :-1], totals, rtol=1e-9, atol=1e-9 * flow.w.max())
    fresh = Flow(flow.w, flow.p2l, ranks)
    for name in ("counts", "width", "main"):
        np.testing.assert_array_equal(getattr(fresh, name), getattr(flow, name))
    for layer in range(len(w)):
        for g in range(ranks):  # a colour meets every rank at most once
            here = flow.colour[layer][np.unique(flow.p2l[layer].reshape(ranks, -1)[g])]
            assert len(np.unique(here[here >= 0])) == (here >= 0).sum()


@quick
@given(problems(spare=True), st.integers(0, 99))
def test_maps_made_elsewhere_may_hold_duplicates(problem: tuple[np.ndarray, int, int], seed: int) -> None:
    w, slots, ranks = problem
    old = greedy_map(w, slots, ranks)
    v = drift(w, seed)
    fix = repair(v, old, ranks)
    np.testing.assert_array_equal(apply_moves(old, fix.moves), fix.physical_to_logical)
    assert (duplicates(fix.physical_to_logical, ranks) <= duplicates(old, ranks)).all()
    served = imbalance(v, fix.physical_to_logical, ranks, fix.shares)
    np.testing.assert_allclose(fix.after, served, rtol=1e-9)
    assert (served <= fix.before + 1e-12).all()


def test_nothing_to_do_moves_nothing() -> None:
    rng = np.random.default_rng(0)
    w = window_counts(probabilities("lognormal .5", 3, 384, rng), 64, rng)
    old = rebalance_experts(w, 448, 1, 1, 64)[0]
    fix = repair(w, old, 64)
    assert fix.moves == [] and (fix.physical_to_logical == old).all()


def test_batches_use_no_rank_twice_and_sources_on_the_same_node_come_first() -> None:
    w, old = _production(64, 0.3)
    near, plain = repair(w, old, 64, num_nodes=8), repair(w, old, 64)
    assert len(near.moves) == len(plain.moves)

    def away(fix: Repair) -> int:
        return sum(m.src_rank // 8 != m.dst_rank // 8 for m in fix.moves)

    assert away(near) <= away(plain)
    batches = list(plain.batches())
    assert sorted(m for batch in batches for m in batch) == sorted(plain.moves)
    for batch in batches:
        assert len({m.src_rank for m in batch}) == len({m.dst_rank for m in batch}) == len(batch)
    order = {move: i for i, batch in enumerate(batches) for move in batch}
    for layer in range(len(w)):
        own = [order[m] for m in plain.moves if m.layer == layer]
        assert own == sorted(own)


# Transfers.


class Toy:
    """Three layers of experts with scaled weights, computed through physical slots."""

    def __init__(self, p2l: np.ndarray, experts: int, dim: int = 8) -> None:
        make = torch.Generator().manual_seed(0)
        logical = torch.randn(len(p2l), experts, dim, dim, generator=make, dtype=torch.float64) / dim
        scale = torch.rand(len(p2l), experts, dim, generator=make, dtype=torch.float64) + 0.5
        self.gate = torch.randn(len(p2l), dim, experts, generator=make, dtype=torch.float64)
        self.tensors = [
            {"weight": w[p].clone(), "scale": s[p].clone()}
            for w, s, p in zip(logical, scale, torch.from_numpy(p2l), strict=True)
        ]

    def layer(self, x: torch.Tensor, layer: int, table: np.ndarray, step: int) -> torch.Tensor:
        ids = (x @ self.gate[layer]).topk(2, dim=1).indices
        slots = torch.from_numpy(dispatch(ids.numpy(), table[layer], 3, step)).long()
        weight, scale = self.tensors[layer]["weight"][slots], self.tensors[layer]["scale"][slots]
        return x + (torch.einsum("td,tkde->tke", x, weight) * scale).sum(1)

    def forward(self, x: torch.Tensor, table: np.ndarray, step: int) -> torch.Tensor:
        for layer in range(len(self.tensors)):
            x = self.layer(x, layer, table, step)
        return x


def test_a_stream_computes_the_same_before_during_and_after_a_reshuffle() -> None:
    experts, slots, ranks = 24, 32, 8
    w = np.exp(np.random.default_rng(0).normal(0, 1, (3, experts)))
    plain = np.tile(np.arange(experts), (3, 1))
    old = rebalance_experts(w, slots, 1, 1, ranks)[0]
    v = drift(w, 3)
    fix = repair(v, old, ranks, target=1.0)
    assert len({m.layer for m in fix.moves}) == 3
    x = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    unbalanced = Toy(plain, experts).forward(x, to_table(np.ones(plain.shape), plain, experts), 0)

    toy = Toy(old, experts)
    before = to_table(water_fill(w, old, ranks), old, experts)
    after = to_table(fix.shares, fix.physical_to_logical, experts)
    assert torch.equal(toy.forward(x, before, 0), unbalanced)
    h, table = x, before.copy()
    for layer in range(3):  # between layers: move the experts of the layer to come, switch its table
        transfer([m for m in fix.moves if m.layer == layer], toy.tensors, InMemory())
        table[layer] = after[layer]
        h = toy.layer(h, layer, table, 1)
    assert torch.equal(h, unbalanced)
    assert torch.equal(toy.forward(x, after, 2), unbalanced)


def test_in_memory_copies_read_before_they_write() -> None:
    for tensor in (np.arange(3.0), torch.arange(3.0)):
        transport = InMemory()
        transport.copy(Move(0, 0, 0, 1, 1, 0), {"weight": tensor})
        transport.copy(Move(0, 1, 1, 0, 0, 1), {"weight": tensor})
        assert tensor.tolist() == [0, 1, 2]
        transport.flush()
        assert tensor.tolist() == [1, 0, 2]


def test_every_prefix_of_the_moves_serves_the_same_model() -> None:
    experts, slots, ranks = 24, 32, 8
    w = np.exp(np.random.default_rng(0).normal(0, 1, (3, experts)))
    old = rebalance_experts(w, slots, 1, 1, ranks)[0]
    fix = repair(drift(w, 3), old, ranks, target=1.0)
    toy, now = Toy(old, experts), old
    x = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = toy.forward(x, to_table(water_fill(w, now, ranks), now, experts), 0)
    for move in fix.moves:
        assert transfer([move], toy.tensors, InMemory()) == 2
        now = apply_moves(now, [move])
        assert torch.equal(toy.forward(x, to_table(water_fill(w, now, ranks), now, experts), 0), want)


@quick
@given(problems(spare=True), st.integers(0, 99))
def test_batched_transfers_end_where_the_map_says(problem: tuple[np.ndarray, int, int], seed: int) -> None:
    w, slots, ranks = problem
    old = rebalance_experts(w, slots, 1, 1, ranks)[0]
    fix = repair(drift(w, seed), old, ranks)
    layers = {i: {"weight": row.copy(), "scale": row[:, None] * 2.0} for i, row in enumerate(old)}
    assert transfer(fix.moves, layers, InMemory()) == 2 * len(fix.moves)
    for layer, row in enumerate(fix.physical_to_logical):
        np.testing.assert_array_equal(layers[layer]["weight"], row)
        np.testing.assert_array_equal(layers[layer]["scale"], row[:, None] * 2.0)


# Errors.


def test_transfer_refuses_before_it_copies() -> None:
    tensors = {"weight": np.arange(4)}
    moves = [Move(0, 1, 0, 1, 2, 0), Move(0, 1, 0, 1, 9, 0)]
    with pytest.raises(ValueError, match=r"transfer: expected slots below 4 \(weight\), got \(0, 9\)"):
        transfer(moves, [tensors], InMemory())
    np.testing.assert_array_equal(tensors["weight"], np.arange(4))
    with pytest.raises(ValueError, match="expected tensors for every layer in moves, got none for layer 1"):
        transfer([Move(1, 0, 0, 0, 0, 0)], [tensors], InMemory())
    with pytest.raises(ValueError, match="at least one tensor a layer"):
        transfer([Move(0, 0, 0, 0, 0, 0)], [{}], InMemory())


@pytest.mark.parametrize(
    ("weight", "previous", "ranks", "options", "message"),
    [
        ([[1.0, 1.0]], [[0, 1], [0, 1]], 2, {}, r"expected previous: \[1, slots\] of integers, got \[2, 2\]"),
        ([[1.0, 1.0]], [[0, 0]], 2, {}, "none of expert 1 in layer 0"),
        ([[1.0, 1.0]], [[0.0, 1.0]], 2, {}, "of integers, got"),
        ([[1.0, 1.0]], [[0, 1]], 3, {}, "2 slots over 3 GPUs"),
        ([[1.0, 1.0]], [[0, 1]], 2, {"target": 0.5}, "expected target >= 1, got 0.5"),
        ([[1.0, 1.0]], [[0, 1]], 2, {"budget": -1}, "expected budget >= 0, got -1"),
        ([[1.0, 1.0]], [[0, 1]], 2, {"per_rank": -1}, "expected per_rank >= 0, got -1"),
        ([[1.0, 1.0]], [[0, 1]], 2, {"num_nodes": 3}, "expected num_nodes to divide 2 GPUs, got 3"),
    ],
)
def test_wrong_calls_get_a_sentence(weight, previous, ranks, options, message: str) -> None:
    with pytest.raises(ValueError, match=f"repair: .*{message}"):
        repair(weight, previous, ranks, **options)
