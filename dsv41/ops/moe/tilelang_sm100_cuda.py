"""mxfp4_moe on SM100: tcgen05 products of E4M3 rows and E2M1 weights with their scales.

Compiled, never run. The copy engine spreads the packed weights to a byte a value on the way to
shared memory; nothing is packed in advance. Rows are sorted by expert with PyTorch's operators.
"""

import torch

from ..._op import compiled
from .._tilelang import arch_of, build
from .._tilelang import tilelang_sm100 as sm100
from . import sorted_experts


@compiled
def _product(features, k, experts, arch):
    return build(sm100.product(features, k, experts), arch)


def variants(cfg):
    """Both products."""
    yield _product, (2 * cfg.inter, cfg.hidden, cfg.num_experts, "sm_100a")
    yield _product, (cfg.hidden, cfg.inter, cfg.num_experts, "sm_100a")


def _multiply(rows, codes, weights, scale, owner, out):
    experts, features, k = *weights.shape[:2], rows.shape[1]
    _product(features, k, experts, arch_of(rows))(
        rows, codes.view(torch.uint32), weights.view(torch.uint8).flatten(0, 1).view(torch.float4_e2m1fn_x2),
        scale.view(torch.uint8).flatten(0, 1).view(torch.uint32), owner, out,
    )  # fmt: skip


def mxfp4_moe(*args):
    """Launches of ``dsv41.ops.mxfp4_moe``."""
    if args[0].shape[0]:
        sorted_experts.run(_multiply, sm100.ROWS, args)
