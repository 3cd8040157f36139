"""Every op, flat: ``dsv41.ops.quantize_mxfp8``, ``dsv41.ops.sparse_attn``, ..."""

from .attn import sparse_attn, sparse_attn_scratch
from .compress import compress_pairs, copy_records, write_cache
from .draft import markov_bias
from .engram import engram_gate, engram_hash, engram_lookup
from .exchange.api import (
    exchange_combine,
    exchange_pack,
    exchange_pack_fixed,
    exchange_plan,
    exchange_unpack,
)
from .hyper import mhc_boundary, mhc_collapse, mhc_expand, mhc_mixes, mhc_scratch
from .index import index_query, index_topk, index_topk_scratch, topk, topk_scratch
from .linear import (
    block_linear,
    block_linear_scratch,
    grouped_linear,
    grouped_linear_scratch,
    linear,
    linear_scratch,
    pack_linear,
)
from .moe import mxfp4_moe, mxfp4_moe_scratch, pack_experts
from .norm_rope import rms_norm, rms_norm_quantize, rope
from .quant import quantize_mxfp4, quantize_mxfp8, quantize_nvfp4, swiglu_quantize
from .route import physical_experts, topk_route
from .verify import apply_token_bitmask, sample_tokens, split_budget_ragged, verify_drafts

__all__ = [
    "apply_token_bitmask",
    "block_linear",
    "block_linear_scratch",
    "compress_pairs",
    "copy_records",
    "engram_gate",
    "engram_hash",
    "engram_lookup",
    "exchange_combine",
    "exchange_pack",
    "exchange_pack_fixed",
    "exchange_plan",
    "exchange_unpack",
    "grouped_linear",
    "grouped_linear_scratch",
    "index_query",
    "index_topk",
    "index_topk_scratch",
    "linear",
    "linear_scratch",
    "markov_bias",
    "mhc_boundary",
    "mhc_collapse",
    "mhc_expand",
    "mhc_mixes",
    "mhc_scratch",
    "mxfp4_moe",
    "mxfp4_moe_scratch",
    "pack_experts",
    "pack_linear",
    "physical_experts",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "rms_norm",
    "rms_norm_quantize",
    "rope",
    "sample_tokens",
    "sparse_attn",
    "sparse_attn_scratch",
    "split_budget_ragged",
    "swiglu_quantize",
    "topk",
    "topk_route",
    "topk_scratch",
    "verify_drafts",
    "write_cache",
]
