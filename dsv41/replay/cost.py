"""What a prefill costs with and without bounded replay, in floating-point operations.

Closed sums over positions, all derived from the model's configuration; nothing is measured. One
multiply-accumulate counts as 2. Elementwise work, quantisation, top-k and Sinkhorn steps are left out (below
0.1 %).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .config import check_int, check_kind

if TYPE_CHECKING:
    from ..config import V41FlashConfig
    from .plan import ReplayPlan


@dataclass(frozen=True)
class Cost:
    """FLOPs of one prompt's prefill, logits for its last row only.

    Attributes:
        encoder: all rows through the encoder layers, Engram included.
        global_kv: the first decoder layer's cache entries, all rows; needed in every mode.
        decoder_off: all rows through the rest of the decoder layers (mode off).
        decoder_compact: the last `min(keep, prompt_len)` rows only (mode compact).
        decoder_mask_empty: all rows, rows below the segment without attention (mode mask, dead "empty").
        head: the language-model head on one row.
    """

    encoder: float
    global_kv: float
    decoder_off: float
    decoder_compact: float
    decoder_mask_empty: float
    head: float

    @property
    def total_off(self) -> float:
        """FLOPs of the whole prefill in mode off; mask/windowed costs the same."""
        return self.encoder + self.global_kv + self.decoder_off + self.head

    @property
    def saved(self) -> float:
        """Share of `total_off` that mode compact does not spend, 0..1."""
        return (self.decoder_off - self.decoder_compact) / self.total_off

    @property
    def saved_mask_empty(self) -> float:
        """Share of `total_off` that mode mask with dead "empty" does not spend, 0..1."""
        return (self.decoder_off - self.decoder_mask_empty) / self.total_off


def flops(prompt_len: int, keep: int, config: V41FlashConfig) -> Cost:
    """Prefill cost of one prompt without a prefix hit.

    Args:
        prompt_len: L, tokens; at least 1.
        keep: decoder rows kept by mode compact, at least 1; more than L means all.
        config: the model (read only for its sizes and layer schedule).

    Returns:
        `Cost`, in FLOPs.
    """
    check_int("flops.prompt_len", prompt_len, 1)
    check_int("flops.keep", keep, 1)
    from ..config import V41FlashConfig

    check_kind("flops.config", config, V41FlashConfig)
    start = max(prompt_len - keep, 0)
    kept = float(_decoder(config, start, prompt_len, start))
    return Cost(
        encoder=2.0 * _encoder_macs(config, prompt_len),
        global_kv=2.0 * prompt_len * _global_kv_macs(config),
        decoder_off=float(_decoder(config, 0, prompt_len, 0)),
        decoder_compact=kept,
        decoder_mask_empty=kept + 2.0 * start * _decoder_row_macs(config),
        head=2.0 * config.vocab_size * config.hidden,
    )


def plan_flops(plan: ReplayPlan, config: V41FlashConfig) -> tuple[float, float]:
    """(mode off, this plan) decoder FLOPs of one forward; first-layer cache writes are in neither."""
    from ..config import V41FlashConfig
    from .plan import ReplayPlan

    check_kind("plan_flops.plan", plan, ReplayPlan)
    check_kind("plan_flops.config", config, V41FlashConfig)
    end = plan.seq_lens.astype(np.int64)
    start = end - np.diff(plan.query_start_loc)
    first, floor, f = (x.astype(np.int64) for x in (plan.cached_lens, plan.swa_floor, plan.encoder_floor))
    live = np.where(plan.dead > 0, np.clip(floor, first, end), first)
    below = np.where(
        plan.dead == 2,
        _decoder(config, first, live, np.minimum(f, first)),
        np.where(plan.dead == 1, 2.0 * (live - first) * _decoder_row_macs(config), 0.0),
    )
    planned = below + _decoder(config, live, end, np.minimum(floor, live))
    return float(_decoder(config, start, end, f).sum()), float(planned.sum())


def _layer_macs(c: V41FlashConfig) -> int:
    """One row through one layer: projections, experts, router, hyper-connection mixes; no attention core."""
    q_width, o_width = c.num_heads * c.head_dim, c.o_groups * c.o_rank
    attention = c.hidden * (c.q_rank + c.head_dim + o_width) + q_width * c.q_rank + c.o_rank * q_width
    moe = (c.top_k + 1) * 3 * c.inter * c.hidden + c.num_experts * c.hidden
    return attention + moe + 2 * _mix_macs(c)


def _mix_macs(c: V41FlashConfig) -> int:
    return (2 + c.num_streams) * c.num_streams * c.num_streams * c.hidden


def _global_kv_macs(c: V41FlashConfig) -> int:
    """One row's mix, window KV, compressed entry and index key at the first decoder layer."""
    return _mix_macs(c) + 2 * c.head_dim * c.hidden + c.index_dim * c.head_dim


