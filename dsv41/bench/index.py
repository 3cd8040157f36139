"""`python -m dsv41 bench index`: index scores, top 512 and both fused, on a CUDA device, beside their peers.

Parity first, then the median time of a launch within a CUDA graph. Keys are far larger than the L2 cache;
the scores of the stand-alone selection rotate among copies for the same reason. Peers run in the same process
when they are importable: DeepGEMM (``deep_gemm``) on FP8 keys, and ``torch.topk``.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from .. import ops
from ..cache import PagedKV, Record
from ..formats import MXFP4, quantize_mxfp4
from ..ops.index.api import index_topk_scratch
from . import results
from .gpu_time import graph_us
from .roofline import measured, share

HEADS, DIM, TOP_K, PAGE, REQUESTS = 32, 128, 512, 64, 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `bench index`."""
    parser.add_argument("--keys", type=int, nargs="*", default=[65_536, 1_048_576], help="entries a request")
    parser.add_argument("--prefill", type=int, default=2048, help="queries of the prefill row; 0 for none")
    parser.add_argument("--no-peers", action="store_true", help="only our own kernels")
    parser.add_argument("--json", help="append the measurements to this JSON-lines file")


def run(args: argparse.Namespace) -> int:
    """Print one JSON line a measurement. Returns 0 when every parity check held, 1 otherwise."""
    if not torch.cuda.is_available():
        print("bench index needs a CUDA device")
        return 1
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    peers = not args.no_peers
    for keys in args.keys:
        rows += _cases(keys, peers, scores=keys == min(args.keys))
    if args.prefill:
        rows += _prefill(args.prefill, min(args.keys))
    for row in rows:
        print(json.dumps(row))
    if args.json:
        results.append(args.json, rows)
    return 0 if all(row.get("parity", True) for row in rows) else 1


