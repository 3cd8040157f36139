"""Attention of one layer: window rows of its own, compressed entries and a selection of its sources."""

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from ..cache import PagedKV
from ..config import V41FlashConfig
from ..formats import MXFP8
from ..ops import (
    block_linear,
    compress_pairs,
    copy_records,
    grouped_linear,
    index_query,
    index_topk,
    linear,
    rms_norm,
    rms_norm_quantize,
    rope,
    sparse_attn,
    write_cache,
)
from .joined import joined
from .linear import BlockLinear, Weight, frozen
from .state import Step, V41State


@dataclass
class Selection:
    """What index sources publish to the layers behind them, within one forward.

    selected: [num_tokens, index_top_k] int32 slots of the source's compressed cache.
    candidates: [num_tokens, candidate_blocks] int32.
    """

    selected: torch.Tensor | None = None
    candidates: torch.Tensor | None = None
    workspace: dict[int, PagedKV] = field(default_factory=dict)

    def window(self, step: Step, ring: PagedKV) -> PagedKV:
        """The window cache that a layer attends: its ring, or the workspace that all layers share in turn."""
        rows = step.workspace_rows
        if rows == 0:
            return ring
        if rows not in self.workspace:
            pages = torch.empty((1, rows, ring.record.bytes), dtype=torch.uint8, device=ring.pages.device)
            self.workspace[rows] = PagedKV(pages, ring.record)
        return self.workspace[rows]


class Compressor(nn.Module):
    """Latent of each closed group of ``ratio`` tokens; ratio 1 has no gate."""

    def __init__(self, cfg: V41FlashConfig, ratio: int):
        super().__init__()
        self.eps, self.ratio = cfg.norm_eps, ratio
        self.wkv = Weight(cfg.head_dim, cfg.hidden)
        if ratio == 2:
            self.wgate = Weight(cfg.head_dim, cfg.hidden)
        self.norm = Weight(cfg.head_dim)
        self.joined: torch.Tensor | None = None  # wkv and wgate in one, by `join`

    def join(self) -> None:
        """Make one weight of the two that read the input."""
        if self.ratio == 2:
            self.joined = torch.cat([self.wkv.weight, self.wgate.weight])
            self.wkv.weight.data, self.wgate.weight.data = self.joined.chunk(2)

    def kv_gate(self, h: torch.Tensor) -> torch.Tensor:
        """Latents and gates [num_tokens, 2 * head_dim] f32 before they are pooled."""
        if self.joined is None:
            return torch.cat([linear(h, w.weight, dtype=torch.float32) for w in (self.wkv, self.wgate)], 1)
        return linear(h, self.joined, dtype=torch.float32)

    def forward(self, h: torch.Tensor, step: Step, carry: torch.Tensor | None) -> torch.Tensor:
        """h [num_tokens, hidden] bf16 to latents [num_tokens, head_dim] bf16, valid where an entry closes."""
        if self.ratio == 1:
            pooled = linear(h, self.wkv.weight)
        else:
            assert carry is not None
            pooled = compress_pairs(self.kv_gate(h), step.request_ids, step.positions, carry)
        return rms_norm(pooled, self.norm.weight, eps=self.eps)


class Indexer(nn.Module):
    """Index queries and head weights; keys too where the layer owns them."""

    def __init__(self, cfg: V41FlashConfig, owns_keys: bool):
        super().__init__()
        self.cfg = cfg
        if owns_keys:
            self.wk = Weight(cfg.index_dim, cfg.head_dim)
            self.k_norm = Weight(cfg.index_dim)
        self.wq_b = BlockLinear(cfg.q_rank, cfg.index_heads * cfg.index_dim)
        self.weights_proj = Weight(cfg.index_heads, cfg.hidden)

    def head_weights(self, h: torch.Tensor) -> torch.Tensor:
        """[num_tokens, index_heads] f32: bf16(h @ weights_proj.T) / sqrt(index_dim * index_heads)."""
        wide = linear(h, self.weights_proj.weight)
        factor = (self.cfg.index_dim * self.cfg.index_heads) ** -0.5
        if math.frexp(factor)[0] == 0.5:  # a power of two
            return wide.float() * factor
        # In float64: a factor that is itself rounded to f32 moves the last bit, and with it near-ties of
        # scores.
        return (wide.double() * factor).float()


