"""Linears on Ascend cube cores: emulated, never run."""

import torch

from ..._op import compiled
from .._ascend import build
from .._ascend import tilelang_cube as cube


@compiled
def _plain(features, k, result):
    return build(cube.plain(features, k, result))


@compiled
def _mxfp8(features, k):
    return build(cube.mxfp8(features, k))


@compiled
def _group(features, k):
    """One group of the output projection: bf16 rows, E4M3 weights."""
    return build(cube.tiled(features, k))


def variants(cfg):
    """Block-scaled linears, a group of the output projection, and the router's and the head's bf16 ones."""
    heads, wide = cfg.num_heads * cfg.head_dim, cfg.o_groups * cfg.o_rank
    shapes = [(cfg.q_rank, cfg.hidden), (heads, cfg.q_rank), (cfg.hidden, wide), (cfg.hidden, cfg.inter)]
    for features, k in shapes:
        yield _mxfp8, (features, k)
    yield _group, (cfg.o_rank, heads // cfg.o_groups)
    yield _plain, (cfg.num_experts, cfg.hidden, "float32")
    yield _plain, (cfg.vocab_size, cfg.hidden, "float32")


def block_linear(x, x_scale, w, w_scale, numerics, out, scratch):
    """Launch of ``dsv41.ops.block_linear``."""
    if x.shape[0]:
        codes = w_scale.view(torch.uint8)
        rows = codes[:, None].expand(-1, 32, -1)
        _mxfp8(*w.shape)(x, x_scale.view(torch.uint8), w, rows, out)


def grouped_linear(x, w, w_scale, out, scratch):
    """Launches of ``dsv41.ops.grouped_linear``, one a group."""
    tokens, groups, k = x.shape
    if not tokens:
        return
    rank = out.shape[2]
    for g in range(groups):
        weights = w[g * rank : (g + 1) * rank].view(torch.uint8)
        codes = w_scale[g * rank // 32 : (g + 1) * rank // 32].view(torch.uint8)
        _group(rank, k)(x[:, g], weights, codes, out[:, g])


def linear(x, w, out, scratch):
    """Launch of ``dsv41.ops.linear``."""
    if out.numel():
        _plain(*w.shape, str(out.dtype).removeprefix("torch."))(x, w, out)
