"""Load windows, decisions over time, noise, the command line and the benchmark's own figures."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.bench import eplb as bench
from dsv41.eplb import (
    Balancer,
    LoadWindow,
    cli,
    count_pairs,
    equal_shares,
    expected_maximum,
    imbalance,
    metrics,
    noise_floor,
    rebalance_experts,
    roll,
    to_table,
)

# Windows.


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 4), st.integers(1, 5), st.lists(st.integers(0, 9), min_size=0, max_size=40), st.booleans()
)
def test_window_is_the_sum_of_the_last_steps(blocks: int, per: int, steps: list[int], device: bool) -> None:
    window = LoadWindow(2, 3, blocks * per, blocks)
    if device:
        for name in ("ring", "clock", "lanes", "enabled"):
            setattr(window, name, torch.from_numpy(getattr(window, name)))
    history = []
    for i, value in enumerate(steps):
        counts = np.full((2, 3), value) + np.arange(3) * i
        history.append(counts)
        if device:
            step = torch.from_numpy(counts)
            roll(window.ring, window.clock, window.lanes, step, window.enabled, window.block_steps)
        else:
            window.record(counts)
        covered = window.quality().steps
        into = i % per + 1
        assert covered == min(i + 1, (blocks - 1) * per + into)
        np.testing.assert_array_equal(window.snapshot(), np.sum(history[-covered:], axis=0))
    assert window.quality().pairs == window.snapshot().sum()


def test_window_ignores_what_it_should() -> None:
    window = LoadWindow(1, 2, 4, 2)
    window.record([[1, 2]])
    window.enabled[0] = 0
    for _ in range(9):
        window.record([[100, 100]])
    window.enabled[0] = 1
    window.record([[10, 20]])
    assert window.snapshot().tolist() == [[11, 22]] and window.quality().recorded == 2
    window.clear()
    assert window.snapshot().sum() == 0 and window.quality().steps == 0


def test_window_counts_beyond_32_bits_and_reduces_over_ranks() -> None:
    window = LoadWindow(1, 2, 2, 1)
    window.record(np.array([[2**40, 1]]))
    window.record(np.array([[2**40, 1]]))
    assert window.snapshot().dtype == np.int64
    assert window.snapshot(lambda own: own + own).tolist() == [[2**42, 4]]


def test_padding_and_absent_ids_do_not_count() -> None:
    ids = np.array([[[0, 1], [2, -1], [2, 2]], [[1, 1], [0, 0], [2, 0]]])
    assert count_pairs(ids, 3).tolist() == [[1, 1, 3], [3, 2, 1]]
    assert count_pairs(ids, 3, np.array([False, False, True])).tolist() == [[1, 1, 1], [2, 2, 0]]
    both = count_pairs(ids[:, :1], 3) + count_pairs(ids[:, 1:], 3)  # ranks hold different tokens
    assert (both == count_pairs(ids, 3)).all()
    assert count_pairs(np.zeros((2, 0, 6), int), 3).sum() == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LoadWindow(1, 1, 10, 4), "LoadWindow: expected window a multiple of 4 blocks, got 10"),
        (lambda: LoadWindow(0, 1, 8), "LoadWindow: expected layers >= 1"),
        (lambda: LoadWindow(1, 2, 8).record([[1, 2, 3]]), r"expected counts: \[1, 2\], got \[1, 3\]"),
        (lambda: LoadWindow(1, 2, 8).record([[1.0, 2.0]]), "expected counts of integers, got float64"),
        (lambda: LoadWindow(1, 2, 8).record([[-1, 2]]), "expected counts >= 0, got -1"),
        (lambda: count_pairs([[[5]]], 5), r"expected ids in \[-1, 5\), got 5..5"),
        (lambda: count_pairs([[5]], 6), r"count_pairs: expected ids: \[layers, tokens, top_k\]"),
        (lambda: count_pairs([[[1]]], 5, [True, False]), r"expected padding: \[1\], got \[2\]"),
    ],
)
def test_wrong_windows_get_a_sentence(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# Noise.


def test_expected_maximum_of_normals() -> None:
    assert expected_maximum(1) == pytest.approx(0.0, abs=1e-5)
    assert expected_maximum(2) == pytest.approx(np.pi**-0.5, abs=1e-5)
    assert expected_maximum(8) == pytest.approx(1.4236, abs=1e-3)
    draws = np.random.default_rng(0).normal(size=(20000, 64)).max(1)
    assert expected_maximum(64) == pytest.approx(draws.mean(), abs=0.02)
    assert noise_floor(64, 113) == pytest.approx(1.09, abs=1e-3)


def test_perfect_maps_measure_at_the_floor() -> None:
    rng = np.random.default_rng(0)
    steps = [metrics(rng.multinomial(64 * 128 * 6, [1 / 448] * 448, size=4), 64) for _ in range(20)]
    assert np.mean([m.mean for m in steps]) == pytest.approx(noise_floor(64, 128), abs=0.01)
    assert steps[0].floor == pytest.approx(noise_floor(64, 128), rel=1e-3)
    assert metrics(np.zeros((1, 4)), 2).floor == 1.0


# Decisions.


def _balancer(**options) -> tuple[Balancer, np.ndarray]:
    w = np.exp(np.random.default_rng(0).normal(0, 1, (3, 48)))
    return Balancer(rebalance_experts(w, 64, 1, 1, 16)[0], 48, 16, **options), w


def test_still_loads_change_nothing_and_drift_is_answered_in_proportion() -> None:
    balancer, w = _balancer()
    balancer.commit(balancer.decide(w))
    assert balancer.decide(w).action == "keep" and balancer.epoch == 0
    rng = np.random.default_rng(1)
    small = balancer.decide(w * np.exp(0.05 * rng.normal(size=w.shape)), allow_moves=False)
    assert small.action == "refresh" and not small.moves and small.refreshed < small.now
    balancer.commit(small)
    assert balancer.epoch == 0 and (balancer.table == small.table).all()
    large = balancer.decide(w * np.exp(0.8 * rng.normal(size=w.shape)), step=5)
    assert large.action == "repair" and large.moves and large.repaired < large.refreshed < large.now
    assert not balancer.overdue(1005) and balancer.overdue(1006)
    balancer.commit(large)
    assert balancer.epoch == 1 and not balancer.overdue(10**6)
    with pytest.raises(ValueError, match=r"Balancer\.commit: expected a decision for epoch 1, got 0"):
        balancer.commit(small)


def test_useless_repairs_are_skipped_and_limits_hold() -> None:
    _, w = _balancer()
    v = w * np.exp(0.8 * np.random.default_rng(1).normal(size=w.shape))
    assert _balancer(min_gain=10.0)[0].decide(v).action == "refresh"
    assert len(_balancer(budget=2)[0].decide(v).moves) == 2
    assert _balancer(budget=0)[0].decide(v).action == "refresh"


def test_predictions_are_what_the_shares_give() -> None:
    balancer, w = _balancer()
    v = w * np.exp(0.5 * np.random.default_rng(1).normal(size=w.shape))
    decision = balancer.decide(v)
    served = imbalance(v, decision.physical_to_logical, 16, decision.shares).mean()
    assert decision.repaired == pytest.approx(served, rel=1e-9)
    assert decision.now == pytest.approx(imbalance(v, balancer.physical_to_logical, 16).mean())


def test_idle_windows_are_left_alone() -> None:
    balancer, w = _balancer()
    assert balancer.decide(np.zeros_like(w)).action == "keep"
    with pytest.raises(ValueError, match=r"Balancer\.decide: expected finite loads >= 0, got nan"):
        balancer.decide(np.full_like(w, np.nan))
    with pytest.raises(ValueError, match=r"Balancer: expected slots divisible by num_gpus"):
        Balancer(np.arange(4)[None], 4, 3)


# Command line and benchmark.


def _cli(*words: object) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args([str(word) for word in words]))


def test_plan_then_repair_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    w = np.round(np.exp(rng.normal(0, 1, (3, 24))) * 1000)
    np.save(tmp_path / "a.npy", w)
    np.savetxt(tmp_path / "a.csv", w, delimiter=",")
    (tmp_path / "a.json").write_text(json.dumps(w.tolist()))
    maps = []
    for kind in ("npy", "csv", "json"):
        out = tmp_path / f"{kind}.npz"
        assert _cli("plan", tmp_path / f"a.{kind}", "--gpus", 8, "--redundant", 8, "--out", out) == 0
        maps.append(np.load(out)["physical_to_logical"])
    assert "matplotlib" not in sys.modules or "pytest" in sys.modules
    np.testing.assert_array_equal(maps[0], rebalance_experts(w, 32, 1, 1, 8)[0])
    assert all((m == maps[0]).all() for m in maps)
    np.save(tmp_path / "map.npy", maps[0])
    np.save(tmp_path / "b.npy", w * np.exp(0.6 * rng.normal(size=w.shape)))
    plan = ("plan", tmp_path / "b.npy", "--gpus", 8, "--redundant", 8, "--previous", tmp_path / "map.npy")
    capsys.readouterr()
    assert _cli(*plan, "--plot", tmp_path / "p.png") == 0
    said = capsys.readouterr().out
    done = np.load(tmp_path / "eplb_plan.npz")
    assert "map in use" in said and f"transfers: {len(done['moves'])} of 96 slots" in said
    assert (tmp_path / "p.png").stat().st_size > 1000
    table = to_table(done["shares"], done["physical_to_logical"], 24)
    np.testing.assert_array_equal(done["table"], table)
    assert _cli(*plan, "--full", "--out", tmp_path / "full.npy") == 0
    assert np.load(tmp_path / "full.npy").shape == (3, 32)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", "nowhere.npy", "--gpus", "2"), "expected a file, got"),
        (("plan", "text.txt", "--gpus", "2"), "expected a .npy, .csv or .json file, got text.txt"),
        (("plan", "bad.csv", "--gpus", "2"), "expected a rectangular matrix of numbers in bad.csv"),
        (("plan", "w.csv", "--gpus", "3"), "expected slots divisible by --gpus, got 2 slots over 3 GPUs"),
        (("plan", "w.csv", "--gpus", "2", "--redundant", "-1"), "expected redundant >= 0, got -1"),
        (("plan", "w.csv", "--gpus", "2", "--budget", "4"), "expected --previous together with --budget"),
        (("plan", "w.csv", "--gpus", "2", "--previous", "half.csv"), "expected whole numbers in --previous"),
        (("plan", "w.csv", "--gpus", "2", "--previous", "bad.json"), "expected a rectangular matrix"),
        (("plan", "nan.csv", "--gpus", "2"), "expected finite loads >= 0, got nan at layer 0, expert 1"),
        (("plan", "w.csv", "--gpus", "2", "--out", "x.txt"), "expected --out to end in .npz"),
    ],
)
def test_command_line_explains_bad_input(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("1,2\n")
    Path("bad.csv").write_text("1,x\n")
    Path("bad.json").write_text("[[1, 2], [3]]")
    Path("w.csv").write_text("1,2\n")
    Path("half.csv").write_text("0,0.5\n")
    Path("nan.csv").write_text("1,nan\n")
    assert _cli(*words) == 2
    assert message in capsys.readouterr().out


def test_benchmark_runs_and_writes_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    out = tmp_path / "r.jsonl"
    assert (
        bench.run(
            parser.parse_args(["--quick", "--tables", "parts", "regime", "--layers", "1", "--json", str(out)])
        )
        == 0
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["table"] for row in rows} == {"parts", "regime"}
    regime = [row for row in rows if row["table"] == "regime"]
    assert all(row["ours_step"] < row["greedy_step"] for row in regime)
    assert all(row["ours_transfers"] < 20 < row["greedy_transfers"] for row in regime)
    assert "ours_step" in capsys.readouterr().out


def test_simulated_steps_are_those_of_dispatch() -> None:
    """The vectorised step of the benchmark against ``dispatch``, source by source."""
    from dsv41.eplb import dispatch

    ranks, slots = 8, 392
    rng = np.random.default_rng(0)
    p = bench.probabilities("lognormal .5", 1, 384, rng)
    p2l = rebalance_experts(p * 1e6, slots, 1, 1, ranks)[0]
    table = to_table(equal_shares(p2l, 384), p2l, 384)
    got = bench.step_imbalance(p, table, slots, ranks, 5, np.random.default_rng(1))
    pairs = np.random.default_rng(1).multinomial(bench.TOKENS * bench.TOP_K, p[0], size=ranks)
    loads = np.zeros(slots, np.int64)
    for source in range(ranks):
        ids = np.repeat(np.arange(384), pairs[source])[:, None]
        loads += np.bincount(dispatch(ids, table[0], source, 5).ravel(), minlength=slots)
    per_rank = loads.reshape(ranks, -1).sum(1)
    assert got[0] == pytest.approx(per_rank.max() / per_rank.mean())
