"""``python -m dsv41 bench quant``: quantising ops on a CUDA device, all bound by memory.

Parity with the reference on the same device, then the median time of a launch within a CUDA graph, on inputs
that the L2 does not hold, and the share of the rate that a plain copy has in the same run.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch

from .. import ops
from .._op import use
from ..formats import MXFP8
from ..parity import distance
from . import results
from .gpu_time import graph_us
from .roofline import measured

# Op, width of a result row. What the layers of the model quantise.
SHAPES = (
    ("quantize_mxfp8", 1280),
    ("quantize_mxfp8", 5120),
    ("quantize_mxfp8", 8192),
    ("swiglu_quantize", 2304),
    ("rms_norm_quantize", 1280),
    ("rms_norm_quantize", 5120),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `bench quant`."""
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 4096], help="token counts")
    parser.add_argument("--json", help="append the measurements to this JSON-lines file")


def run(args: argparse.Namespace) -> int:
    """Print one JSON line a measurement. Returns 0 when every parity check held, 1 otherwise."""
    if not torch.cuda.is_available():
        print("bench quant needs a CUDA device")
        return 1
    torch.manual_seed(0)
    rows = []
    for tokens in args.tokens:
        for op, width in SHAPES:
            rows.append(results.judged(case(op, tokens, width)))
            print(json.dumps(rows[-1]), flush=True)
    if args.json:
        results.append(args.json, rows)
    return 0 if all(row["parity"] for row in rows) else 1


def calls(op: str, tokens: int, width: int, device: str, copies: int = 1) -> list[Callable[[], MXFP8]]:
    """The op on inputs and into results of its own, ``copies`` times."""

    def one() -> Callable[[], MXFP8]:
        x = torch.randn(tokens, width * (2 if op == "swiglu_quantize" else 1), device=device).bfloat16()
        out = ops.quantize_mxfp8(x[:, :width])
        if op == "quantize_mxfp8":
            return lambda: ops.quantize_mxfp8(x, out=out)
        if op == "swiglu_quantize":
            return lambda: ops.swiglu_quantize(x, limit=7.0, out=out)
        weight = torch.rand(width, device=device).bfloat16()
        return lambda: ops.rms_norm_quantize(x, weight, eps=1e-6, out=out)

    return [one() for _ in range(copies)]


def case(op: str, tokens: int, width: int) -> dict[str, Any]:
    """One measurement."""
    moved = tokens * width * (5 if op == "swiglu_quantize" else 3) + tokens * width // 32
    rotated = calls(op, tokens, width, "cuda", max(3, (128 << 20) // moved if tokens <= 256 else 1))
    got = rotated[0]().dequantize(torch.float32).clone()
    with use("torch"):
        worst = distance(got, rotated[0]().dequantize(torch.float32))
    same = torch.equal(got, rotated[0]().dequantize(torch.float32))
    us = graph_us(rotated)
    return {
        "op": op, "tokens": tokens, "width": width, "us": round(us, 2), "TBps": round(moved / us / 1e6, 3),
        "share": round(moved / us * 1e6 / measured().copy, 3), "distance": worst,
        "parity": worst < 1e-6 and same,
    }  # fmt: skip
