"""How much memory one rank needs and what fits into the rest: ``plan_memory`` and ``python -m dsv41 plan``.

Nothing here is a formula of its own. Weights and caches are the modules and `V41State` themselves, built
where tensors have no memory ("meta"); what a step needs is the step itself, run there while its allocations
are counted. So a plan cannot drift from the code.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ._op import check, check_flags, check_sizes
from .config import V41FlashConfig
from .eplb import rebalance_experts
from .formats import E4M3, E8M0
from .layers import V41Flash, V41State
from .layers.engram import EngramSpec, MemoryEngramStore, TokenMap
from .layers.expert_parallel import ExpertParallel
from .layers.moe import Experts, MoE
from .ops.exchange import usual_capacity

GB, GIB = 10**9, 2**30
# Bytes of a device. The H200's is what torch reports; the others are data sheets, a GB counted as 10^9.
DEVICES = {
    "H100": 80 * GB,
    "H200": 139 * GIB,
    "B200": 180 * GB,
    "Ascend 950PR": 128 * GB,
    "Ascend 950DT": 144 * GB,
}
ENGRAM_PLACES = ("device", "host", "disk")
# What a process takes without a tensor: the context, the kernels' code, libraries, the allocator's rounding.
RESERVE = 3 * GIB


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank, and what fits; made by `plan_memory`.

    weights: part to bytes on the device. engram_bytes: this rank's table rows, in ``engram`` (device, host,
    disk). prefill, decode: what a step of each kind allocates at most. graphs: the decode step's memory once
    more, which captured graphs keep for themselves. block_bytes: all growing caches of ``block`` tokens.
    request_bytes: rings and carry of a request.
    """

    device_bytes: int
    host_bytes: int
    weights: dict[str, int]
    engram: str
    engram_bytes: int
    prefill: int
    decode: int
    graphs: int
    reserve: int
    block: int
    block_bytes: int
    request_bytes: int
    max_requests: int
    max_context: int

    @property
    def step(self) -> int:
        """The largest step that runs outside graphs."""
        return max(self.prefill, 0 if self.graphs else self.decode)

    @property
    def fixed(self) -> int:
        """Bytes on the device before the first cache."""
        tables = self.engram_bytes if self.engram == "device" else 0
        return sum(self.weights.values()) + tables + self.step + self.graphs + self.reserve

    @property
    def room(self) -> int:
        """Bytes left for caches; below zero when not even the weights and a step fit."""
        return self.device_bytes - self.fixed

    @property
    def host_room(self) -> int:
        """Host bytes left; below zero when the Engram rows do not fit where they were put."""
        return self.host_bytes - (self.engram_bytes if self.engram == "host" else 0)

    @property
    def token_bytes(self) -> float:
        """Cache bytes a token, its share of the page table included."""
        return self.block_bytes / self.block

    def tokens(self, requests: int) -> int:
        """Tokens that ``requests`` sequences (the plan's ``max_requests`` at most) can hold together, in
        whole pages and none above ``max_context``; 0 when nothing fits.
        """
        check_sizes("MemoryPlan.tokens", 1, self.max_requests, requests=requests)
        if self.host_room < 0:
            return 0
        pages = max(0, (self.room - requests * self.request_bytes) // self.block_bytes)
        return min(pages, requests * -(-self.max_context // self.block)) * self.block

    def requests(self, context: int) -> int:
        """Sequences of ``context`` tokens each that fit, at most the plan's ``max_requests``."""
        check_sizes("MemoryPlan.requests", 1, self.max_context, context=context)
        each = self.request_bytes + -(-context // self.block) * self.block_bytes
        return min(self.max_requests, max(0, self.room // each)) if self.host_room >= 0 else 0

    def __str__(self) -> str:
        lines = [f"{name:<28}{_gib(size)}" for name, size in self.weights.items()]
        place = {"device": "on the device", "host": "in host memory", "disk": "in mapped files"}[self.engram]
        lines += [
            f"{'weights in all':<28}{_gib(sum(self.weights.values()))}",
            f"{'Engram rows':<28}{_gib(self.engram_bytes)}  {place}",
            f"{'prefill step':<28}{_gib(self.prefill)}",
            f"{'decode step':<28}{_gib(self.decode)}  {'kept by graphs' if self.graphs else 'eager'}",
            f"{'reserve':<28}{_gib(self.reserve)}",
            f"{'room for caches':<28}{_gib(self.room)}  of {self.device_bytes / GIB:,.1f} GiB",
            f"{'cache of a token':<28}{self.token_bytes:>9,.1f} bytes",
            f"{'rings of a request':<28}{self.request_bytes:>9,} bytes",
        ]
        if self.host_room < 0:
            lines.append(f"Engram does not fit: {-self.host_room / GIB:,.2f} GiB of host memory are missing")
        if self.room < 0:
            lines.append(f"this does not fit: {-self.room / GIB:,.2f} GiB are missing")
        return "\n".join(lines)


def plan_memory(
    cfg: V41FlashConfig,
    device_bytes: int,
    *,
    ep: int = 1,
    redundant: int = 0,
    host_bytes: int = 0,
    engram: str | None = None,
    engram_ranks: int | None = None,
    step_tokens: int = 4096,
    max_requests: int = 64,
    max_context: int | None = None,
    drafts: int | None = None,
    drafter: bool = True,
    graphs: bool = True,
    block: int = 64,
    reserve: int = RESERVE,
) -> MemoryPlan:
    """Memory of one rank of an expert-parallel group, and how many tokens and requests fit.

    The layers' experts are divided over the ranks, Engram rows over whole columns; everything else, the
    drafter included, is on every rank. Steps hold the rows of an exchange with the usual capacity.

    Args:
        cfg: the model's constants.
        device_bytes: bytes of the device; `DEVICES` has some.
        ep: ranks that the experts are divided over.
        redundant: copies of experts in the group beside the first of each; experts and copies fill the ranks
            evenly, no expert twice on one.
        host_bytes: host memory that this rank may use.
        engram: where its table rows are: "device", "host" (pinned), "disk" (mapped files). None is the host
            where they fit, else the disk.
        engram_ranks: ranks that share one copy of the tables, by whole columns; None is ``ep``, or the
            largest possible below it.
        step_tokens: rows of the largest prefill step.
        max_requests: sequences of the largest batch; a step's buffers are sized for them.
        max_context: tokens of the longest sequence; None is the config's ``max_positions``.
        drafts: tokens that a step may take back; None is the config's draft block.
        drafter: with the drafter's weights, rings and logits.
        graphs: decode steps are captured: graphs of all sizes share one pool, which eager steps cannot use.
        block: tokens a page, even.
        reserve: bytes that tensors must leave alone.

    Returns:
        MemoryPlan; ``room`` below zero says how much is missing, nothing is raised for that.

    Errors: ValueError for sizes that cannot be, experts that do not divide, Engram ranks without a column.
    Contract: allocates nothing of these sizes; about four seconds for V4.1-Flash.
    Reference: dsv41.layers.V41Flash, dsv41.layers.V41State
    """
    name = "plan_memory"
    check(isinstance(cfg, V41FlashConfig), name, "cfg: V41FlashConfig", cfg)
    drafts = cfg.draft.block_size if drafts is None else drafts
    max_context = cfg.max_positions if max_context is None else max_context
    check_sizes(name, redundant=redundant, host_bytes=host_bytes, drafts=drafts, reserve=reserve)
    check_sizes(name, 1, device_bytes=device_bytes, ep=ep, max_context=max_context)
    check_sizes(name, 1, step_tokens=step_tokens, max_requests=max_requests)
    check_sizes(name, 2, block=block)
    if engram_ranks is not None:
        check_sizes(name, 1, engram_ranks=engram_ranks)
    check_flags(name, drafter=drafter, graphs=graphs)
    check(block % 2 == 0, name, "block: an even number of tokens", block)
    check(max_context <= cfg.max_positions, name, f"max_context: up to {cfg.max_positions}", max_context)
    known = engram is None or engram in ENGRAM_PLACES
    check(known, name, f"engram: one of {', '.join(ENGRAM_PLACES)}", engram)
    slots, most = cfg.num_experts + redundant, cfg.num_experts * (ep - 1)
    what = f"redundant: 0 to {most} copies for {ep} ranks, no expert twice on one"
    check(redundant <= most, name, what, redundant)
    check(slots % ep == 0, name, f"{slots} experts and copies that {ep} ranks share evenly", slots / ep)
    classes = TokenMap.synthetic(cfg.vocab_size, cfg.engram.num_classes, 0)
    model = rank_model(
        cfg, classes, cfg.num_experts, cfg.draft.num_experts, drafter, rank_group(cfg, ep, slots)
    )
    allocate = functools.partial(
        V41State.allocate, cfg, block=block, drafts=drafts, drafter=drafter, device="meta"
    )
    rows = _engram_bytes(cfg, ep, engram_ranks)
    pages = -(-max_context // block) * block
    state = functools.partial(allocate, max_requests, min(pages, cfg.max_positions // block * block))
    _step(model, allocate(1, 0), 1, None, None)  # constants that a model makes once
    decode = decode_bytes(model, state, max_requests, drafts, drafter)
    request = state_bytes(allocate(1, 0))
    return MemoryPlan(
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        weights={**weight_bytes(model), "tables of classes and experts": _table_bytes(model, classes)},
        engram=engram or ("host" if rows <= host_bytes else "disk"),
        engram_bytes=rows,
        prefill=prefill_bytes(model, state, step_tokens, max_requests),
        decode=decode,
        graphs=decode if graphs else 0,
        reserve=reserve,
        block=block,
        block_bytes=state_bytes(allocate(1, block)) - request,
        request_bytes=request,
        max_requests=max_requests,
        max_context=max_context,
    )


class _Ranks:
    """A transport to ranks that are not there: what `ExpertParallel` needs to be made and to step."""

    rank = 0

    def __init__(self, size: int):
        self.size = size

    def gather(self, value: bytes, timeout: float) -> list[bytes]:
        return [value] * self.size

    def all_to_all(self, *_: Any) -> "_Ranks":
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None  # everything else: wait, all_reduce, broadcast, ...


def rank_group(cfg: V41FlashConfig, ep: int, slots: int) -> ExpertParallel | None:
    """The group of one of ``ep`` ranks of ``slots`` experts and copies; its other ranks do nothing."""
    if ep == 1 and slots == cfg.num_experts:
        return None
    row = torch.from_numpy(rebalance_experts(np.ones((1, cfg.num_experts)), slots, 1, 1, ep)[0])
    ranks: Any = _Ranks(ep)
    placement = row.expand(cfg.num_layers, -1)
    group = ExpertParallel(ranks, placement, cfg.num_experts, capacity=1)
    for name, value in vars(group).items():  # what a step works with; the map itself is read on the host
        if isinstance(value, torch.Tensor) and name != "physical_to_logical":
            setattr(group, name, value.to("meta"))
    return group


def rank_model(
    cfg: V41FlashConfig,
    classes: TokenMap,
    experts: int,
    draft_experts: int,
    drafter: bool,
    group: ExpertParallel | None = None,
) -> V41Flash:
    """One rank's modules without memory: with ``experts`` of each layer, or what a group gives it."""
    with torch.device("meta"):
        model = V41Flash(cfg, drafter=drafter, ep_group=group)
        for path, moe in model.named_modules():
            if isinstance(moe, MoE) and (group is None or path[:3] == "mtp"):
                moe.experts = Experts(cfg.hidden, cfg.inter, draft_experts if path[:3] == "mtp" else experts)
    model.attach_token_map(classes)
    for layer, rows in zip(cfg.engram.layers, cfg.engram.num_rows, strict=True):
        width = cfg.engram.head_dim
        values, scale = (
            torch.empty((rows, n), dtype=torch.uint8, device="meta").view(kind)
            for n, kind in ((width, E4M3), (width // 32, E8M0))
        )
        model.attach_engram(layer, MemoryEngramStore(values, scale))
    return model


def weight_bytes(model: torch.nn.Module) -> dict[str, int]:
    """Bytes of a model's parameters by part; the parts of the drafter are one."""
    sizes: dict[str, int] = {}
    for path, parameter in model.named_parameters():
        part = next(part for key, part in _PARTS if key in path)
        sizes[part] = sizes.get(part, 0) + parameter.nbytes
    return sizes


_PARTS = (  # first key that a parameter's name contains
    ("mtp.", "drafter"),
    (".experts.", "routed experts"),
    (".shared_experts.", "shared experts"),
    (".gate.", "routers"),
    (".engram.", "Engram projections"),
    (".compressor.", "compressors and indexers"),
    (".indexer.", "compressors and indexers"),
    (".attn.", "attention"),
    ("hc_", "mHC mixes"),
    ("norm.", "norms"),
    ("", "embedding and head"),
)


def _table_bytes(model: V41Flash, classes: TokenMap) -> int:
    group = model.ep
    return classes.ids.nbytes + (0 if group is None else group.table.nbytes + group.counts.nbytes)


def state_bytes(state: V41State) -> int:
    """Bytes of the memory behind a state's views, each piece once."""
    caches = (*state.windows, *state.compressed.values(), *state.index_keys.values())
    tensors = [cache.pages for cache in caches] + list(state.carry.values())
    tensors += [state.lens, state.written, state.tokens, state.page_table]
    pieces = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(pieces.values())


def _engram_bytes(cfg: V41FlashConfig, ep: int, ranks: int | None) -> int:
    """Bytes of the table rows of the rank that holds most of them."""
    spec = EngramSpec.from_config(cfg)
    if not spec.layers:
        return 0
    full = [n for n in range(1, spec.columns + 1) if -(-spec.columns // n) * (n - 1) < spec.columns]
    if ranks is None:
        ranks = max(n for n in full if n <= ep)
    check(ranks in full, "plan_memory", f"engram_ranks: one of {full}", ranks)
    each = cfg.engram.head_dim + cfg.engram.head_dim // 32
    shards = [spec.shards(layer, ranks) for layer in spec.layers]
    return max(sum(s.row_stop - s.row_first for s in own) for own in zip(*shards, strict=True)) * each


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside the context: ``now`` alive, ``peak`` at most.

    What exists before, and views of it, count as nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._see((args, kwargs), given=True)
        result = func(*args, **(kwargs or {}))
        self._see(result, given=False)
        return result

    def _see(self, tree: Any, given: bool) -> None:
        for x in tree_iter(tree):
            if not isinstance(x, torch.Tensor):
                continue
            storage = x.untyped_storage()
            key = storage._cdata
            if key in self._sizes:
                continue
            self._sizes[key] = 0 if given else storage.nbytes()
            self.now += self._sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


class DeviceAllocations(contextlib.AbstractContextManager["DeviceAllocations"]):
    """The ``peak`` of what a CUDA device allocates inside the context, beyond what there is before."""

    peak = 0

    def __enter__(self) -> "DeviceAllocations":
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak = torch.cuda.max_memory_allocated() - self._before


def _counting(state: V41State) -> Allocations | DeviceAllocations:
    return Allocations() if state.lens.is_meta else DeviceAllocations()


def _zeros(state: V41State, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=state.lens.device)


def _step(
    model: V41Flash, state: V41State, tokens: int, rows: int | None, inputs: torch.Tensor | None
) -> torch.Tensor:
    return model(
        _zeros(state, tokens),
        _zeros(state, tokens),
        state,
        cu_seqlens=_zeros(state, state.num_requests + 1),
        max_len=tokens if rows is not None else tokens // state.num_requests,
        rows=None if rows is None else _zeros(state, rows, dtype=torch.int64),
        draft_inputs=inputs,
    )


def _room(model: V41Flash, tokens: int) -> None:
    """The exchange of a step of so many rows has the usual room."""
    if model.ep is not None:
        ranks, top_k = model.ep.size, model.cfg.top_k
        model.ep.exchange.capacity = usual_capacity(tokens, top_k, ranks)


def _inputs(model: V41Flash, state: V41State, tokens: int) -> torch.Tensor | None:
    if model.mtp is None:
        return None
    return _zeros(state, tokens, model.mtp.input_width, dtype=torch.bfloat16)


def prefill_bytes(model: V41Flash, make: Callable[[], V41State], tokens: int, requests: int) -> int:
    """A prefill step with one row of logits a request, and its drafter context."""
    state = make()
    _room(model, tokens)
    with _counting(state) as counted:
        inputs = _inputs(model, state, tokens)
        logits = _step(model, state, tokens, min(requests, tokens), inputs)
        if model.mtp is not None and inputs is not None:
            cu = _zeros(state, state.num_requests + 1)
            model.mtp.write_context(inputs, _zeros(state, tokens), state, cu_seqlens=cu)
        del logits
    return counted.peak


def decode_bytes(
    model: V41Flash, make: Callable[[], V41State], requests: int, drafts: int, drafter: bool
) -> int:
    """A decode step with every draft: logits of all rows, then the drafter's context and block."""
    state, tokens = make(), requests * (1 + drafts if drafter else 1)
    _room(model, tokens)
    with _counting(state) as counted:
        inputs = _inputs(model, state, tokens)
        logits = _step(model, state, tokens, None, inputs)
        if model.mtp is not None and inputs is not None:
            cu = _zeros(state, state.num_requests + 1)
            model.mtp.write_context(inputs, _zeros(state, tokens), state, cu_seqlens=cu)
            block = model.mtp(_zeros(state, requests, dtype=torch.int64), state)
            del block
        del logits
    return counted.peak


# The command.


CONTEXTS = (4096, 32768, 131072)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `plan`."""
    parser.add_argument("--device", choices=DEVICES, action="append", help="default: all of them")
    parser.add_argument("--device-gib", type=float, help="another device's memory")
    parser.add_argument("--config", help="config.json of a checkpoint (default: V4.1-Flash)")
    parser.add_argument("--ep", type=int, default=8, help="ranks that share the experts (default 8)")
    parser.add_argument("--redundant", type=int, default=0, help="copies of experts in the group")
    parser.add_argument("--host-gib", type=float, default=64, help="host memory of a rank (default 64)")
    parser.add_argument("--engram", choices=ENGRAM_PLACES, help="default: host where it fits, else disk")
    parser.add_argument("--step", type=int, default=4096, help="rows of a prefill step (default 4096)")
    parser.add_argument("--requests", type=int, default=256, help="largest batch (default 256)")
    parser.add_argument(
        "--context",
        type=int,
        nargs="+",
        help=f"tokens a request (default {CONTEXTS})",
    )
    parser.add_argument("--no-drafter", action="store_true")
    parser.add_argument("--eager", action="store_true", help="decode without graphs")
    parser.add_argument(
        "--reserve-gib", type=float, default=RESERVE / GIB, help=f"left alone (default {RESERVE / GIB:g})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a device")


def run(args: argparse.Namespace) -> int:
    """Print the plan, then how many requests of each context length fit."""
    given = args.device_gib is not None
    devices = {} if given else DEVICES
    devices = {name: size for name, size in devices.items() if name in (args.device or DEVICES)}
    cfg = V41FlashConfig.from_file(args.config) if args.config else V41FlashConfig.flash()
    for label in ("device_gib", "host_gib", "reserve_gib"):
        value = getattr(args, label)
        least = "above 0" if label == "device_gib" else "of at least 0"
        good = value is None or (0 <= value < float("inf") and (value > 0 or label != "device_gib"))
        check(good, "plan", f"--{label.replace('_', '-')} {least}", value)
    most = cfg.max_positions
    contexts: list[int] = args.context or [c for c in CONTEXTS if c <= most] or [most]
    check(all(1 <= c <= most for c in contexts), "plan", f"--context of 1 to {most} tokens", contexts)
    if given:
        devices["device"] = int(args.device_gib * GIB)
    first = plan_memory(
        cfg,
        1,
        ep=args.ep,
        redundant=args.redundant,
        host_bytes=int(args.host_gib * GIB),
        engram=args.engram,
        step_tokens=args.step,
        max_requests=args.requests,
        max_context=max(contexts),
        drafter=not args.no_drafter,
        graphs=not args.eager,
        reserve=int(args.reserve_gib * GIB),
    )
    plans = {name: dataclasses.replace(first, device_bytes=size) for name, size in devices.items()}
    if args.json:
        for name, plan in plans.items():
            fit = {str(c): plan.requests(c) for c in contexts}
            print(json.dumps({"device": name, **dataclasses.asdict(plan), "room": plan.room, "fit": fit}))
        return 0
    shown = "all devices" if len(plans) > 1 else next(iter(plans))
    print(f"One of {args.ep} ranks, at most {args.requests} requests; {shown}\n")
    text = str(next(iter(plans.values())))
    print(text if len(plans) == 1 else "\n".join(_shared(text)))
    print(f"\n{'device':<16}{'room, GiB':>10}" + "".join(f"{f'{c:,} tokens':>18}" for c in contexts))
    for name, plan in plans.items():
        cells = "".join(f"{f'{plan.requests(c)} requests':>18}" for c in contexts)
        print(f"{name:<16}{plan.room / GIB:>10.1f}{cells}")
    return 0


def _shared(text: str) -> list[str]:
    """The lines of a plan that are the same on every device."""
    return [line for line in text.splitlines() if not line.startswith(("room for", "this does"))]


def _gib(size: int) -> str:
    return f"{size / GIB:>9,.2f} GiB" if abs(size) >= GIB / 100 else f"{math.ceil(size / 1024):>9,} KiB"
