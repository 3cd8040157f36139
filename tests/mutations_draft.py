"""Mistakes of drafting that are easily made; see `tests.mutations`."""

DRAFTER = "dsv41.layers.draft:Drafter"
CHECKS = "tests.layers.test_draft"
LOOP = "tests.spec.test_spec_generate"

MUTATIONS = [
    (
        "draft-block-causal",
        f"{DRAFTER}.plan",
        "row_ids=slots.view(requests, block).repeat_interleave(block, 0)",
        "row_ids=torch.where(torch.ones(block, block).tril().bool().repeat(requests, 1),"
        " slots.view(requests, block).repeat_interleave(block, 0), -1)",
        f"{CHECKS}:check_chunks",
    ),
    (
        "draft-window-one-short",
        f"{DRAFTER}.plan",
        "torch.arange(-self.cfg.window, 0",
        "torch.arange(1 - self.cfg.window, 0",
        f"{CHECKS}:check_chunks",
    ),
    (
        "draft-positions-one-late",
        f"{DRAFTER}.plan",
        "torch.arange(block, dtype=torch.int32, device=device)",
        "torch.arange(1, block + 1, dtype=torch.int32, device=device)",
        f"{CHECKS}:check_chunks",
    ),
    (
        "draft-markov-looks-at-the-anchor",
        f"{DRAFTER}.chain",
        "lookup(previous)",
        "lookup(anchors)",
        f"{CHECKS}:check_chunks",
    ),
    (
        "draft-confidence-behind-the-norm",
        f"{DRAFTER}.chain",
        "hidden = hidden.unflatten",
        "hidden = normed.unflatten",
        f"{CHECKS}:check_chunks",
    ),
    (
        "draft-ring-of-rejected-rows",
        f"{DRAFTER}.write_context",
        "(positions < lens) & ",
        "",
        f"{CHECKS}:check_rejected_rows",
    ),
    (
        "draft-targets-one-layer-late",
        "dsv41.layers.model:V41Flash.capture",
        "self.cfg.draft.target_layers, ",
        "tuple(i + 1 for i in self.cfg.draft.target_layers[:-1]) + self.cfg.draft.target_layers[-1:], ",
        f"{CHECKS}:check_behind_the_target",
    ),
    (
        "draft-noise-of-the-next-position",
        "dsv41.spec.generate:generate",
        "split.cu_logits, drafts, start)",
        "split.cu_logits, drafts, start + 1)",
        f"{LOOP}:check_coupled((30,), 2, 0, 1.0, 0.0)",
    ),
    (
        "draft-keeps-a-token-too-many",
        "dsv41.spec.generate:_Batch.lens",
        "len(text) - 1",
        "len(text)",
        f"{LOOP}:check_greedy",
    ),
    (
        "draft-budget-from-the-current-block",
        "dsv41.spec.generate:_Budgets.split",
        "self.stale.read(step, slots, first)",
        "confidence.numpy()[slots]",
        f"{LOOP}:check_stale_budget",
    ),
    (
        "draft-budget-sees-where-the-drafts-end",
        "dsv41.spec.generate:_Budgets.split",
        "hi=most[slots]",
        "hi=offered[slots]",
        f"{LOOP}:check_ends_are_not_read",
    ),
]
