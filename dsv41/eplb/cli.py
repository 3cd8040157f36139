"""``python -m dsv41 eplb plan LOADS``: a plan, or a repair of the map in use, from measured loads."""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from ._check import Floats, Ints, as_loads, as_map, check
from .maps import count_transfers, imbalance, logical_maps, lower_bound, rank_loads
from .plan import rebalance_experts
from .repair import Move, repair
from .split import ENTRIES, to_table, water_fill

OP = "eplb plan"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the ``plan`` command; ``run`` carries it out."""
    commands = parser.add_subparsers(dest="eplb_command", required=True)
    plan = commands.add_parser("plan", help="place experts on ranks from a load matrix")
    plan.add_argument("loads", type=Path, metavar="LOADS", help="[layers, experts] as .npy, .csv or .json")
    plan.add_argument("--gpus", type=int, required=True, help="ranks of the expert-parallel group")
    plan.add_argument(
        "--redundant", type=int, default=0, help="slots per layer beyond one per expert (default 0)"
    )
    plan.add_argument(
        "--groups", type=int, default=1, help="expert groups that must stay on one node (default 1)"
    )
    plan.add_argument(
        "--nodes", type=int, default=1, help="nodes, for groups and for nearby sources (default 1)"
    )
    plan.add_argument(
        "--previous",
        type=Path,
        metavar="MAP",
        help="[layers, slots] map in use (this command's .npz too): repair it",
    )
    plan.add_argument(
        "--full", action="store_true", help="with --previous: a new plan, renumbered to move less"
    )
    plan.add_argument("--target", type=float, help="imbalance to stop at (plan 1.002, repair 1.02)")
    plan.add_argument("--budget", type=int, help="with --previous: at most this many transfers in all")
    plan.add_argument("--allow-duplicates", action="store_true", help="an expert may sit twice on a rank")
    plan.add_argument("--out", type=Path, help="where the results go (default eplb_plan.npz beside LOADS)")
    plan.add_argument("--plot", type=Path, metavar="PNG", help="draw the rank loads before and after")


def read_matrix(path: Path, key: str = "") -> np.ndarray:
    """A matrix from .npy (no pickles), .csv (comma-separated rows), .json (list of rows), or ``key`` of an
    .npz."""
    check(path.is_file(), OP, "a file", str(path))
    kind = path.suffix.lower()
    kinds = (".npy", ".csv", ".json", ".npz") if key else (".npy", ".csv", ".json")
    check(kind in kinds, OP, f"a {', '.join(kinds[:-1])} or {kinds[-1]} file", path.name)
    want = f"a rectangular matrix of numbers in {path.name}"
    check(path.stat().st_size > 0, OP, want, "an empty file")
    try:
        if kind == ".npy":
            return np.load(path, allow_pickle=False)
        if kind == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                check(key in arrays, OP, f"{key} in {path.name}", ", ".join(arrays) or "nothing")
                return arrays[key]
        text = path.read_text(encoding="utf-8-sig")
        if kind == ".json":
            return np.array(json.loads(text))
        lines = text.splitlines()
        check(any(line.partition("#")[0].strip() for line in lines), OP, want, "no rows")
        return np.loadtxt(lines, delimiter=",", ndmin=2)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        if str(error).startswith(f"{OP}: "):
            raise
        raise ValueError(f"{OP}: expected {want}, got {' '.join(str(error).split())}") from None


def _writable(name: str, path: Path) -> None:
    """Raise unless ``path`` can be written; leaves nothing behind and what is there as it is."""
    new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{OP}: expected a writable file for {name}, got {path}: {error.strerror}") from None


def run(args: argparse.Namespace) -> int:
    """Plan, print imbalances and moves, write the maps; 0, or 2 after one sentence on what is wrong."""
    try:
        _plan(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}")
        return 2
    return 0


def _plan(args: argparse.Namespace) -> None:
    check(args.target is None or args.target >= 1, OP, "target >= 1", args.target)
    loads = as_loads(OP, read_matrix(args.loads))
    out = args.out or args.loads.with_name("eplb_plan.npz")
    check(out.suffix in (".npz", ".npy"), OP, "--out to end in .npz, or .npy for the map alone", out.name)
    _writable("--out", out)
    if args.plot:
        kinds = (".png", ".svg", ".pdf", ".jpg", ".jpeg")
        check(args.plot.suffix.lower() in kinds, OP, f"--plot to end in {', '.join(kinds)}", args.plot.name)
        _writable("--plot", args.plot)
    layers, experts = loads.shape
    check(args.redundant >= 0, OP, "redundant >= 0", args.redundant)
    slots = experts + args.redundant
    distinct = not args.allow_duplicates
    moves: list[Move] = []
    if args.previous is None:
        check(
            args.budget is None and not args.full, OP, "--previous together with --budget or --full", "none"
        )
        before, start = _first_map(loads, slots, args.gpus)
        old = None
    else:
        matrix = read_matrix(args.previous, "physical_to_logical")
        if matrix.dtype.kind == "f":  # text formats
            check(bool((matrix == np.rint(matrix)).all()), OP, "whole numbers in --previous", "fractions")
            matrix = matrix.astype(np.int64)
        before = old = as_map(OP, "previous", matrix, layers, experts, slots)
        start = "map in use"
    if old is not None and not args.full:
        check(args.groups == 1, OP, "one group without --full", args.groups)
        fix = repair(
            loads,
            old,
            args.gpus,
            target=args.target if args.target is not None else 1.02,
            budget=args.budget,
            num_nodes=args.nodes,
            compiled=False,  # one call does not pay for loading numba
        )
        p2l, moves, shares = fix.physical_to_logical, fix.moves, fix.shares
    else:
        target = args.target if args.target is not None else 1.002
        p2l = rebalance_experts(
            loads, slots, args.groups, args.nodes, args.gpus, previous=old, target=target, distinct=distinct
        )[0]
        shares = water_fill(loads, p2l, args.gpus, compiled=False)
    bound = lower_bound(loads, slots, args.gpus, distinct)
    _report(loads, args.gpus, bound, start, before, p2l, shares)
    if old is not None:
        changed = count_transfers(old, p2l, args.gpus)
        print(f"transfers: {changed.sum()} of {layers * slots} slots, at most {changed.max()} in a layer")
    for move in moves[:20]:
        print(f"  layer {move.layer}: expert {move.expert} from rank {move.src_rank} to rank {move.dst_rank},"
              f" slot {move.dst_slot}")  # fmt: skip
    if len(moves) > 20:
        print(f"  and {len(moves) - 20} more")
    _write(out, p2l, experts, shares, moves)
    print(f"wrote {out}")
    if args.plot:
        _plot(
            args.plot, rank_loads(loads, before, args.gpus), rank_loads(loads, p2l, args.gpus, shares), start
        )
        print(f"wrote {args.plot}")


def _first_map(loads: Floats, slots: int, gpus: int) -> tuple[Ints, str]:
    """What an engine serves with before it has a plan: experts in order, spare slots in order again."""
    order = np.arange(slots) % loads.shape[1]
    check(gpus >= 1 and slots % gpus == 0, OP, "slots divisible by --gpus", f"{slots} slots over {gpus} GPUs")
    return np.tile(order, (len(loads), 1)), "experts in order"


def _report(
    loads: Floats, gpus: int, bound: Floats, start: str, before: Ints, p2l: Ints, shares: Floats
) -> None:
    rows = (
        (start, imbalance(loads, before, gpus)),
        ("after, equal split", imbalance(loads, p2l, gpus)),
        ("after, levelled split", imbalance(loads, p2l, gpus, shares)),
        ("lower bound, equal split", bound),
    )
    print(f"{len(loads)} layers, {loads.shape[1]} experts, {p2l.shape[1]} slots on {gpus} ranks")
    print(f"{'largest / mean rank load':<26}{'mean':>10}{'worst layer':>14}")
    for name, ratio in rows:
        print(f"{name:<26}{ratio.mean():>10.4f}{ratio.max():>14.4f}")


def _write(out: Path, p2l: Ints, experts: int, shares: Floats, moves: list[Move]) -> None:
    l2p, counts = logical_maps(p2l, experts)
    arrays: dict[str, Any] = {"physical_to_logical": p2l, "logical_to_physical": l2p, "counts": counts}
    arrays["table"] = to_table(shares, p2l, experts, ENTRIES)
    arrays["shares"] = shares
    arrays["moves"] = np.array(moves, np.int64).reshape(len(moves), len(Move._fields))
    if out.suffix == ".npy":
        np.save(out, p2l)
    else:
        np.savez(out, **arrays)


def _plot(path: Path, before: Floats, after: Floats, start: str) -> None:
    """Rank loads over their mean, sorted within each layer: the mean over layers, and the spread between
    layers."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"{OP}: expected matplotlib for --plot, got no such package") from None
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for loads, name, colour in ((before, start, "tab:red"), (after, "after, levelled split", "tab:blue")):
        mean = loads.mean(1, keepdims=True)
        ratio = np.sort(loads / np.where(mean > 0, mean, 1.0), axis=1)[:, ::-1]
        rank = np.arange(1, ratio.shape[1] + 1)
        axes.fill_between(rank, ratio.min(0), ratio.max(0), color=colour, alpha=0.15, linewidth=0)
        axes.plot(rank, ratio.mean(0), color=colour, label=name)
    axes.axhline(1.0, color="0.5", linewidth=0.8)
    axes.set_xlabel("ranks, from the most to the least loaded of each layer")
    axes.set_ylabel("rank load / mean")
    axes.set_title(f"Rank loads: mean over {len(before)} layers, band from lowest to highest layer")
    axes.legend(frameon=False)
    figure.savefig(path)
