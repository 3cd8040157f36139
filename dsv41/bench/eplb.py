"""Measures of ``dsv41.eplb``: balance and time of plans, transfers under drift, and a whole serving regime.

Everything runs on one CPU thread; loads are synthetic, drawn as in production windows of 1,000
steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..eplb import (
    Balancer,
    count_transfers,
    duplicates,
    equal_shares,
    greedy_map,
    imbalance,
    logical_maps,
    lower_bound,
    noise_floor,
    rebalance_experts,
    repair,
    to_table,
    water_fill,
)
from ..eplb._mix import mix

LAYERS, EXPERTS, TOP_K, TOKENS, WINDOW = 40, 384, 6, 128, 1000
LOADS = ("zipf .5", "zipf .8", "zipf 1.0", "lognormal .5", "lognormal 1.0", "dirichlet 1", "dirichlet 4")
SIZES = ((8, 1), (16, 1), (32, 1), (64, 1), (128, 1), (8, 2), (16, 2), (32, 2), (64, 2), (128, 2))

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Row = dict[str, Any]


def probabilities(name: str, layers: int, experts: int, rng: np.random.Generator) -> Floats:
    """How likely each expert is: [layers, experts], rows add up to 1. ``name`` is one of ``LOADS``."""
    kind, value = name.split()
    if kind == "zipf":
        base = 1.0 / np.arange(1, experts + 1) ** float(value)
        p = np.stack([base[rng.permutation(experts)] for _ in range(layers)])
    elif kind == "lognormal":
        p = np.exp(rng.normal(0.0, float(value), (layers, experts)))
    else:
        p = rng.gamma(float(value), 1.0, (layers, experts))
    return p / p.sum(1, keepdims=True)


def window_counts(p: Floats, ranks: int, rng: np.random.Generator, steps: int = WINDOW) -> Floats:
    """Routed pairs of a window of ``steps`` steps: independent draws, [layers, experts] float64."""
    pairs = steps * TOKENS * ranks * TOP_K
    return np.stack([rng.multinomial(pairs, row) for row in p]).astype(np.float64)


def drifted(p: Floats, size: float, rng: np.random.Generator) -> Floats:
    """Probabilities after every expert's log moved by ``size`` times a standard normal."""
    p = p * np.exp(size * rng.normal(size=p.shape))
    return p / p.sum(1, keepdims=True)


def fastest(fn: Callable[[], Any], repeats: int) -> float:
    """Least CPU time of ``fn`` in milliseconds: wall time on an idle machine, steadier on a shared one."""
    best = math.inf
    for _ in range(repeats):
        start = time.process_time()
        fn()
        best = min(best, time.process_time() - start)
    return best * 1e3


def bench_plan(layers: int, repeats: int, sizes: tuple[tuple[int, int], ...] = SIZES) -> Iterator[Row]:
    """Plan and plain greedy: imbalance over the lower bound, duplicates on a rank, milliseconds."""
    for ranks, per_rank in sizes:
        for name in LOADS:
            rng = np.random.default_rng([ranks, per_rank, LOADS.index(name)])
            w = window_counts(probabilities(name, layers, EXPERTS, rng), ranks, rng)
            slots = EXPERTS + ranks * per_rank
            plan, _, counts = rebalance_experts(w, slots, 1, 1, ranks)
            greedy = greedy_map(w, slots, ranks)
            bound = lower_bound(w, slots, ranks)
            ours, theirs = imbalance(w, plan, ranks), imbalance(w, greedy, ranks)
            if duplicates(plan, ranks).any() or (counts < 1).any():
                raise AssertionError(f"plan for {name} on {ranks} ranks is not a distinct map")
            yield {
                "table": "plan",
                "ranks": ranks,
                "redundant": per_rank,
                "loads": name,
                "mean": float((ours / bound).mean()),
                "worst": float((ours / bound).max()),
                "greedy_mean": float((theirs / bound).mean()),
                "greedy_worst": float((theirs / bound).max()),
                "greedy_duplicates": int(duplicates(greedy, ranks).sum()),
                "ms": fastest(lambda w=w, s=slots, g=ranks: rebalance_experts(w, s, 1, 1, g), repeats),
            }


def bench_parts(layers: int, repeats: int) -> Iterator[Row]:
    """Milliseconds of the other parts on a drifted window: maps, split, table, repair; and what the table
    costs. Once with NumPy alone and, where numba is installed, once compiled."""
    paths = {"numpy": False, "compiled": True}
    if importlib.util.find_spec("numba") is None:
        del paths["compiled"]
    for ranks in (64, 128):
        for name in ("lognormal .5", "zipf .8"):
            for drift in (0.1, 0.2):
                rng = np.random.default_rng([ranks, 7])
                p = probabilities(name, layers, EXPERTS, rng)
                plan = rebalance_experts(window_counts(p, ranks, rng), EXPERTS + ranks, 1, 1, ranks)[0]
                w = window_counts(drifted(p, drift, rng), ranks, rng)
                for path in paths:
                    parts = _parts(w, plan, ranks, repeats, paths[path])
                    yield {
                        "table": "parts",
                        "ranks": ranks,
                        "loads": name,
                        "drift": drift,
                        "path": path,
                        **parts,
                    }


