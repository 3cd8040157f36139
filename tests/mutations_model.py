"""The mutation table of the model's arithmetic; see `tests.test_mutations`."""

Mutation = tuple[str, str, str, str, str]

PARITY = "tests.layers.test_model:check_incremental('micro', 35, [9, 2, 8], True)"
REF = "dsv41_reference"

STREAMS: list[Mutation] = [
    (
        "mhc-own-pre-mix",
        "dsv41.layers.block:Block.enter",
        "*self.attention_input(x, pre)",
        "*self.attention_input(x, mixes.wait()[0])",
        PARITY,
    ),
    (
        "mhc-ffn-other-pre-mix",
        "dsv41.layers.block:Block.cross",
        "before.mixes.wait()",
        "(mhc_mixes(before.x, **mixing)[0], *before.mixes.wait()[1:])",
        PARITY,
    ),
    (
        "mhc-comb-orientation",
        f"{REF}.hyper:mhc_expand",
        ".transpose(1, 2)",
        "",
        "tests.ops.test_hyper:test_expand_closed_form",
    ),
    (
        "sinkhorn-one-step-more",
        f"{REF}.hyper:sinkhorn",
        "range(iters - 1)",
        "range(iters)",
        "tests.ops.test_hyper:test_mixes_closed_form",
    ),
    (
        "sinkhorn-softmax-over-columns",
        f"{REF}.hyper:sinkhorn",
        "e / e.sum(-1, keepdim=True)",
        "e / e.sum(-2, keepdim=True)",
        "tests.ops.test_hyper:test_mixes_closed_form",
    ),
    (
        "sinkhorn-eps-not-in-the-denominator",
        f"{REF}.hyper:sinkhorn",
        "c / (c.sum(-1, keepdim=True) + eps)",
        "c / c.sum(-1, keepdim=True)",
        "tests.ops.test_hyper:test_mixes_closed_form",
    ),
    (
        "pre-without-eps",
        f"{REF}.hyper:mhc_mixes",
        "b[:streams]) + eps, pre.dtype",
        "b[:streams]), pre.dtype",
        "tests.ops.test_hyper:test_mixes_closed_form",
    ),
    (
        "post-without-two",
        f"{REF}.hyper:mhc_mixes",
        "narrow(2 * sigmoid(",
        "narrow(sigmoid(",
        "tests.ops.test_hyper:test_zero_logits",
    ),
    (
        "norm-eps-1e-6",
        f"{REF}.norm_rope:normalise",
        "mean_square(x) + eps",
        "mean_square(x) + 1e-6",
        "tests.ops.test_norm_rope:test_tiny_rows_are_normalised",
    ),
    (
        "engram-behind-the-layer",
        "dsv41.layers.model:V41Flash.run",
        "        if not isinstance(layer, Layer) or layer.engram is None:\n",
        "        layer = self.layers[max(layer.layer - 1, 0)]\n"
        "        if not isinstance(layer, Layer) or layer.engram is None:\n",
        PARITY,
    ),
]

