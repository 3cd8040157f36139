"""`torchrun -m dsv41 bench ep` over gloo, as CI runs it: 2 and 4 processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--config=micro", "--decode=2", "--prefill=16", "--context=24", "--replay=12", "--layers=2"]


@pytest.mark.parametrize(
    "ranks, parts", [(2, ["exchange", "layer", "eplb", "backbone"]), (4, ["exchange", "eplb"])]
)
def test_bench(ranks: int, parts: list[str], tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [
        *launch,
        "-m",
        "dsv41",
        "bench",
        "ep",
        *SMALL,
        "--parts",
        *parts,
        "--json",
        str(tmp_path / "ep.jsonl"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "ep.jsonl").read_text().splitlines()]
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == len(printed) and all(row["ranks"] == ranks for row in rows)  # rank 0 alone prints
    by_part = {row["part"]: row for row in rows}
    assert by_part["parity"]["equal"] and by_part["parity"]["distance"] < 1e-5
    assert by_part["eplb"]["imbalance_after"] <= by_part["eplb"]["imbalance_before"]
    if "backbone" in parts:
        assert by_part["decode"]["tokens_per_s"] > 0 and by_part["prefill"]["replay"] == 12
