"""Tokens a second with drafts: tau of counts, and one curve an acceptance."""

import json
from pathlib import Path

import numpy as np
import pytest

from dsv41.__main__ import main
from dsv41.bench.throughput import curve, tokens_a_step
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