def _parts(w: Floats, plan: Ints, ranks: int, repeats: int, compiled: bool) -> Row:
    shares = water_fill(w, plan, ranks, compiled=compiled)
    table = to_table(shares, plan, EXPERTS)
    served = np.stack([np.bincount(row.ravel(), minlength=plan.shape[1]) for row in table]) / table.shape[2]
    fix = repair(w, plan, ranks, compiled=compiled)
    return {
        "maps_ms": fastest(lambda: logical_maps(plan, EXPERTS), repeats),
        "split_ms": fastest(lambda: water_fill(w, plan, ranks, compiled=compiled), repeats),
        "table_ms": fastest(lambda: to_table(shares, plan, EXPERTS), repeats),
        "repair_ms": fastest(lambda: repair(w, plan, ranks, compiled=compiled), repeats),
        "equal": float(imbalance(w, plan, ranks).mean()),
        "split": float(imbalance(w, plan, ranks, shares).mean()),
        "split_by_table": float(imbalance(w, plan, ranks, served).mean()),
        "repair": float(fix.after.mean()),
        "moves": len(fix.moves),
    }


def bench_moves(layers: int, windows: int = 5) -> Iterator[Row]:
    """Transfers over successive drifted windows: ``repair`` at 1.02, a relabelled new plan, and the greedy
    re-run."""
    for ranks in (8, 64, 128):
        for name in ("lognormal .5", "zipf .8"):
            for drift in (0.05, 0.2):
                rng = np.random.default_rng([ranks, LOADS.index(name), int(drift * 100)])
                p = probabilities(name, layers, EXPERTS, rng)
                slots = EXPERTS + ranks
                w = window_counts(p, ranks, rng)
                fixed = fresh = rebalance_experts(w, slots, 1, 1, ranks)[0]
                greedy = greedy_map(w, slots, ranks)
                sums: dict[str, float] = defaultdict(float)
                worst = 0
                for _ in range(windows):
                    p = drifted(p, drift, rng)
                    w = window_counts(p, ranks, rng)
                    fix = repair(w, fixed, ranks)
                    worst = max([worst, *Counter((m.layer, m.dst_rank) for m in fix.moves).values()])
                    new = rebalance_experts(w, slots, 1, 1, ranks, previous=fresh)[0]
                    again = greedy_map(w, slots, ranks)
                    sums["repair"] += len(fix.moves)
                    sums["plan"] += int(count_transfers(fresh, new, ranks).sum())
                    sums["greedy"] += int(count_transfers(greedy, again, ranks).sum())
                    sums["after"] += float(fix.after.mean())
                    sums["greedy_after"] += float(imbalance(w, again, ranks).mean())
                    fixed, fresh, greedy = fix.physical_to_logical, new, again
                whole = windows * layers * slots
                yield {
                    "table": "moves",
                    "ranks": ranks,
                    "loads": name,
                    "drift": drift,
                    "repair_percent": 100 * sums["repair"] / whole,
                    "repair_after": sums["after"] / windows,
                    "repair_worst_rank": worst,
                    "new_plan_percent": 100 * sums["plan"] / whole,
                    "greedy_percent": 100 * sums["greedy"] / whole,
                    "greedy_after": sums["greedy_after"] / windows,
                }


def step_imbalance(
    p: Floats, table: NDArray[np.int16], slots: int, ranks: int, step: int, rng: np.random.Generator
) -> Floats:
    """Imbalance of one step whose pairs all sources dispatch through ``table``: [layers].

    Every source sends ``TOKENS * TOP_K`` pairs; ``dispatch`` is repeated here for all sources at once.
    """
    layers, experts, entries = table.shape
    out = np.empty(layers)
    source = np.repeat(np.arange(ranks), experts)
    expert = np.tile(np.arange(experts), ranks)
    offset = mix(source, expert, step)
    for layer in range(layers):
        pairs = rng.multinomial(TOKENS * TOP_K, p[layer], size=ranks).ravel()
        first = np.cumsum(pairs) - pairs
        k = np.arange(pairs.sum()) - np.repeat(first, pairs)
        at = (k + np.repeat(offset, pairs)) & (entries - 1)
        loads = np.bincount(table[layer, np.repeat(expert, pairs), at], minlength=slots)
        per_rank = loads.reshape(ranks, -1).sum(1)
        out[layer] = per_rank.max() / per_rank.mean()
    return out


def bench_regime(layers: int, periods: int, steps: int) -> Iterator[Row]:
    """A window of 1,000 steps after another, drift 0.1 per 10,000 steps, 128 tokens a rank: ours and the
    greedy.

    Log-probabilities follow an Ornstein-Uhlenbeck walk whose spread stays that of lognormal .5. Ours decides
    every window; the greedy is run again every tenth window, with equal splits and the same dispatch. Both
    see the same walk.
    """
    for ranks in (64, 128):
        for drift in (0.1, 0.05, 0.2):
            if drift != 0.1 and steps < 4:
                continue
            yield _regime(ranks, drift, layers, periods, steps)