class Case:
    """Queries and paged keys of ``requests`` requests in random pages; the scale codes of a key differ by up
    to two.
    """

    def __init__(self, tokens: int, requests: int, keys: int):
        self.count, record, device = keys, Record("mxfp4", DIM), "cuda"
        pages = requests * keys // PAGE
        data = torch.randint(0, 256, (pages, PAGE, record.bytes), dtype=torch.uint8, device=device)
        scales = torch.randint(124, 127, (pages, PAGE * 4), dtype=torch.uint8, device=device)
        data.view(pages, -1)[:, PAGE * DIM // 2 :] = scales
        self.keys = PagedKV(data, record)
        self.table = torch.randperm(pages, device=device).to(torch.int32).view(requests, -1)
        self.q = quantize_mxfp4(torch.randn(tokens, HEADS, DIM, device=device))
        self.weights = torch.randn(tokens, HEADS, device=device)
        self.request = torch.arange(tokens, device=device, dtype=torch.int32) * requests // tokens
        self.visible = torch.full((tokens,), keys, dtype=torch.int32, device=device)
        self.out = torch.empty((tokens, TOP_K), dtype=torch.int32, device=device)
        self.scratch = torch.empty(index_topk_scratch(tokens), dtype=torch.uint8, device=device)

    def fused(self) -> torch.Tensor:
        """The op."""
        few = self.weights, self.request, self.visible, self.keys, self.table
        return ops.index_topk(self.q, *few, top_k=TOP_K, out=self.out, scratch=self.scratch)[0]

    def scores(self, out: torch.Tensor) -> None:
        """The same kernel with the selection left out: every score to ``out`` [num_tokens, keys] f32."""
        kernel = importlib.import_module("dsv41.ops.index.tilelang_cuda")
        few = self.weights, self.request, self.visible, self.keys.pages, "mxfp4", self.table
        none = self.out[:, :0]
        kernel.launch(*self.q.flat(), *few, None, 8, out, none, self.scratch, select=False)

    def exact(self, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of query ``t`` in float64, and the sum of magnitudes that each is made of."""
        slots = self.table[int(self.request[t])].long()[:, None] * PAGE + torch.arange(PAGE, device="cuda")
        keys = self.keys.read(slots.flatten()[: self.count]).double()
        q = MXFP4(self.q.values[t], self.q.scale[t]).dequantize(torch.float32).double()
        w = self.weights[t].double()
        return w @ (q @ keys.T).clamp(min=0), w.abs() @ (q.abs() @ keys.abs().T)


def check(case: Case, rows: Sequence[int]) -> dict[str, Any]:
    """Whether the fused op gives exactly the best of the kernel's own scores, and those scores' error."""
    scores = torch.full((len(case.request), case.count), torch.nan, device="cuda")
    case.scores(scores)
    ids = case.fused()
    order = scores[list(rows)].sort(dim=1, descending=True, stable=True).indices[:, :TOP_K].sort(1).values
    parity = bool((ids[list(rows)] == order).all())
    error = max(float(((scores[t] - s).abs() / m).max()) for t in rows[:3] for s, m in [case.exact(t)])
    return {"parity": parity, "score_error": error}


def _cases(keys: int, peers: bool, scores: bool) -> list[dict[str, Any]]:
    """64 requests with one query each."""
    rows: list[dict[str, Any]] = []
    case = Case(REQUESTS, REQUESTS, keys)
    name = f"b={REQUESTS} keys={keys}"
    held = check(case, range(0, REQUESTS, 1 if keys < 100_000 else 16))
    peer_scores = _deepgemm(keys) if peers else None
    out = torch.empty((REQUESTS, keys), device="cuda")
    size = REQUESTS * keys
    if scores:
        us = graph_us([lambda: case.scores(out)] * 4)
        rate = size * 68 / us / 1e6
        part = rate * 1e12 / measured().copy
        rows.append(_row("scores " + name, us, peer_scores, TBps=rate, share=part, **held))
    copies = [torch.randn(REQUESTS, keys, device="cuda") for _ in range(8 if keys < 100_000 else 1)]
    lens = case.visible
    ids = torch.empty_like(case.out)
    ops.topk(copies[0], lens, k=TOP_K, out=ids, scratch=case.scratch)
    best = copies[0].sort(dim=1, descending=True, stable=True).indices[:, :TOP_K].sort(1).values
    same = bool((ids == best).all())
    calls = [lambda x=x: ops.topk(x, lens, k=TOP_K, out=ids, scratch=case.scratch) for x in copies]
    us = graph_us(calls)
    # torch.topk asks for memory inside, which a graph gives it.
    peer_topk = graph_us([lambda x=x: torch.topk(x, TOP_K, dim=1) for x in copies]) if peers else None
    extra: dict[str, Any] = {"TBps": size * 4 / us / 1e6, "parity": same, **share(calls[0], us)}
    rows.append(_row(f"topk {TOP_K} of {REQUESTS} x {keys}", us, peer_topk, **extra))
    both = peer_scores + peer_topk if peer_scores is not None and peer_topk is not None else None
    us = graph_us([case.fused] * 4)
    extra = {"TBps": size * 68 / us / 1e6, "scratch": case.scratch.numel(), **share(case.fused, us)}
    rows.append(_row("index_topk " + name, us, both, **extra, **held))
    return rows


def _prefill(tokens: int, keys: int) -> list[dict[str, Any]]:
    """Many queries of one request."""
    case = Case(tokens, 1, keys)
    held = check(case, range(0, tokens, 101))
    us = graph_us([case.fused])
    flop = 2 * tokens * keys * HEADS * DIM
    extra = {"TFLOPs": flop / us / 1e6, "scratch": case.scratch.numel(), **share(case.fused, us)}
    return [_row(f"index_topk prefill {tokens} x {keys}", us, None, **extra, **held)]


def _row(case: str, us: float, peer: float | None, **more: Any) -> dict[str, Any]:
    ratio = None if peer is None else round(us / peer, 3)
    rounded = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in more.items()}
    timed = {"us": round(us, 1), "peer_us": peer and round(peer, 1), "ratio": ratio}
    return results.judged({"case": case, **timed, **rounded})


def _deepgemm(keys: int) -> float | None:
    """Microseconds of DeepGEMM's paged logits on FP8 keys, or None where it cannot be imported."""
    try:
        dg: Any = importlib.import_module("deep_gemm")
    except ImportError:
        return None
    blocks = REQUESTS * keys // 64
    # Bytes below 0x70: finite values and scales.
    cache = torch.randint(0, 0x70, (blocks, 64, 1, 132), device="cuda", dtype=torch.uint8)
    q = torch.randn(REQUESTS, 1, HEADS, DIM, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(REQUESTS, HEADS, device="cuda")
    lens = torch.full((REQUESTS, 1), keys, device="cuda", dtype=torch.int32)
    table = torch.arange(blocks, device="cuda", dtype=torch.int32).view(REQUESTS, -1)
    plan = dg.get_paged_mqa_logits_metadata(lens, 64, dg.get_num_sms())
    if hasattr(dg, "fp8_fp4_paged_mqa_logits"):
        return graph_us(
            [lambda: dg.fp8_fp4_paged_mqa_logits((q, None), cache, weights, lens, table, plan, keys)] * 4
        )
    return graph_us([lambda: dg.fp8_paged_mqa_logits(q, cache, weights, lens, table, plan, keys)] * 4)
