"""The mutation table of SM100's launch functions; see `tests.test_mutations`."""

from tests.mutations_model import Mutation

LINEAR, MOE = "dsv41.ops.linear.tilelang_sm100_cuda", "dsv41.ops.moe.tilelang_sm100_cuda"
SORTED = "dsv41.ops.moe.sorted_experts"
ON_LINEAR = "tests.test_sm100_launch:test_block_linear(8, False)"
ON_GROUPS = "tests.test_sm100_launch:test_grouped_linear(8, False)"
INDEX, SCANS = "dsv41.ops.index.tilelang_sm100_cuda", "dsv41.ops.index.tilelang_scan"
ON_INDEX = "tests.ops.test_index_sm100:test_launches"
ON_EXPERTS = "tests.test_sm100_launch:test_experts(False)"

MUTATIONS: list[Mutation] = [
    (
        "linear-scales-swapped",
        f"{LINEAR}:block_linear",
        "(x_scale, w_scale)",
        "(w_scale, x_scale)",
        ON_LINEAR,
    ),
    ("linear-sizes-swapped", f"{LINEAR}:block_linear", "*w.shape,", "*w.shape[::-1],", ON_LINEAR),
    (
        "linear-scales-of-another-row",
        f"{LINEAR}:block_linear",
        "words[1], owner",
        "words[1].roll(1, 0), owner",
        ON_LINEAR,
    ),
    (
        "linear-no-rows",
        f"{LINEAR}:block_linear",
        "if x.shape[0]:",
        "if True:",
        "tests.test_sm100_launch:test_block_linear(0, False)",
    ),
    (
        "groups-sizes-swapped",
        f"{LINEAR}:grouped_linear",
        "_grouped(out.shape[2], k, groups,",
        "_grouped(k, out.shape[2], groups,",
        ON_GROUPS,
    ),
    (
        "groups-in-another-order",
        f"{LINEAR}:grouped_linear",
        "x.flatten(1), words",
        "x.flip(1).flatten(1), words",
        ON_GROUPS,
    ),
    (
        "groups-scales-of-another-tile",
        f"{LINEAR}:grouped_linear",
        "w, words, owner",
        "w, words.roll(1, 0), owner",
        ON_GROUPS,
    ),
    (
        "groups-no-rows",
        f"{LINEAR}:grouped_linear",
        "if tokens:",
        "if True:",
        "tests.test_sm100_launch:test_grouped_linear(0, False)",
    ),
    (
        "index-scales-and-weights-exchanged",
        f"{INDEX}:launch",
        "q, *before, *after",
        "q, before[1], before[0], *before[2:], *after",
        ON_INDEX,
    ),
    (
        "index-blocks-restricted-too",
        f"{SCANS}:index_topk",
        "launch(*few, None, block_size, ids, new_candidates, scratch)",
        "launch(*few, candidates, block_size, ids, new_candidates, scratch)",
        ON_INDEX,
    ),
    (
        "index-candidates-forgotten",
        f"{SCANS}:index_topk",
        "launch(*few, candidates, block_size, ids, new_candidates[:, :0], scratch)",
        "launch(*few, None, block_size, ids, new_candidates[:, :0], scratch)",
        ON_INDEX,
    ),
    (
        "index-stride-of-another-tensor",
        f"{SCANS}:launch",
        "pages.stride(0),",
        "pages.shape[1] * pages.shape[2],",
        ON_INDEX,
    ),
    ("experts-tile-of-64", f"{MOE}:mxfp4_moe", "sm100.ROWS", "sm100.ROWS // 2", ON_EXPERTS),
    (
        "experts-weights-in-another-order",
        f"{MOE}:_multiply",
        "weights.view(torch.uint8)",
        "weights.flip(0).view(torch.uint8)",
        ON_EXPERTS,
    ),
    (
        "experts-scales-in-another-order",
        f"{MOE}:_multiply",
        "scale.view(torch.uint8)",
        "scale.flip(0).view(torch.uint8)",
        ON_EXPERTS,
    ),
    (
        "experts-owners-in-another-order",
        f"{MOE}:_multiply",
        "owner, out,\n",
        "owner.flip(0), out,\n",
        ON_EXPERTS,
    ),
    (
        "experts-codes-of-another-row",
        f"{MOE}:_multiply",
        "codes.view(torch.uint32)",
        "codes.roll(1, 0).view(torch.uint32)",
        ON_EXPERTS,
    ),
    (
        "sorted-scales-swapped",
        f"{SORTED}:run",
        "w13, w13_scale, w2, w2_scale, _",
        "w13, w2_scale, w2, w13_scale, _",
        ON_EXPERTS,
    ),
    (
        "sorted-expert-order",
        f"{SORTED}:sorted_rows",
        "torch.where(live, owner, -1)",
        "torch.where(live, experts - 1 - owner, -1)",
        ON_EXPERTS,
    ),
    (
        "sorted-offset-of-a-row",
        f"{SORTED}:sorted_rows",
        "starts[bucket] + rank",
        "starts[bucket] + rank + 1",
        ON_EXPERTS,
    ),
    (
        "sorted-starts-without-padding",
        f"{SORTED}:sorted_rows",
        "(counts[:experts] + tile - 1) // tile * tile",
        "counts[:experts]",
        ON_EXPERTS,
    ),
    ("sorted-owner-at-the-end", f"{SORTED}:sorted_rows", "right=True", "right=False", ON_EXPERTS),
    (
        "sorted-ids-of-nobody",
        f"{SORTED}:sorted_rows",
        "(flat >= 0) & (flat < experts)",
        "flat >= 0",
        ON_EXPERTS,
    ),
    (
        "sorted-codes-of-another-token",
        f"{SORTED}:run",
        "x_scale.view(torch.uint8)[token]",
        "x_scale.view(torch.uint8)[token.roll(1)]",
        ON_EXPERTS,
    ),
    (
        "sorted-weights-unspread",
        f"{SORTED}:run",
        "weight=spread(expert_weights.flatten())",
        "weight=spread(expert_weights.T.flatten())",
        ON_EXPERTS,
    ),
    (
        "sorted-tokens-of-the-columns",
        f"{SORTED}:run",
        ".repeat_interleave(top_k)",
        ".repeat(top_k)",
        ON_EXPERTS,
    ),
    ("sorted-without-the-first-expert", f"{SORTED}:run", "range(1, top_k)", "range(2, top_k)", ON_EXPERTS),
    (
        "sorted-without-shared",
        f"{SORTED}:run",
        "total if shared is None else total + shared.float()",
        "total",
        ON_EXPERTS,
    ),
    (
        "sorted-rows-of-nobody-are-read",
        f"{SORTED}:run",
        "torch.where((owner[place] >= 0)[:, None], y[place], 0)",
        "y[place]",
        ON_EXPERTS,
    ),
]
