"""``dsv41.prepare``: every kernel that a model can need, compiled before the first request.

TileLang kernels are listed by their files (``variants(cfg)``). Triton compiles for the arguments of a call,
so calls are made: the model runs where tensors have no memory ("meta"), every op call is noted, and those
that take a Triton kernel are repeated on the device, on zeros.
"""

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ._op import Op, Target, check, check_flags, check_sizes, ops
from .config import V41FlashConfig
from .layers import V41Flash, V41State
from .layers.block import Block
from .layers.engram import TokenMap
from .memory import rank_model
from .ops.verify import sample_tokens, split_budget_ragged
from .spec import DecodeGraphs, default_sizes

Build = tuple[Callable[..., Any], tuple[Any, ...]]
Call = tuple[Op, tuple[Any, ...]]
# Of these arguments only so many bytes are made, of the first rows: zeros of ids read nothing behind them.
TABLES = {"engram_lookup": ("values", "scale"), "mxfp4_moe": ("w13", "w13_scale", "w2", "w2_scale")}
MOST_BYTES = 256 << 20
PACKED = "hopper exact 127 127"  # a layout of `pack_experts`


@dataclass(frozen=True)
class Prepared:
    """What `prepare` did: kernels compiled ahead, calls made on the device, seconds."""

    compiled: int
    warmed: int
    seconds: float


def prepare(
    cfg: V41FlashConfig,
    device: torch.device | str = "cuda",
    *,
    experts: int | None = None,
    max_requests: int = 64,
    step_tokens: int = 4096,
    drafter: bool = True,
) -> Prepared:
    """Compile every kernel that a model of this config needs on a device.

    Afterwards steps, also captured ones, compile nothing; ``with dsv41.no_compile():`` proves it.

    Args:
        cfg: the model's constants.
        device: where it will run; nothing is compiled for a CPU.
        experts: routed experts a layer that this rank holds; None is all.
        max_requests: sequences of the largest batch. Sizes of steps are arguments of kernels, not constants:
            these two only choose what is tried.
        step_tokens: rows of the largest prefill step.
        drafter: with the drafter and its verification.

    Returns:
        Prepared.

    Errors: `Unsupported` for an op that no kernel of the device takes; what a compiler says.
    Contract: about a minute an architecture the first time; seconds when the kernels are in their caches.
        The kernels of an ``ep_group``'s exchange compile in its first step.
    """
    began = time.perf_counter()
    check(isinstance(cfg, V41FlashConfig), "prepare", "cfg: V41FlashConfig", cfg)
    check_sizes("prepare", 1, max_requests=max_requests, step_tokens=step_tokens)
    if experts is not None:
        check_sizes("prepare", 1, cfg.num_experts, experts=experts)
    check_flags("prepare", drafter=drafter)
    try:
        place = torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # torch raises any of them
        check(False, "prepare", "device: one that is here", f"{device} ({str(error).splitlines()[0]})")
        raise
    target = Target.of(place)
    if target.device == "cpu":
        return Prepared(0, 0, time.perf_counter() - began)
    builds = variants(cfg, target)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda build: build[0](*build[1]), builds))
    count = 0
    for op, args in calls(cfg, experts or cfg.num_experts, max_requests, step_tokens, drafter):
        args = packed(op, args, target)
        kernel = op.select(target, args)
        if kernel.startswith("triton"):
            tables, names = TABLES.get(op.name, ()), op._call._schema.arguments
            made = (_real(a, place.device, n.name in tables) for a, n in zip(args, names, strict=True))
            op.load(kernel)(*made)
            count += 1
    torch.accelerator.synchronize()
    return Prepared(len(builds), count, time.perf_counter() - began)


def variants(cfg: V41FlashConfig, target: Target) -> list[Build]:
    """(builder, arguments) of all kernels that are compiled ahead for a target.

    Files name the architecture that they were written for; most of their kernels are for any. Those that are
    not are named by the file's ``HOPPER_ONLY``.
    """
    modules = {
        f"{op.package}.{kernel.name}"
        for op in ops().values()
        for kernel in op.kernels
        if kernel.name.startswith("tilelang") and kernel.refusal(target, None) is None
    }
    found = []
    for module in map(importlib.import_module, sorted(modules)):
        only = getattr(module, "HOPPER_ONLY", ()) if target.arch != 90 else ()
        for builder, args in module.variants(cfg):
            if builder.__name__ not in only:
                if target.device == "cuda":
                    args = tuple(f"sm_{target.arch}a" if str(a)[:3] == "sm_" else a for a in args)
                found.append((builder, args))
    return found


