"""``python -m dsv41 bench cpu``: prefill and decode of a synthetic model on this CPU."""

import argparse
import itertools
import statistics
import time

import torch

from ..config import V41FlashConfig
from ..layers import V41Flash, V41State
from ..layers.engram import MemoryEngramStore, TokenMap
from ..layers.weights import synthetic_tensor
from . import results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `bench cpu`."""
    parser.add_argument("--config", choices=("tiny", "mini"), default="mini")
    parser.add_argument("--tokens", type=int, default=1024, help="prefill tokens")
    parser.add_argument("--chunk", type=int, default=512, help="tokens a prefill step")
    parser.add_argument("--steps", type=int, default=16, help="decode steps")
    parser.add_argument("--requests", type=int, default=1, help="sequences in the batch")
    parser.add_argument("--json", help="append the results to this JSON-lines file")


def synthetic_model(cfg: V41FlashConfig, seed: int = 0) -> V41Flash:
    """A model with synthetic weights and Engram tables in memory."""
    model = V41Flash(cfg, TokenMap.synthetic(cfg.vocab_size, cfg.engram.num_classes, seed))
    for name, view in model.checkpoint_tensors().items():
        view.view(torch.uint8).copy_(synthetic_tensor(cfg, name, seed).view(torch.uint8))
    for layer in cfg.engram.layers:
        parts = (synthetic_tensor(cfg, f"layers.{layer}.engram.embed.{p}", seed) for p in ("weight", "scale"))
        model.attach_engram(layer, MemoryEngramStore(*parts))
    return model


def run(args: argparse.Namespace) -> int:
    """Time prefill in chunks, then decode steps; print tokens a second."""
    cfg = getattr(V41FlashConfig, args.config)()
    model = synthetic_model(cfg)
    count = args.requests
    state = V41State.allocate(cfg, count, args.tokens + args.steps)
    ids = torch.randint(0, cfg.image_token, (count, args.tokens + args.steps))

    def step(start: int, stop: int) -> float:
        cu = torch.arange(count + 1, dtype=torch.int32) * (stop - start)
        place = torch.arange(start, stop, dtype=torch.int32).repeat(count)
        began = time.perf_counter()
        model(ids[:, start:stop].flatten(), place, state, cu_seqlens=cu, rows=cu[1:].long() - 1)
        return time.perf_counter() - began

    step(0, 1)  # imports and first allocations
    state.lens.zero_()
    cuts = [*range(0, args.tokens, args.chunk), args.tokens]
    prefill = sum(step(a, b) for a, b in itertools.pairwise(cuts))
    decode = [step(args.tokens + i, args.tokens + i + 1) for i in range(args.steps)]
    rows = [
        {"op": "prefill", "config": args.config, "requests": count,
         "tokens": args.tokens, "chunk": args.chunk,
         "tokens_per_s": round(count * args.tokens / prefill, 2)},
        {"op": "decode", "config": args.config, "requests": count, "context": args.tokens,
         "tokens_per_s": round(count / statistics.median(decode), 2)},
    ]  # fmt: skip
    for row in rows:
        print(f"{row['op']:<8} {row['config']} x {count}: {row['tokens_per_s']:>9.1f} tokens/s")
    if args.json:
        results.append(args.json, rows)
    return 0
