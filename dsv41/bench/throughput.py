"""``python -m dsv41 bench throughput``: tokens a second with drafts, for measured and for assumed acceptance.

A step of R requests with k drafts each verifies R (1 + k) tokens and emits R tau; tau = 1 + k x acceptance,
acceptance being the share of the drafts that stay. Acceptance is the text's, the drafter's and the sampler's:
measure it on traffic (`DraftCounts.lengths` of `dsv41.spec.generate`) and give the counts here.
"""

import argparse
import json
import math
from typing import Any

import numpy as np

from .._op import check
from ..spec import StepCost
from ..spec._values import numbers
from . import results
from .budget import BLOCK, step_cost

NAME = "bench throughput"
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST = 1 << 16  # requests: the simulated table has an entry a token
ASSUMED = (0.3, 0.5, 0.7, 0.9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `bench throughput`."""
    parser.add_argument(
        "--cost",
        help="a StepCost file (StepCost.to_json) or the JSON lines of bench step; default: as bench budget",
    )
    parser.add_argument("--context", type=int, default=4096, help="of the steps taken from JSON lines")
    parser.add_argument("--counts", help="JSON list: how often 0, 1, 2, ... drafts of a request stayed")
    parser.add_argument("--acceptance", type=float, nargs="+", default=list(ASSUMED), help="assumed shares")
    parser.add_argument("--requests", type=int, nargs="+", default=list(REQUESTS))
    parser.add_argument("--plot", help="write a chart to this file (extra: plot)")
    parser.add_argument("--json", help="append the results to this JSON-lines file")


def tokens_a_step(lengths: np.ndarray) -> float:
    """tau of counts: 1 and the mean number of drafts that stayed.

    Args:
        lengths: [drafts + 1] how often exactly 0, 1, ... drafts of a request stayed.
    """
    good = lengths.ndim == 1 and lengths.size > 1 and bool((lengths >= 0).all())
    good = good and 0 < float(lengths.sum()) < math.inf
    check(good, NAME, "counts of 0, 1, 2, ... accepted drafts, some above 0", lengths.tolist())
    return 1 + float((lengths * np.arange(lengths.size)).sum() / lengths.sum())


def read_cost(path: str, context: int, drafts: bool) -> StepCost:
    """A `StepCost` file, or the decode steps of one context in the JSON lines of ``bench step``, with all
    their drafts or without any: those with drafts hold the drafter's time.
    """
    rows = results.read(NAME, path, lines=True)
    if rows and "format" in rows[0]:
        return StepCost.from_json(json.dumps(rows[0]))
    wanted = ("decode", context, "all" if drafts else "none")
    chosen = [
        r
        for r in rows
        if (r.get("op"), r.get("context"), r.get("drafts")) == wanted and {"tokens", "ms"} <= r.keys()
    ]
    steps = {r["tokens"]: r["ms"] / 1e3 for r in chosen}
    check(bool(steps), NAME, f"decode steps at a context of {context} in {path}", "none")
    return StepCost(sorted(steps), [steps[size] for size in sorted(steps)])


def curve(cost: StepCost, requests: list[int], drafts: int, tau: float) -> list[float | None]:
    """Tokens a second of R requests that all verify ``drafts``; None where the table ends before."""
    rates: list[float | None] = []
    for count in requests:
        size = count * (1 + drafts)
        if size > cost.max_tokens:
            rates.append(None)
            continue
        seconds = float(cost(size)) + (cost.draft_seconds(count) if drafts else 0.0)
        rates.append(count * tau / seconds)
    return rates


def run(args: argparse.Namespace) -> int:
    """Print a table, tokens a second by requests; plot it where asked."""
    rows = measure(args)
    print(f"{'acceptance':<26}{'tau':>6}" + "".join(f"{n:>9}" for n in args.requests))
    for row in rows:
        cells = "".join(f"{'-' if r is None else f'{r:,.0f}':>9}" for r in row["tokens_per_s"])
        print(f"{row['curve']:<26}{row['tau']:>6.2f}{cells}")
    if args.plot:
        plot(rows, args.plot)
    if args.json:
        results.append(args.json, rows)
    return 0


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a curve: no drafts, measured, assumed."""
    good = all(0 <= a <= 1 for a in args.acceptance) and all(0 < n <= MOST for n in args.requests)
    wanted = f"acceptance 0 to 1, requests above 0 and up to {MOST}"
    check(good, NAME, wanted, (args.acceptance, args.requests))
    taus = [("no drafts", 0, 1.0)]
    drafts = BLOCK
    if args.counts:
        lengths = numbers(NAME, "--counts", results.read(NAME, args.counts))
        tau, drafts = tokens_a_step(lengths), lengths.size - 1
        taus.append((f"measured {(tau - 1) / drafts:.2f}", drafts, tau))
    taus += [(f"assumed {a:.2f}", drafts, 1 + drafts * a) for a in args.acceptance]
    if args.cost:
        plain, cost = (read_cost(args.cost, args.context, drafts=k) for k in (False, True))
    else:
        plain = cost = step_cost(16, max(args.requests) * (1 + drafts))
    source = "measured steps" if args.cost else "simulated steps"
    return [
        {"op": "throughput", "steps": source, "curve": name, "drafts": k, "tau": round(tau, 4),
         "requests": args.requests, "tokens_per_s": curve(cost if k else plain, args.requests, k, tau)}
        for name, k, tau in taus
    ]  # fmt: skip


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Tokens a second by requests, one line a curve; the measured one is solid and thick."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for row in rows:
        measured = row["curve"].startswith("measured")
        style: dict[str, Any] = {"linewidth": 2.6} if measured else {"linestyle": "--"}
        if row["drafts"] == 0:
            style = {"color": "black", "linewidth": 1.4}
        axes.plot(
            row["requests"],
            [np.nan if r is None else r for r in row["tokens_per_s"]],
            label=f"{row['curve']} (tau {row['tau']:.2f})",
            **style,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows[0]["requests"], [str(n) for n in rows[0]["requests"]])
    axes.set_xlabel("requests in the batch")
    axes.set_ylabel(f"tokens a second ({rows[0]['steps']})")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=140)
    plt.close(figure)
