"""``python -m dsv41 bench rows``: what a step does besides products and attention, on a CUDA device.

The boundary of mHC, Engram's gate and its lookup in pinned host memory, the router and the budget's split.
Parity with the reference on the same device first, then the median time of a launch within a CUDA graph, on
inputs that the L2 does not hold. Peers run in the same process where they are importable (``deep_gemm``,
``tile_kernels``).
"""

import argparse
import importlib
import json
from collections.abc import Callable
from typing import Any

import torch

from .. import ops
from .._op import use
from ..formats import E4M3, E8M0
from ..ops.hyper import mhc_scratch
from ..parity import distance
from . import results
from .gpu_time import graph_us

HIDDEN, STREAMS, EXPERTS, TOP_K, COLUMNS, HEAD = 5120, 4, 384, 6, 24, 256
MIXING: dict[str, Any] = {"norm_eps": 1e-20, "eps": 1e-6, "iters": 20}
BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `bench rows`."""
    parser.add_argument("--host-gb", type=float, default=2.0, help="pinned host memory of the lookup")
    parser.add_argument("--peers", action="store_true", help="also time DeepGEMM and TileKernels")
    parser.add_argument("--json", help="append the measurements to this JSON-lines file")


def run(args: argparse.Namespace) -> int:
    """Print one JSON line a measurement. Returns 0 when every parity check held, 1 otherwise."""
    if not torch.cuda.is_available():
        print("bench rows needs a CUDA device")
        return 1
    torch.manual_seed(0)
    cases: list[Callable[[], Row]] = []
    for tokens in (4096, 256, 64):
        cases += [lambda t=tokens: boundary(t), lambda t=tokens: gate(t), lambda t=tokens: router(t)]
    cases += [split, *(lambda on=on: host_lookup(8192, args.host_gb, on) for on in (False, True))]
    rows = []
    for case in cases:
        row = case()
        if args.peers:
            row |= _peers(row)
        print(json.dumps(row), flush=True)
        rows.append(row)
    if args.json:
        results.append(args.json, rows)
    return 0 if all(row["parity"] for row in rows) else 1


def _row(op: str, tokens: int, us: float, bytes_moved: int, parity: bool, **more: Any) -> Row:
    rate = round(bytes_moved / us / 1e6, 3)
    row = {"op": op, "tokens": tokens, "us": round(us, 2), "TBps": rate, "parity": parity, **more}
    return results.judged(row)


def _rotated(tokens: int) -> int:
    """Copies of a case's inputs: together far more than the L2."""
    return max(3, 4096 // tokens)


def _normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def boundary(tokens: int) -> Row:
    """`ops.mhc_boundary`."""
    fn = _normal(STREAMS * (STREAMS + 2), STREAMS * HIDDEN, dtype=F32) * 0.01
    params: Row = {"fn": fn, "base": _normal(24, dtype=F32), "scale": torch.ones(3, device="cuda")}
    weight = _normal(HIDDEN)
    inputs = []
    for _ in range(_rotated(tokens)):
        x = _normal(tokens, STREAMS, HIDDEN)
        mixes = (torch.rand(tokens, 4, device="cuda"), torch.rand(tokens, 4, device="cuda"))
        inputs.append((_normal(tokens, HIDDEN), x, (*mixes, torch.rand(tokens, 4, 4, device="cuda"))))
    scratch = torch.empty(mhc_scratch(tokens, HIDDEN), device="cuda")

    def call(i: int) -> Any:
        return ops.mhc_boundary(*inputs[i], weight=weight, scratch=scratch, **params, **MIXING)

    got = call(0)
    with use("torch"):
        want = call(0)
    pairs = [(got.x, want.x), (got.pre, want.pre), (got.post, want.post), (got.comb, want.comb)]
    pairs += [(got.norm, want.norm)]
    worst = max(distance(a, b) for a, b in pairs)
    again = call(0)
    same = all(torch.equal(a.contiguous(), b.contiguous()) for a, b in zip(got[:5], again[:5], strict=True))
    us = graph_us([lambda i=i: call(i) for i in range(len(inputs))])
    moved = tokens * HIDDEN * (2 * STREAMS * 2 + 2 + 2 + 1) + fn.nbytes
    return _row("mhc_boundary", tokens, us, moved, worst < 1e-6 and same, distance=worst)


def gate(tokens: int) -> Row:
    """`ops.engram_gate`."""
    inputs = [
        (_normal(tokens, STREAMS, HIDDEN), _normal(tokens, (STREAMS + 1) * HIDDEN))
        for _ in range(_rotated(tokens))
    ]
    weights = _normal(STREAMS, HIDDEN), _normal(STREAMS, HIDDEN)
    dead = torch.zeros(tokens, dtype=torch.bool, device="cuda")
    out = torch.empty_like(inputs[0][0])

    def call(i: int) -> torch.Tensor:
        return ops.engram_gate(*inputs[i], *weights, dead=dead, out=out)

    got = call(0).clone()
    with use("torch"):
        worst = distance(got, call(0))
    us = graph_us([lambda i=i: call(i) for i in range(len(inputs))])
    moved = tokens * HIDDEN * 2 * (2 * STREAMS + STREAMS + 1)
    return _row("engram_gate", tokens, us, moved, worst < 1e-6, distance=worst)


def router(tokens: int) -> Row:
    """`ops.topk_route`."""
    inputs = [_normal(tokens, EXPERTS, dtype=F32) for _ in range(max(8, _rotated(tokens)))]
    bias = _normal(EXPERTS, dtype=F32) * 0.01
    image = torch.zeros(tokens, dtype=torch.bool, device="cuda")
    out = (
        torch.empty((tokens, TOP_K), dtype=I32, device="cuda"),
        torch.empty((tokens, TOP_K), device="cuda"),
    )
    options: Row = {"top_k": TOP_K, "scale": 1.5, "image_bias": bias, "image": image, "out": out}

    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.topk_route(x, bias, **options)

    ids, weights = (t.clone() for t in call(inputs[0]))
    with use("torch"):
        want = call(inputs[0])
    same, worst = bool((ids == want[0]).all()), distance(weights, want[1])
    us = graph_us([lambda x=x: call(x) for x in inputs])
    return _row("topk_route", tokens, us, tokens * EXPERTS * 4, same and worst < 1e-10, distance=worst)


def split(requests: int = 256, block: int = 5) -> Row:
    """`ops.split_budget_ragged`: every integer equals the reference's."""
    confidence = torch.rand(requests, block, device="cuda")
    budget = torch.full((1,), requests * block // 2, dtype=I32, device="cuda")
    start = torch.randint(0, 4096, (requests,), device="cuda")
    given: Row = {"start": start, "rotation": torch.full((1,), 77, dtype=I32, device="cuda")}
    for name, value in (("hi", block), ("lo", 0), ("base", 1), ("bonus", 1)):
        given[name] = torch.full((requests,), value, dtype=I32, device="cuda")
    given["weights"] = torch.ones(requests, device="cuda")
    given["num_requests"] = torch.full((1,), requests, dtype=I32, device="cuda")
    out = ops.split_budget_ragged(confidence, budget, **given)
    got = [t.clone() for t in out]
    with use("torch"):
        want = ops.split_budget_ragged(confidence, budget, **given)
    same = all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    us = graph_us([lambda: ops.split_budget_ragged(confidence, budget, out=out, **given)] * 16)
    return _row("split_budget_ragged", requests, us, confidence.nbytes, same, drafts=block)


def host_lookup(tokens: int, gigabytes: float, neighbours: bool) -> Row:
    """`ops.engram_lookup` of a table in pinned host memory, beside a copy of as many bytes from there.

    ``neighbours`` reads rows that lie side by side, which no text does: what the scattering costs.
    """
    rows_held = int(gigabytes * 2**30) // (HEAD + HEAD // 32)
    values = torch.empty((rows_held, HEAD), dtype=torch.uint8, pin_memory=True)
    values.view(torch.int64).random_(0, 2**62)
    values &= 0x77  # finite
    codes = torch.randint(110, 140, (rows_held, HEAD // 32), dtype=torch.uint8).pin_memory()
    if neighbours:
        ids = [torch.arange(tokens * COLUMNS, dtype=I32, device="cuda").view(tokens, COLUMNS)]
    else:
        ids = [torch.randint(0, rows_held, (tokens, COLUMNS), dtype=I32, device="cuda") for _ in range(3)]
    out = torch.empty((tokens, COLUMNS * HEAD), dtype=BF16, device="cuda")
    table = values.view(E4M3), codes.view(E8M0)
    got = ops.engram_lookup(ids[0], *table, out=out)[:64].cpu()
    want = ops.engram_lookup(ids[0][:64].cpu(), *table)
    us = graph_us([lambda x=x: ops.engram_lookup(x, *table, out=out) for x in ids], repeats=5)
    moved = tokens * COLUMNS * (HEAD + HEAD // 32)
    flat, target = values.view(-1)[: 4 * moved], torch.empty(4 * moved, dtype=torch.uint8, device="cuda")
    copy = graph_us([lambda: target.copy_(flat, non_blocking=True)], repeats=5) / 4
    same = torch.equal(got, want)
    more = {"GBps": round(moved / us / 1e3, 2), "copy_GBps": round(moved / copy / 1e3, 2)}
    more |= {"rows": "neighbours" if neighbours else "random"}
    return _row("engram_lookup host", tokens, us, moved, same, share=round(copy / us, 3), **more)


# Peers: their calls on the same shapes.


def _peers(row: Row) -> Row:
    tokens = row["tokens"]
    wanted = {
        "mhc_boundary": (_deepgemm_prenorm, _tilekernels_pre, _tilekernels_post),
        "engram_gate": (_tilekernels_gate,),
        "topk_route": (_tilekernels_router,),
    }
    parts = {f.__name__[1:] + "_us": _try(f, tokens) for f in wanted.get(row["op"], ())}
    known = [v for v in parts.values() if v is not None]
    if not parts or len(known) < len(parts) or "us" not in row:
        return parts
    peer = "DeepGEMM + TileKernels" if len(parts) > 1 else "TileKernels"
    return {
        **parts, "peer": peer, "peer_us": round(sum(known), 1), "ratio": round(row["us"] / sum(known), 3),
    }  # fmt: skip


def _try(peer: Callable[[int], float], tokens: int) -> float | None:
    try:
        return round(peer(tokens), 2)
    except Exception as error:  # a peer that is not here, or of another version
        print(f"# {peer.__name__}: {type(error).__name__} {str(error)[:120]}", flush=True)
        return None


def _deepgemm_prenorm(tokens: int) -> float:
    dg: Any = importlib.import_module("deep_gemm")
    fn = _normal(24, STREAMS * HIDDEN, dtype=F32)
    xs = [_normal(tokens, STREAMS * HIDDEN) for _ in range(_rotated(tokens))]
    out, squares = torch.empty(tokens, 24, device="cuda"), torch.empty(tokens, device="cuda")
    return graph_us([lambda x=x: dg.tf32_hc_prenorm_gemm(x, fn, out, squares) for x in xs])


def _tilekernels_pre(tokens: int) -> float:
    peer: Any = importlib.import_module("tile_kernels.mhc.pre_big_fuse_kernel")
    splits = 16
    sums, squares = (
        torch.randn(splits, tokens, 24, device="cuda"),
        torch.rand(splits, tokens, device="cuda") * HIDDEN,
    )
    scale, base = torch.ones(3, device="cuda"), torch.zeros(24, device="cuda")
    post, comb = torch.empty(tokens, 4, device="cuda"), torch.empty(tokens, 16, device="cuda")
    xs = [_normal(tokens, STREAMS, HIDDEN) for _ in range(_rotated(tokens))]
    out = torch.empty(tokens, HIDDEN, dtype=BF16, device="cuda")

    def call(x: torch.Tensor) -> None:
        peer.mhc_pre_big_fuse_fwd(
            sums, squares, scale, base, x, post, comb, out, 1e-6, 1e-6, 1e-6, 2.0, 20, splits
        )

    return graph_us([lambda x=x: call(x) for x in xs])


def _tilekernels_post(tokens: int) -> float:
    peer: Any = importlib.import_module("tile_kernels.mhc.post_kernel")
    y = _normal(1, tokens, HIDDEN)
    post = torch.rand(1, tokens, STREAMS, 1, device="cuda")
    comb = torch.rand(1, tokens, STREAMS, STREAMS, device="cuda")
    xs = [_normal(1, tokens, STREAMS, HIDDEN) for _ in range(_rotated(tokens))]
    return graph_us([lambda x=x: peer.mhc_post_fwd(y, x, post, comb) for x in xs])


def _tilekernels_gate(tokens: int) -> float:
    peer: Any = importlib.import_module("tile_kernels.engram.engram_gate_fwd_kernel")
    weight = torch.rand(STREAMS, HIDDEN, device="cuda")
    pairs = [
        (_normal(tokens, STREAMS, HIDDEN), _normal(tokens, STREAMS + 1, HIDDEN))
        for _ in range(_rotated(tokens))
    ]
    return graph_us([lambda p=p: peer.engram_gate_fwd(*p, weight, 1e-6, 1e-6, False) for p in pairs])


def _tilekernels_router(tokens: int) -> float:
    peer: Any = importlib.import_module("tile_kernels.moe.moe_topk_gate_forward_kernel")
    bias = torch.randn(EXPERTS, device="cuda") * 0.01
    xs = [_normal(tokens, EXPERTS, dtype=F32) for _ in range(max(8, _rotated(tokens)))]
    return graph_us(
        [lambda x=x: peer.moe_topk_gate_forward(x, TOP_K, False, 0, 2.5, 0, bias=bias) for x in xs]
    )
