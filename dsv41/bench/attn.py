"""``python -m dsv41 bench attn``: sparse attention on a GPU against FlashMLA, parity first; then the writers
of the caches against the bytes they move.

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
from ..ops import compress_pairs, copy_records, sparse_attn, write_cache
from ..ops.attn import sparse_attn_scratch
from . import results
from .gpu_time import graph_us
from .roofline import measured, share

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
    parser.add_argument(
        "--writers-json", help="append the results of the cache writers to this JSON-lines file"
    )
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


def ours(case: Case) -> tuple[float, float, dict[str, float]]:
    """(distance to the reference, us, share of the ceilings)."""
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
    us = graph_us(calls)
    return worst, us, share(calls[0], us)


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


def _writer(layout: str, dim: int, norm: bool) -> Callable[[int], tuple[Callable[[], object], int]]:
    """A maker of one call of ``write_cache`` on data of its own, and the bytes that it must move."""

    def make(rows: int) -> tuple[Callable[[], object], int]:
        record = Record(layout, dim)
        pages = torch.zeros((-(-rows // PAGE), PAGE, record.bytes), dtype=torch.uint8, device="cuda")
        into = PagedKV(pages, record)
        x = torch.randn(rows, dim, device="cuda").to(torch.bfloat16)
        cos, sin = torch.randn(2, rows, 32, device="cuda").unbind()
        slots = torch.randperm(into.num_slots, device="cuda")[:rows].to(torch.int32)
        keys: dict[str, Any] = {"norm_weight": x[0].clone(), "eps": 1e-6} if norm else {}
        bytes_moved = rows * (2 * dim + 256 + 4 + record.bytes)
        return lambda: write_cache(x, cos, sin, slots, into, **keys), bytes_moved

    return make


def _pairs(rows: int) -> tuple[Callable[[], object], int]:
    kv_gate = torch.randn(rows, 2 * WIDTH, device="cuda")
    at = torch.arange(rows, dtype=torch.int32, device="cuda")
    requests, positions = at // 512, at % 512
    carry = torch.randn(-(-rows // 512), 8, 2 * WIDTH, device="cuda")
    out = torch.empty(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
    # Kept rows are read once more and written.
    bytes_moved = rows * (8 * WIDTH + 8 + 2 * WIDTH) + carry.numel() * 8
    return lambda: compress_pairs(kv_gate, requests, positions, carry, out=out), bytes_moved


def _copies(rows: int) -> tuple[Callable[[], object], int]:
    source, into = (cache("mxfp8", -(-rows // PAGE) * PAGE) for _ in range(2))
    slots = torch.randperm(rows, device="cuda").to(torch.int32)
    return lambda: copy_records(source, slots, into, slots), rows * (2 * 528 + 8)


WRITERS = {
    "window rows (norm, RoPE, mxfp8)": _writer("mxfp8", 512, True),
    "entries (RoPE, nvfp4)": _writer("nvfp4", 512, False),
    "index keys (norm, RoPE, mxfp4)": _writer("mxfp4", 128, True),
    "pairs of the compressor": _pairs,
    "copies of window rows": _copies,
}


def writers(only: str) -> list[dict[str, Any]]:
    """Time of every cache writer, and its share of the rate of a copy."""
    rows = []
    for name, make in WRITERS.items():
        for count in (64, 8192):
            case = f"{name} x {count}"
            if only not in case:
                continue
            made = [make(count) for _ in range(32 if count < 1000 else 8)]
            us, moved = graph_us([call for call, _ in made]), made[0][1]
            rate = moved / us / 1e6
            part = rate * 1e12 / measured().copy
            print(f"{case:<40} {us:8.2f} us {rate:5.2f} TB/s, {part:.0%} of a copy's", flush=True)
            found = {"us": round(us, 2), "TBps": round(rate, 3), "share": round(part, 3)}
            rows.append({"op": "writer", "case": case, **found})
    return rows


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
        distance, us, of_ceiling = ours(case)
        torch.cuda.empty_cache()
        good = distance < PARITY
        row: dict[str, Any] = {"op": "sparse_attn", "case": case.name, "distance": distance}
        line = f"{case.name:<20} distance {distance:.1e}"
        if good:
            flops = case.rows * HEADS * (WINDOW + SELECTED) * WIDTH * 4
            row |= {"us": round(us, 2), "tflops": round(flops / us / 1e6, 1), **of_ceiling}
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
    timed = writers(args.only or "")
    if args.writers_json:
        results.append(args.writers_json, timed)
    return 0 if all(row["distance"] < PARITY for row in rows) else 1
