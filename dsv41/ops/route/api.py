"""Expert choice."""

from typing import Any

import torch

from ..._op import (
    Kernel,
    Op,
    check,
    check_numbers,
    check_sizes,
    check_tensor,
    check_values,
    given_outputs,
    output,
)
from ..quant.api import unaligned


def _few(logits: torch.Tensor, *_: Any) -> str | None:
    experts = logits.shape[1]
    return None if experts <= 8192 else f"built for up to 8192 experts, not {experts}"


def _a_warp(
    logits: torch.Tensor, bias: torch.Tensor, image_bias: Any, image: Any, temperature: Any, scale: Any,
    ids: torch.Tensor, *_: Any,
) -> str | None:  # fmt: skip
    if logits.shape[1] % 4 or logits.shape[1] > 1024 or ids.shape[1] > 32:
        return f"built for up to 32 of 1024 experts, a multiple of 4, not {ids.shape[1]} of {logits.shape[1]}"
    return unaligned(logits=logits, bias=bias, image_bias=bias if image_bias is None else image_bias)


_ROUTE = Op(
    "topk_route(Tensor logits, Tensor bias, Tensor? image_bias, Tensor? image, float temperature,"
    " float scale, Tensor(a!) ids, Tensor(b!) weights) -> ()",
    reference="dsv41_reference.route:topk_route",
    package=__package__,
    kernels=(
        Kernel("tilelang_cuda", "cuda", needs=("tilelang",), archs=(90,), supports=_a_warp),
        Kernel("triton_cuda", "cuda", needs=("triton",), supports=_few),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu")),
    ),
)

_PHYSICAL = Op(
    "physical_experts(Tensor expert_ids, Tensor table, int source, Tensor step, Tensor(a!) out) -> ()",
    reference="dsv41_reference.route:physical_experts",
    package=__package__,
    kernels=(
        Kernel("triton_cuda", "cuda", needs=("triton",)),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu")),
    ),
)


def topk_route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    scale: float,
    temperature: float = 1.0,
    image_bias: torch.Tensor | None = None,
    image: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by sqrt(softplus) plus a bias; weigh them without the bias.

        a = sqrt(softplus(logits / temperature))               softplus is linear above 20
        ids = the top_k largest of a + bias, largest first; equal values by the lower id
        weights = a[ids] / (sum a[ids] + 1e-20) * scale

    Args:
        logits: [num_tokens, num_experts] f32.
        bias: [num_experts] f32, for the choice only.
        top_k: experts a token.
        scale: sum of a row's weights.
        temperature: divides the logits.
        image_bias: [num_experts] f32, the bias of image tokens; needs ``image``.
        image: [num_tokens] bool, which tokens are image tokens.
        out: ids [num_tokens, top_k] int32 and weights [num_tokens, top_k] f32 to write into.

    Returns:
        ids [num_tokens, top_k] int32, distinct in a row, and weights [num_tokens, top_k] f32.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run.
    Reference: dsv41_reference.route.topk_route
    """
    name = "topk_route"
    check_tensor(name, "logits", logits, (None, None), torch.float32)
    tokens, experts = logits.shape
    check_tensor(name, "bias", bias, (experts,), torch.float32, like=logits)
    check_sizes(name, 1, experts, top_k=top_k)
    check((image is None) == (image_bias is None), name, "image and image_bias together", (image, image_bias))
    if image is not None and image_bias is not None:
        check_tensor(name, "image", image, (tokens,), torch.bool, like=logits)
        check_tensor(name, "image_bias", image_bias, (experts,), torch.float32, like=logits)
    check_numbers(name, above=True, temperature=temperature, scale=scale)
    given = given_outputs(name, out, 2)
    out = (
        output(name, given[0], (tokens, top_k), torch.int32, logits, "out ids"),
        output(name, given[1], (tokens, top_k), torch.float32, logits, "out weights"),
    )
    _ROUTE(logits, bias, image_bias, image, temperature, scale, *out)
    return out


def physical_experts(
    expert_ids: torch.Tensor,
    table: torch.Tensor,
    *,
    source: int,
    step: torch.Tensor | int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The copy that serves each routed pair: logical experts to physical slots.

        out[t, j] = table[e, (k + mix(source, e, step)) & (entries - 1)],   e = expert_ids[t, j]
        k = number of pairs before (t, j), in row-major order of this call, with the same expert

    ``mix`` is the uint32 hash of `dsv41.eplb.dispatch`, which is the same function over NumPy.

    Args:
        expert_ids: [num_tokens, top_k] int32, logical experts; below 0 means none.
        table: [num_experts, entries] int16 slots, entries a power of two: a layer of `dsv41.eplb.to_table`.
        source: rank of the sender, 0 to 2^31 - 1.
        step: number of the step, 0 or more; a [1] int64 tensor on the device where a graph is captured.
        out: [num_tokens, top_k] int32 to write into.

    Returns:
        [num_tokens, top_k] int32; -1 where the id is below 0 or no expert of the table.

    Contract: no host sync unless DSV41_CHECK=1; graph-safe; integer arithmetic only; the same bits on every
        run.
    Reference: dsv41_reference.route.physical_experts
    """
    name = "physical_experts"
    check_tensor(name, "expert_ids", expert_ids, (None, None), torch.int32)
    check_tensor(name, "table", table, (None, None), torch.int16, like=expert_ids)
    entries = table.shape[1]
    power = entries > 0 and entries & (entries - 1) == 0
    check(power, name, "table: [num_experts, entries], entries a power of two", table)
    check_sizes(name, 0, 2**31 - 1, source=source)
    if not isinstance(step, torch.Tensor):
        check_sizes(name, step=step)
        step = torch.full((1,), step, dtype=torch.int64, device=expert_ids.device)
    check_tensor(name, "step", step, (1,), torch.int64, like=expert_ids)
    if check_values() and expert_ids.numel():
        high = int(expert_ids.max())
        check(high < table.shape[0], name, f"expert_ids: below {table.shape[0]}", high)
    out = output(name, out, tuple(expert_ids.shape), torch.int32, expert_ids)
    _PHYSICAL(expert_ids, table, source, step, out)
    return out
