"""What a stranger hands in: one sentence, or the plain reading of it, never a silent wrong answer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv41.eplb import (
    Balancer,
    LoadWindow,
    cli,
    count_transfers,
    dispatch,
    duplicates,
    greedy_map,
    imbalance,
    rebalance_experts,
    repair,
    water_fill,
)

loose: Any = {"Balancer": Balancer, "rebalance": rebalance_experts, "repair": repair, "greedy": greedy_map}
nan = float("nan")
half: Any = lambda x: x * 0.5  # noqa: E731
W, M = [[3.0, 1.0]], [[0, 1, 0, 1]]


def shares(*values: float) -> Any:
    return np.array([values])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: water_fill(W, M, 2, start=shares(nan, 0.5, 0.5, 0.5)),
            "expected finite start >= 0, got nan",
        ),
        (
            lambda: water_fill(W, M, 2, start=shares(-0.5, 0.5, 1.5, 0.5)),
            "expected finite start >= 0, got -0.5",
        ),
        (lambda: water_fill(W, M, 2, start=shares(0.5, 0.5, 0.9, 0.5)), "start of an expert to add up to 1"),
        (lambda: imbalance(W, np.array(M), 2, shares(-1, 0.5, 2, 0.5)), "expected finite shares >= 0"),
        (lambda: imbalance(W, np.array(M), 2, shares(nan, 0.5, 2, 0.5)), "expected finite shares >= 0"),
        (lambda: imbalance(W, np.array(M), 2, shares(1, 1)), r"expected shares: \[1, 4\], got \[1, 2\]"),
        (lambda: LoadWindow(1, 1, 8).record(np.array([[1 << 63]], np.uint64)), "counts below 2"),
        (lambda: LoadWindow(1, 1, 8).record([[-1]]), "expected counts >= 0, got -1"),
        (lambda: LoadWindow(1, 2, 8).snapshot(lambda x: x[:, :1]), r"all_reduce to return \[1, 2\] int64"),
        (lambda: LoadWindow(1, 2, 8).snapshot(half), "all_reduce to return"),
        (lambda: count_transfers([[0, 1]], [[0, -1]], 2), "expected new to hold expert ids >= 0, got -1"),
        (lambda: count_transfers([[0, 1.5]], [[0, 1]], 2), "expected old of integers, got float64"),
        (lambda: loose["Balancer"](M, 2, 2, budget=-1), "expected budget >= 0, got -1"),
        (lambda: loose["Balancer"](M, 2, 2, per_rank=-1), "expected per_rank >= 0, got -1"),
        (lambda: loose["Balancer"](M, 2, 2, patience=-1), "expected patience >= 0, got -1"),
        (lambda: loose["Balancer"](M, 2, 2, budget=1.5), "expected budget to be an integer, got 1.5"),
        (lambda: loose["rebalance"](W, 4.0, 1, 1, 2), "expected num_replicas to be an integer, got 4.0"),
        (lambda: loose["rebalance"](W, 4, 1, 1, 2.0), "expected num_gpus to be an integer, got 2.0"),
        (
            lambda: loose["rebalance"](W, 4, 1, 1, 2, previous=M, budget=1.0),
            "budget to be an integer, got 1.0",
        ),
        (lambda: loose["repair"](W, M, 2, budget=1.0), "expected budget to be an integer, got 1.0"),
        (lambda: loose["repair"](W, M, 2.0), "expected num_gpus to be an integer, got 2.0"),
        (lambda: greedy_map([[1.0] * 12], 104, 8, distinct=True), "expected at most 96 slots of distinct"),
    ],
)
def test_wrong_calls_get_a_sentence(call, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_reduce_in_place_counts() -> None:
    window = LoadWindow(1, 2, 8)
    window.record([[1, 2]])

    def double(x: np.ndarray) -> None:
        x *= 2

    assert window.snapshot(double).tolist() == [[2, 4]]
    assert window.snapshot().tolist() == [[1, 2]]


def test_dispatch_reads_lists() -> None:
    ids, table = [[0, 1], [1, -1]], [[0, 2], [1, 3]]
    np.testing.assert_array_equal(dispatch(ids, table, 1), dispatch(np.array(ids), np.array(table), 1))


def test_the_distinct_greedy_is_distinct() -> None:
    for w in ([[0, 0, 0, 7, 0]], [[7, 1, 1, 0, 2]]):
        p2l = greedy_map(w, 44, 11, distinct=True)
        assert duplicates(p2l, 11).tolist() == [0] and set(p2l[0]) == set(range(5))


def test_decisions_compare_without_an_array_of_truths() -> None:
    balancer = Balancer(M, 2, 2)
    one, other = balancer.decide(W), balancer.decide(W)
    assert one == one and one != other and len({one, other}) == 2


def _plan(*words: object) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(
        parser.parse_args(["plan", *(str(word) for word in words), "--gpus", "2", "--redundant", "2"])
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("w.csv", "--target", "0"), "expected target >= 1, got 0.0"),
        (("empty.npy",), "empty.npy, got an empty file"),
        (("empty.csv",), "empty.csv, got an empty file"),
        (("blank.csv",), "blank.csv, got no rows"),
        (("w.csv", "--out", "no/x.npz"), "expected a writable file for --out, got no/x.npz"),
        (("w.csv", "--plot", "no/x.png"), "expected a writable file for --plot, got no/x.png"),
        (("w.csv", "--previous", "other.npz"), "expected physical_to_logical in other.npz, got x"),
        (("w.csv", "--previous", "bad.npz"), "expected a rectangular matrix of numbers in bad.npz"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_the_command_answers_in_one_line(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("w.csv").write_text("1,2\n")
    for name in ("empty.npy", "empty.csv"):
        Path(name).touch()
    Path("blank.csv").write_text("\n\n")
    Path("bad.npz").write_text("PK")
    np.savez("other.npz", x=np.zeros(1))
    assert _plan(*words) == 2
    said = capsys.readouterr().out
    assert message in said and said.count("\n") == 1
    assert not Path("eplb_plan.npz").exists()


def test_the_command_reads_its_own_output_and_marked_text(tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_bytes(b"\xef\xbb\xbf5,2,1,1\n")
    out, again = tmp_path / "a.npz", tmp_path / "b.npz"
    assert _plan(tmp_path / "w.csv", "--out", out) == 0
    assert _plan(tmp_path / "w.csv", "--previous", out, "--out", again) == 0
    for name in ("physical_to_logical", "counts"):
        np.testing.assert_array_equal(np.load(out)[name], np.load(again)[name])
