"""One layer: hyper-connected attention and MoE, with the collapse weights delayed by one sub-layer."""

from collections.abc import Callable

import torch
from torch import nn

from ..config import V41FlashConfig
from ..ops import mhc_collapse, mhc_expand, mhc_mixes, rms_norm
from .attention import Attention
from .expert_parallel import EPLayer
from .linear import Weight, frozen
from .moe import MoE


def embed_streams(
    tokens: torch.Tensor, weight: torch.Tensor, num_streams: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What enters the first layer: equal streams, and the pre-mix that takes the first of them.

    Args:
        tokens: [num_tokens] int ids; one out of range gives a row of zeros.
        weight: [vocab_size, hidden] bf16.
        num_streams: copies.

    Returns:
        [num_tokens, num_streams, hidden] bf16 and [num_tokens, num_streams] f32.
    """
    known = (tokens >= 0) & (tokens < weight.shape[0])
    e = torch.where(known[:, None], weight[torch.where(known, tokens, 0).long()], 0)
    pre = torch.zeros((tokens.shape[0], num_streams), device=tokens.device)
    pre[:, 0] = 1
    return e[:, None].expand(-1, num_streams, -1).contiguous(), pre


class Block(nn.Module):
    """Backbone layer or drafter stage. Parameters ``hc_*`` are the mHC mixes of its two sub-layers."""

    def __init__(self, cfg: V41FlashConfig, layer: int, ep: EPLayer | None = None):
        super().__init__()
        self.cfg, self.layer = cfg, layer
        drafting = layer >= cfg.num_layers
        streams, hidden = cfg.num_streams, cfg.hidden
        outputs = streams * (streams + 2)
        self.attn_norm = Weight(hidden)
        self.ffn_norm = Weight(hidden)
        for part in ("attn", "ffn"):
            setattr(self, f"hc_{part}_fn", frozen((outputs, streams * hidden), torch.float32))
            setattr(self, f"hc_{part}_base", frozen((outputs,), torch.float32))
            setattr(self, f"hc_{part}_scale", frozen((3,), torch.float32))
        self.attn = Attention(cfg, layer)
        experts = (cfg.draft.num_experts, cfg.draft.top_k) if drafting else (cfg.num_experts, cfg.top_k)
        self.ffn = MoE(cfg, *experts, ep)

    def mixes(self, x: torch.Tensor, part: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(pre, post, comb) of a sub-layer, ``attn`` or ``ffn``, from the streams that enter it."""
        return mhc_mixes(
            x,
            getattr(self, f"hc_{part}_fn"),
            getattr(self, f"hc_{part}_base"),
            getattr(self, f"hc_{part}_scale"),
            norm_eps=self.cfg.norm_eps,
            eps=self.cfg.mhc_eps,
            iters=self.cfg.sinkhorn_iters,
        )

    def enter(self, x: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        """The attention's input: collapse with the pre-mix carried in, then the norm."""
        return rms_norm(mhc_collapse(x, pre), self.attn_norm.weight, eps=self.cfg.norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        pre: torch.Tensor,
        attention: Callable[[torch.Tensor], torch.Tensor],
        image: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer.

        Args:
            x: [num_tokens, streams, hidden] bf16.
            pre: [num_tokens, streams] f32, from the previous sub-layer.
            attention: the layer's attention over its normalised input, [num_tokens, hidden] bf16.
            image: [num_tokens] bool, or None.

        Returns:
            The streams and the pre-mix of the next sub-layer.
        """
        # A sub-layer's own pre-mix is never used for its own input: it belongs to the next one.
        next_pre, post, comb = self.mixes(x, "attn")
        x = mhc_expand(attention(self.enter(x, pre)), x, post, comb)
        pre = next_pre
        next_pre, post, comb = self.mixes(x, "ffn")
        h = rms_norm(mhc_collapse(x, pre), self.ffn_norm.weight, eps=self.cfg.norm_eps)
        return mhc_expand(self.ffn(h, image), x, post, comb), next_pre
