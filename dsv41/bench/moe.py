"""`python -m dsv41 bench moe`: the routed experts of one layer on a CUDA device, full path.

Parity against the reference first, then the median time of a launch in a CUDA graph. Weights are far larger
than the L2, which is flushed between replays.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

import torch

from .._op import use
from ..formats import E8M0, MXFP4Experts, quantize_mxfp8
from ..ops import mxfp4_moe, mxfp4_moe_scratch, pack_experts
from ..parity import distance
from . import results
from .gpu_time import graph_us
from .roofline import share

HIDDEN, INTER, TOP_K, LIMIT = 5120, 2304, 6, 10.0
# Experts of 48 that do not fold, 64 tokens: they take the path of any scales.
UNFOLDED = (2, 48)
CASES = ((48, 16), (48, 64), (48, 256), (48, 1024), (48, 4096), (384, 64), (384, 256), (384, 4096))
EXPERT_BYTES = 3 * INTER * HIDDEN * (1 / 2 + 1 / 32)
BOUND = 1e-5  # distance to the reference, of both numerics
PARITY_TOKENS = 256  # rows of a call that the reference makes too: all would take it minutes
FP8_TOKENS = 256  # fp8 numerics are measured from here on; below, the weights' bytes decide


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `bench moe`."""
    parser.add_argument("--experts", type=int, nargs="*", default=[48, 384], help="experts of the rank")
    parser.add_argument("--tokens", type=int, nargs="*", help="only these token counts")
    parser.add_argument("--numerics", nargs="*", default=["exact", "fp8"], help="exact, fp8")
    parser.add_argument("--json", help="append the measurements to this JSON-lines file")


def run(args: argparse.Namespace) -> int:
    """Print one JSON line a measurement. Returns 0 when every parity check held, 1 otherwise."""
    if not torch.cuda.is_available():
        print("bench moe needs a CUDA device")
        return 1
    rows: list[dict[str, Any]] = []
    for experts in args.experts:
        tokens = [t for e, t in CASES if e == experts and (not args.tokens or t in args.tokens)]
        for numerics in args.numerics:
            rows += _cases(experts, [t for t in tokens if numerics == "exact" or t >= FP8_TOKENS], numerics)
        if experts == 48 and 64 in tokens and "exact" in args.numerics:
            for unfolded in UNFOLDED:
                rows += _cases(experts, [64], "exact", unfolded)
    if args.json:
        results.append(args.json, rows)
    return results.status(rows)


def make_experts(experts: int, seed: int = 0) -> MXFP4Experts:
    """Random weights with scales of 2^-9 to 2^-3, in the plain layout on the GPU."""
    g = torch.Generator("cuda").manual_seed(seed)

    def part(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.empty(experts, rows, k // 2, device="cuda", dtype=torch.uint8)
        scale = torch.empty(experts, rows, k // 32, device="cuda", dtype=torch.uint8)
        for e in range(experts):
            values[e].random_(0, 256, generator=g)
            scale[e].random_(118, 125, generator=g)
        return values, scale.view(E8M0)

    return MXFP4Experts(*part(2 * INTER, HIDDEN), *part(HIDDEN, INTER))


def make_step(experts: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, expert ids and weights of a step."""
    g = torch.Generator().manual_seed(1000 * experts + tokens)
    ids = torch.rand(tokens, experts, generator=g).argsort(1)[:, :TOP_K].int().contiguous()
    weights = torch.rand(tokens, TOP_K, generator=g) + 0.1
    x = torch.randn(tokens, HIDDEN, generator=g).bfloat16()
    return x.cuda(), ids.cuda(), (weights / weights.sum(1, keepdim=True)).cuda()


def some(tokens: int) -> torch.Tensor:
    """The rows of a call that are compared with the reference: all, or so many that are evenly apart."""
    count = min(tokens, PARITY_TOKENS)
    return torch.arange(count, device="cuda") * tokens // max(1, count)


def _cases(experts: int, tokens: list[int], numerics: str, unfolded: int = 0) -> list[dict[str, Any]]:
    plain = make_experts(experts)
    # A scale too far from the others, of values that are not zeros.
    plain.w13_scale.view(torch.uint8)[:unfolded, 7, 3] = 160
    plain.w13[:unfolded, 7, 48:64] |= 0x11
    if numerics == "fp8":
        plain = dataclasses.replace(plain, layout="plain fp8")
    expected: dict[int, torch.Tensor] = {}
    for t in tokens:
        compared = some(t)
        x, ids, weights = (full[compared] for full in make_step(experts, t))
        with use("torch"):
            expected[t] = mxfp4_moe(x, ids, weights, plain, limit=LIMIT)
    packed = pack_experts(dataclasses.replace(plain, layout="plain"), numerics=numerics)
    rows = []
    for t in tokens:
        x, ids, weights = make_step(experts, t)
        q = quantize_mxfp8(x)
        scratch = torch.empty(
            mxfp4_moe_scratch(t, TOP_K, experts, HIDDEN, INTER), dtype=torch.uint8, device="cuda"
        )
        out = torch.full_like(x, torch.nan)
        mxfp4_moe(q, ids, weights, packed, limit=LIMIT, out=out, scratch=scratch)
        again = out.clone()

        def call(q=q, ids=ids, weights=weights, out=out, scratch=scratch):
            return mxfp4_moe(q, ids, weights, packed, limit=LIMIT, out=out, scratch=scratch)

        us = graph_us([call] * (4 if t <= 256 else 1))
        active = int(ids.unique().numel())
        flops = 6 * t * TOP_K * HIDDEN * INTER
        row = {
            "op": "mxfp4_moe", "numerics": numerics, "experts": experts, "tokens": t, "us": round(us, 1),
            "TBps": round(active * EXPERT_BYTES / us / 1e6, 3), "TFLOPs": round(flops / us / 1e6, 1),
            "unfolded": packed.unfolded, "distance": distance(out[some(t)], expected[t]),
            "bound": BOUND, "repeat": bool(torch.equal(out, again)), **share(call, us),
        }  # fmt: skip
        rows.append(results.judged(row))
        print(json.dumps(rows[-1]), flush=True)
    return rows
