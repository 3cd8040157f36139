"""`bench step` runs dry on a CPU: every case gives a row, and its accounts add up."""

import argparse
import json
import pathlib

import pytest
import torch

from dsv41 import ops
from dsv41.bench import results, roofline, step
from dsv41.layers.engram import E4M3, E8M0


def test_a_dry_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser, out = argparse.ArgumentParser(), tmp_path / "step.jsonl"
    step.add_arguments(parser)
    given = "--config tiny --device cpu --prefill 48 --keep 20 --requests 2 --contexts 130 --repeats 1"
    args = parser.parse_args([*given.split(), "--engram-gb", "0.0001", "--json", str(out)])
    assert step.run(args) == 0
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [(r["op"], r.get("replay"), r.get("drafts")) for r in rows] == [
        ("prefill", "off", None),
        ("prefill", "22", None),
        ("decode", None, "none"),
        ("decode", None, "all"),
        ("decode", None, "budget"),
    ]
    for row in rows:
        assert row["experts"] == 1 and row["ms"] > 0 and row["tokens_per_s"] > 0
        assert row["roofline_ms"] == pytest.approx(sum(row["least_ms"].values()), abs=2e-3)
    calls = [row["calls"] for row in rows]
    # Seven layers with Engram in front of two: a boundary in each layer, and between those that touch.
    # Of so few rows the mixes are calls of their own.
    assert calls[0]["mhc_boundary"] == 7 + 5 and calls[0]["mhc_mixes"] == 2 + 12
    assert calls[0]["mxfp4_moe"] == 7
    assert "verify_drafts" in calls[2] and "verify_drafts" not in calls[0] and calls[3]["markov_bias"] == 5
    assert "prepared: 0 kernels" in capsys.readouterr().out


def least(call: object, *args: object, **options: object) -> dict[str, list[float]]:
    with roofline.account() as found:
        call(*args, **options)  # type: ignore[operator]
    return found


def test_the_least_time_of_a_linear_is_its_bytes_or_its_products() -> None:
    w = torch.zeros(256, 64, dtype=torch.bfloat16)
    few, many = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(5000, 64, dtype=torch.bfloat16)
    (count, seconds) = least(ops.linear, few, w)["linear"]
    assert (count, seconds) == (1, pytest.approx((few.nbytes + w.nbytes + 512) / roofline.H200.copy))
    moved = many.nbytes + w.nbytes + 5000 * 512
    assert least(ops.linear, many, w)["linear"][1] == pytest.approx(
        max(moved / roofline.H200.copy, 2 * 5000 * w.numel() / roofline.H200.bf16)
    )


def test_only_the_rows_that_are_read_count_in_a_lookup() -> None:
    values = torch.zeros(1000, 64, dtype=torch.uint8).view(E4M3)
    scale = torch.full((1000, 2), 120, dtype=torch.uint8).view(E8M0)
    rows = torch.tensor([[3, -1], [5, 9]], dtype=torch.int32)
    got = least(ops.engram_lookup, rows, values, scale)["engram_lookup"][1]
    assert got == pytest.approx(3 * 66 / roofline.HOST_BYTES)


def test_the_page_shows_the_committed_results() -> None:
    docs = pathlib.Path(__file__).parents[1] / "docs"
    results = docs / "results" / "step.jsonl"
    if not results.exists():
        pytest.skip("no full run is committed")
    rows = [json.loads(line) for line in results.read_text("utf-8").splitlines()]
    made = step.markdown(rows)
    assert made in (docs / "step.md").read_text("utf-8"), "python -m dsv41 bench step --saved FILE prints it"


def test_a_wrong_result_has_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    good = {"us": 3.0, "TBps": 1.0, "distance": 1e-7, "bound": 1e-5, "repeat": True}
    assert results.judged(good) == good and results.status([good]) == 0
    for wrong in ({"distance": 1e-3}, {"distance": float("nan")}, {"repeat": False}):
        row = results.judged({**good, **wrong})
        assert "us" not in row and "TBps" not in row and results.status([good, row]) == 1
    assert results.status([]) == 1 and "nothing was measured" in capsys.readouterr().out
