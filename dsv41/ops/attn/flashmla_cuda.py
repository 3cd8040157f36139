"""sparse_attn through FlashMLA: V4.1 records on SM100, V4 records also on SM90, as they lie in a cache.

FlashMLA tells formats by the bytes of a record. Not run here: no such package, no SM100.
"""

import flash_mla  # pyright: ignore[reportMissingImports]

from ..norm_rope.api import rope


def sparse_attn(
    q, window, window_layout, window_ids, compressed, compressed_layout, compressed_ids, sink, cos, sin,
    scale, num_splits, out, lse, scratch,
):  # fmt: skip
    """Call for ``dsv41.ops.sparse_attn``; `flashmla` in api.py says what it takes."""
    if not q.shape[0]:
        return
    result, log_sum = flash_mla.flash_mla_with_kvcache(
        q=q.unsqueeze(1),
        k_cache=window.unsqueeze(2),
        block_table=None,
        cache_seqlens=None,
        head_dim_v=q.shape[2],
        tile_scheduler_metadata=flash_mla.get_mla_metadata()[0],
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=window_ids.unsqueeze(1),
        attn_sink=sink,
        extra_k_cache=None if compressed is None else compressed.unsqueeze(2),
        extra_indices_in_kvcache=None if compressed_ids is None else compressed_ids.unsqueeze(1),
    )
    out.copy_(result.squeeze(1))
    if cos is not None:
        rope(out, cos, sin, inverse=True, out=out)
    if lse.numel():
        lse.copy_(log_sum.squeeze(2))
        lse.masked_fill_(lse == float("inf"), -float("inf"))  # its word for a row without a key
