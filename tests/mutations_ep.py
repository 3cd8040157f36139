"""Mistakes of expert parallel that are easily made; see `tests.test_mutations`."""

LIVE, HANDLE, LAYERS = (
    "dsv41.eplb.live:LiveExperts",
    "dsv41.ops.exchange.handle",
    "dsv41.layers.expert_parallel",
)
REFERENCE, OPS = "dsv41_reference.exchange", "tests.ep.test_exchange_ops"
EXCHANGE, MODEL, MOVING = "tests.ep.test_exchange", "tests.ep.test_layers", "tests.ep.test_live"
EVERY_SLOT = f"{MOVING}:test_every_slot_gets_what_the_plan_says(1)"

MUTATIONS = [
    (
        "ep-global-slot-sent",
        f"{REFERENCE}:exchange_pack",
        "slots.flatten()[pair] % slots_per_rank",
        "slots.flatten()[pair]",
        f"{OPS}:test_records_hold_what_was_packed",
    ),
    (
        "ep-sum-in-another-order",
        f"{REFERENCE}:exchange_combine",
        "in range(place.shape[1])",
        "in reversed(range(place.shape[1]))",
        f"{EXCHANGE}:test_the_order_of_the_sum_is_the_order_of_the_experts_not_of_the_ranks",
    ),
    (
        "ep-overflow-of-the-fullest-rank-only",
        f"{HANDLE}:Exchange.lost",
        "self.overflow.sum()",
        "self.overflow.amin()",
        f"{EXCHANGE}:test_pairs_past_the_capacity_are_counted_on_every_rank",
    ),
    (
        "ep-a-difference-is-no-matter",
        "dsv41.ops.exchange.peers:agree",
        "if value != common",
        "if False",
        f"{EXCHANGE}:test_ranks_that_differ_are_named",
    ),
    (
        "ep-padding-is-sent",
        f"{LAYERS}:EPLayer.dispatch",
        "ids = torch.where(g.live, ids, -1)",
        "pass",
        f"{MODEL}:test_counts_are_of_real_tokens",
    ),
    (
        "ep-overflow-is-kept",
        f"{LAYERS}:forward_complete",
        "any(group.exchange.lost())",
        "any(group.exchange.lost()) and False",
        f"{MODEL}:test_an_overflow_is_counted_and_the_step_repeated_exactly",
    ),
    (
        "ep-loads-of-the-planner-only",
        f"{LIVE}.propose",
        "self.ranks.all_reduce(total)",
        "pass",
        f"{MOVING}:test_the_loads_of_all_ranks_make_the_plan",
    ),
    (
        "ep-tensors-in-two-orders",
        f"{LIVE}._stage",
        "for _, t in sorted(tensors.items())",
        "for _, t in tensors.items()",
        EVERY_SLOT,
    ),
    (
        "ep-the-slot-beside",
        f"{LIVE}._write",
        "move.dst_slot - move.dst_rank * self.slots_per_rank",
        "(move.dst_slot + 1) % self.slots_per_rank",
        EVERY_SLOT,
    ),
    ("ep-old-table", f"{LIVE}._serve", "table[layer] = decision.table[layer]", "pass", EVERY_SLOT),
    (
        "ep-checksums-not-compared",
        f"{LIVE}.advance",
        'if sums != votes[int(source)]["sent"][str(r)]',
        "if False",
        f"{MOVING}:test_other_bytes_than_were_sent_leave_the_old_map",
    ),
    (
        "ep-maps-not-compared",
        f"{LIVE}._agree",
        "if facts[key] != common",
        "if False",
        f"{MOVING}:test_maps_that_disagree_are_refused_with_the_rank",
    ),
]
