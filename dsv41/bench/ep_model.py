"""The backbone part of `bench ep`: the whole model over the ranks, random weights made where they are.

Every rank prefills its own prompts under bounded replay and decodes its own requests. Engram tables are one
constant file that the ranks map together, with fewer rows than the real tables: row numbers are taken modulo
theirs. Caches of decode hold random records.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..formats import E4M3, E8M0
from ..layers import V41Flash, V41State
from ..layers.engram import EngramStore, MemoryEngramStore, TokenMap
from ..layers.moe import MoE
from ..ops.exchange import usual_capacity
from ..replay import ReplayConfig, ReplayGeometry, ReplayMode, RequestSpan, plan_decoder
from ..replay.device import to_device
from .ep import even, fill
from .step import random_state

if TYPE_CHECKING:
    from .ep import Bench

TABLE_ROWS = 1 << 20  # rows of the shared table: 0.28 GB at the real width
STEPS = 8  # decode steps timed together


class WrappedStore(EngramStore):
    """A smaller table in place of a larger one."""

    def __init__(self, store: MemoryEngramStore):
        self._store, self.num_rows, self.head_dim = store, store.num_rows, store.head_dim

    def lookup(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """As `EngramStore.lookup`, of ``rows`` modulo the table's."""
        return self._store.lookup(torch.where(rows < 0, rows, rows % self.num_rows), out)


