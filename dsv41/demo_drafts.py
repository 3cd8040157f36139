"""Rows of the demo about drafts: the drafter against its dense twin, and text with drafts and without."""

from collections.abc import Mapping

import numpy as np
import torch
from dsv41_reference import accumulate, keep_weights
from dsv41_reference.draft import V41ReferenceDraft

from .demo import Report, largest, place
from .layers import V41Flash, V41State
from .spec import DraftCounts, OracleDrafter, StepCost, generate

NEW_TOKENS, REAL_TOKENS = 12, 5
# Seconds of a step by its rows, made up for the demo: two captured sizes, the larger one dear.
COST = StepCost([4, 8, 12], [1.0, 1.1, 1.9])


def draft_stages(
    report: Report,
    model: V41Flash,
    ids: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    trace: dict[str, torch.Tensor],
) -> None:
    """All rows.

    Args:
        report: receives them.
        model: built with its drafter, loaded.
        ids: [num_tokens] the demo's text.
        weights: the checkpoint, for the dense drafter.
        trace: of the dense model over a text that starts with ``ids``.
    """
    cfg, drafter = model.cfg, model.mtp
    assert drafter is not None
    prompts = [ids[:24].tolist(), ids[-16:].tolist()]
    length = len(prompts[0])
    with accumulate(torch.float64), keep_weights():
        state = V41State.allocate(cfg, 1, length, drafter=True)
        inputs = torch.empty((length, drafter.input_width), dtype=torch.bfloat16)
        model(ids[:length], place(0, length), state, rows=torch.tensor([0]), draft_inputs=inputs)
        drafter.write_context(inputs, place(0, length), state)
        anchor = int(ids[length % len(ids)])
        block = drafter(torch.tensor([anchor]), state)
        targets = torch.cat([trace[f"target.{i}"][:length] for i in cfg.draft.target_layers], 1)
        tokens, logits, confidence = V41ReferenceDraft(cfg, weights).forward(targets, anchor)
        assert block.logits is not None
        parts = ((block.tokens, tokens), (block.logits, logits), (block.confidence, confidence))
        difference = max(largest(ours[0].double(), theirs.double()) for ours, theirs in parts)
        report.add(
            "drafter", drafter.block_size, difference, "drafts, logits, confidences = the dense drafter's"
        )

        def written(count: int, **options: object) -> tuple[list[list[int]], DraftCounts]:
            room = max(map(len, prompts)) + count
            caches = V41State.allocate(cfg, len(prompts), room, drafter=True)
            done = generate(model, caches, prompts, max_new_tokens=count, **options)  # type: ignore[arg-type]
            return done.tokens, done.counts

        plain, _ = written(NEW_TOKENS)
        report.add("plain text", 2 * NEW_TOKENS, None, "two requests, greedy, without drafts")

        text, counts = written(REAL_TOKENS, drafter=drafter)
        want = [request[:REAL_TOKENS] for request in plain]
        report.add(
            "own drafts", 2 * REAL_TOKENS, differing(text, want), "the same text; " + acceptance(counts)
        )

        texts = [prompt + request for prompt, request in zip(prompts, plain, strict=True)]
        oracle = OracleDrafter(texts, drafter.block_size, cfg.vocab_size, error=0.2)
        text, counts = written(NEW_TOKENS, drafter=oracle)
        report.add(
            "oracle drafts", 2 * NEW_TOKENS, differing(text, plain), "the same text; " + acceptance(counts)
        )

        text, counts = written(NEW_TOKENS, drafter=oracle, budget=COST)
        saved = (
            f"the same text; {counts.verified_rows} rows verified, {counts.saved_rows} saved by the budget"
        )
        report.add("draft budget", 2 * NEW_TOKENS, differing(text, plain), saved)


def differing(text: list[list[int]], want: list[list[int]]) -> float:
    """Tokens that differ."""
    return float(np.sum(np.array(text) != np.array(want)))


def acceptance(counts: DraftCounts) -> str:
    """Steps, and how many drafts stayed of those that were reached, by position."""
    pairs = zip(counts.accepted, counts.reached, strict=True)
    shares = " ".join(f"{stayed}/{reached}" for stayed, reached in pairs)
    return f"{counts.steps} steps, drafts kept by position {shares}"
