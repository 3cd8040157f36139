"""One layer: hyper-connected attention and MoE, with the collapse weights delayed by one sub-layer."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..config import V41FlashConfig
from ..formats import MXFP8
from ..ops import mhc_boundary, mhc_collapse, mhc_expand, mhc_mixes, rms_norm_quantize
from .attention import Attention
from .beside import LONG, Branch, beside
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


# Rows up to which mixes are made beside the sub-layer that they enter, out of its way; the streams of more
# are worth reading once for everything.
BESIDE = 128
Mixes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Entered(NamedTuple):
    """What a sub-layer begins with.

    x: [num_tokens, streams, hidden] bf16, the streams that it leaves as they are.
    mixes: pre of the next sub-layer, and post and comb, which take this one's output into the streams.
    norm, q: its input [num_tokens, hidden], bf16 and MXFP8.
    """

    x: torch.Tensor
    mixes: Branch[Mixes]
    norm: torch.Tensor
    q: MXFP8


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

    def mixing(self, part: str) -> dict[str, Any]:
        """Arguments of the mixes of a sub-layer, ``attn`` or ``ffn``."""
        tensors = {name: getattr(self, f"hc_{part}_{name}") for name in ("fn", "base", "scale")}
        cfg = self.cfg
        return {**tensors, "norm_eps": cfg.norm_eps, "eps": cfg.mhc_eps, "iters": cfg.sinkhorn_iters}

    def attention_input(self, x: torch.Tensor, pre: torch.Tensor) -> tuple[torch.Tensor, MXFP8]:
        """Collapse with the pre-mix carried in, then the norm: as bf16 and as MXFP8."""
        h = mhc_collapse(x, pre)
        norm = torch.empty_like(h)
        return norm, rms_norm_quantize(h, self.attn_norm.weight, eps=self.cfg.norm_eps, norm=norm)

    def enter(self, x: torch.Tensor, pre: torch.Tensor) -> Entered:
        """Open the layer on streams that no boundary has prepared for it."""
        # A sub-layer's own pre-mix is never used for its own input: it belongs to the next one.
        mixes = beside(lambda: mhc_mixes(x, **self.mixing("attn")), x, LONG)
        return Entered(x, mixes, *self.attention_input(x, pre))

    def cross(self, y: torch.Tensor, before: Entered, part: str) -> Entered:
        """From the output ``y`` of the sub-layer that ``before`` entered to this block's ``part``."""
        norm = self.attn_norm if part == "attn" else self.ffn_norm
        mix, mixing = len(y) > BESIDE, self.mixing(part)
        made = mhc_boundary(y, before.x, before.mixes.wait(), weight=norm.weight, mix=mix, **mixing)
        if mix:
            mixes = Branch((made.pre, made.post, made.comb))
        else:
            mixes = beside(lambda: mhc_mixes(made.x, **mixing), y, LONG)
        return Entered(made.x, mixes, made.norm, made.q)

    def run(
        self, entered: Entered, attention: Callable[..., torch.Tensor], image: torch.Tensor | None
    ) -> tuple[torch.Tensor, Entered]:
        """Both sub-layers; the second's output [num_tokens, hidden] bf16 is not in the streams yet.

        Args:
            entered: of `enter`, or of `cross` from the layer before.
            attention: the layer's attention over its normalised input, bf16 and MXFP8 [num_tokens, hidden].
            image: [num_tokens] bool, or None.
        """
        between = self.cross(attention(entered.norm, entered.q), entered, "ffn")
        return self.ffn(between.norm, image, between.q, between.mixes), between


def run_blocks(
    blocks: Sequence[Block],
    x: torch.Tensor,
    pre: torch.Tensor,
    attention: Callable[..., torch.Tensor],
    image: torch.Tensor | None,
    *,
    watch: Callable[[Block, torch.Tensor], None] | None = None,
    inject: Callable[[Block], Callable[[torch.Tensor], torch.Tensor] | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run layers one after the other. From one sub-layer to the next the streams are read and written once.

    Args:
        blocks: the layers.
        x: [num_tokens, streams, hidden] bf16.
        pre: [num_tokens, streams] f32, from the previous sub-layer.
        attention: called with the block and its normalised input, bf16 and MXFP8 [num_tokens, hidden].
        image: [num_tokens] bool, or None.
        watch: sees each block and the streams that enter it.
        inject: gives what changes the streams in front of a block, or None where nothing does.

    Returns:
        The streams and the pre-mix of the sub-layer behind the last block.
    """
    changes = [inject(block) if inject is not None else None for block in blocks]
    entered: Entered | None = None
    for i, block in enumerate(blocks):
        if watch is not None:
            watch(block, x if entered is None else entered.x)
        change = changes[i]
        if change is not None:
            x = change(x)
        if entered is None:
            entered = block.enter(x, pre)
        y, between = block.run(entered, functools.partial(attention, block), image)
        if i + 1 < len(blocks) and changes[i + 1] is None:
            entered = blocks[i + 1].cross(y, between, "attn")
        else:
            pre, *mixes = between.mixes.wait()
            x, entered = mhc_expand(y, between.x, *mixes), None
    return x, pre