ROPE: list[Mutation] = [
    (
        "rope-halves-instead-of-pairs",
        f"{REF}.norm_rope:rotate",
        ".unflatten(-1, (-1, 2))",
        ".unflatten(-1, (2, -1)).transpose(-1, -2)",
        "tests.ops.test_norm_rope:test_rope_closed_form",
    ),
    (
        "rope-on-the-first-dimensions",
        f"{REF}.norm_rope:rotate",
        "out[..., out.shape[-1] - width :]",
        "out[..., :width]",
        "tests.ops.test_norm_rope:test_rope_closed_form",
    ),
    (
        "yarn-attention-factor",
        f"{REF}.rope:rope_table",
        "torch.cos(angles), torch.sin(angles)",
        "1.277 * torch.cos(angles), 1.277 * torch.sin(angles)",
        "tests.reference.test_reference_rope:test_plain_table_is_float32_from_the_angle_on",
    ),
    (
        "rope-table-in-float64",
        f"{REF}.rope:rope_table",
        "positions.to(torch.float32)[..., None] * _frequencies_at(positions, *constants)",
        "positions.to(torch.float64)[..., None] * _frequencies_at(positions, *constants).double()",
        "tests.reference.test_reference_rope:test_plain_table_is_float32_from_the_angle_on",
    ),
    (
        "yarn-everywhere",
        "dsv41.layers.state:plan_step",
        "plain = rope_tables(cfg, positions, False)",
        "plain = rope_tables(cfg, positions, True)",
        PARITY,
    ),
    (
        "plain-table-in-compressed-layers",
        "dsv41.layers.state:rope_tables",
        "if not yarn:",
        "if True:",
        PARITY,
    ),
    (
        "yarn-over-the-plain-base",
        "dsv41.layers.state:rope_tables",
        "cfg.compress_rope_theta",
        "cfg.rope_theta",
        PARITY,
    ),
    (
        "entry-turns-at-its-last-token",
        "dsv41.layers.state:plan_step",
        "rope_tables(cfg, entry * ratio, True)",
        "rope_tables(cfg, entry * ratio + ratio - 1, True)",
        PARITY,
    ),
    (
        "no-inverse-rope",
        "dsv41.layers.attention:Attention.attend",
        "inverse_rope=(cos, sin)",
        "inverse_rope=(cos, 0 * sin)",
        PARITY,
    ),
    (
        "inverse-rope-forwards",
        "dsv41.layers.attention:Attention.attend",
        "inverse_rope=(cos, sin)",
        "inverse_rope=(cos, -sin)",
        PARITY,
    ),
]

ATTENTION: list[Mutation] = [
    (
        "window-without-the-query-itself",
        "dsv41.layers.state:plan_step",
        "torch.arange(window - 1, -1, -1",
        "torch.arange(window, 0, -1",
        PARITY,
    ),
    (
        "entry-visible-before-its-last-token",
        "dsv41.layers.state:plan_step",
        "(positions + 1).div(ratio",
        "(positions + 2).div(ratio",
        PARITY,
    ),
    (
        "entry-visible-after-its-last-token",
        "dsv41.layers.state:plan_step",
        "torch.where(live, (positions + 1).div(ratio",
        "torch.where(live, positions.div(ratio",
        PARITY,
    ),
    (
        "entries-inside-the-window-masked",
        "dsv41.layers.attention:Attention.select",
        "step.visible[self.ratio],",
        "(step.visible[self.ratio] - cfg.window // self.ratio).clamp(min=0),",
        PARITY,
    ),
    (
        "q-norm-a-head",
        "dsv41.layers.attention:Attention.queries",
        "self.wq_b(qr).unflatten(1, (cfg.num_heads, cfg.head_dim))",
        "torch.nn.functional.rms_norm("
        "self.wq_b(qr).unflatten(1, (cfg.num_heads, cfg.head_dim)), (cfg.head_dim,))",
        PARITY,
    ),
    (
        "sink-scaled",
        f"{REF}.attn:attend",
        "wide(sink).expand",
        "(scale * wide(sink)).expand",
        "tests.ops.test_attn:test_closed_form(1, True)",
    ),
    (
        "sink-left-out-of-the-denominator",
        f"{REF}.attn:attend",
        "denominator = total + torch.exp(logit - top)",
        "denominator = total",
        "tests.ops.test_attn:test_equal_scores_average_and_the_sink_takes_its_share",
    ),
    (
        "sink-a-set",
        f"{REF}.attn:attend",
        "total + torch.exp(logit - top)",
        "total + 2 * torch.exp(logit - top)",
        "tests.ops.test_attn:test_closed_form(2, True)",
    ),
    (
        "weights-of-values-not-rounded",
        f"{REF}.attn:attend",
        "matmul(bf16(e)",
        "matmul(e",
        "tests.ops.test_attn:test_closed_form(1, True)",
    ),
    (
        "denominator-from-rounded-terms",
        f"{REF}.attn:attend",
        "total = e.sum(-1)",
        "total = wide(bf16(e)).sum(-1)",
        "tests.ops.test_attn:test_closed_form(1, True)",
    ),
    (
        "wo-a-input-quantised",
        "dsv41.layers.attention:Attention.project",
        "grouped_linear(grouped,",
        'grouped_linear(__import__("dsv41").ops.quantize_mxfp8(grouped.flatten(1)).dequantize().view_as(grouped),',
        PARITY,
    ),
    (
        "wo-a-groups-of-every-other-head",
        "dsv41.layers.attention:Attention.project",
        "o.flatten(1).unflatten(1, (self.cfg.o_groups, -1))",
        "o.unflatten(1, (-1, self.cfg.o_groups)).transpose(1, 2).flatten(2)",
        PARITY,
    ),
]

