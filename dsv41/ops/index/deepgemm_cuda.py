"""index_topk through DeepGEMM on SM100: FP4 scores over pages, then the library's own top-k. Not run here."""

import deep_gemm  # pyright: ignore[reportMissingImports]
import torch

from . import api


def index_topk(
    q, q_scale, head_weights, request_ids, visible, keys, layout, page_table, candidates, block_size, ids,
    new_candidates, scratch,
):  # fmt: skip
    """Call for ``dsv41.ops.index_topk``; `deepgemm` in api.py says what it takes."""
    if not q.shape[0]:
        return
    page, longest = keys.shape[1], page_table.shape[1] * keys.shape[1]
    known = (request_ids >= 0) & (request_ids < page_table.shape[0])
    lens = torch.where(known, visible.clamp(0, longest), 0).int()
    table = page_table[torch.where(known, request_ids, 0).long()].int()
    held = (table >= 0) & (table < keys.shape[0])  # the library reads every page that it is given
    table = torch.where(held, table, 0)
    plan = deep_gemm.get_paged_mqa_logits_metadata(lens[:, None], page, deep_gemm.get_num_sms())
    words = q_scale.view(torch.uint8).contiguous().view(torch.int32)
    scores = deep_gemm.fp8_fp4_paged_mqa_logits(
        (q.view(torch.int8).unsqueeze(1), words.view(*q.shape[:2]).unsqueeze(1)), keys.unsqueeze(2),
        head_weights, lens[:, None], table, plan, longest,
    )  # fmt: skip
    scores = scores[:, :longest].masked_fill(~held.repeat_interleave(page, 1), -torch.inf)
    api.topk(scores, lens, k=ids.shape[1], out=ids)
