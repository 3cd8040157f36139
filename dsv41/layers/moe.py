"""Router, shared expert and routed experts of one layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .._op import Target, check
from ..config import V41FlashConfig
from ..formats import E8M0, MXFP8, MXFP4Experts
from ..ops import block_linear, linear, mxfp4_moe, pack_experts, quantize_mxfp8, swiglu_quantize, topk_route
from .beside import SHORT, Branch, beside
from .expert_parallel import EPLayer
from .joined import joined
from .linear import BlockLinear, frozen


class Gate(nn.Module):
    """Router weight [num_experts, hidden] bf16 and the biases of the choice, for text and for image
    tokens.
    """

    def __init__(self, hidden: int, num_experts: int):
        super().__init__()
        self.weight = frozen((num_experts, hidden), torch.bfloat16)
        self.bias = frozen((num_experts,), torch.float32)
        self.bias_vl = frozen((num_experts,), torch.float32)


class Experts(nn.Module):
    """Routed experts, stacked; see `dsv41.formats.MXFP4Experts`. The checkpoint's tensors are slices of
    these. ``ids`` names the expert in each slot, in order unless told otherwise; ``routed`` is how many
    packing left to the exact path.
    """

    def __init__(self, hidden: int, inter: int, num_experts: int, ids: list[int] | None = None):
        super().__init__()
        self.inter, self.layout, self.routed = inter, "plain", 0
        self.ids = list(range(num_experts)) if ids is None else ids
        self.add_up: Callable[[torch.Tensor], None] | None = None
        self.w13 = frozen((num_experts, 2 * inter, hidden // 2), torch.uint8)
        self.w13_scale = frozen((num_experts, 2 * inter, hidden // 32), E8M0)
        self.w2 = frozen((num_experts, hidden, inter // 2), torch.uint8)
        self.w2_scale = frozen((num_experts, hidden, inter // 32), E8M0)

    @property
    def mxfp4(self) -> MXFP4Experts:
        """The weights as the op takes them."""
        return MXFP4Experts(self.w13, self.w13_scale, self.w2, self.w2_scale, self.layout)

    @property
    def packable(self) -> bool:
        """Whether the device's kernel reads an order that these weights are not in yet."""
        fits = self.w13.shape[2] * 2 % 256 == 0 and self.inter % 128 == 0
        return self.layout == "plain" and fits and Target.of(self.w13) == Target("cuda", 90)

    def pack(self) -> None:
        """Put loaded weights into the order that the accelerator's kernel reads, in place and once.

        Ranks that share a layer pack together: packed experts may move between them.
        """
        if self.layout == "plain":
            packed = pack_experts(self.mxfp4, add_up=self.add_up)
            self.layout, self.routed = packed.layout, packed.routed

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """``{e}.w1.weight``, ``{e}.w1.scale``, ...: views in the checkpoint's shapes and types."""
        check(self.layout == "plain", "checkpoint_tensors", "experts in the plain layout", self.layout)
        views: dict[str, torch.Tensor] = {}
        for slot, e in enumerate(self.ids):
            for name, rows in (("w1", slice(None, self.inter)), ("w3", slice(self.inter, None))):
                views[f"{e}.{name}.weight"] = self.w13[slot, rows].view(torch.int8)
                views[f"{e}.{name}.scale"] = self.w13_scale[slot, rows]
            views[f"{e}.w2.weight"] = self.w2[slot].view(torch.int8)
            views[f"{e}.w2.scale"] = self.w2_scale[slot]
        return views


class SharedExperts(nn.Module):
    """The expert that every token takes, in E4M3."""

    def __init__(self, hidden: int, inter: int):
        super().__init__()
        self.w1 = BlockLinear(hidden, inter)
        self.w2 = BlockLinear(inter, hidden)
        self.w3 = BlockLinear(hidden, inter)
        self.joined: MXFP8 | None = None  # w1 and w3 in one, by `join`

    def join(self) -> None:
        """Make one weight of the two that read the input."""
        self.joined = joined(self.w1, self.w3)

    def gate_up(self, q: MXFP8) -> torch.Tensor:
        """[num_tokens, 2 * inter] bf16, the gate first."""
        if self.joined is None:
            return torch.cat([self.w1(q), self.w3(q)], 1)
        return block_linear(q, self.joined)


class MoE(nn.Module):
    """``ffn``: x [num_tokens, hidden] bf16 (normalised) to [num_tokens, hidden] bf16."""

    def __init__(self, cfg: V41FlashConfig, num_experts: int, top_k: int, ep: EPLayer | None = None):
        super().__init__()
        self.cfg, self.top_k, self.ep = cfg, top_k, ep
        self.gate = Gate(cfg.hidden, num_experts)
        if ep is None:
            self.experts = Experts(cfg.hidden, cfg.inter, num_experts)
        else:  # this rank's share
            own = ep.group.own(ep.layer)
            self.experts = ep.experts = Experts(cfg.hidden, cfg.inter, len(own), own)
            self.experts.add_up = ep.group.transport.all_reduce
        self.shared_experts = SharedExperts(cfg.hidden, cfg.inter)

    def route(self, x: torch.Tensor, image: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids and weights [num_tokens, top_k]; ``image`` [num_tokens] bool marks image tokens."""
        return topk_route(
            linear(x, self.gate.weight, dtype=torch.float32),
            self.gate.bias,
            top_k=self.top_k,
            scale=self.cfg.route_scale,
            temperature=self.cfg.route_temperature,
            image_bias=None if image is None else self.gate.bias_vl,
            image=image,
        )

    def forward(
        self,
        x: torch.Tensor,
        image: torch.Tensor | None = None,
        q: MXFP8 | None = None,
        behind: Branch[Any] | None = None,
    ) -> torch.Tensor:
        """``q`` is ``x`` as MXFP8, where it is there already; ``behind`` is a branch that the caller needs
        next: the routed experts wait for one anyway.
        """
        packed = not self.experts.packable
        check(packed, "V41Flash", "packed experts: model.pack() once the weights are there", "plain ones")
        q = quantize_mxfp8(x) if q is None else q
        limit, shared, experts = self.cfg.swiglu_limit, self.shared_experts, self.experts.mxfp4

        def expert() -> torch.Tensor:
            return shared.w2(swiglu_quantize(shared.gate_up(q), limit=limit))

        if self.ep is None:
            made = beside(expert, x, SHORT)
            ids, weights = self.route(x, image)
            if behind is not None:
                behind.wait()
            y = made.wait()
            return mxfp4_moe(q, ids, weights, experts, limit=limit, shared=y, out=y)
        flight = self.ep.dispatch(q, *self.route(x, image))
        y = expert()  # while rows travel
        rows = mxfp4_moe(*flight.wait(), experts, limit=limit)
        return flight.combine(rows, shared=y, out=y)