def _regime(ranks: int, drift: float, layers: int, periods: int, steps: int) -> Row:
    rng = np.random.default_rng([ranks, int(drift * 1000)])
    spread, slots = 0.5, EXPERTS + ranks
    keep = (1 - drift**2 / (2 * spread**2)) ** 0.1
    log = rng.normal(0.0, spread, (layers, EXPERTS))

    def chances() -> Floats:
        p = np.exp(log)
        return p / p.sum(1, keepdims=True)

    w = window_counts(chances(), ranks, rng)
    ours = Balancer(rebalance_experts(w, slots, 1, 1, ranks)[0], EXPERTS, ranks, target=1.03, min_gain=0.002)
    maps = {"never": greedy_map(w, slots, ranks)}
    maps["greedy"] = maps["never"]
    tables = {key: to_table(equal_shares(p2l, EXPERTS), p2l, EXPERTS) for key, p2l in maps.items()}
    window: dict[str, list[float]] = {"ours": [], "greedy": [], "never": []}
    step: dict[str, list[float]] = {"ours": [], "greedy": [], "never": []}
    moved = Counter()
    for turn in range(10 * periods):
        # Loads of a window are those of its middle: half a walk step before and half after.
        log = keep * log + math.sqrt(1 - keep**2) * spread * rng.normal(size=log.shape)
        p = chances()
        w = window_counts(p, ranks, rng)
        tables["ours"] = ours.table
        for key in window:
            p2l = ours.physical_to_logical if key == "ours" else maps[key]
            shares = ours.shares if key == "ours" else None
            window[key].append(float(imbalance(w, p2l, ranks, shares).mean()))
            for i in range(steps):
                one = np.random.default_rng([turn, i, ranks])
                step[key].append(
                    float(step_imbalance(p, tables[key], slots, ranks, turn * WINDOW + i, one).mean())
                )
        decision = ours.decide(w, turn * WINDOW)
        moved["ours"] += len(decision.moves)
        ours.commit(decision)
        if turn % 10 == 9:
            new = greedy_map(w, slots, ranks)
            moved["greedy"] += int(count_transfers(maps["greedy"], new, ranks).sum())
            maps["greedy"] = new
            tables["greedy"] = to_table(equal_shares(new, EXPERTS), new, EXPERTS)
    row: Row = {"table": "regime", "ranks": ranks, "drift": drift, "tokens": TOKENS}
    row["floor"] = noise_floor(ranks, TOKENS, TOP_K)
    for key in window:
        row[f"{key}_window"] = float(np.mean(window[key]))
        row[f"{key}_step"] = float(np.mean(step[key]))
        row[f"{key}_transfers"] = moved[key] / layers / periods
    return row


TABLES = ("plan", "parts", "moves", "regime")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m dsv41 bench eplb``."""
    parser.add_argument(
        "--tables", nargs="+", choices=TABLES, default=list(TABLES), help="which tables to print"
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help="MoE layers (default 40)")
    parser.add_argument("--repeats", type=int, default=5, help="timings taken, the least counts (default 5)")
    parser.add_argument(
        "--quick", action="store_true", help="a few layers and steps, to see that everything runs"
    )
    parser.add_argument("--json", type=Path, help="append one JSON line per row to this file")


def run(args: argparse.Namespace) -> int:
    """Print the tables asked for; returns 0."""
    layers = min(args.layers, 4) if args.quick else args.layers
    repeats = 1 if args.quick else args.repeats
    sizes = ((64, 1), (128, 1)) if args.quick else SIZES
    makers: dict[str, Callable[[], Iterator[Row]]] = {
        "plan": lambda: bench_plan(layers, repeats, sizes),
        "parts": lambda: bench_parts(layers, repeats),
        "moves": lambda: bench_moves(layers, 2 if args.quick else 5),
        "regime": lambda: bench_regime(
            2 if args.quick else 6, 1 if args.quick else 3, 1 if args.quick else 4
        ),
    }
    where = {
        "device": platform.processor() or platform.machine(),
        "numpy": np.__version__,
        "commit": _commit(),
    }
    for table in args.tables:
        print(f"\n{table}: {makers_title(table)}")
        header = None
        for row in makers[table]():
            if header is None:
                header = list(row)[1:]
                print("  ".join(f"{name:>14}" for name in header))
            print("  ".join(f"{_cell(row[name]):>14}" for name in header), flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps({"op": "eplb", **row, **where, "layers": layers}) + "\n")
    return 0


def makers_title(table: str) -> str:
    """One line that says what a table shows."""
    return {
        "plan": "imbalance / lower bound, mean and worst layer; CPU time of one plan (NumPy, one thread)",
        "parts": "CPU milliseconds of the other parts; imbalance with three splits, and after repair",
        "moves": "experts new on a rank, per cent of all slots per window; imbalance after",
        "regime": "window and step imbalance while serving; transfers per layer per 10,000 steps",
    }[table]


def _cell(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _commit() -> str:
    git = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"
