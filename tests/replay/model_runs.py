"""Prefills of small models under a replay plan, with everything out of reach poisoned.

A `Run` prefills a batch and keeps what each row produced. Every byte that a floor says is out of reach is NaN
before each step, so that equality also shows that nobody read it. Rings hold all rows unless a test is about
rings.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from dsv41_reference import accumulate

from dsv41 import V41FlashConfig
from dsv41.layers import V41State
from dsv41.replay import ReplayConfig, ReplayGeometry, ReplayPlan, RequestSpan, plan_decoder
from dsv41.replay.device import to_device
from tests import models

POISON = 0x7F  # NaN as E4M3, as E2M1 scale and as E8M0 power
Cut = Sequence[int]  # where chunks end


@functools.cache
def variant(num_decoder: int, window: int, drafts: int = 2) -> V41FlashConfig:
    """Four encoder layers and a decoder of this depth; narrow enough for exhaustive tests."""
    small = V41FlashConfig.micro()
    return V41FlashConfig.micro(
        num_layers=4 + num_decoder,
        window=window,
        compress_ratios=(0, 0, 2, 2) + (1,) * num_decoder,
        index_top_k=2,  # few entries: the far end of a window has a say in every record
        index_sources=(2, 4, 6) if num_decoder > 2 else (2, 4),
        draft=dataclasses.replace(small.draft, target_layers=(3 + num_decoder,), block_size=drafts),
    )


def setting(cfg: V41FlashConfig, mode: str, keep: int | None = None, **options: Any) -> ReplayConfig:
    geom = ReplayGeometry.from_config(cfg)
    return ReplayConfig(mode, geom.min_keep if keep is None else keep, geometry=geom, **options)  # type: ignore


class Run:
    """Requests of one state and, by request and position, the logits of the rows that ran."""

    def __init__(
        self, cfg: V41FlashConfig, lengths: Sequence[int], drafts: int | None = None, block: int = 2
    ):
        self.cfg, self.geom = cfg, ReplayGeometry.from_config(cfg)
        room = max(lengths) + 16
        self.state = V41State.allocate(
            cfg, len(lengths), room, drafts=room if drafts is None else drafts, block=block
        )
        for cache in (*self.state.windows, *self.state.compressed.values(), *self.state.index_keys.values()):
            cache.pages.fill_(POISON)
        for ring in self.state.carry.values():
            ring.fill_(torch.nan)
        self.out: list[dict[int, torch.Tensor]] = [{} for _ in lengths]
        self.records = torch.zeros(
            (cfg.num_layers, len(lengths), room, self.state.windows[0].record.bytes), dtype=torch.uint8
        )

    def step(
        self, config: ReplayConfig, spans: Sequence[RequestSpan], texts: Sequence[torch.Tensor], pad: int = 0
    ) -> ReplayPlan:
        """One forward of these spans."""
        plan = plan_decoder(config, self.geom, spans)
        plan = plan.pad(plan.num_rows + pad)
        self.poison(plan, [s.end - s.q_len for s in spans])
        bounds = torch.tensor([0, *(s.q_len for s in spans)]).cumsum(0).to(torch.int32)
        rows = [(s.end - s.q_len, s.end) for s in spans]
        out = models.model(self.cfg)(
            torch.cat([text[a:b] for text, (a, b) in zip(texts, rows, strict=True)]),
            torch.cat([models.positions(a, b - a) for a, b in rows]),
            self.state,
            cu_seqlens=bounds,
            replay=to_device(plan, "cpu"),
        )
        for i, (r, p) in enumerate(zip(plan.row_to_request()[: plan.num_rows], plan.positions, strict=True)):
            self.out[r][int(p)] = out[i]
        for r, (a, b) in enumerate(rows):
            place = torch.arange(max(a, b - self.state.windows[0].page_size), b)
            for i, ring in enumerate(self.state.windows):
                self.records[i, r, place] = ring.pages[r, place % ring.page_size]
        return plan

    def poison(self, plan: ReplayPlan, starts: list[int]) -> None:
        """Everything below a floor becomes NaN where no row of the step runs below it."""
        cut = self.cfg.first_decoder_layer
        for r, start in enumerate(starts):
            for i, ring in enumerate(self.state.windows):
                floors = (
                    plan.encoder_floor if i < cut else plan.first_layer_floor if i == cut else plan.swa_floor
                )
                floor = min(int(floors[r]), start)
                if i < cut or (plan.n_kept[r] and not plan.dead[r]):
                    gone = torch.arange(min(floor, max(0, start - ring.page_size)), floor)
                    ring.pages[r, gone % ring.page_size] = POISON

    def prefill(
        self, config: ReplayConfig, texts: Sequence[torch.Tensor], cuts: Cut = (), pad: int = 0
    ) -> "Run":
        """All prompts side by side, in steps that end at ``cuts``."""
        edges = sorted({*cuts, max(map(len, texts))})
        for a, b in itertools.pairwise([0, *edges]):
            ends = [min(b, len(text)) for text in texts]
            spans = [RequestSpan(max(0, e - a), e, len(t)) for e, t in zip(ends, texts, strict=True)]
            self.step(config, spans, texts, pad)
        return self

    def window(self, layer: int, request: int, place: torch.Tensor) -> torch.Tensor:
        """Window records of positions ``place``, as they were behind the step that wrote them."""
        return self.records[layer, request, place]

    def entries(self, request: int, count: int) -> list[torch.Tensor]:
        """Stored compressed entries and index keys of the first ``count`` tokens, every source."""
        pages = self.state.page_table[request].long()
        caches = [
            (i, c[i]) for c in (self.state.compressed, self.state.index_keys) for i in self.cfg.kv_sources
        ]
        return [c.pages[pages].flatten(0, 1)[: count // self.cfg.compress_ratios[i]] for i, c in caches]


def one(cfg: V41FlashConfig, config: ReplayConfig, text: torch.Tensor, cuts: Cut = (), **options: Any) -> Run:
    with accumulate(torch.float64):
        return Run(cfg, [len(text)], **options).prefill(config, [text], cuts)


def same_rows(a: Run, b: Run, positions: Sequence[int], request: int = 0) -> None:
    """Logits and all window records of these positions are equal to the bit."""
    for p in positions:
        assert torch.equal(a.out[request][p], b.out[request][p]), f"logits of row {p}"
    place = torch.tensor(list(positions), dtype=torch.int64)
    for layer in range(a.cfg.num_layers):
        assert torch.equal(a.window(layer, request, place), b.window(layer, request, place)), (
            f"window of layer {layer}"
        )


def same_entries(a: Run, b: Run, length: int, request: int = 0) -> None:
    for x, y in zip(a.entries(request, length), b.entries(request, length), strict=True):
        assert torch.equal(x, y), "a compressed entry or index key"


def lend(source: Run, target: Run, request: int, count: int) -> None:
    """Copy the first entries of a cached prefix into a request's pages, as if the page table shared them."""
    for a, b in (
        (source.state.compressed, target.state.compressed),
        (source.state.index_keys, target.state.index_keys),
    ):
        for i, cache in a.items():
            pages = -(-count // source.state.block)
            mine = target.state.page_table[request, :pages].long()
            b[i].pages[mine] = cache.pages[source.state.page_table[0, :pages].long()]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)
