"""`python -m dsv41 bench linear`: block-scaled linears on a CUDA device beside bf16 products.

Parity against the product of the dequantised operands, and the median time of a launch in a CUDA graph. The
peer is torch's bf16 product of bf16 weights, timed in the same run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch

from .._op import Target, Unsupported, use
from ..formats import E4M3, E8M0, MXFP8, FP8Tiles
from ..ops import block_linear, block_linear_scratch, grouped_linear, pack_linear
from ..parity import distance
from . import results
from .gpu_time import graph_us
from .roofline import share

# Name, features, k. Every block-scaled linear of the model.
SHAPES = (
    ("wq_b", 32768, 1280),
    ("wo_b", 5120, 8192),
    ("wq_a+wkv", 1792, 5120),
    ("indexer wq_b", 4096, 1280),
    ("shared w13", 4608, 5120),
    ("shared w2", 5120, 2304),
    ("main_proj", 5120, 15360),
)
TARGETS = ("wq_b", "wo_b")
GROUPS, RANK, GROUP_K = 8, 1024, 4096  # wo_a
BOUND = 1e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `bench linear`."""
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[64, 192, 384, 768, 1536, 4096], help="token counts"
    )
    parser.add_argument("--only", nargs="*", help="only the shapes of these names, such as wq_b")
    parser.add_argument("--json", help="append the measurements to this JSON-lines file")


def run(args: argparse.Namespace) -> int:
    """Print one JSON line a measurement. Returns 0 when every parity check held, 1 otherwise."""
    if not torch.cuda.is_available():
        print("bench linear needs a CUDA device")
        return 1
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    rows: list[dict[str, Any]] = []
    for name, features, k in SHAPES:
        if not args.only or name in args.only:
            for tokens in args.tokens:
                rows += _block(name, features, k, tokens)
    if not args.only or "wo_a" in args.only:
        for tokens in args.tokens:
            rows += _grouped(tokens)
    if args.json:
        results.append(args.json, rows)
    return results.status(rows)


def _values(rows: int, k: int) -> torch.Tensor:
    return (torch.randn(rows, k, device="cuda") * 100).clamp(-448, 448).to(E4M3)


def _codes(*shape: int) -> torch.Tensor:
    return torch.randint(116, 121, shape, device="cuda", dtype=torch.uint8).view(E8M0)


def make_weight(rows: int, k: int) -> MXFP8:
    """Random E4M3 weights with scales of 2^-11 to 2^-7 a 32 x 32 tile."""
    return MXFP8(_values(rows, k), _codes(rows // 32, k // 32), 32)


def make_rows(tokens: int, k: int) -> MXFP8:
    """Random MXFP8 rows with scales of 2^-11 to 2^-7."""
    return MXFP8(_values(tokens, k), _codes(tokens, k // 32))


def _row(
    op: str, name: str, numerics: str, sizes: tuple[int, int, int], us: float, peer: float
) -> dict[str, Any]:
    tokens, features, k = sizes
    weights, flops = features * k * (1 + 1 / 1024), 2 * tokens * features * k
    return {
        "op": op, "shape": name, "numerics": numerics, "tokens": tokens, "features": features, "k": k,
        "us": round(us, 2), "TBps": round(weights / us / 1e6, 3), "TFLOPs": round(flops / us / 1e6, 1),
        "torch_bf16_us": round(peer, 2), "speedup": round(peer / us, 3),
    }  # fmt: skip


def _report(row: dict[str, Any], call: Callable[[], torch.Tensor], want: torch.Tensor) -> dict[str, Any]:
    got = call().clone()
    row |= share(call, row["us"])
    row |= {"distance": distance(got, want), "bound": BOUND, "repeat": bool(torch.equal(got, call()))}
    row = results.judged(row)
    print(json.dumps(row), flush=True)
    return row


def _block(name: str, features: int, k: int, tokens: int) -> list[dict[str, Any]]:
    copies = max(1, min(4, (256 << 20) // (features * k))) if tokens < 4096 else 1
    weights = [make_weight(features, k) for _ in range(copies)]
    x = make_rows(tokens, k)
    out = torch.empty(tokens, features, dtype=torch.bfloat16, device="cuda")
    wide, x_wide = [w.dequantize() for w in weights], x.dequantize()
    peer = graph_us([lambda w=w: torch.mm(x_wide, w.t(), out=out) for w in wide])
    want, found = torch.mm(x_wide.float(), wide[0].float().t()), []
    del wide
    for numerics in ("exact", "fp8"):
        packed: list[MXFP8 | FP8Tiles] = [pack_linear(w, numerics=numerics) for w in weights]
        size = block_linear_scratch(tokens, features, k, numerics)
        scratch = torch.empty(size, dtype=torch.uint8, device="cuda")

        def call(w=packed[0], scratch=scratch):
            return block_linear(x, w, out=out, scratch=scratch)

        us = graph_us([lambda w=w, call=call: call(w) for w in packed])
        row = _row("block_linear", name, numerics, (tokens, features, k), us, peer)
        if isinstance(packed[0], FP8Tiles):
            row["changed"] = packed[0].changed / packed[0].values.numel()
            if name in TARGETS and tokens >= 4096 and Target.of(out).has("deep_gemm"):
                row |= _deepgemm(call, want)
        found.append(_report(row, call, want))
    return found


def _deepgemm(call: Callable[[], torch.Tensor], want: torch.Tensor) -> dict[str, Any]:
    """The same call through DeepGEMM, which compiles a shape for seconds first."""
    with use("deepgemm_cuda", block_linear):
        good = distance(call(), want) < BOUND
        return {"deepgemm_us": round(graph_us([call] * 3), 2) if good else None}


def _grouped(tokens: int) -> list[dict[str, Any]]:
    copies = 4 if tokens < 4096 else 1
    weights = [make_weight(GROUPS * RANK, GROUP_K) for _ in range(copies)]
    x = torch.randn(tokens, GROUPS, GROUP_K, device="cuda").bfloat16()
    out = torch.empty(tokens, GROUPS, RANK, dtype=torch.bfloat16, device="cuda")
    wide = [w.dequantize().unflatten(0, (GROUPS, RANK)).transpose(1, 2) for w in weights]
    swapped = out.transpose(0, 1)
    peer = graph_us([lambda w=w: torch.bmm(x.transpose(0, 1), w, out=swapped) for w in wide])
    want = torch.bmm(x.transpose(0, 1).float(), wide[0].float()).transpose(0, 1)

    def call(w=weights[0]):
        return grouped_linear(x, w, out=out)

    try:
        us = graph_us([lambda w=w: call(w) for w in weights])
    except Unsupported as error:
        print(error)
        return []
    row = _row("grouped_linear", "wo_a", "exact", (tokens, GROUPS * RANK, GROUP_K), us, peer)
    return [_report(row, call, want)]
