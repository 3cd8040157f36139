"""The simulation behind `python -m dsv41 bench budget`, small."""

import argparse
import json

import numpy as np

from dsv41.bench import budget


def test_simulation_reproduces_the_shape_of_the_paper():
    found = {n: budget.simulate(n, 16, batches=3, steps=12, seed=0) for n in (10, 60, 200)}
    for requests, row in found.items():
        gains = {k: round(v["gain_percent"], 1) for k, v in row.items()}
        print(requests, gains)
        # Even the true probabilities buy little more, and early stop loses on stairs.
        assert row["budget"]["gain_percent"] > row["true_probabilities"]["gain_percent"] - 1.5
        assert row["early_stop"]["gain_percent"] < -10
        assert row["fixed"]["rows_per_request"] == 6
    assert abs(found[10]["budget"]["gain_percent"]) < 1
    assert 3 < found[60]["budget"]["gain_percent"] < 8
    assert 12 < found[200]["budget"]["gain_percent"] < 20


def test_generator_matches_the_published_threshold_sweep():
    """Verified and accepted tokens a step (block 7, bonus included) under static thresholds on c."""
    published = {  # threshold: math, code, chat
        0.0: ((7.95, 6.11), (7.96, 5.38), (7.96, 3.64)),
        0.5: ((7.76, 6.13), (7.43, 5.36), (4.92, 3.27)),
        0.7: ((6.99, 5.74), (6.44, 5.06), (3.32, 2.74)),
        0.9: ((4.93, 4.56), (4.05, 3.73), (2.09, 2.00)),
    }
    rng, n, block = np.random.default_rng(0), 50_000, 7
    for d, within, column in zip(budget.DOMAINS, (0.15, 0.10, 0.45), range(3), strict=True):
        z = d.first + d.slope * np.arange(block) + d.block_spread * rng.normal(size=(n, 1))
        z += d.token_spread * rng.normal(size=(n, block))
        survived = np.cumprod(budget._sigmoid(z), axis=1)
        for threshold, row in published.items():
            taken = np.cumprod(budget._sigmoid(z + d.over) >= threshold, axis=1)
            found = 1 + taken.sum(1).mean(), 1 + (survived * taken).sum(1).mean()
            assert np.abs(np.subtract(found, row[column])).max() < within, (threshold, found)


def test_command_prints_writes_and_plots(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    budget.add_arguments(parser)
    files = [str(tmp_path / name) for name in ("rows.jsonl", "gain.png")]
    arguments = [
        "--part",
        "table",
        "--requests",
        "4",
        "12",
        "--stairs",
        "1",
        "16",
        "--batches",
        "1",
        "--steps",
        "2",
    ]
    assert budget.run(parser.parse_args([*arguments, "--json", files[0], "--plot", files[1]])) == 0
    assert "early stop" in capsys.readouterr().out
    with open(files[0]) as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 2 * 2 * len(budget.POLICIES) and {r["part"] for r in rows} == {"table"}
    with open(files[1], "rb") as file:
        assert file.read(4) == b"\x89PNG"
