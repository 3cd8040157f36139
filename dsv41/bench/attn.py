"""``python -m dsv41 bench attn``: sparse attention on a GPU against FlashMLA, parity first.

FlashMLA reads 584-byte records in decode and plain bf16 rows in prefill; ours are the model's 528- and
288-byte records. FLOPs count every slot: 64 heads x slots x 512 x 2 products x 2.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import use
from ..cache import PagedKV, Record
from ..ops import sparse_attn
from ..ops.attn import sparse_attn_scratch
from . import results
from .gpu_time import graph_us

HEADS, WIDTH, SCALE, PAGE = 64, 512, 512**-0.5, 64
PARITY = 1e-5  # 1 - cosine-like distance of bf16 outputs to the reference


@dataclass(frozen=True)
class Case:
    """One shape: rows = requests x queries; ``wanted`` is the ratio to the peer that we aim at."""

    name: str
    requests: int
    queries: int
    wanted: float
    sets: int
    slots: int = 8192 * 64
    peer_prefill: bool = False

    @property
    def rows(self) -> int:
        return self.requests * self.queries


CASES = (
    Case("decode b=1 q=1", 1, 1, 1.2, 64),
    Case("decode b=16 q=1", 16, 1, 1.0, 16),
    Case("decode b=64 q=1", 64, 1, 1.0, 16),
    Case("decode b=128 q=1", 128, 1, 1.0, 8),
    Case("decode b=64 q=4", 64, 4, 0.8, 8),
    Case("decode b=64 q=6", 64, 6, 0.8, 8),
    Case("prefill 4096 x 640", 1, 4096, 1.0, 2, 65536, peer_prefill=True),
)
WINDOW, SELECTED = 128, 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `bench attn`."""
    parser.add_argument("--peers", help="folder with _flashmla_C.abi3.so, to time it in the same run")
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--json", help="append the results to this JSON-lines file")


