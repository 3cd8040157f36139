"""``python -m dsv41 bench memory``: what a rank's share really allocates on a CUDA device, beside its plan.

Modules, state and steps are those of the plan, with memory. Ops do nothing but clear what they write: their
scratch and results are allocated, and no kernel is needed.
"""

import argparse
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .. import memory
from .._op import Op
from ..config import V41FlashConfig
from ..formats import E4M3, E8M0
from ..layers import V41Flash, V41State
from ..layers.engram import MemoryEngramStore, TokenMap
from ..layers.moe import Experts
from ..warm import PACKED
from . import results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `bench memory`."""
    parser.add_argument("--config", choices=("flash", "mini", "tiny"), default="flash")
    parser.add_argument("--ep", type=int, default=8, help="ranks that share the experts")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--step-tokens", type=int, default=4096, help="rows of a prefill step")
    parser.add_argument("--json", help="append the measurements to this JSON-lines file")


def run(args: argparse.Namespace) -> int:
    """Print one JSON line a part. Returns 0 when the plan is within 1 % of every part, 1 otherwise."""
    if not torch.cuda.is_available():
        print("bench memory needs a CUDA device")
        return 1
    cfg: V41FlashConfig = getattr(V41FlashConfig, args.config)()
    requests, context, tokens = args.requests, args.context, args.step_tokens
    plan = memory.plan_memory(
        cfg, torch.cuda.mem_get_info()[1], ep=args.ep, max_requests=requests, step_tokens=tokens,
        max_context=context,
    )  # fmt: skip
    before = torch.cuda.memory_allocated()
    model = real_model(cfg, args.ep)
    weights = torch.cuda.memory_allocated() - before
    state = V41State.allocate(cfg, requests, context, block=plan.block, drafter=True, device="cuda")
    held = torch.cuda.memory_allocated() - before - weights
    with nothing_computed():
        for _ in range(2):  # the first step makes a model's constants
            prefill = memory.prefill_bytes(model, lambda: state, tokens, requests)
            decode = memory.decode_bytes(model, lambda: state, requests, cfg.draft.block_size, True)
    caches = requests * (plan.request_bytes + context // plan.block * plan.block_bytes)
    parts = {
        "weights": (sum(plan.weights.values()), weights),
        "caches": (caches, held),
        "prefill step": (plan.prefill, prefill),
        "decode step": (plan.decode, decode),
    }
    sizes = {"ep": args.ep, "requests": requests, "context": context, "step_tokens": tokens}
    rows = []
    for part, (planned, allocated) in parts.items():
        row: dict[str, Any] = {"op": "plan_memory", "config": args.config, **sizes, "part": part}
        rows.append(
            row | {"planned": planned, "allocated": allocated, "ratio": round(allocated / planned, 4)}
        )
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        results.append(args.json, rows)
    return 0 if all(abs(row["ratio"] - 1) < 0.01 for row in rows) else 1


def real_model(cfg: V41FlashConfig, ep: int) -> V41Flash:
    """The modules of one rank of ``ep`` with memory of their own, and Engram tables of a few rows."""
    group = memory.rank_group(cfg, ep, cfg.num_experts)
    for name, value in vars(group).items() if group is not None else ():
        if isinstance(value, torch.Tensor) and name != "physical_to_logical":
            setattr(group, name, torch.zeros_like(value, device="cuda"))
    classes = TokenMap.synthetic(cfg.vocab_size, cfg.engram.num_classes, 0)
    model = memory.rank_model(cfg, classes, cfg.num_experts, cfg.draft.num_experts, True, group)
    for module in model.modules():
        if isinstance(module, Experts):
            module.layout = PACKED
        for name, meta in list(module.named_parameters(recurse=False)):
            kind = torch.uint8 if meta.dtype == E8M0 else meta.dtype
            made = torch.empty(meta.shape, dtype=kind, device="cuda").view(meta.dtype)
            setattr(module, name, nn.Parameter(made, requires_grad=False))
    for layer in cfg.engram.layers:
        values, scale = (
            torch.zeros((1000, width), dtype=torch.uint8, device="cuda").view(kind)
            for width, kind in ((cfg.engram.head_dim, E4M3), (cfg.engram.head_dim // 32, E8M0))
        )
        model.attach_engram(layer, MemoryEngramStore(values, scale))
    return model


@contextlib.contextmanager
def nothing_computed() -> Iterator[None]:
    """Inside, ops fill their results with zeros."""
    run_op = Op.__call__

    def clear(self: Op, *args: Any) -> None:
        for x, argument in zip(args, self._call._schema.arguments, strict=True):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if isinstance(x, torch.Tensor) and written and argument.name != "scratch":
                x.zero_()

    Op.__call__ = clear
    try:
        yield
    finally:
        Op.__call__ = run_op
