"""Tokens a second with drafts: tau of counts, and one curve an acceptance."""

import json
from pathlib import Path

import numpy as np
import pytest

from dsv41.__main__ import main
from dsv41.bench.throughput import curve, read_cost, tokens_a_step
from dsv41.spec import StepCost


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The command; its parts are found by the real command line."""
    monkeypatch.setattr("sys.argv", ["dsv41", "bench", "throughput", *arguments])
    return main()


def test_tau_is_one_and_the_mean_of_the_drafts_that_stay() -> None:
    assert tokens_a_step(np.array([1, 0, 0, 1])) == 2.5
    assert tokens_a_step(np.array([0, 0, 5])) == 3


def test_a_curve_pays_for_padded_steps_and_ends_with_the_table() -> None:
    cost = StepCost([4, 8], [0.01, 0.02])
    assert curve(cost, [1, 2, 3], 1, 1.5) == [150.0, 300.0, 225.0]
    assert curve(cost, [2, 5], 1, 1.5) == [300.0, None]


def test_steps_of_the_benchmark_are_a_cost_table(tmp_path: Path) -> None:
    lines = tmp_path / "step.jsonl"
    rows = [
        {"op": "prefill", "tokens": 4096, "ms": 99.0},
        {"op": "decode", "context": 4096, "drafts": "all", "tokens": 384, "ms": 40.0},
        {"op": "decode", "context": 4096, "drafts": "all", "tokens": 96, "ms": 21.0},
        {"op": "decode", "context": 4096, "drafts": "budget", "tokens": 48, "ms": 18.0},
        {"op": "decode", "context": 4096, "drafts": "none", "tokens": 16, "ms": 12.5},
        {"op": "decode", "context": 131072, "drafts": "none", "tokens": 16, "ms": 14.0},
    ]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cost = read_cost(str(lines), 4096, drafts=True)
    assert cost.sizes.tolist() == [96, 384] and cost.seconds.tolist() == [0.021, 0.04]
    with pytest.warns(UserWarning, match="every size costs the same"):
        assert read_cost(str(lines), 131072, drafts=False).seconds.tolist() == [0.014]
    with pytest.raises(ValueError, match="bench throughput: expected decode steps at a context of 1 in"):
        read_cost(str(lines), 1, drafts=True)


def test_measured_beside_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, cost, lines = tmp_path / "counts.json", tmp_path / "cost.json", tmp_path / "out.jsonl"
    counts.write_text("[2, 0, 2]")
    cost.write_text(StepCost([4, 8], [0.01, 0.02]).to_json())
    arguments = ["--counts", str(counts), "--cost", str(cost), "--requests", "1", "2", "--acceptance", "0.5"]
    assert bench(monkeypatch, *arguments, "--json", str(lines)) == 0
    text = capsys.readouterr().out
    assert "measured 0.50" in text and "no drafts" in text
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    measured, assumed = rows[1:]
    assert measured["tokens_per_s"] == assumed["tokens_per_s"] and measured["tau"] == 2
    assert {row["steps"] for row in rows} == {"measured steps"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("[]", "counts of 0, 1, 2"), ("[0, 0]", "some above 0"), ("[1, -1]", "counts of 0, 1, 2")],
)
def test_bad_counts(text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counts.json").write_text(text)
    with pytest.raises(SystemExit, match=sentence):
        bench(monkeypatch, "--counts", str(tmp_path / "counts.json"))


def test_bad_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="acceptance 0 to 1"):
        bench(monkeypatch, "--acceptance", "1.5")
