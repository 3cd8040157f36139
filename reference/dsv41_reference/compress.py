"""Compressor at ratio 2: pairs of tokens pooled per channel, with the pair's first half carried over
steps.
"""

import torch

from .numerics import bf16, wide


def compress_pairs(
    kv_gate: torch.Tensor,
    request_ids: torch.Tensor,
    positions: torch.Tensor,
    carry: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.compress_pairs``."""
    slots = carry.shape[1]
    rows = torch.arange(len(kv_gate), device=kv_gate.device)
    live = (request_ids >= 0) & (request_ids < carry.shape[0])
    closing = (live & (positions % 2 == 1)).nonzero()[:, 0]
    request = request_ids[closing].long()
    before = (closing - 1).clamp(min=0)
    inside = (closing > 0) & (request_ids[before] == request_ids[closing])
    # Read the ring before anything of this call is written to it.
    carried = carry[request, (positions[closing].long() - 1) % slots]
    first = torch.where(inside[:, None], kv_gate[before], carried)
    kv0, gate0 = wide(first).chunk(2, -1)
    kv1, gate1 = wide(kv_gate[closing]).chunk(2, -1)
    top = torch.maximum(gate0, gate1)
    e0, e1 = torch.exp(gate0 - top), torch.exp(gate1 - top)
    out.zero_()
    out[closing] = bf16((e0 * kv0 + e1 * kv1) / (e0 + e1))
    # Of the rows that share a ring slot only the last may write.
    later = (rows + slots).clamp(max=max(len(kv_gate) - 1, 0))
    last = (rows + slots >= len(kv_gate)) | (request_ids[later] != request_ids)
    kept = (live & last).nonzero()[:, 0]
    carry[request_ids[kept].long(), positions[kept].long() % slots] = kv_gate[kept]