INDEX: list[Mutation] = [
    (
        "candidate-source-restricted-by-its-own-blocks",
        f"{REF}.index:index_topk",
        "if candidates is not None:",
        "if (candidates := new_candidates if new_candidates.shape[1] else candidates) is not None:",
        PARITY,
    ),
    (
        "later-sources-unrestricted",
        "dsv41.layers.attention:Attention.select",
        "shared.candidates if restricted else None",
        "None",
        PARITY,
    ),
    (
        "newest-block-not-pinned",
        f"{REF}.index:candidate_mask",
        "torch.where(pinned & (visible > 0)[:, None], torch.inf, best)",
        "best",
        "tests.ops.test_index:test_closed_form(3)",
    ),
    (
        "newest-block-of-the-longest-query",
        f"{REF}.index:candidate_mask",
        "(visible.long() - 1)",
        "(visible.long().max().expand_as(visible) - 1)",
        "tests.ops.test_index:test_the_newest_block_is_the_querys_own",
    ),
    (
        "scores-without-relu",
        f"{REF}.index:index_scores",
        ".clamp(min=0)",
        "",
        "tests.ops.test_index:test_closed_form(3)",
    ),
    (
        "ties-to-the-higher-entry",
        f"{REF}.index:topk_mask",
        "equal.cumsum(-1) <=",
        "equal.flip(-1).cumsum(-1).flip(-1) <=",
        "tests.ops.test_index:test_ties_go_to_the_lower_entry",
    ),
    (
        "nan-scores-chosen",
        f"{REF}.index:topk_mask",
        "torch.where(score.isnan(), -torch.inf, score)",
        "torch.where(score.isnan(), torch.inf, score)",
        "tests.ops.test_index:test_nan_keys_are_never_chosen",
    ),
    (
        "index-key-of-the-rotated-latent",
        "dsv41.layers.attention:Attention.write_entries",
        "linear(latent, self.indexer.wk.weight)",
        "linear(rope(latent[:, None], at[0], at[1])[:, 0], self.indexer.wk.weight)",
        PARITY,
    ),
    (
        "index-key-of-the-quantised-latent",
        "dsv41.layers.attention:Attention.write_entries",
        "linear(latent, self.indexer.wk.weight)",
        'linear(__import__("dsv41").ops.quantize_mxfp8(latent).dequantize(), self.indexer.wk.weight)',
        PARITY,
    ),
    (
        "no-index-keys-while-all-fit",
        "dsv41.layers.attention:Attention.write_entries",
        "write_cache(key, *at, keys,",
        "write_cache(key, *at[:2], torch.where(at[2] < cfg.index_top_k, -1, at[2]), keys,",
        PARITY,
    ),
    (
        "pages-of-another-request",
        f"{REF}.index:index_topk",
        "page_table[request,",
        "page_table[0,",
        "tests.ops.test_index:test_closed_form(3)",
    ),
    (
        "index-lists-without-room-for-warps-behind",
        "dsv41.ops.index.tilelang_cuda:source",
        'return device_source(*paths, wgmma={"e4m3_rs": widths} if widths else None)',
        'return device_source(*paths, wgmma={"e4m3_rs": widths} if widths else None)'
        ".replace('kAhead = kGroups', 'kAhead = (kGroups - 1)')",
        "tests.ops.test_index_hopper:check_full_lists('plain', 1, 'first')",
    ),
    (
        "index-block-lists-without-room-for-warps-behind",
        "dsv41.ops.index.tilelang_cuda:source",
        'return device_source(*paths, wgmma={"e4m3_rs": widths} if widths else None)',
        'return device_source(*paths, wgmma={"e4m3_rs": widths} if widths else None)'
        ".replace('kBlockCap - kAhead / kQuad', 'kBlockCap - kAhead / kQuad / 2')",
        "tests.ops.test_index_hopper:check_full_lists('publishing', 1, 'first')",
    ),
]

