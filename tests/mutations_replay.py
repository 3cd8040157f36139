"""Mistakes of bounded replay in the model that are easily made; see `tests.mutations`."""

FORWARD = "dsv41.layers.replayed:ReplayedForward"
CHECKS = "tests.replay.test_replay_model"

MUTATIONS = [
    (
        "replay-decoder-floor-ignored",
        f"{FORWARD}.decode_rows",
        "plan.max_q_len, replay.floor)",
        "plan.max_q_len)",
        f"{CHECKS}:check_modes",
    ),
    (
        "replay-dead-rows-see-entries",
        f"{FORWARD}.decode_rows",
        "torch.where(replay.attends, count, 0)",
        "count",
        f"{CHECKS}:check_windows",
    ),
    (
        "replay-entries-of-kept-rows-only",
        f"{FORWARD}.write_global_kv",
        "layer.attn.write_entries(h, self.step, self.state)",
        "layer.attn.write_entries(h[self.replay.rows], self.step.rows(self.replay.rows), self.state)",
        f"{CHECKS}:check_writes",
    ),
    (
        "replay-first-layer-always-segment",
        f"{FORWARD}.write_global_kv",
        "if plan.first_layer_differs:",
        "if False:",
        f"{CHECKS}:check_writes",
    ),
    (
        "replay-hit-rewrites-entries",
        f"{FORWARD}.__init__",
        "torch.where(replay.writes_entries, s, -1)",
        "s",
        f"{CHECKS}:check_hit",
    ),
    (
        "replay-draft-inputs-at-packed-place",
        f"{FORWARD}.decode_rows",
        "self.draft_inputs, replay.rows)",
        "self.draft_inputs, torch.arange(plan.num_rows))",
        f"{CHECKS}:check_prefill",
    ),
]
