"""V4.1-Flash as one dense pass over a whole sequence: no caches, no pages, no chunks. Slow, to be read.

It is the twin of the incremental, paged model: what that one stores and finds again, this one keeps in plain
tensors of the full length, and what that one gathers, this one masks. Each result is rounded once, where the
rounding contract (docs/numerics.md) says so; inside ``accumulate(torch.float64)`` a row's bits do not depend
on the length of the sequence or on the size of the query blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import dense
from .dense import Scope, expect
from .numerics import bf16, wide


class V41Reference:
    """The whole backbone, computed anew at each call.

    Args:
        cfg: an object with the attributes of ``V41FlashConfig``.
        weights: checkpoint name to tensor in its stored dtype (E4M3, E8M0 or uint8 scales, packed int8, bf16,
            f32). It may be lazy: an expert or an Engram row is read when a token needs it.
        token_classes: [vocab_size] int, the Engram class of each token id.
    """

    def __init__(self, cfg: Any, weights: Mapping[str, torch.Tensor], token_classes: torch.Tensor) -> None:
        fits = token_classes.shape == (cfg.vocab_size,) and not token_classes.is_floating_point()
        expect(fits, "V41Reference", f"token_classes: [{cfg.vocab_size}] int", token_classes)
        self.cfg, self.weights = cfg, weights
        self.classes = token_classes.to(torch.int64)
        layers = cfg.engram.layers
        primes = dense.engram_primes(cfg.engram.base, len(layers), cfg.engram.columns)
        sums = tuple(sum(p) for p in primes)
        expect(
            sums == tuple(cfg.engram.num_rows),
            "V41Reference",
            f"engram.num_rows: {sums}",
            cfg.engram.num_rows,
        )
        self.primes = dict(zip(layers, primes, strict=True))

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        rows: Sequence[int] | torch.Tensor | None = None,
        trace: dict[str, torch.Tensor] | None = None,
        block: int = 128,
    ) -> torch.Tensor:
        """Next-token logits of one sequence that starts at position 0.

        Args:
            tokens: [num_tokens] int.
            rows: positions whose logits are wanted, [n] int; None for all.
            trace: receives what the caches of an incremental run must hold, by name and layer l:
                ``window.l`` [T, head_dim] bf16;
                of key-value sources ``compressed.l`` [T // ratio, head_dim] bf16, ``index_key.l``
                [T // ratio, index_dim] bf16 and at ratio 2 ``carry.l`` [T, 2 * head_dim] f32;
                of index sources ``selected.l`` [T, index_top_k] int64, ascending, −1 behind the last;
                ``engram_rows.l`` [T, columns] int64, −1 for image tokens; ``target.l`` [T, hidden] bf16;
                and ``hidden.l`` [T, num_streams, hidden] bf16, the streams that leave the layer.
            block: queries attended at a time; bounds memory.

        Returns:
            [len(rows), vocab_size] f32.

        Contract: no state between calls; in float64 accumulation free of ``block`` and of later tokens.
        """
        expect(
            tokens.dim() == 1 and not tokens.is_floating_point(),
            "V41Reference",
            "tokens: [num_tokens] int",
            tokens,
        )
        expect(block > 0, "V41Reference", "block: 1 or more", block)
        streams, pre = _Pass(self, tokens.to(torch.int64), trace, block).run()
        if rows is not None:
            at = torch.as_tensor(rows, dtype=torch.int64)
            inside = at.dim() == 1 and bool(((at >= 0) & (at < len(tokens))).all())
            expect(inside, "V41Reference", f"rows: positions below {len(tokens)}", rows)
            streams, pre = streams[at], pre[at]
        scope = Scope(self.weights)
        h = dense.rms_norm(dense.collapse(streams, pre), scope["norm.weight"], self.cfg.norm_eps)
        return dense.head_logits(h, scope["head.weight"], block)


@dataclass
class _Published:
    """What source layers leave for the layers behind them."""

    rows: torch.Tensor  # [E, head_dim] bf16
    keys: torch.Tensor  # [E, index_dim] bf16
    selected: torch.Tensor  # [T, E] bool
    candidates: torch.Tensor | None = None  # [T, E] bool


class _Pass:
    """One forward pass: the sequence, its tables, and what the sources have published so far."""

    def __init__(
        self, model: V41Reference, tokens: torch.Tensor, trace: dict[str, torch.Tensor] | None, block: int
    ) -> None:
        self.model, self.cfg, self.tokens = model, model.cfg, tokens
        self.trace, self.block = trace, block
        self.positions = torch.arange(len(tokens))
        self.plain_table, self.yarn_table = (
            dense.layer_table(model.cfg, ratio, self.positions) for ratio in (0, 1)
        )
        self.published: _Published | None = None

    def keep(self, name: str, layer: int, value: torch.Tensor) -> None:
        if self.trace is not None:
            self.trace[f"{name}.{layer}"] = value

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The streams [T, S, hidden] bf16 and the pre-mix [T, S] f32 behind the last layer."""
        cfg, weights, tokens = self.cfg, self.model.weights, self.tokens
        image = (tokens >= cfg.image_token) & (tokens < cfg.image_token_end)
        streams, pre = dense.embed(tokens, weights, cfg.num_streams)
        for layer in range(cfg.num_layers):
            scope = Scope(weights, f"layers.{layer}.")
            # The drafter's target is the stream that enters the layer, so before the layer's own injection.
            if layer in cfg.draft.target_layers:
                self.keep("target", layer, bf16(wide(streams).sum(1) / cfg.num_streams))
            if layer in cfg.engram.layers:
                streams = self.engram(layer, streams)
            streams, pre = dense.residual_block(
                streams,
                pre,
                scope,
                cfg,
                attention=lambda h, layer=layer, scope=scope: self.attention(layer, scope, h),
                mixture=lambda x, scope=scope: dense.mixture(x, scope, cfg, cfg.top_k, image),
            )
            self.keep("hidden", layer, streams)
        return streams, pre

    def engram(self, layer: int, streams: torch.Tensor) -> torch.Tensor:
        """[T, S, hidden] bf16 to the same."""
        cfg, memory, classes = self.cfg, self.cfg.engram, self.model.classes
        dead = self.tokens == cfg.image_token
        multipliers = dense.engram_multipliers(layer, memory.num_classes, memory.max_ngram)
        pad = int(classes[memory.pad_token])
        rows = dense.engram_rows(classes[self.tokens], dead, pad, multipliers, self.model.primes[layer])
        rows = rows.masked_fill(dead[:, None], -1)
        self.keep("engram_rows", layer, rows)
        return dense.engram(streams, rows, Scope(self.model.weights, f"layers.{layer}.engram."), cfg.norm_eps)

    def attention(self, layer: int, scope: Scope, h: torch.Tensor) -> torch.Tensor:
        """[T, hidden] bf16 to the same. A source publishes all its entries before any query attends."""
        cfg, ratio = self.cfg, self.cfg.compress_ratios[layer]
        table = self.yarn_table if ratio else self.plain_table
        qr, q = dense.queries(h, scope, cfg, table)
        window = dense.window_rows(h, scope, cfg, table)
        self.keep("window", layer, window)
        if layer in cfg.kv_sources:
            self.publish(layer, scope, h)
        if layer in cfg.index_sources:
            self.select(layer, scope, h, qr)
        out = torch.empty_like(q)
        sink = scope["attn.attn_sink"]
        for start, stop in self.blocks():
            oldest = max(start - cfg.window + 1, 0)  # of the keys that the block's first query sees
            age = self.positions[start:stop, None] - self.positions[oldest:stop]
            keys, visible = window[oldest:stop], (age >= 0) & (age < cfg.window)
            if ratio:
                assert self.published is not None
                n = stop // ratio  # entries that the block's last query sees
                keys = torch.cat([keys, self.published.rows[:n]])
                visible = torch.cat([visible, self.published.selected[start:stop, :n]], 1)
            out[start:stop] = dense.attend(q[start:stop], keys, visible, sink, cfg.head_dim**-0.5)
        return dense.project_out(out, scope, cfg, table)

    def publish(self, layer: int, scope: Scope, h: torch.Tensor) -> None:
        """The compressed rows and index keys of a source, all of the sequence's complete groups."""
        cfg, ratio = self.cfg, self.cfg.compress_ratios[layer]
        latent, carry = dense.compress(h, scope, ratio, cfg.norm_eps)
        cos, sin = self.yarn_table
        first = cos[::ratio][: len(latent)], sin[::ratio][: len(latent)]  # a group turns as its first token
        rows = dense.compressed_rows(latent, first, cfg.round_compressed_rope)
        keys = dense.index_keys(latent, scope, first, cfg.norm_eps)
        self.published = _Published(rows, keys, torch.zeros(len(h), len(latent), dtype=torch.bool))
        self.keep("compressed", layer, rows)
        self.keep("index_key", layer, keys)
        if carry is not None:
            self.keep("carry", layer, carry)

    def select(self, layer: int, scope: Scope, h: torch.Tensor, qr: torch.Tensor) -> None:
        """The entries that each query attends to; the candidate source leaves its blocks as well."""
        cfg, ratio, published = self.cfg, self.cfg.compress_ratios[layer], self.published
        assert published is not None
        q, weight = dense.index_queries(h, qr, scope, cfg, self.yarn_table)
        selected = torch.zeros_like(published.selected)
        candidates = torch.zeros_like(selected) if layer == cfg.candidate_source else published.candidates
        for start, stop in self.blocks():
            num_visible = (self.positions[start:stop] + 1) // ratio
            n = stop // ratio
            scores = dense.index_scores(q[start:stop], weight[start:stop], published.keys[:n])
            scores = scores.masked_fill(torch.arange(n) >= num_visible[:, None], -torch.inf)
            if candidates is not None and layer == cfg.candidate_source:
                kept = dense.candidate_mask(
                    scores, num_visible, cfg.candidate_block_size, cfg.candidate_blocks
                )
                candidates[start:stop, :n] = kept
            elif candidates is not None:
                scores = scores.masked_fill(~candidates[start:stop, :n], -torch.inf)
            selected[start:stop, :n] = dense.top_mask(scores, cfg.index_top_k)
        published.selected, published.candidates = selected, candidates
        if self.trace is not None:
            self.keep("selected", layer, dense.index_lists(selected, cfg.index_top_k))

    def blocks(self) -> list[tuple[int, int]]:
        """Start and stop of each query block."""
        num_tokens = len(self.tokens)
        return [(s, min(s + self.block, num_tokens)) for s in range(0, num_tokens, self.block)]
