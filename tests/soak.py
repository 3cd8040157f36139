"""Random requests, for as long as one likes: ``python -m tests.soak --seconds 480 --device cuda``.

Requests of random lengths arrive, run in random chunks beside each other, with padding rows in between, draft
and take back, are cancelled and end. Whenever one ends, every record that its caches hold must be that of its
text alone: on a CPU of the dense reference in float64, on a GPU of a state of its own that got the text in
even chunks, both inside `batch_invariant()`, where bits must agree. Memory must not grow.
"""

import argparse
import contextlib
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from dsv41_reference import accumulate, keep_weights

from dsv41 import V41FlashConfig, batch_invariant, prepare
from dsv41.cache import page_slots
from dsv41.layers import V41Flash, V41State
from tests import models

ROWS = 64  # of a step, at most


@dataclass
class Counts:
    """What happened, and what was wrong."""

    steps: int = 0
    rows: int = 0
    finished: int = 0
    cancelled: int = 0
    rolled_back: int = 0
    differing: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def line(self) -> str:
        return (
            f"{self.steps} steps, {self.rows} rows ({self.rolled_back} taken back), {self.finished} requests"
            f" to their end, {self.cancelled} cancelled;"
            f" {len(self.differing)} differ; memory grew: {self.grew()}"
        )

    def grew(self) -> bool:
        """Whether allocated bytes at the end are above those after the first requests."""
        return bool(self.memory) and self.memory[-1] > max(self.memory[: max(1, len(self.memory) // 4)])


class Soak:
    """One model, one state of ``requests`` rows, and what each of them holds."""

    def __init__(self, kind: models.Kind, model: V41Flash, requests: int, longest: int, seed: int):
        self.kind, self.model, self.cfg = kind, model, models.config(kind)
        self.device = next(model.parameters()).device
        self.draw, self.longest = random.Random(seed), longest
        self.state = V41State.allocate(self.cfg, requests, longest + 8, block=8, device=self.device)
        order = torch.randperm(self.state.page_table.numel(), generator=torch.Generator().manual_seed(seed))
        self.state.page_table.copy_(order.view_as(self.state.page_table))
        self.texts: list[list[int]] = [[] for _ in range(requests)]
        self.ends = [0] * requests
        self.counts = Counts()

    def token(self) -> int:
        return self.draw.randrange(self.cfg.image_token + 2)  # image tokens among them

    def step(self) -> None:
        """One forward over some of the requests; then some of their rows are taken back."""
        back, pieces = self.state.max_rollback, []
        for r in range(len(self.texts)):
            if not self.ends[r] and self.draw.random() < 0.5:
                self.ends[r] = self.draw.randint(1, self.longest)
            room = min(self.ends[r] - len(self.texts[r]), ROWS // len(self.texts))
            rows = self.draw.choice([0, 1, 1, back, room]) if room > 0 else 0
            pieces.append([self.token() for _ in range(min(rows, room))])
        self.forward(self.state, self.texts, pieces, padding=self.draw.choice([0, 0, 3]))
        kept = []
        for r, piece in enumerate(pieces):
            drop = self.draw.randint(0, len(piece)) if len(piece) <= back and self.draw.random() < 0.5 else 0
            self.texts[r] += piece[: len(piece) - drop]
            self.counts.rolled_back += drop
            kept.append(len(self.texts[r]))
        self.state.rollback(torch.tensor(kept, dtype=torch.int32, device=self.device))
        self.counts.steps += 1
        self.counts.rows += sum(map(len, pieces))
        for r, text in enumerate(self.texts):
            if self.ends[r] and len(text) == self.ends[r]:
                self.compare(r)
                self.counts.finished += 1
                self.leave(r)
            elif text and self.draw.random() < 0.02:
                self.counts.cancelled += 1
                self.leave(r)

    def leave(self, r: int) -> None:
        self.texts[r], self.ends[r] = [], 0
        self.state.reset(r)

    def forward(
        self, state: V41State, texts: list[list[int]], pieces: list[list[int]], padding: int = 0
    ) -> None:
        starts = [len(text) for text in texts]
        ids = [t for piece in pieces for t in piece] + [0] * padding
        place = [p for a, piece in zip(starts, pieces, strict=True) for p in range(a, a + len(piece))]
        cu = torch.tensor([0, *map(len, pieces)]).cumsum(0).int()
        self.model(
            torch.tensor(ids, dtype=torch.int64, device=self.device),
            torch.tensor(place + [0] * padding, dtype=torch.int32, device=self.device),
            state,
            cu_seqlens=cu.to(self.device),
            max_len=max(map(len, pieces)),
        )

    def compare(self, r: int) -> None:
        """A finished request's caches against those of its text alone."""
        text = self.texts[r]
        try:
            if self.device.type == "cpu":
                trace: dict[str, torch.Tensor] = {}
                models.reference(self.kind).forward(torch.tensor(text), trace=trace)
                models.assert_state_equals(self.state, r, trace, len(text))
            else:
                self.assert_alone(r, text)
        except AssertionError as error:
            self.counts.differing.append(f"{len(text)} tokens: {str(error).splitlines()[0]}")
        if self.device.type == "cuda":
            self.counts.memory.append(torch.cuda.memory_allocated())

    def assert_alone(self, r: int, text: list[int]) -> None:
        alone = V41State.allocate(self.cfg, 1, len(text), block=8, device=self.device)
        for start in range(0, len(text), ROWS):
            self.forward(alone, [text[:start]], [text[start : start + ROWS]])
        for label, got, want in zip(records(self.cfg), held(self.state, r), held(alone, 0), strict=True):
            assert torch.equal(got, want), label


def records(cfg: V41FlashConfig) -> list[str]:
    """Names of what `held` lists."""
    names = [f"window of layer {i}" for i in range(cfg.num_layers)]
    return names + [f"{kind} of layer {i}" for i in cfg.kv_sources for kind in ("entries", "keys")]


def held(state: V41State, r: int) -> list[torch.Tensor]:
    """Every record of a request that is valid."""
    length, found = int(state.lens[r]), []
    place = torch.arange(max(0, length - state.cfg.window), length, device=state.lens.device)
    for ring in state.windows[: state.cfg.num_layers]:
        found.append(ring.read(r * ring.page_size + place % ring.page_size))
    for i in state.cfg.kv_sources:
        for cache in (state.compressed[i], state.index_keys[i]):
            entries = torch.arange(length // state.cfg.compress_ratios[i], device=state.lens.device)
            request = torch.tensor([r], device=state.lens.device)
            found.append(cache.read(page_slots(entries[None], request, state.page_table, cache.page_size)[0]))
    return found


def run(
    kind: models.Kind,
    model: V41Flash,
    *,
    seconds: float,
    requests: int,
    longest: int,
    seed: int,
    steps: int = 0,
    report: float = 0,
) -> Counts:
    """Soak for some seconds, or for exactly ``steps`` steps; ``report``: seconds between lines of counts."""
    soak, end = Soak(kind, model, requests, longest, seed), time.monotonic() + seconds
    told = time.monotonic()
    with contextlib.ExitStack() as stack:
        if soak.device.type == "cpu":
            stack.enter_context(accumulate(torch.float64))
            stack.enter_context(keep_weights())
        else:
            stack.enter_context(batch_invariant())
        while soak.counts.steps < steps if steps else time.monotonic() < end:
            soak.step()
            if report and time.monotonic() > told + report:
                told += report
                print(soak.counts.line(), flush=True)
    return soak.counts


def on_gpu(cfg: V41FlashConfig, drafter: bool = False) -> V41Flash:
    """The synthetic model of a config on the GPU, packed and prepared, its tables beside it."""
    with batch_invariant():
        prepare(cfg, max_requests=4, step_tokens=128, drafter=drafter)
    model = models.build(cfg, drafter=drafter).cuda().pack()
    for layer in cfg.engram.layers:
        block: Any = model.layers[layer]
        store = block.engram.store
        store.values, store.scale = (
            t.view(torch.uint8).cuda().view(t.dtype) for t in (store.values, store.scale)
        )
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--longest", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    kind: models.Kind = "micro" if args.device == "cpu" else V41FlashConfig.tiny(hidden=256, inter=128)
    model = models.model(kind) if args.device == "cpu" else on_gpu(models.config(kind))
    done = run(
        kind, model, seconds=args.seconds, requests=args.requests, longest=args.longest, seed=args.seed,
        report=30,
    )  # fmt: skip
    print(done.line())
    for line in done.differing[:10]:
        print(line)
    return int(bool(done.differing) or done.grew() or not done.finished)


if __name__ == "__main__":
    sys.exit(main())