def cache(layout: str, slots: int) -> PagedKV:
    """Random finite records."""
    record = Record(layout, WIDTH)
    pages = torch.randint(0, 256, (slots // PAGE, PAGE, record.bytes), dtype=torch.uint8, device="cuda")
    values = {"mxfp8": 512, "nvfp4": 256}[layout]
    low, high = {"mxfp8": (116, 122), "nvfp4": (0x20, 0x40)}[layout]
    if layout == "mxfp8":
        pages[..., :values][(pages[..., :values] & 0x7F) == 0x7F] = 0
    pages[..., values:].random_(low, high)
    return PagedKV(pages, record)


def distinct(rows: int, count: int, slots: int) -> torch.Tensor:
    """[rows, count] slots, distinct in a row: one of each of ``count`` parts of the cache, in any order."""
    part = slots // count
    ids = torch.randint(0, part, (rows, count), dtype=torch.int32, device="cuda")
    ids += torch.arange(count, dtype=torch.int32, device="cuda") * part
    return ids[:, torch.randperm(count, device="cuda")].contiguous()


def parity(q: torch.Tensor, arguments: tuple[Any, ...], sink: torch.Tensor) -> float:
    """Distance of the kernel's first rows to the reference."""
    window, near, compressed, far = arguments
    rows = slice(0, 4)
    few = (q[rows], window, near[rows], compressed, far[rows])
    got = sparse_attn(q, *arguments, scale=SCALE, sink=sink)[0][rows].double()
    with use("torch"):
        want = sparse_attn(*few, scale=SCALE, sink=sink)[0].double()
    return float(1 - 2 * (got * want).sum() / (got.square().sum() + want.square().sum()))


def ours(case: Case) -> tuple[float, float]:
    """(distance to the reference, us)."""
    window, compressed = cache("mxfp8", case.slots), cache("nvfp4", case.slots)
    sink = torch.randn(HEADS, device="cuda")
    calls: list[Callable[[], object]] = []
    worst = 0.0
    for i in range(case.sets):
        q = torch.randn(case.rows, HEADS, WIDTH, device="cuda").to(torch.bfloat16)
        near, far = (distinct(case.rows, n, case.slots) for n in (WINDOW, SELECTED))
        arguments = (window, near, compressed, far)
        if i == 0:
            worst = parity(q, arguments, sink)
        out = torch.empty_like(q)
        size = sparse_attn_scratch(case.rows, HEADS, WIDTH, WINDOW, SELECTED)
        scratch = torch.empty(size, dtype=torch.uint8, device="cuda")

        def call(q: Any = q, arguments: Any = arguments, out: Any = out, scratch: Any = scratch) -> None:
            sparse_attn(q, *arguments, scale=SCALE, sink=sink, out=out, scratch=scratch)

        calls.append(call)
    return worst, graph_us(calls)


def flashmla(case: Case) -> float:
    """us of FlashMLA on records of its own of the same count."""
    op = torch.ops._flashmla_C
    calls: list[Callable[[], object]] = []
    if case.peer_prefill:
        rows = torch.randn(case.slots, 1, WIDTH, device="cuda", dtype=torch.bfloat16)
        for _ in range(case.sets):
            q = torch.randn(case.rows, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
            ids = distinct(case.rows, WINDOW + SELECTED, case.slots)[:, None]
            calls.append(
                lambda q=q, ids=ids: op.sparse_prefill_fwd(q, rows, ids, SCALE, WIDTH, None, None, None)
            )
        return graph_us(calls)
    kv = torch.randint(0, 0x70, (case.slots // 64, 64, 1, 584), device="cuda", dtype=torch.uint8)
    kv = kv.view(torch.float8_e4m3fn)
    sink = torch.zeros(HEADS, device="cuda")
    plan: list[Any] = [None, None]

    def call(q: torch.Tensor, near: torch.Tensor, far: torch.Tensor) -> Any:
        return op.sparse_decode_fwd(q, kv, near, None, sink, *plan, kv, far, None, WIDTH, SCALE)

    for _ in range(case.sets):
        q = torch.randn(case.requests, case.queries, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
        shape = (case.requests, case.queries, -1)
        near, far = (distinct(case.rows, n, case.slots).view(shape) for n in (WINDOW, SELECTED))
        if plan[0] is None:
            result = call(q, near, far)
            plan[0], plan[1] = result[2], result[3]
        calls.append(lambda q=q, near=near, far=far: call(q, near, far))
    return graph_us(calls)


def run(args: argparse.Namespace) -> int:
    """Parity, time and ratio of every case."""
    if not torch.cuda.is_available():
        print("bench attn: needs a CUDA device")
        return 1
    library = os.path.join(args.peers, "_flashmla_C.abi3.so") if args.peers else ""
    has_peer = bool(library) and os.path.exists(library)
    if has_peer:
        torch.ops.load_library(library)
    rows = []
    for case in CASES:
        if args.only and args.only not in case.name:
            continue
        distance, us = ours(case)
        torch.cuda.empty_cache()
        good = distance < PARITY
        row: dict[str, Any] = {"op": "sparse_attn", "case": case.name, "distance": distance}
        line = f"{case.name:<20} distance {distance:.1e}"
        if good:
            flops = case.rows * HEADS * (WINDOW + SELECTED) * WIDTH * 4
            row |= {"us": round(us, 2), "tflops": round(flops / us / 1e6, 1)}
            line += f"  {us:8.1f} us {row['tflops']:6.1f} TFLOP/s"
            if has_peer:
                peer = flashmla(case)
                torch.cuda.empty_cache()
                row |= {"peer": "FlashMLA", "peer_us": round(peer, 2), "ratio": round(us / peer, 3)}
                row["wanted"] = case.wanted
                line += f"  FlashMLA {peer:8.1f} us  ratio {us / peer:.2f} (wanted {case.wanted})"
        else:
            line += "  WRONG: not timed"
        print(line, flush=True)
        rows.append(row)
    if args.json:
        results.append(args.json, rows)
    return 0 if all(row["distance"] < PARITY for row in rows) else 1