EXPERTS: list[Mutation] = [
    (
        "bias-in-the-weights",
        f"{REF}.route:topk_route",
        "a = a.gather(1, chosen)",
        "a = (a + beta).gather(1, chosen)",
        "tests.ops.test_route:test_bias_chooses_but_does_not_weigh",
    ),
    (
        "choice-without-bias",
        f"{REF}.route:topk_route",
        "top_lower_first(a + beta,",
        "top_lower_first(a,",
        "tests.ops.test_route:test_bias_chooses_but_does_not_weigh",
    ),
    (
        "weights-not-renormalised",
        f"{REF}.route:topk_route",
        "a / (a.sum(-1, keepdim=True) + 1e-20) * scale",
        "a * scale",
        "tests.ops.test_route:test_closed_form",
    ),
    (
        "scale-before-renormalising",
        f"{REF}.route:topk_route",
        "+ 1e-20) * scale",
        "+ 1e-20)",
        "tests.ops.test_route:test_closed_form",
    ),
    (
        "ties-to-the-higher-expert",
        f"{REF}.route:top_lower_first",
        "torch.sort(score, dim=-1, descending=True, stable=True).indices[:, :k]",
        "score.shape[1] - 1"
        " - torch.sort(score.flip(-1), dim=-1, descending=True, stable=True).indices[:, :k]",
        "tests.ops.test_route:test_ties_go_to_the_lower_id",
    ),
    (
        "images-routed-as-text",
        "dsv41.layers.moe:MoE.route",
        "else self.gate.bias_vl",
        "else self.gate.bias",
        PARITY,
    ),
    (
        "gate-clamped-from-below",
        f"{REF}.quant:swiglu",
        ".clamp(max=limit)",
        ".clamp(-limit, limit)",
        "tests.ops.test_quant:test_swiglu_closed_form(True)",
    ),
    (
        "up-clamped-from-above-only",
        f"{REF}.quant:swiglu",
        "wide(up).clamp(-limit, limit)",
        "wide(up).clamp(max=limit)",
        "tests.ops.test_quant:test_swiglu_closed_form(True)",
    ),
    (
        "routing-weight-behind-the-quantiser",
        f"{REF}.moe:mxfp4_moe",
        "to_mxfp8(bf16(swiglu(gate, up, expert_weights[token, column], limit))))",
        "to_mxfp8(bf16(swiglu(gate, up, None, limit)))) * expert_weights[token, column, None]",
        "tests.ops.test_moe:test_closed_form(10.0)",
    ),
    (
        "product-not-rounded-before-the-quantiser",
        f"{REF}.moe:mxfp4_moe",
        "to_mxfp8(bf16(swiglu(gate, up, expert_weights[token, column], limit))))",
        "to_mxfp8(swiglu(gate, up, expert_weights[token, column], limit)))",
        "tests.ops.test_moe:test_closed_form(10.0)",
    ),
    (
        "up-rows-first",
        f"{REF}.moe:mxfp4_moe",
        "gate, up = bf16(",
        "up, gate = bf16(",
        "tests.ops.test_moe:test_identity_expert",
    ),
    (
        "no-expert-is-the-last-expert",
        f"{REF}.moe:mxfp4_moe",
        "if not 0 <= e < len(w13):",
        "if e >= len(w13):",
        "tests.ops.test_moe:test_none_and_shared",
    ),
    (
        "shared-expert-without-clamp",
        "dsv41.layers.moe:MoE.forward",
        "swiglu_quantize(shared.gate_up(q), limit=limit)",
        "swiglu_quantize(shared.gate_up(q), limit=1e9)",
        "tests.test_mutations:check_shared_expert_is_clamped",
    ),
]

MUTATIONS: list[Mutation] = [*STREAMS, *ROPE, *ATTENTION, *INDEX, *EXPERTS]
