"""Exchange and experts in one kernel of a library; the files beside this one are that library's."""

import importlib
from typing import Any

from ...formats import MXFP4Experts


def mega_experts(buffer: Any, experts: MXFP4Experts) -> Any:
    """Experts spread over ranks through DeepGEMM's Mega MoE (SM100): dispatch, products and combine at once.

        made = mega_experts(buffer, experts)                      # once a layer
        y = made(x, slots, weights, limit=10.0, shared=shared)    # in place of Exchange, mxfp4_moe, combine

    Args:
        buffer: of ``deep_gemm.get_symm_buffer_for_mega_moe(group, num_experts, max_tokens, top_k, hidden,
            inter)`` over the ranks, ``num_experts`` being the slots of all of them. One serves all layers.
        experts: MXFP4Experts view of this rank's slots in the plain layout, hidden and inter multiples of
            128. Copied into the library's order: the given view is not needed any more.

    Returns:
        A callable. Its arguments are those of `Exchange.dispatch`: x MXFP8 of [num_tokens, hidden], at most
        the buffer's tokens; slots [num_tokens, top_k] int32 of all ranks, others contribute nothing (those
        past the last are refused with DSV41_CHECK=1); weights [num_tokens, top_k] f32; ``limit`` of the
        SwiGLU; ``shared`` [num_tokens, hidden] bf16 to add, or None; ``out`` [num_tokens, hidden] bf16, which
        may be ``shared``. All ranks must call it, also without tokens.

    Errors: ValueError when DeepGEMM is not installed, on another device than SM100, or for a buffer of other
        sizes. Adapter: tested against a stand-in, never run. The sum over experts is rounded to bf16 before
        ``shared`` is added, once more than `Exchange` rounds, and its order is the library's.
    """
    module = importlib.import_module(f"{__package__}.deepgemm_cuda")
    return module.MegaExperts(buffer, experts)
