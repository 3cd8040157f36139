"""Routed experts with MXFP4 weights and MXFP8 activations."""

import torch

from .numerics import accumulator, bf16, matmul, weight, wide
from .quant import coarsen_mxfp8, from_mxfp4, from_mxfp8, swiglu, to_mxfp8


def mxfp4_moe(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    layout: str,
    limit: float,
    shared: torch.Tensor | None,
    out: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.mxfp4_moe``: a loop over the experts that have tokens.

    Layout "plain fp8": activations move to one scale a 128 values, the weights' values are the same.
    """
    if layout not in ("plain", "plain fp8"):
        raise ValueError(f"mxfp4_moe: expected experts in the plain layout for the reference, got {layout}")

    def carried(values: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
        return from_mxfp8(*(coarsen_mxfp8(values, code) if layout == "plain fp8" else (values, code)), acc)

    tokens, top_k = expert_ids.shape
    acc = accumulator()
    rows = carried(x, x_scale)
    parts = torch.zeros((tokens, top_k, out.shape[1]), dtype=torch.bfloat16, device=x.device)
    for e in expert_ids.unique().tolist():
        if not 0 <= e < len(w13):
            continue  # -1 is none; a wrong id contributes nothing
        token, column = (expert_ids == e).nonzero(as_tuple=True)
        gate, up = bf16(matmul(rows[token], weight(from_mxfp4, w13[e], w13_scale[e]))).chunk(2, -1)
        y = carried(*to_mxfp8(bf16(swiglu(gate, up, expert_weights[token, column], limit))))
        parts[token, column] = bf16(matmul(y, weight(from_mxfp4, w2[e], w2_scale[e])))
    total = torch.zeros((tokens, out.shape[1]), dtype=acc, device=x.device)
    for column in range(top_k):  # in top-k order, so that the sum does not depend on the expert numbering
        total += wide(parts[:, column])
    out.copy_(bf16(total if shared is None else total + wide(shared)))
