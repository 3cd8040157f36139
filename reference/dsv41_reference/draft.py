"""The DSpark drafter without a cache: from the target's rows of all positions to one block of drafts."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import dense
from .dense import Scope, Table, expect
from .numerics import matmul, wide


def markov_bias(logits: torch.Tensor, embeds: torch.Tensor, weight: torch.Tensor) -> None:
    """Reference of ``dsv41.ops.markov_bias``."""
    logits.copy_((wide(logits) + matmul(embeds, weight)).float())


class V41ReferenceDraft:
    """Stages ``mtp.*`` with the Markov and confidence heads; embedding and output head are the target's.

    Args:
        cfg: an object with the attributes of ``V41FlashConfig``.
        weights: checkpoint name to tensor, as for `V41Reference`.
    """

    def __init__(self, cfg: Any, weights: Mapping[str, torch.Tensor]) -> None:
        self.cfg, self.weights = cfg, weights

    def forward(
        self,
        targets: torch.Tensor,
        next_token: int,
        *,
        temperature: float = 0.0,
        sample: Callable[[torch.Tensor], int] | None = None,
        trace: dict[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draft the tokens that follow ``next_token``, which stands at position T.

            context = RMS(main_proj(targets)), seen by each stage only through Q8(RoPE(RMS(context · wkvᵀ)))
            block rows [next_token, noise, ...] at positions T, T + 1, ... see the last ``window`` context
            rows and all rows of the block
            logits_i = RMS(h_i) · headᵀ + markov_head · markov_embed[previous token]
            confidence_i = confidence_proj · [h_i, markov_embed[previous token]]

        Args:
            targets: [T, len(target_layers) * hidden] bf16, the model's ``target.l`` of positions 0 .. T - 1
                side by side in ascending layer order; T may be 0.
            next_token: the token that the target emitted last.
            temperature: 0 takes the largest logit, the lower id on ties.
            sample: for temperature > 0, from softmax(logits / temperature) [vocab_size] f32 to a token id.
            trace: receives ``ring.i`` [T, head_dim] bf16, the context rows of stage i.

        Returns:
            tokens [block_size] int64, logits [block_size, vocab_size] f32 before the temperature, and
            confidence logits [block_size] f32 before the sigmoid.

        Contract: no state between calls; row i depends on the drafts before it through the last one only.
        """
        cfg, draft, name = self.cfg, self.cfg.draft, "V41ReferenceDraft"
        width = len(draft.target_layers) * cfg.hidden
        fits = targets.dim() == 2 and targets.shape[1] == width and targets.dtype == torch.bfloat16
        expect(fits, name, f"targets: [num_tokens, {width}] bfloat16", targets)
        expect(0 <= next_token < cfg.vocab_size, name, f"next_token: below {cfg.vocab_size}", next_token)
        expect(temperature == 0 or sample is not None, name, "sample: a function for temperature > 0", sample)

        num_context = len(targets)
        positions = torch.arange(num_context + draft.block_size)
        cos, sin = dense.layer_table(cfg, 0, positions)
        past, now = (cos[:num_context], sin[:num_context]), (cos[num_context:], sin[num_context:])

        first, last = Scope(self.weights, "mtp.0."), Scope(self.weights, f"mtp.{draft.num_stages - 1}.")
        context = dense.linear(targets, first.tiles("main_proj"))
        context = dense.rms_norm(context, first["main_norm.weight"], cfg.norm_eps)
        block = torch.tensor([next_token] + [draft.noise_token] * (draft.block_size - 1))
        streams, pre = dense.embed(block, self.weights, cfg.num_streams)
        for stage in range(draft.num_stages):
            scope = Scope(self.weights, f"mtp.{stage}.")
            ring = dense.window_rows(context, scope, cfg, past)
            if trace is not None:
                trace[f"ring.{stage}"] = ring
            streams, pre = dense.residual_block(
                streams,
                pre,
                scope,
                cfg,
                attention=lambda h, scope=scope, ring=ring: self.attention(scope, h, ring, now),
                mixture=lambda x, scope=scope: dense.mixture(x, scope, cfg, draft.top_k),
            )
        hidden = dense.collapse(streams, pre)
        normed = dense.rms_norm(hidden, last["norm.weight"], cfg.norm_eps)
        base = dense.head_logits(normed, Scope(self.weights)["head.weight"], len(normed))
        return self.chain(last, hidden, base, next_token, temperature, sample)

    def attention(self, scope: Scope, h: torch.Tensor, ring: torch.Tensor, table: Table) -> torch.Tensor:
        """Every row of the block sees the newest ``window`` ring rows and the whole block."""
        cfg = self.cfg
        _, q = dense.queries(h, scope, cfg, table)
        keys = torch.cat([ring[max(len(ring) - cfg.window, 0) :], dense.window_rows(h, scope, cfg, table)])
        visible = torch.ones(len(h), len(keys), dtype=torch.bool)
        out = dense.attend(q, keys, visible, scope["attn.attn_sink"], cfg.head_dim**-0.5)
        return dense.project_out(out, scope, cfg, table)

    def chain(
        self,
        scope: Scope,
        hidden: torch.Tensor,
        base: torch.Tensor,
        next_token: int,
        temperature: float,
        sample: Callable[[torch.Tensor], int] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sequential heads: each row's bias and confidence look at the token before it.

        Args:
            hidden: [block, hidden] bf16, collapsed and not normalised; base: [block, vocab_size] f32.

        Returns:
            As `forward`.
        """
        embed, head = scope["markov_head.embed.weight"], scope["markov_head.head.weight"]
        confidence_proj = scope["confidence_head.proj.weight"]
        tokens, logits, confidence = [], [], []
        previous = next_token
        for i in range(len(hidden)):
            markov = embed[previous : previous + 1]  # [1, markov_rank] bf16
            z = (wide(base[i]) + matmul(markov, head)[0]).float()
            both = torch.cat([hidden[i : i + 1], markov], -1)
            confidence.append(matmul(both, confidence_proj)[0, 0].float())
            if temperature == 0 or sample is None:
                previous = int((z == z.max()).nonzero()[0])
            else:
                p = torch.exp((wide(z) - wide(z).max()) / temperature)
                previous = int(sample((p / p.sum()).float()))
            logits.append(z)
            tokens.append(previous)
        return torch.tensor(tokens), torch.stack(logits), torch.stack(confidence)
