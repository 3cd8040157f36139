"""Heads of the drafter: the bias that the token before gives to a row of logits."""

from typing import NamedTuple

import torch

from ..._op import Kernel, Op, check_apart, check_tensor


def _npu(logits: torch.Tensor, embeds: torch.Tensor, weight: torch.Tensor) -> str | None:
    if weight.shape[1] % 128:
        return f"rank a multiple of 128, got {weight.shape[1]}"
    return None if embeds.is_contiguous() and weight.is_contiguous() else "embeds or weight is strided"


_BIAS = Op(
    "markov_bias(Tensor(a!) logits, Tensor embeds, Tensor weight) -> ()",
    reference="dsv41_reference.draft:markov_bias",
    package=__package__,
    kernels=(
        Kernel("triton_cuda", "cuda", needs=("triton",)),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu"), supports=_npu),
    ),
)


class DraftBlock(NamedTuple):
    """Drafts of a batch, one block a request.

    tokens: [num_requests, block] int64; -1 ends a request's drafts.
    logits: [num_requests, block, vocab] f32 that they were drawn from, before temperature; None if they were
        not drawn from any.
    confidence: [num_requests, block] f32 logits: draft j is accepted if those before it are.
    """

    tokens: torch.Tensor
    logits: torch.Tensor | None
    confidence: torch.Tensor


def markov_bias(logits: torch.Tensor, embeds: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Add the Markov head's bias to one row of logits a request, in place.

        logits[r] = logits[r] + embeds[r] @ weight.T, rounded once

    Args:
        logits: [num_requests, vocab] f32; changed in place.
        embeds: [num_requests, rank] bf16, of the token before each row.
        weight: [vocab, rank] bf16.

    Returns:
        [num_requests, vocab]; ``logits`` itself.

    Contract: no host sync; graph-safe; allocates nothing that outlives the call; the same bits on every run.
    Reference: dsv41_reference.draft.markov_bias
    """
    check_tensor("markov_bias", "weight", weight, (None, None), torch.bfloat16)
    vocab, rank = weight.shape
    check_tensor("markov_bias", "embeds", embeds, (None, rank), torch.bfloat16, like=weight)
    check_tensor("markov_bias", "logits", logits, (embeds.shape[0], vocab), torch.float32, like=weight)
    check_apart("markov_bias", "logits", logits)
    _BIAS(logits, embeds, weight)
    return logits
