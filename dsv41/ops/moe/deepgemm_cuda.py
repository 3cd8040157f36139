"""mxfp4_moe through DeepGEMM on SM100: two grouped FP8 x FP4 products over rows sorted by expert.

Not run here. Mega MoE, which also exchanges tokens between ranks, needs a symmetric buffer that no argument
of this op carries.
"""

import deep_gemm  # pyright: ignore[reportMissingImports]
import torch

from .._deepgemm import packed_scale
from . import sorted_experts


def _product(rows, codes, weights, scale, owner, out):
    deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(
        (rows, packed_scale(codes)), (weights.view(torch.int8), packed_scale(scale)), out, owner,
        recipe_a=(1, 32), recipe_b=(1, 32),
    )  # fmt: skip


def mxfp4_moe(*args):
    """Call for ``dsv41.ops.mxfp4_moe``."""
    if args[0].shape[0]:
        sorted_experts.run(_product, deep_gemm.get_mk_alignment_for_contiguous_layout(), args)
