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