def calls(
    cfg: V41FlashConfig, experts: int, max_requests: int, step_tokens: int, drafter: bool
) -> list[Call]:
    """Every op call of prefill and decode steps once; its tensors have no memory."""
    classes = TokenMap.synthetic(cfg.vocab_size, cfg.engram.num_classes, 0)
    model = rank_model(cfg, classes, experts, min(experts, cfg.draft.num_experts), drafter)
    model.layers = nn.ModuleList(one_of_each(model))
    with noted() as found:
        for requests in sorted({1, max_requests}):
            state = V41State.allocate(cfg, requests, 64, drafter=drafter, device="meta")
            for mode in ("chain", "coupled"):
                DecodeGraphs(model, state, drafter=model.mtp, mode=mode).run(
                    requests, requests * (1 + cfg.draft.block_size * drafter)
                )
            _prefill(model, state, step_tokens)
        for requests in {r for r, _ in default_sizes(max_requests, 0)}:
            for block in {1, cfg.draft.block_size if drafter else 1}:  # without a drafter: 1
                _split(requests, block)
    return list(found.values())


def one_of_each(model: V41Flash) -> list[Block]:
    """The first layer of every kind."""
    cfg, kinds = model.cfg, {}
    for block in model.blocks:
        attn, i = block.attn, block.layer
        kind = (attn.ratio, attn.compressor is None, attn.indexer is None, i in cfg.engram.layers)
        kinds.setdefault((*kind, i == cfg.candidate_source, i > cfg.candidate_source), block)
    return list(kinds.values())


def _split(requests: int, block: int) -> None:
    """The split of a budget, whose kernel is made for a number of requests."""

    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows: dict[str, Any] = {name: meta(requests) for name in ("hi", "base", "bonus")}
    confidence, start = meta(requests, block, dtype=torch.float32), meta(requests, dtype=torch.int64)
    split_budget_ragged(confidence, meta(1), start=start, rotation=meta(1), **rows)


def packed(op: Op, args: tuple[Any, ...], target: Target) -> tuple[Any, ...]:
    """A call as it is behind ``model.pack()``: experts in the layout of the target's kernel, if any."""
    if op.name != "mxfp4_moe":
        return args
    at = [a.name for a in op._call._schema.arguments].index("layout")
    other = (*args[:at], PACKED, *args[at + 1 :])
    taken = any(reason is None for name, reason in op.explain(target, other) if name != "torch")
    return other if taken else args


def _prefill(model: V41Flash, state: V41State, tokens: int) -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    requests, long = state.num_requests, torch.int64
    cu, positions, inputs = meta(requests + 1), meta(tokens), None
    if model.mtp is not None:
        inputs = meta(tokens, model.mtp.input_width, dtype=torch.bfloat16)
    for kind in (torch.int32, long):
        logits = model(
            meta(tokens, dtype=kind), positions, state, cu_seqlens=cu, max_len=tokens,
            rows=meta(requests, dtype=long), draft_inputs=inputs,
        )  # fmt: skip
    if model.mtp is not None and inputs is not None:
        model.mtp.write_context(inputs, positions, state, cu_seqlens=cu)
    keys: dict[str, Any] = {name: meta(requests, dtype=long) for name in ("seeds", "uids", "positions")}
    sample_tokens(logits, temperature=meta(requests, dtype=torch.float32), **keys)


@contextlib.contextmanager
def noted() -> Iterator[dict[Any, Call]]:
    """Inside the context ops do nothing; the dict gets every different call."""
    found: dict[Any, Call] = {}
    run = Op.__call__

    def note(self: Op, *args: Any) -> None:
        key = tuple(
            (a.dtype, tuple(a.shape), a.stride(), a.storage_offset()) if isinstance(a, torch.Tensor) else a
            for a in args
        )
        found.setdefault((self.name, key), (self, args))

    Op.__call__ = note
    try:
        yield found
    finally:
        Op.__call__ = run


def _real(x: Any, device: torch.device, table: bool = False) -> Any:
    """Zeros on a device in the layout of a tensor without memory; other arguments as they are."""
    if not isinstance(x, torch.Tensor):
        return x
    shape = list(x.shape)
    if table and x.nbytes > MOST_BYTES:
        shape[0] = max(1, shape[0] * MOST_BYTES // x.nbytes)
    size = 1 + sum((n - 1) * step for n, step in zip(shape, x.stride(), strict=True)) if 0 not in shape else 0
    skip = x.storage_offset() * x.dtype.itemsize
    memory = torch.zeros(skip + size * x.dtype.itemsize, dtype=torch.uint8, device=device)
    return memory[skip:].view(x.dtype).as_strided(shape, x.stride())