def _index_query_macs(c: V41FlashConfig) -> int:
    return c.index_heads * (c.index_dim * c.q_rank + c.hidden)


def _decoder_row_macs(c: V41FlashConfig) -> int:
    """One row through the decoder layers without any key: what a dead row still costs."""
    first = c.first_decoder_layer
    own = c.head_dim * c.hidden + _mix_macs(c)  # done once, in the cache writes of the first layer
    queries = sum(layer >= first for layer in c.index_sources)
    return (c.num_layers - first) * _layer_macs(c) - own + queries * _index_query_macs(c)


def _decoder(c: V41FlashConfig, start, end, floor):
    """FLOPs of decoder rows start..end-1 with windows cut at floor; ints, or int arrays of a shape."""
    start, end, floor = (np.asarray(x, np.float64) for x in (start, end, floor))
    first = c.first_decoder_layer
    pool = c.candidate_blocks * c.candidate_block_size
    window = _capped(end - floor, c.window, 1) - _capped(start - floor, c.window, 1)
    total = (end - start) * _decoder_row_macs(c)
    for layer in range(first, c.num_layers):
        ratio = c.compress_ratios[layer]
        keys = window
        if ratio:
            keys = keys + _capped(end, c.index_top_k, ratio) - _capped(start, c.index_top_k, ratio)
        total = total + 2 * c.num_heads * c.head_dim * keys
        if layer in c.index_sources:
            limit = np.inf if layer <= c.candidate_source else pool
            entries = _capped(end, limit, ratio) - _capped(start, limit, ratio)
            total = total + c.index_heads * c.index_dim * entries
    return 2.0 * total


def _encoder_macs(c: V41FlashConfig, rows: int) -> float:
    total = float(rows * len(c.engram.layers) * (c.num_streams + 1) * c.hidden * c.engram.width)
    for layer in range(c.first_decoder_layer):
        ratio = c.compress_ratios[layer]
        keys = _capped(rows, c.window, 1) + (_capped(rows, c.index_top_k, ratio) if ratio else 0)
        total += rows * _layer_macs(c) + 2 * c.num_heads * c.head_dim * keys
        if layer in c.kv_sources:
            total += rows * (1 + (ratio > 1)) * c.head_dim * c.hidden  # entries, and gates when entries pool
            total += rows // ratio * c.index_dim * c.head_dim
        if layer in c.index_sources:
            total += rows * _index_query_macs(c) + c.index_heads * c.index_dim * _capped(rows, np.inf, ratio)
    return float(total)


def _capped(count, limit: float, ratio: int):
    """sum over n = 1..count of min(limit, n // ratio); float64, exact below 2**53."""
    count = np.asarray(count, np.float64)
    below = np.minimum(count, limit * ratio if np.isfinite(limit) else count)
    whole = below // ratio
    return ratio * whole * (whole - 1) / 2 + whole * (below - whole * ratio + 1) + (count - below) * whole
