"""mxfp4_moe on Ascend: rows sorted by expert, weights expanded to FP8 by vector cores beside the products.

Emulated, never run.
"""

import torch

from ..._op import compiled
from .._ascend import build
from .._ascend import tilelang_cube as cube
from . import sorted_experts


@compiled
def _product(features, k, experts):
    return build(cube.mxfp4(features, k, experts))


def variants(cfg):
    """Both products."""
    yield _product, (2 * cfg.inter, cfg.hidden, cfg.num_experts)
    yield _product, (cfg.hidden, cfg.inter, cfg.num_experts)


def _multiply(rows, codes, weights, scale, owner, out):
    experts, features, k = *weights.shape[:2], rows.shape[1]
    _product(features, k, experts)(
        rows, codes, weights.view(torch.uint8).flatten(0, 1),
        scale.view(torch.uint8).flatten(0, 1), owner, out,
    )  # fmt: skip


def mxfp4_moe(*args):
    """Launches of ``dsv41.ops.mxfp4_moe``."""
    if args[0].shape[0]:
        sorted_experts.run(_multiply, cube.ROWS, args)
