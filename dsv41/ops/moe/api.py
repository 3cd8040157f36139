"""Mixture of experts with MXFP4 weights."""

import torch

from ..._op import Op, check, check_tensor, check_values, output
from ...formats import MXFP8, MXFP4Experts
from ..quant.api import mxfp8_operand

_MOE = Op(
    "mxfp4_moe(Tensor x, Tensor x_scale, Tensor expert_ids, Tensor expert_weights, Tensor w13,"
    " Tensor w13_scale, Tensor w2, Tensor w2_scale, str layout, float limit, Tensor? shared,"
    " Tensor(a!) out) -> ()",
    reference="dsv41_reference.moe:mxfp4_moe",
    package=__package__,
)


def mxfp4_moe(
    x: torch.Tensor | MXFP8,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    experts: MXFP4Experts,
    *,
    limit: float,
    shared: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Everything one rank does for its local experts.

        y_e = MXFP8(bf16(weight * silu(min(x @ w1_e.T, limit)) * clamp(x @ w3_e.T, ±limit))) @ w2_e.T
        out = sum of y_e over the row's experts, in top-k order in f32, plus ``shared``, rounded once

    Args:
        x: [num_tokens, hidden] bf16, quantised here, or an MXFP8 view of values [num_tokens, hidden] e4m3.
        expert_ids: [num_tokens, top_k] int32, local expert numbers; -1 is skipped.
        expert_weights: [num_tokens, top_k] f32, multiplied before the second product.
        experts: MXFP4Experts view.
        limit: clamp of the SwiGLU; the gate from above only.
        shared: [num_tokens, hidden] bf16 added before the rounding (the shared expert's output), or None.
        out: [num_tokens, hidden] bf16 to write into; may be ``shared``.

    Returns:
        [num_tokens, hidden] bf16; ``out`` itself when it was given. A row whose ids are all -1 is ``shared``
        or 0.

    Contract: no host sync on accelerators; graph-safe; allocates only what is None (and the quantised x); the
        same bits on every run; a row's bits do not depend on rows whose ids are -1.
    Reference: dsv41_reference.moe.mxfp4_moe
    """
    name = "mxfp4_moe"
    check(isinstance(experts, MXFP4Experts), name, "experts: MXFP4Experts", experts)
    hidden = experts.hidden
    x = mxfp8_operand(name, x, hidden, experts.w13)
    tokens = x.values.shape[0]
    check_tensor(name, "expert_ids", expert_ids, (tokens, None), torch.int32, like=experts.w13)
    shape = tuple(expert_ids.shape)
    check_tensor(name, "expert_weights", expert_weights, shape, torch.float32, like=experts.w13)
    if check_values() and expert_ids.numel():
        low, high = int(expert_ids.min()), int(expert_ids.max())
        good = low >= -1 and high < experts.num_experts
        check(good, name, f"expert_ids: -1 to {experts.num_experts - 1}", f"{low} to {high}")
    if shared is not None:
        check_tensor(name, "shared", shared, (tokens, hidden), torch.bfloat16, like=experts.w13)
    out = output(name, out, (tokens, hidden), torch.bfloat16, experts.w13)
    _MOE(*x.flat(), expert_ids, expert_weights, *experts.flat(), limit, shared, out)
    return out
