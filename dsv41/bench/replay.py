"""`python -m dsv41 bench replay`: what bounded replay saves on paper and on a model, and what planning costs.

Each part is one function in `_PARTS`; it prints its table and returns True when its bound holds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from ..config import V41FlashConfig
from ..replay import (
    ReplayConfig,
    ReplayGeometry,
    ReplayMode,
    RequestSpan,
    SpanBatch,
    flops,
    plan_decoder,
)

_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 32768, 131_072, 1_048_576)
_NUM_REQUESTS = 256
_PLAN_BUDGET_US = 200.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `bench replay`."""
    parser.add_argument("--part", choices=(*_PARTS, "all"), default="all", help="what to print")
    parser.add_argument("--keep", type=int, default=140, help="decoder rows kept at the end of a prompt")
    parser.add_argument("--chunk", type=int, default=4096, help="prefill chunk in tokens")
    parser.add_argument("--repeats", type=int, default=300, help="timed calls of each plan")
    parser.add_argument("--tokens", type=int, default=4096, help="prompt of the prefill part")
    parser.add_argument("--model-chunk", type=int, default=512, help="tokens a forward of the prefill part")
    parser.add_argument("--json", help="append the measurements on models to this JSON-lines file")
    parser.add_argument(
        "--plot", metavar="PATH", help="part error: also draw savings and error (needs matplotlib)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the chosen parts. Returns 0 when every printed bound holds, 1 otherwise."""
    parts = _PARTS.values() if args.part == "all" else (_PARTS[args.part],)
    return 0 if all([part(args) for part in parts]) else 1


def _flops(args: argparse.Namespace) -> bool:
    """Saved share of a prefill's FLOPs, from the model's configuration."""
    config = V41FlashConfig()
    geom = ReplayGeometry.from_config(config)
    keeps = sorted(
        {config.window, geom.min_keep, args.keep, geom.exact_keep("all_rows", config.window), 2560}
    )
    print("Prefill FLOPs saved by mode compact, per cent (V4.1-Flash, logits of one row)")
    print(
        f"{'tokens':>8} {'TFLOP off':>10} "
        + " ".join(f"{'keep ' + str(k):>10}" for k in keeps)
        + "  mask/empty"
    )
    for length in _LENGTHS:
        costs = [flops(length, keep, config) for keep in keeps]
        masked = 100 * costs[keeps.index(args.keep)].saved_mask_empty
        saved = " ".join(f"{100 * cost.saved:10.1f}" for cost in costs)
        print(f"{length:8d} {costs[0].total_off / 1e12:10.1f} {saved}  {masked:10.1f}")
    print(f"mask/empty at keep {args.keep}; mask/windowed saves nothing")
    return True


def _planner(args: argparse.Namespace) -> bool:
    """Time of `plan_decoder` for 256 requests, and decoder rows of a million-token prompt in chunks."""
    geom = ReplayGeometry.from_config(V41FlashConfig())
    cfg = ReplayConfig(ReplayMode.COMPACT, args.keep, geometry=geom)
    rng = np.random.default_rng(0)
    verify = [
        RequestSpan(geom.backtrack, int(end), is_decode=True)
        for end in rng.integers(200, 50_000, _NUM_REQUESTS)
    ]
    mixed = verify[:240] + [RequestSpan(512, 4096, 4096)] * 16
    prompts = [RequestSpan(3000, 3000, 3000)] * _NUM_REQUESTS
    holds = True
    print(f"plan_decoder, {_NUM_REQUESTS} requests: us of CPU time, median (minimum) of {args.repeats} calls")
    for name, spans in (
        ("verify steps", verify),
        ("240 verify + 16 prompts", mixed),
        ("prompts of 3000", prompts),
    ):
        columns = SpanBatch.from_spans(spans)
        rows = plan_decoder(cfg, geom, spans).num_rows
        median, least = _time(lambda spans=spans: plan_decoder(cfg, geom, spans), args.repeats)
        column_median, column_least = _time(
            lambda columns=columns: plan_decoder(cfg, geom, columns), args.repeats
        )
        holds &= least <= _PLAN_BUDGET_US  # undisturbed; the median also measures the neighbours
        print(
            f"{name:>24}  {rows:6d} rows  from spans {median:6.0f} ({least:.0f})"
            f"  from columns {column_median:6.0f} ({column_least:.0f})"
        )
    median, least = _time(
        lambda: [RequestSpan(6, 1006, is_decode=True) for _ in range(_NUM_REQUESTS)], args.repeats
    )
    print(f"{'making 256 RequestSpans':>24}  {median:.0f} ({least:.0f}); columns need none")
    print(f"bound {_PLAN_BUDGET_US:.0f} us on the minima from spans: {'holds' if holds else 'DOES NOT HOLD'}")
    length = 1 << 20
    edges = [*range(args.chunk, length, args.chunk), length]
    for policy in ("prompt_window", "per_chunk_tail"):
        setting = ReplayConfig(ReplayMode.COMPACT, args.keep, policy, geometry=geom)
        rows = sum(
            plan_decoder(setting, geom, [RequestSpan(end - start, end, length)]).num_rows
            for start, end in zip([0, *edges], edges, strict=False)
        )
        print(f"{length} tokens in {len(edges)} chunks, {policy}: {rows} decoder rows")
    return holds


def _time(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(median, minimum) CPU time of this thread in us a call, after a tenth of the calls as warm-up.

    CPU and not wall time: a plan is shorter than a scheduler slice, and on a busy machine the wall time of a
    call is mostly that of the other processes.
    """
    for _ in range(max(1, repeats // 10)):
        call()
    times = []
    for _ in range(repeats):
        start = time.thread_time_ns()
        call()
        times.append(time.thread_time_ns() - start)
    return float(np.median(times)) / 1e3, min(times) / 1e3


def _prefill(args: argparse.Namespace) -> bool:
    """Time of a prefill with and without replay."""
    from .replay_model import prefill_speed

    return prefill_speed(args)


def _error(args: argparse.Namespace) -> bool:
    """Error of the last row against `keep`."""
    from .replay_model import prefill_error

    return prefill_error(args)


_PARTS: dict[str, Callable[[argparse.Namespace], bool]] = {
    "flops": _flops,
    "planner": _planner,
    "prefill": _prefill,
    "error": _error,
}