class Attention(nn.Module):
    """``attn`` of a backbone layer, or of a drafter stage (ratio 0, no sources)."""

    def __init__(self, cfg: V41FlashConfig, layer: int):
        super().__init__()
        backbone = layer < cfg.num_layers
        self.cfg, self.layer = cfg, layer
        self.ratio = cfg.compress_ratios[layer] if backbone else 0
        self.source = cfg.kv_source(layer) if self.ratio else -1
        width = cfg.num_heads * cfg.head_dim
        self.attn_sink = frozen((cfg.num_heads,), torch.float32)
        self.wq_a = BlockLinear(cfg.hidden, cfg.q_rank)
        self.q_norm = Weight(cfg.q_rank)
        self.wq_b = BlockLinear(cfg.q_rank, width)
        self.wkv = BlockLinear(cfg.hidden, cfg.head_dim)
        self.kv_norm = Weight(cfg.head_dim)
        self.wo_a = BlockLinear(width // cfg.o_groups, cfg.o_groups * cfg.o_rank)
        self.wo_b = BlockLinear(cfg.o_groups * cfg.o_rank, cfg.hidden)
        self.joined: MXFP8 | None = None  # wq_a and wkv in one, by `join`
        owns = backbone and layer in cfg.kv_sources
        self.compressor = Compressor(cfg, self.ratio) if owns else None
        self.indexer = Indexer(cfg, owns) if backbone and layer in cfg.index_sources else None

    def join(self) -> None:
        """Make one weight of those that read the same input."""
        self.joined = joined(self.wq_a, self.wkv)
        if self.compressor is not None:
            self.compressor.join()

    def down(self, hq: MXFP8) -> tuple[torch.Tensor, torch.Tensor]:
        """The input's low-rank query [num_tokens, q_rank] and window row [num_tokens, head_dim], bf16."""
        if self.joined is None:
            return self.wq_a(hq), self.wkv(hq)
        low, kv = block_linear(hq, self.joined).split((self.cfg.q_rank, self.cfg.head_dim), 1)
        return low, kv

    def write_window(
        self, kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, cache: PagedKV
    ) -> None:
        """Store the window records of rows at ``slots`` [num_tokens] int32; -1 stores nothing."""
        weight, eps = self.kv_norm.weight, self.cfg.norm_eps
        write_cache(kv, cos, sin, slots, cache, norm_weight=weight, eps=eps)

    def queries(self, low: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, MXFP8]:
        """Rotated queries [num_tokens, num_heads, head_dim] bf16, and their low-rank input."""
        cfg = self.cfg
        qr = rms_norm_quantize(low, self.q_norm.weight, eps=cfg.norm_eps)
        q = self.wq_b(qr).unflatten(1, (cfg.num_heads, cfg.head_dim))
        return rope(q, cos, sin, out=q), qr

    def fill_window(self, kv: torch.Tensor, step: Step, state: V41State, shared: Selection) -> PagedKV:
        """Write the window records of the step; returns the window cache to attend."""
        ring = state.windows[self.layer]
        window = shared.window(step, ring)
        if step.fill is not None:
            copy_records(ring, step.fill[0], window, step.fill[1])
        self.write_window(kv, step.cos[self.ratio], step.sin[self.ratio], step.window_slots, window)
        if step.keep is not None:
            copy_records(window, step.keep[0], ring, step.keep[1])
        return window

    def write_entries(self, h: torch.Tensor, step: Step, state: V41State) -> None:
        """Write the compressed entries and index keys of the step, where the layer owns such caches."""
        cfg = self.cfg
        if self.compressor is not None and self.indexer is not None:
            latent = self.compressor(h, step, state.carry.get(self.layer))
            at = (step.entry_cos[self.ratio], step.entry_sin[self.ratio], step.entry_slots[self.ratio])
            write_cache(latent, *at, state.compressed[self.layer], round_rope=cfg.round_compressed_rope)
            key = linear(latent, self.indexer.wk.weight)
            keys, weight = state.index_keys[self.layer], self.indexer.k_norm.weight
            write_cache(key, *at, keys, norm_weight=weight, eps=cfg.norm_eps)

    def select(self, h: torch.Tensor, qr: MXFP8, step: Step, state: V41State, shared: Selection) -> None:
        """Choose entries for the rows of the step and publish them."""
        cfg, indexer = self.cfg, self.indexer
        assert indexer is not None
        q = indexer.wq_b(qr).unflatten(1, (cfg.index_heads, cfg.index_dim))
        publishes = self.layer == cfg.candidate_source
        restricted = self.layer > cfg.candidate_source and self.source == cfg.kv_source(cfg.candidate_source)
        ids, candidates = index_topk(
            index_query(q, step.cos[self.ratio], step.sin[self.ratio]),
            indexer.head_weights(h),
            step.request_ids,
            step.visible[self.ratio],
            state.index_keys[self.source],
            state.page_table,
            top_k=cfg.index_top_k,
            candidates=shared.candidates if restricted else None,
            num_candidates=cfg.candidate_blocks if publishes else 0,
            block_size=cfg.candidate_block_size,
        )
        if publishes:
            shared.candidates = candidates
        shared.selected = step.pages.wait().slots(ids, state.compressed[self.source].page_size)

    def attend(
        self,
        h: torch.Tensor,
        low: torch.Tensor,
        step: Step,
        state: V41State,
        shared: Selection,
        window: PagedKV,
    ) -> torch.Tensor:
        """Attention of the rows of the step, h and low-rank queries to [num_tokens, hidden] bf16."""
        cfg = self.cfg
        cos, sin = step.cos[self.ratio], step.sin[self.ratio]
        q, qr = self.queries(low, cos, sin)
        if self.indexer is not None:
            self.select(h, qr, step, state, shared)
        compressed = (state.compressed[self.source], shared.selected) if self.ratio else (None, None)
        o, _ = sparse_attn(
            q, window, step.window_ids, *compressed,
            scale=cfg.softmax_scale, sink=self.attn_sink, inverse_rope=(cos, sin),
        )  # fmt: skip
        return self.project(o)

    def project(self, o: torch.Tensor) -> torch.Tensor:
        """Grouped output projection of what attention rotated back.

        o [num_tokens, num_heads, head_dim] bf16 to [num_tokens, hidden] bf16.
        """
        grouped = o.flatten(1).unflatten(1, (self.cfg.o_groups, -1))
        return self.wo_b(grouped_linear(grouped, self.wo_a.mxfp8).flatten(1))

    def forward(
        self, h: torch.Tensor, hq: MXFP8, step: Step, state: V41State, shared: Selection
    ) -> torch.Tensor:
        """The normalised input [num_tokens, hidden], bf16 and MXFP8, to [num_tokens, hidden] bf16; writes
        this layer's caches.
        """
        low, kv = self.down(hq)
        if self.ratio:
            step.pages.wait()
        window = self.fill_window(kv, step, state, shared)
        # Compressed entries of the chunk are written before any of its queries attends.
        self.write_entries(h, step, state)
        return self.attend(h, low, step, state, shared, window)
