"""Router: square root of softplus, choice with a bias, weights without it."""

import torch

from .numerics import narrow, softplus, wide


def top_lower_first(score: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [rows, k] of the k largest of each row, largest first; equal scores by the lower index."""
    return torch.sort(score, dim=-1, descending=True, stable=True).indices[:, :k]


def topk_route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    image_bias: torch.Tensor | None,
    image: torch.Tensor | None,
    temperature: float,
    scale: float,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.topk_route``."""
    a = softplus(wide(logits) / temperature).sqrt()
    beta = wide(bias).expand_as(a)
    if image is not None and image_bias is not None:
        beta = torch.where(image[:, None], wide(image_bias), beta)
    chosen = top_lower_first(a + beta, ids.shape[1])
    a = a.gather(1, chosen)
    ids.copy_(chosen)
    weights.copy_(narrow(a / (a.sum(-1, keepdim=True) + 1e-20) * scale, weights.dtype))


def mix(source: int, expert: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """uint32 hash of (source, expert, step), held in int64: where a source starts in an expert's table."""
    full = 0xFFFFFFFF
    x = (source * 0x9E3779B1 + expert.long() * 0x85EBCA77 + step * 0xC2B2AE3D) & full
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & full
    x = ((x ^ (x >> 15)) * 0x846CA68B) & full
    return x ^ (x >> 16)


def physical_experts(
    expert_ids: torch.Tensor, table: torch.Tensor, source: int, step: torch.Tensor, out: torch.Tensor
) -> None:
    """Reference of ``dsv41.ops.physical_experts``."""
    flat = expert_ids.flatten()
    if not table.shape[0]:
        out.fill_(-1)
        return
    valid = (flat >= 0) & (flat < table.shape[0])
    expert = torch.where(valid, flat, 0)
    order = flat.argsort(stable=True)
    ordered = flat[order].contiguous()
    earlier = torch.empty_like(flat, dtype=torch.int64)
    rank = torch.arange(len(flat), device=flat.device)
    earlier[order] = rank - torch.searchsorted(ordered, ordered)
    slot = table[expert, (earlier + mix(source, expert, step)) & (table.shape[1] - 1)]
    out.copy_(torch.where(valid, slot, -1).view_as(out))
