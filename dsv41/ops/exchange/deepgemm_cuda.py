"""DeepGEMM's Mega MoE on SM100: arguments into its symmetric buffer, weights into its order. Never run."""

import importlib
import importlib.util
from typing import Any

import torch

from ..._op import Target, check, check_numbers, check_tensor, output
from ...formats import MXFP8, MXFP4Experts
from .._deepgemm import packed_scale
from .api import _check_below


class MegaExperts:
    """See `dsv41.ops.exchange.mega_experts`."""

    def __init__(self, buffer: Any, experts: MXFP4Experts):
        name = "mega_experts"
        check(importlib.util.find_spec("deep_gemm") is not None, name, "package 'deep_gemm'", "not installed")
        target = Target.of(experts.w13)
        sm100 = target.device == "cuda" and target.arch in (100, 103)
        check(sm100, name, "experts on cuda sm100 or sm103", str(target))
        check(experts.layout == "plain", name, "experts in the plain layout", experts.layout)
        hidden, inter = experts.hidden, experts.inter
        check(
            hidden % 128 == 0 and inter % 128 == 0, name, "hidden and inter multiples of 128", (hidden, inter)
        )
        wanted = (experts.num_experts * buffer.group.size(), hidden, inter)
        given = (buffer.num_experts, buffer.hidden, buffer.intermediate_hidden)
        check(given == wanted, name, f"a buffer of {wanted} slots of all ranks, hidden and inter", given)
        self.buffer, self._library = buffer, importlib.import_module("deep_gemm")
        w13, w13_scale, w2, w2_scale, _ = experts.flat()
        self.weights = self._library.transform_weights_for_mega_moe(
            (w13.view(torch.int8), packed_scale(w13_scale)), (w2.view(torch.int8), packed_scale(w2_scale))
        )

    def __call__(
        self,
        x: MXFP8,
        slots: torch.Tensor,
        weights: torch.Tensor,
        *,
        limit: float,
        shared: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        name, b = "mega_experts", self.buffer
        good = isinstance(x, MXFP8) and x.tile_rows == 1 and x.values.dim() == 2
        check(good and x.values.shape[1] == b.hidden, name, f"x: MXFP8 of [num_tokens, {b.hidden}]", x)
        tokens = x.values.shape[0]
        room = b.num_max_tokens_per_rank
        check(tokens <= room, name, f"at most {room} tokens, as the buffer has room for", tokens)
        check_tensor(name, "slots", slots, (tokens, b.num_topk), torch.int32, like=x.values)
        _check_below(name, "slots", slots, b.num_experts)
        check_tensor(name, "weights", weights, (tokens, b.num_topk), torch.float32, like=x.values)
        check_numbers(name, above=True, limit=limit)
        if shared is not None:
            check_tensor(name, "shared", shared, (tokens, b.hidden), torch.bfloat16, like=x.values)
        out = output(name, out, (tokens, b.hidden), torch.bfloat16, x.values)
        b.x[:tokens].copy_(x.values)
        b.x_sf[:tokens].copy_(x.scale.view(torch.uint8).contiguous().view(torch.int32))
        # The library sends a row wherever it is told: past the last slot would be past the buffer.
        held = (slots >= 0) & (slots < b.num_experts)
        b.topk_idx[:tokens].copy_(torch.where(held, slots, -1))
        b.topk_weights[:tokens].copy_(torch.where(held, weights, 0))
        # A result of its own: `out` may be `shared`, and its rows need not be contiguous.
        y = torch.empty_like(x.values, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
        self._library.fp8_fp4_mega_moe(y, *self.weights, b, activation_clamp=limit, fast_math=False)
        return out.copy_(y) if shared is None else torch.add(y, shared, out=out)
