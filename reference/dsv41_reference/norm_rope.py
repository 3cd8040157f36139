"""RMSNorm and rotary embedding of the last dimensions."""

import torch

from .numerics import bf16, mean_square, wide
from .quant import to_mxfp8


def normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x * rsqrt(mean(x^2) + eps), not rounded."""
    return wide(weight) * (wide(x) * torch.rsqrt(mean_square(x) + eps))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate interleaved pairs of the last 2 * cos.shape[-1] dimensions; not rounded, the others widened.

    (a, b) -> (a cos - b sin, b cos + a sin); the inverse negates the angle.

    Args:
        x: [num_tokens, ..., dim], cos and sin: [num_tokens, rope_dim/2] f32.
    """
    width = 2 * cos.shape[-1]
    shape = (cos.shape[0], *(1,) * (x.dim() - 2), cos.shape[-1])
    c, s = wide(cos).view(shape), wide(sin).view(shape)
    if inverse:
        s = -s
    out = wide(x).clone()
    pairs = out[..., out.shape[-1] - width :].unflatten(-1, (-1, 2))
    a, b = pairs[..., 0].clone(), pairs[..., 1].clone()
    pairs[..., 0] = a * c - b * s
    pairs[..., 1] = b * c + a * s
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Reference of ``dsv41.ops.rms_norm``."""
    out.copy_(bf16(normalise(x, weight, eps)))


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    floor: float,
    norm: torch.Tensor | None,
    values: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.rms_norm_quantize``."""
    rounded = bf16(normalise(x, weight, eps))
    if norm is not None:
        norm.copy_(rounded)
    q, code = to_mxfp8(rounded, floor=floor)
    values.copy_(q)
    scale.copy_(code)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool, out: torch.Tensor) -> None:
    """Reference of ``dsv41.ops.rope``."""
    out.copy_(bf16(rotate(x, cos, sin, inverse)))
