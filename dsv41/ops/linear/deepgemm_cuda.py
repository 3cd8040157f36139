"""block_linear through DeepGEMM: MXFP8 on SM100; on SM90 the "fp8" numerics, with f32 scales a 128 values.

Not run here on SM100. Weights keep the checkpoint's layout: their scales are laid out anew in every call,
which costs a thirty-second of the weights' bytes.
"""

import deep_gemm  # pyright: ignore[reportMissingImports]
import torch

from ..._op import split_scratch
from ...formats import E4M3, E8M0
from .._deepgemm import packed_scale
from .._triton import coarsen_rows
from .api import scratch_parts


def block_linear(x, x_scale, w, w_scale, numerics, out, scratch):
    """Call for ``dsv41.ops.block_linear``."""
    if not x.shape[0]:
        return
    if numerics == "fp8":
        (tokens, k), features = x.shape, w.shape[0]
        _, values, *_ = split_scratch(scratch, scratch_parts(tokens, features, k, numerics))
        # Scales of a group for all tokens, whose number it wants as a multiple of four.
        scale = torch.empty((k // 128, -(-tokens // 4) * 4), dtype=torch.float32, device=x.device)
        coarsen_rows(x.view(torch.uint8), x_scale, values, scale)
        of_rows, of_weights = scale[:, :tokens].t(), w_scale.view(E8M0).to(torch.float32)
        deep_gemm.fp8_gemm_nt((values.view(E4M3), of_rows), (w, of_weights), out)
        return
    each_row = w_scale.view(torch.uint8).repeat_interleave(32, 0)
    deep_gemm.fp8_fp4_gemm_nt(
        (x, packed_scale(x_scale)), (w, packed_scale(each_row)), out, recipe_a=(1, 32), recipe_b=(1, 32)
    )
