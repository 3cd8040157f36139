"""``torchrun --nproc-per-node N -m dsv41 bench ep``: expert parallel over N ranks, NCCL or gloo.

exchange: dispatch and combine against a bare all-to-all of the same bytes. layer: a decode MoE layer by
phase. eplb: skewed routing before and after a live reshuffle, and what it moved. backbone: the whole model.
Without torchrun it is one rank. ``--simulate`` needs none: see `dsv41.bench.ep_sim`.

Two ranks with ``--experts 192`` stand for four with 384: a rank holds as many experts, and as many rows
arrive, as many at each expert. What differs is in every row, under "differs".
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..config import V41FlashConfig
from ..eplb import Balancer
from ..eplb.live import LiveExperts
from ..formats import MXFP8, MXFP4Experts
from ..layers.checkpoint import draw_tensor
from ..layers.expert_parallel import ExpertParallel, even_map, even_table
from ..layers.moe import Experts, MoE
from ..ops import (
    exchange_pack,
    exchange_pack_fixed,
    exchange_plan,
    exchange_unpack,
    mxfp4_moe,
    pack_experts,
    quantize_mxfp8,
    swiglu_quantize,
)
from ..ops.exchange import GroupTransport, usual_capacity
from ..parity import distance
from . import results

PARTS = ("exchange", "layer", "eplb", "backbone")
SPARE = 1  # redundant slots a rank
SKEW = 0.8  # exponent of the popularity of experts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `bench ep`."""
    configs = ("micro", "tiny", "mini", "flash")
    parser.add_argument("--config", choices=configs, help="default: flash on GPUs, mini on CPUs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["exchange", "layer", "eplb"])
    parser.add_argument("--decode", type=int, nargs="+", default=[16, 64, 128], help="tokens a rank")
    parser.add_argument("--prefill", type=int, default=4096, help="tokens a rank")
    parser.add_argument("--context", type=int, nargs="+", default=[8192, 131072], help="of decode, backbone")
    parser.add_argument("--replay", type=int, default=140, help="keep of the backbone's prefill; 0 is off")
    parser.add_argument(
        "--experts", type=int, help="other than the config's: 192 on two ranks fill them as 384 on four"
    )
    parser.add_argument("--layers", type=int, default=4, help="layers of the eplb part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="append the measurements to this JSON-lines file")
    parser.add_argument("--simulate", action="store_true", help="EP8 to EP128 from measured inputs instead")


def run(args: argparse.Namespace) -> int:
    """Rank 0 prints one JSON line a measurement. Returns 0 when every parity check held, 1 otherwise."""
    if args.simulate:
        from . import ep_sim

        return ep_sim.run(args)
    bench = Bench(args)
    for part in args.parts:
        if part == "backbone":
            from .ep_model import backbone

            backbone(bench)
        else:
            getattr(bench, part)()
    dist.destroy_process_group()
    return 0 if all(row.get("equal", True) for row in bench.rows) else 1


def start() -> GroupTransport:
    """Join the ranks that torchrun started, or be the only one."""
    store, rank, size = dist.HashStore(), 0, 1  # pyright: ignore[reportPrivateImportUsage]
    if dist.is_torchelastic_launched():
        from torch.distributed.rendezvous import rendezvous

        store, rank, size = next(rendezvous("env://"))
    cuda = torch.cuda.is_available()
    options: dict[str, Any] = {}
    if cuda:
        device = torch.device("cuda", dist.get_node_local_rank(0))  # pyright: ignore[reportPrivateImportUsage]
        torch.cuda.set_device(device)
        options["device_id"] = device
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, **options)
    group = dist.group.WORLD
    assert group is not None
    return GroupTransport(group, store)


class Bench:
    """What the parts share: the ranks, the config, timing, and the rows measured so far."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.transport = args, start()
        self.rank, self.size = self.transport.rank, self.transport.size
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        self.name = args.config or ("flash" if self.cuda else "mini")
        more = {"num_experts": args.experts} if args.experts else {}
        self.cfg: V41FlashConfig = getattr(V41FlashConfig, self.name)(**more)
        self.draw = torch.Generator(self.device).manual_seed(args.seed + self.rank)
        self.rows: list[dict[str, Any]] = []
        self.common: dict[str, Any] = {
            "config": self.name, "ranks": self.size, "experts": self.cfg.num_experts
        }  # fmt: skip
        full = getattr(V41FlashConfig, self.name)().num_experts
        if self.cfg.num_experts != full:
            stands = full * self.size // self.cfg.num_experts
            self.common["stands_for"] = f"{stands} ranks of {full} experts"
            self.common["differs"] = (
                f"{self.size - 1} of {self.size} rows leave their rank, not {stands - 1} of {stands}; "
                f"{self.size - 1} peers; the router has {self.cfg.num_experts} experts; "
                f"the fullest of {self.size} ranks is waited for, not of {stands}"
            )

    def note(self, row: dict[str, Any]) -> None:
        """Keep a measurement with four figures a number; rank 0 prints it."""
        row = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
        row = {"op": "ep", **self.common, **row}
        self.rows.append(row)
        if self.rank == 0:
            print(json.dumps(row), flush=True)
            if self.args.json:  # at once: a part that ends badly does not take the others' rows
                results.append(self.args.json, [row])

    def graph_us(self, call: Callable[[], object]) -> float:
        """Microseconds of a call that never waits for the host: in a CUDA graph, or on the clock of a CPU.
        The slowest rank's.
        """
        if not self.cuda:
            return self.clock_us(call)
        from .gpu_time import graph_us

        # Ranks start a replay some microseconds apart: many calls share them.
        return self.slowest(graph_us([call] * 24))

    def clock_us(self, call: Callable[[], object], repeats: int = 5) -> float:
        """Microseconds of a call by the host's clock, all ranks starting together; the slowest rank's."""
        times = []
        for _ in range(1 + (repeats if self.cuda else 1)):  # a CPU shows that it runs, not how fast
            self.wait()
            began = time.perf_counter()
            call()
            if self.cuda:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e6)
        return self.slowest(statistics.median(times[1:]))

    def wait(self) -> None:
        """All ranks, and their devices, are here."""
        self.slowest(0.0)

    def slowest(self, value: float) -> float:
        """The largest of the ranks' values."""
        x = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.transport.group)
        return float(x)

    def group(self, layers: int, capacity: int | None) -> ExpertParallel:
        """The ranks with an even map and one redundant slot each."""
        spare = SPARE if self.size > 1 else 0
        p2l = even_map(layers, self.cfg.num_experts, self.size, spare)
        return ExpertParallel(
            self.transport, p2l, self.cfg.num_experts, capacity=capacity, device=self.device
        )

    def moe(self, group: ExpertParallel | None, layer: int = 0, random: bool = False) -> MoE:
        """A layer with random weights: an expert's are the same wherever it is, unless they are `random`."""
        with torch.device(self.device):
            experts, top_k = self.cfg.num_experts, self.cfg.top_k
            moe = MoE(self.cfg, experts, top_k, None if group is None else group.layers[layer])
        at = f"layers.{layer}.ffn."
        named = {f"{at}{k}": p.data for k, p in moe.named_parameters() if not k.startswith("experts.")}
        if random:
            self.random_experts(moe.experts)
        else:
            named |= {f"{at}experts.{k}": v for k, v in moe.experts.checkpoint_tensors().items()}
        fill(named, self.cfg, self.device, self.args.seed)
        if random:
            even(moe)
        if moe.experts.packable:
            moe.experts.pack()
        return moe

    def random_experts(self, experts: Experts) -> None:
        """Random bytes are random weights in any order: only one expert is packed, to learn the order's
        name.
        """
        for values in (experts.w13, experts.w2):
            values.data.random_(0, 256, generator=self.draw)
        for scale in (experts.w13_scale, experts.w2_scale):
            scale.data.view(torch.uint8).random_(118, 122, generator=self.draw)
        if experts.packable:
            parts = (t[:1].view(torch.uint8).clone().view(t.dtype) for t in experts.parameters())
            experts.layout = pack_experts(MXFP4Experts(*parts)).layout  # pyright: ignore[reportArgumentType]

    def tokens(self, count: int) -> torch.Tensor:
        """[count, hidden] bf16, other rows on every rank."""
        shape = (count, self.cfg.hidden)
        return torch.randn(shape, device=self.device, generator=self.draw).bfloat16()

    # Parts.

    def exchange(self) -> None:
        """Dispatch and combine against a bare all-to-all of the same bytes; parity of a layer first."""
        self.parity()
        for tokens in self.args.decode:
            self.roundtrip(tokens, usual_capacity(tokens, self.cfg.top_k, self.size))
        for tokens in (self.args.prefill // 8, self.args.prefill):
            self.roundtrip(tokens, None)

    def parity(self, tokens: int = 8) -> None:
        """The ranks' output for a few tokens beside that of one rank with all experts."""
        x, group = self.tokens(tokens), self.group(1, tokens * self.cfg.top_k)
        got = self.moe(group)(x)
        lost = sum(group.exchange.lost())
        want = self.moe(None)(x)
        away = self.slowest(distance(got, want))
        # Bits are equal where both calls take the kernel of the same tiling; on a CPU float32 products may
        # depend on the number of rows.
        bits = self.slowest(float(not torch.equal(got, want))) == 0.0
        row = {"part": "parity", "tokens": tokens, "lost": lost, "distance": away, "bits": bits}
        self.note({**row, "equal": lost == 0 and away < 1e-5})

    def roundtrip(self, tokens: int, capacity: int | None) -> None:
        """One row: every step of an exchange, its bytes, and the bare collective."""
        group, cfg, t = self.group(1, capacity), self.cfg, self.transport
        x = quantize_mxfp8(self.tokens(tokens))
        ids = torch.rand((tokens, cfg.num_experts), device=self.device, generator=self.draw)
        ids = ids.argsort(1)[:, : cfg.top_k].int().contiguous()
        weights = torch.rand((tokens, cfg.top_k), device=self.device, generator=self.draw)
        per = group.slots_per_rank
        # Uniform slots: the table of copies would do no other.
        slots = (ids * (per * self.size) // cfg.num_experts).int().contiguous()
        ranks: dict[str, Any] = {"num_ranks": self.size, "slots_per_rank": per}
        calls: dict[str, Callable[[], object]] = {}
        if capacity is not None:
            sent, came = None, None
            lost = torch.zeros(self.size, dtype=torch.int64, device=self.device)
            pack = functools.partial(exchange_pack_fixed, capacity=capacity, lost=lost, **ranks)
            calls["pack"] = lambda: pack(x, weights, slots)
            records = pack(x, weights, slots)[1]
        else:
            _, source, counts = exchange_plan(slots, **ranks)
            records = exchange_pack(x, weights, slots, source, slots_per_rank=per)
            sent, came = t.counts(counts)
            calls["plan"] = lambda: exchange_plan(slots, **ranks)
            calls["pack"] = lambda: exchange_pack(x, weights, slots, source, slots_per_rank=per)
        arriving = (
            torch.empty_like(records) if came is None else records.new_empty((sum(came), records.shape[1]))
        )
        rows = torch.zeros((len(arriving), cfg.hidden), dtype=torch.bfloat16, device=self.device)
        back = torch.zeros((len(records), cfg.hidden), dtype=torch.bfloat16, device=self.device)
        bare = self.graph_us(lambda: t.all_to_all(records, arriving, sent, came).wait())
        bare_back = self.graph_us(
            lambda: t.all_to_all(rows.view(torch.uint8), back.view(torch.uint8), came, sent).wait()
        )
        away = (self.size - 1) / self.size

        def out() -> Any:
            return group.exchange.dispatch(x, slots, weights, exact=capacity is None).wait()

        timed = self.graph_us if capacity else self.clock_us
        out_us = timed(out)
        calls["unpack"] = lambda: exchange_unpack(arriving, hidden=cfg.hidden)
        flight = group.exchange.dispatch(x, slots, weights, exact=capacity is None)
        flight.wait()
        back_us = self.graph_us(lambda: flight.combine(rows))
        row = {
            "part": "exchange", "tokens": tokens, "form": "fixed" if capacity else "exact",
            "capacity": capacity,
            "out_bytes": int(records.nbytes * away), "back_bytes": int(back.nbytes * away),
            "dispatch_us": out_us, "combine_us": back_us, "bare_dispatch_us": bare,
            "bare_combine_us": bare_back, **{f"{k}_us": self.graph_us(call) for k, call in calls.items()},
            "bare_dispatch_GBps": records.nbytes * away / bare / 1e3,
            "bare_combine_GBps": back.nbytes * away / bare_back / 1e3,
            "dispatch_GBps": records.nbytes * away / out_us / 1e3,
            "combine_GBps": back.nbytes * away / back_us / 1e3,
            "dispatch_ratio": bare / out_us, "combine_ratio": bare_back / back_us,
        }  # fmt: skip
        self.note(row)

    def layer(self) -> None:
        """A decode layer by phase, and the whole with the shared expert overlapping the way out."""
        moe = self.moe(self.group(1, None), random=True)
        for tokens in self.args.decode:
            self.phases(moe, tokens)

    def phases(self, moe: MoE, tokens: int) -> None:
        """One row of `layer`."""
        capacity = usual_capacity(tokens, self.cfg.top_k, self.size)
        group, x = self.group(1, capacity), self.tokens(tokens)
        moe.ep, group.layers[0].experts = group.layers[0], moe.experts
        q = quantize_mxfp8(x)
        ids, weights = moe.route(x, None)
        ep = group.layers[0]
        flight = ep.dispatch(q, ids, weights)
        arrived = flight.wait()
        rows = mxfp4_moe(*arrived, moe.experts.mxfp4, limit=self.cfg.swiglu_limit)
        limit, shared = self.cfg.swiglu_limit, moe.shared_experts
        calls: dict[str, Callable[[], object]] = {
            "route": lambda: moe.route(x, None),
            "dispatch": lambda: ep.dispatch(q, ids, weights).wait(),
            "shared": lambda: shared.w2(swiglu_quantize(shared.gate_up(q), limit=limit)),
            "experts": lambda: mxfp4_moe(*arrived, moe.experts.mxfp4, limit=limit),
            "combine": lambda: flight.combine(rows),
            "whole": lambda: moe(x, None, q),
        }
        times = {f"{name}_us": self.graph_us(call) for name, call in calls.items()}
        lost = sum(group.exchange.lost())
        row = {"part": "layer", "tokens": tokens, "capacity": capacity, "rows": len(rows), "lost": lost}
        self.note({**row, **times})

    def eplb(self) -> None:
        """Skewed random routing: imbalance, step time, and the price of a live reshuffle."""
        layers = self.args.layers
        group = self.group(layers, max(self.args.decode) * self.cfg.top_k)
        moes = [self.moe(group, i, random=True) for i in range(layers)]
        host = np.random.default_rng(self.args.seed)  # the same popularity on every rank
        popular = (1 + np.arange(self.cfg.num_experts)) ** -SKEW
        self.reshuffle(group, moes, "scattered", np.stack([host.permutation(popular) for _ in moes]))
        self.reshuffle(group, moes, "worst first", np.stack([popular] * layers))

    def reshuffle(self, group: ExpertParallel, moes: list[MoE], order: str, popular: np.ndarray) -> None:
        """One row of `eplb`: ``order`` says which experts are the popular ones."""
        cfg, layers = self.cfg, len(moes)
        even = even_map(1, cfg.num_experts, self.size, SPARE * (self.size > 1))
        for i, table in enumerate(even_table(even, cfg.num_experts).expand(layers, -1, -1)):
            group.switch(i, even[0], table)
        # A decode step in the fixed form, with room for everything, and a prefill step in the exact one.
        sizes = {"decode": max(self.args.decode), "prefill": self.args.prefill}
        steps: dict[str, Callable[[], None]] = {}
        routed = {name: [self.skewed(row, tokens) for row in popular] for name, tokens in sizes.items()}
        for name, tokens in sizes.items():
            q, shared = quantize_mxfp8(self.tokens(tokens)), self.tokens(tokens)
            shares = torch.full((tokens, cfg.top_k), 1 / cfg.top_k, device=self.device)

            def step(name: str = name, q: MXFP8 = q, shares: Any = shares, shared: Any = shared) -> None:
                group.begin(len(shared), None)
                for moe, chosen in zip(moes, routed[name], strict=True):
                    assert moe.ep is not None
                    flight = moe.ep.dispatch(q, chosen, shares)
                    rows = mxfp4_moe(*flight.wait(), moe.experts.mxfp4, limit=cfg.swiglu_limit)
                    flight.combine(rows, shared=shared)
                group.end()

            steps[name] = step
        row: dict[str, Any] = {
            "part": "eplb", "order": order, "skew": SKEW, "layers": layers, "tokens": sizes["decode"],
            "prefill_tokens": sizes["prefill"],
        }  # fmt: skip

        def measure(when: str) -> None:
            row[f"decode_{when}_us"] = self.graph_us(steps["decode"])
            with group.exactly():
                row[f"prefill_{when}_us"] = self.clock_us(steps["prefill"])
            row[f"imbalance_{when}"] = self.spread(group, routed["prefill"])

        measure("before")
        moved = self.move(group, group.counts)
        measure("after")
        self.note(row | moved)

    def move(self, group: ExpertParallel, loads: torch.Tensor) -> dict[str, Any]:
        """Plan for ``loads``, and move and switch every layer: what of a row that is. Bytes are those into
        the rank that gets most, layer by layer; the first layer of all also opens the connections.
        """
        served = group.physical_to_logical.numpy()
        balancer = Balancer(served, self.cfg.num_experts, self.size, min_gain=0.0, compiled=False)
        layers = [group.tensors(i) for i in range(len(served))]
        live = LiveExperts(balancer, self.transport, layers, group.switch)
        began = time.perf_counter()
        decision = live.propose(loads)
        planned = self.slowest(time.perf_counter() - began)
        seconds, came = [], []
        while live.todo:
            self.wait()
            began, before = time.perf_counter(), live.moved
            live.advance()
            self.wait()
            seconds.append(round(time.perf_counter() - began, 5))
            came.append(int(self.slowest(float(live.moved - before))))
        return {
            "moves": len(decision.moves), "bytes": sum(came), "plan_s": planned, "transfer_s": sum(seconds),
            "layer_bytes": came, "layer_s": seconds,
        }  # fmt: skip

    def uneven(self, group: ExpertParallel) -> float:
        """Most rows of a rank over the mean, averaged over layers, of the last step by the tables' shares."""
        counts = group.counts.clone()
        self.transport.all_reduce(counts)
        rank = group.table.long() // group.slots_per_rank
        share = torch.nn.functional.one_hot(rank, self.size).double().mean(2)  # [layers, experts, ranks]
        rows = (counts[:, :, None] * share).sum(1)
        return float((rows.amax(1) / rows.mean(1).clamp(min=1e-9)).mean())

    def skewed(self, weight: np.ndarray, tokens: int) -> torch.Tensor:
        """[tokens, top_k] int32 distinct experts drawn by their popularity."""
        noise = torch.rand((tokens, self.cfg.num_experts), device=self.device, generator=self.draw)
        keys = torch.log(torch.from_numpy(weight).to(self.device, torch.float32)) - torch.log(
            -torch.log(noise)
        )
        return keys.topk(self.cfg.top_k, dim=1).indices.int().contiguous()

    def spread(self, group: ExpertParallel, ids: list[torch.Tensor]) -> float:
        """Most rows of a rank over the mean, averaged over layers, of one step of all ranks."""
        from ..ops import physical_experts

        ratios = []
        for i, chosen in enumerate(ids):
            slots = physical_experts(chosen, group.table[i], source=self.rank, step=group.step)
            rows = torch.bincount(slots.flatten().long() // group.slots_per_rank, minlength=self.size)
            self.transport.all_reduce(rows)
            ratios.append(float(rows.max() * self.size / rows.sum()))
        return statistics.fmean(ratios)


def even(moe: MoE) -> None:
    """No biases of the choice: those of synthetic weights send most tokens to a few experts."""
    for bias in (moe.gate.bias, moe.gate.bias_vl):
        bias.data.zero_()


def fill(tensors: dict[str, torch.Tensor], cfg: V41FlashConfig, device: torch.device, seed: int) -> None:
    """Random values by checkpoint name, drawn on the device: a name has the same bits on every rank."""
    draw = torch.Generator(device)
    for name, tensor in tensors.items():
        # A generator a name: which tensors a rank holds must not change the others.
        draw.manual_seed(seed * 1_000_003 + sum(ord(c) * 131**i for i, c in enumerate(name[-24:])) % 2**40)
        draw_tensor(tensor, cfg, name, draw)
