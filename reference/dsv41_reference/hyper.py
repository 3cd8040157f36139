"""Manifold-constrained hyper-connections (mHC): four residual streams, mixed at every sub-layer boundary."""

import torch

from .norm_rope import rms_norm_quantize
from .numerics import bf16, matmul, mean_square, narrow, sigmoid, wide


def sinkhorn(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """[..., S, S] logits to a nearly doubly stochastic matrix, in the accumulation dtype.

    Softmax over the last dimension plus eps, then one column step, then ``iters - 1`` row and column steps.
    """
    e = torch.exp(logits - logits.amax(-1, keepdim=True))
    c = e / e.sum(-1, keepdim=True) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def mhc_mixes(
    x: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    eps: float,
    iters: int,
    pre: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.mhc_mixes``; needs no scratch."""
    streams = x.shape[1]
    row = x.flatten(1)
    m = matmul(row, fn) * torch.rsqrt(mean_square(row) + norm_eps)
    b, s = wide(base), wide(scale)
    pre.copy_(narrow(sigmoid(m[:, :streams] * s[0] + b[:streams]) + eps, pre.dtype))
    post.copy_(narrow(2 * sigmoid(m[:, streams : 2 * streams] * s[1] + b[streams : 2 * streams]), post.dtype))
    logits = (m[:, 2 * streams :] * s[2] + b[2 * streams :]).unflatten(1, (streams, streams))
    comb.copy_(narrow(sinkhorn(logits, iters, eps), comb.dtype))


def mhc_collapse(x: torch.Tensor, pre: torch.Tensor, out: torch.Tensor) -> None:
    """Reference of ``dsv41.ops.mhc_collapse``."""
    out.copy_(bf16((wide(x) * wide(pre)[:, :, None]).sum(1)))


def mhc_expand(
    y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, out: torch.Tensor
) -> None:
    """Reference of ``dsv41.ops.mhc_expand``."""
    mixed = wide(comb).transpose(1, 2) @ wide(x)  # sums over comb's first stream index
    out.copy_(bf16(wide(post)[:, :, None] * wide(y)[:, None, :] + mixed))


def mhc_boundary(
    y: torch.Tensor,
    x: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    norm_eps: float,
    eps: float,
    iters: int,
    floor: float,
    out: torch.Tensor,
    next_pre: torch.Tensor,
    next_post: torch.Tensor,
    next_comb: torch.Tensor,
    norm: torch.Tensor,
    values: torch.Tensor,
    codes: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.mhc_boundary``: the ops one after the other; mixes of no rows are left out."""
    mhc_expand(y, x, post, comb, out)
    if len(next_pre) == len(x):
        mhc_mixes(out, fn, base, scale, norm_eps, eps, iters, next_pre, next_post, next_comb, scratch)
    mhc_collapse(out, pre, norm)
    rms_norm_quantize(norm, weight, norm_eps, floor, norm, values, codes)