def shared_table(bench: Bench, head_dim: int) -> WrappedStore:
    """A constant table that every rank of the host maps; pinned on GPUs."""
    width = head_dim + head_dim // 32
    # Memory with a file's name: the pages of a file on a disk cannot be pinned for writing.
    file = os.memfd_create("engram") if bench.rank == 0 else 0
    if bench.rank == 0:
        os.truncate(file, TABLE_ROWS * width)
    owner = os.getpid() if bench.rank == 0 else 0
    owner, file = (int(bench.slowest(float(number))) for number in (owner, file))
    path = f"/proc/{owner}/fd/{file}"
    raw = torch.from_file(path, shared=True, size=TABLE_ROWS * width, dtype=torch.uint8)
    values, scale = raw.split([TABLE_ROWS * head_dim, TABLE_ROWS * (head_dim // 32)])
    if bench.rank == 0:
        values.fill_(0x30)  # 0.5
        scale.fill_(127)
    bench.wait()
    if bench.cuda:
        cudart: Any = torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(raw.data_ptr(), raw.numel(), 0))
        if code:
            raise RuntimeError(f"bench ep: expected to pin the shared Engram table, got CUDA error {code}")
    table = values.view(TABLE_ROWS, head_dim), scale.view(TABLE_ROWS, head_dim // 32)
    return WrappedStore(MemoryEngramStore(table[0].view(E4M3), table[1].view(E8M0)))


def build(bench: Bench, capacity: int) -> V41Flash:
    """This rank's model, its experts in the kernel's order."""
    cfg = bench.cfg
    group = bench.group(cfg.num_layers, capacity)
    with torch.device(bench.device):
        model = V41Flash(cfg, TokenMap.synthetic(cfg.vocab_size, cfg.engram.num_classes, 0), ep_group=group)
    names = {k: v for k, v in model.checkpoint_tensors().items() if ".experts." not in k}
    fill(names, cfg, bench.device, bench.args.seed)
    for module in model.modules():
        if isinstance(module, MoE):
            bench.random_experts(module.experts)
            even(module)
    model.pack()  # what is left: weights that read the same input become one
    if cfg.engram.layers:
        store = shared_table(bench, cfg.engram.head_dim)
        for layer in cfg.engram.layers:
            model.attach_engram(layer, store)
    return model


def backbone(bench: Bench) -> None:
    """Rows of the whole model: how it fits, prefill, decode."""
    args, began = bench.args, time.perf_counter()
    model = build(bench, usual_capacity(max(args.decode), bench.cfg.top_k, bench.size))
    row: dict[str, Any] = {"part": "fits", "build_s": bench.slowest(time.perf_counter() - began)}
    row["weights"] = sum(p.nbytes for p in model.parameters())
    if bench.cuda:
        free, total = torch.cuda.mem_get_info()
        row |= {"device_bytes": total, "least_free": -int(bench.slowest(-float(free)))}
    bench.note(row)
    loads = prefill(bench, model)
    for context in args.context:
        for requests in args.decode:
            decode(bench, model, requests, context)
    if bench.size > 1:
        reshuffle(bench, model, loads)
        prefill(bench, model)
        decode(bench, model, _middle(bench), min(args.context))


def reshuffle(bench: Bench, model: V41Flash, loads: torch.Tensor) -> None:
    """All layers by the loads of a prefill step; what follows is measured with the new map."""
    assert model.ep is not None
    bench.note({"part": "reshuffle", "layers": bench.cfg.num_layers, **bench.move(model.ep, loads)})
    bench.common["eplb"] = "on"


def prefill(bench: Bench, model: V41Flash) -> torch.Tensor:
    """One prompt a rank, as long as the step, in the exact form; returns the loads of this rank."""
    cfg, args, length = bench.cfg, bench.args, bench.args.prefill
    assert model.ep is not None
    tokens = torch.randint(0, cfg.image_token, (length,), device=bench.device, generator=bench.draw)
    place = torch.arange(length, dtype=torch.int32, device=bench.device)
    state = V41State.allocate(cfg, 1, length, device=bench.device)
    geometry = ReplayGeometry.from_config(cfg)
    mode = ReplayMode.COMPACT if args.replay else ReplayMode.OFF
    config = ReplayConfig(mode, args.replay or geometry.min_keep, geometry=geometry)
    spans = [RequestSpan(length, length, length)]
    plan = to_device(plan_decoder(config, geometry, spans), bench.device)

    def step() -> None:
        state.reset(0)
        model(tokens, place, state, rows=plan.logits_row.long(), replay=plan)

    # Behind the encoder few rows are left: they fit into the room that decode has.
    few = usual_capacity(plan.plan.num_rows, cfg.top_k, bench.size) <= (model.ep.exchange.capacity or 0)
    exact = range(cfg.first_decoder_layer) if few else range(cfg.num_layers)
    model.ep.exchange.lost()
    with model.ep.exactly(exact):
        us = bench.clock_us(step, repeats=3)
        phases = spent(bench, step, step)
    row = {"part": "prefill", "tokens": length, "replay": args.replay, "us": us, "exact_layers": len(exact)}
    row |= {"lost_pairs": sum(model.ep.exchange.lost())}
    row |= {"tokens_per_s": length / us * 1e6, "imbalance": bench.uneven(model.ep)}
    bench.note(row | phases)
    return model.ep.counts.clone()


def decode(bench: Bench, model: V41Flash, requests: int, context: int) -> None:
    """Steps of one token a request, captured on a GPU, in the fixed form."""
    cfg = bench.cfg
    context = min(context, cfg.max_positions - 4 * STEPS)
    row: dict[str, Any] = {"part": "decode", "requests": requests, "context": context}
    assert model.ep is not None
    try:
        state = random_state(cfg, requests, context + 4 * STEPS, bench.device)
        short = 0.0
    except torch.OutOfMemoryError:
        short = 1.0
    if bench.slowest(short):
        bench.note({**row, "skipped": "caches do not fit"})
        return
    tokens = torch.randint(0, cfg.image_token, (requests,), device=bench.device, generator=bench.draw)
    place = torch.empty(requests, dtype=torch.int32, device=bench.device)
    cu = torch.arange(requests + 1, dtype=torch.int32, device=bench.device)

    def step() -> None:
        place.copy_(state.lens)
        model(tokens, place, state, cu_seqlens=cu, max_len=1)

    def set_back() -> None:
        state.lens.fill_(context)
        state.written.fill_(context)

    set_back()
    step()  # compiles and allocates
    run = step
    if bench.cuda:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    set_back()
    model.ep.exchange.lost()
    steps = STEPS if bench.cuda else 1
    us = bench.clock_us(lambda: [run() for _ in range(steps)], repeats=2) / steps
    lost = sum(model.ep.exchange.lost())
    row |= {"us": us, "lost_pairs": lost, "tokens_per_s": requests / us * 1e6}
    row["imbalance"] = bench.uneven(model.ep)
    set_back()
    bench.note(row | (spent(bench, step, run) if requests == _middle(bench) else {}))


def _middle(bench: Bench) -> int:
    """Requests of the decode steps that are taken apart."""
    return sorted(bench.args.decode)[len(bench.args.decode) // 2]


def spent(bench: Bench, step: Callable[[], object], run: Callable[[], object]) -> dict[str, Any]:
    """Milliseconds of this rank's kernels: by op in ``step``, and between ranks in ``run``, the same from a
    graph where there is one: there no rank waits for the other's host.
    """
    if not bench.cuda:
        return {}
    from torch.profiler import ProfilerActivity, profile

    found = []
    for call in (step, run):
        bench.wait()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as made:
            call()
            torch.cuda.synchronize()
        found.append(made.key_averages())
    ops = {e.key[7:]: e.device_time_total / 1e3 for e in found[0] if e.key.startswith("dsv41::")}
    kernels = [e for e in found[1] if e.device_type.name == "CUDA"]
    nccl = sum(e.self_device_time_total for e in kernels if "nccl" in e.key.lower()) / 1e3
    total = sum(e.self_device_time_total for e in kernels) / 1e3
    ops |= {"between ranks": nccl, "torch": total - nccl - sum(ops.values())}
    ops = {k: round(v, 3) for k, v in sorted(ops.items(), key=lambda kv: -kv[1]) if v >= 0.05}
    return {"kernels_ms": total, "spent_ms": ops}
