"""`torchrun -m dsv41 bench ep` over gloo, as CI runs it: 2 and 4 processes."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dsv41 import V41FlashConfig
from dsv41.bench import ep_sim, ep_tables

ROOT = Path(__file__).parents[2]
SMALL = ["--config=micro", "--decode=2", "--prefill=16", "--context=24", "--replay=12", "--layers=2"]


@pytest.mark.parametrize(
    "ranks, parts",
    [
        (2, ["exchange", "layer", "eplb", "backbone"]),
        (4, ["exchange", "eplb"]),
        (8, ["exchange", "backbone"]),
    ],
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
    if "eplb" in parts:
        assert by_part["eplb"]["imbalance_after"] <= by_part["eplb"]["imbalance_before"]
    if "backbone" in parts:
        assert by_part["reshuffle"]["layers"] == 6 and by_part["decode"]["eplb"] == "on"
        assert by_part["decode"]["tokens_per_s"] > 0 and by_part["prefill"]["replay"] == 12


def test_the_tables_of_the_page_are_fresh() -> None:
    text = ep_tables.PAGE.read_text("utf-8")
    assert ep_tables.refresh(text) == text, "run python -m dsv41.bench.ep_tables"
    assert all(f"<!-- ep {name}:" in text for name in ep_tables.tables())


@pytest.mark.parametrize("ranks", [8, 32])
def test_what_the_simulation_must_say(ranks: int) -> None:
    """Even popularities need no plan; skewed ones do; a faster link never makes a step longer."""
    cfg, links = V41FlashConfig.flash(), ep_sim.measured_links()
    costs = ep_sim.measured(cfg)
    in_order, planned = ep_sim.POLICIES

    def row(policy: ep_sim.Policy, spread: float, given: ep_sim.Links = links) -> dict[str, float]:
        return ep_sim.simulate(cfg, costs, given, ranks, spread, policy)

    assert row(in_order, 0.0)["window_imbalance"] < 1.1
    skewed, even = row(in_order, 1.0), row(planned, 1.0)
    assert even["step_imbalance"] < skewed["step_imbalance"] and even["step_imbalance"] < even["floor"] + 0.06
    slower = tuple(4 * us for us in links.nvlink_us)
    slow = dataclasses.replace(links, nvlink_us=slower, network_gbps=10.0)
    assert row(planned, 1.0, slow)["step_ms"] > even["step_ms"]
    # Time of experts: at least that of reading all, at most that of a rank with every row.
    rows = np.full((1, 8), 4.0)
    assert costs.experts(rows) < costs.experts(rows + 60) and costs.experts(rows * 0) == costs.call_us
