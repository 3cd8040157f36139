"""block_linear and grouped_linear on SM100: tcgen05 products. Compiled, never run.

A 32 x 32 tile of the weights has one scale: every row of a tile takes it, so that the hardware's one scale a
row and 32 values is what the format means and nothing is packed in advance. The rows of `grouped_linear` are
bf16, which tcgen05 multiplies with bf16 only: its weights are expanded on their way to the product.
"""

import torch

from ..._op import compiled
from .._tilelang import arch_of, build
from .._tilelang import tilelang_sm100 as sm100


@compiled
def _product(features, k, arch):
    return build(sm100.product(features, k, None), arch)


@compiled
def _grouped(features, k, groups, arch):
    return build(sm100.product(features, k, None, groups), arch)


def variants(cfg):
    """The block-scaled linears of attention, indexer and shared expert, and the grouped output projection."""
    heads, wide = cfg.num_heads * cfg.head_dim, cfg.o_groups * cfg.o_rank
    shapes = [(cfg.q_rank, cfg.hidden), (heads, cfg.q_rank), (cfg.hidden, wide), (cfg.hidden, cfg.inter)]
    shapes += [(cfg.head_dim, cfg.hidden), (2 * cfg.inter, cfg.hidden)]
    for features, k in sorted({(f, k) for f, k in shapes if f % 128 == 0 and k % 128 == 0}):
        yield _product, (features, k, "sm_100a")
    yield _grouped, (cfg.o_rank, heads // cfg.o_groups, cfg.o_groups, "sm_100a")


def block_linear(x, x_scale, w, w_scale, numerics, out, scratch):
    """Launch of ``dsv41.ops.block_linear``."""
    if x.shape[0]:
        words = [s.view(torch.uint8).view(torch.uint32) for s in (x_scale, w_scale)]
        owner = words[0].view(torch.int32)[:, 0]  # one matrix: not read
        _product(*w.shape, arch_of(x))(x, words[0], w, words[1], owner[:1], out)


def grouped_linear(x, w, w_scale, out, scratch):
    """Launch of ``dsv41.ops.grouped_linear``."""
    tokens, groups, k = x.shape
    if tokens:
        words = w_scale.view(torch.uint8).view(torch.uint32)
        owner = words.view(torch.int32)[:1, 0]  # neither it nor scales of rows are read
        _grouped(out.shape[2], k, groups, arch_of(x))(x.flatten(1), words, w, words, owner, out.flatten(1))
