"""Splitting a draft budget over the requests of a step, and the ragged layout that follows from it.

Everything is integer arithmetic on the bit patterns of fp32 survivals, so a kernel on any device can agree
bit for bit.
"""

import torch
from torch import Tensor

SMALLEST_NORMAL = 2.0**-126
"""Smaller survivals count as 0, so that devices which flush subnormal numbers agree with the others."""


def survival(confidence: Tensor) -> tuple[Tensor, Tensor]:
    """Running product of conditional confidences along a row.

        a[i, j] = c[i, 0] * c[i, 1] * ... * c[i, j],   each factor clamped to [0, 1], NaN and infinities read
        as 0

    Args:
        confidence: [num_requests, block] conditional acceptance probabilities.

    Returns:
        (survival, invalid): [num_requests, block] f32, non-increasing along a row, and a bool mask of the
        slots that were NaN or infinite.
    """
    c = confidence.to(torch.float32)
    invalid = ~torch.isfinite(c)
    c = torch.where(invalid, 0.0, c.clamp(0.0, 1.0))
    columns, product = [], torch.ones_like(c[:, 0])
    # One factor after the other: a scan that re-associates could round a longer product above a shorter one.
    for j in range(c.shape[1]):
        product = flush(product * c[:, j])
        columns.append(product)
    return torch.stack(columns, dim=1), invalid


def flush(x: Tensor) -> Tensor:
    """Non-negative ``x`` with subnormal values replaced by 0."""
    return torch.where(x < SMALLEST_NORMAL, 0.0, x)


def split_budget_ragged(
    confidence: Tensor,
    lo: Tensor,
    hi: Tensor,
    base: Tensor,
    bonus: Tensor,
    start: Tensor,
    weights: Tensor,
    budget: Tensor,
    num_requests: Tensor,
    rotation: Tensor,
    lengths: Tensor,
    cu_q: Tensor,
    cu_logits: Tensor,
    token_request_ids: Tensor,
    positions: Tensor,
    logits_ids: Tensor,
    stats: Tensor,
) -> None:
    """Give ``budget`` draft tokens to the requests and write the ragged layout of the step.

    Slots of row i run over ``lo[i] <= j < hi[i]``. Beyond the floors, the slots with the largest key win, in
    the total
    order (weight * survival falling, (i + rotation) mod num_requests rising, j rising). Survivals do not grow
    along a row and ties inside a row go to the shallower slot, hence a row takes a prefix and draft j never
    depends on what the confidences say about j + 1 and later.

    Args:
        confidence: [max_requests, block] conditional acceptance probabilities of the current drafts.
        lo: [max_requests] int32, drafts a row gets whatever the budget (cut to ``hi``).
        hi: [max_requests] int32, drafts available to a row (or fewer, as a cap).
        base: [max_requests] int32, tokens of the row before its drafts (1 for the anchor, more in a prefill
            chunk).
        bonus: [max_requests] int32, 1 where the row emits a token in this step; other rows take no drafts.
        start: [max_requests] int64, position of the row's first token.
        weights: [max_requests] f32; anything not finite and positive reads as 0.
        budget: [1] int32, drafts of the whole step; clamped to [sum lo, sum hi].
        num_requests: [1] int32, rows in use.
        rotation: [1] int32, the step counter, which moves the tie break from row to row.
        lengths: [max_requests] int32, drafts of each row.
        cu_q: [max_requests + 1] int32, exclusive sums of base + lengths.
        cu_logits: [max_requests + 1] int32, exclusive sums of bonus + lengths.
        token_request_ids: [max_tokens] int32, row of each token, -1 beyond the last.
        positions: [max_tokens] int64, position of each token, 0 beyond the last.
        logits_ids: [max_logits] int32, token whose logits row this is, -1 beyond the last.
        stats: [5] int64: tokens, logits rows, drafts, candidate slots that were NaN or infinite, and the sum
            of the admitted survivals in units of 2**-24 (an integer, so that its order of summation cannot
            show).
    """
    max_requests, block = confidence.shape
    device = confidence.device
    row = torch.arange(max_requests, device=device)
    column = torch.arange(block, device=device)
    live = row < num_requests
    emits = live & (bonus != 0)
    cap = torch.where(emits, hi.to(torch.int64).clamp(0, block), 0)
    floor = torch.minimum(lo.to(torch.int64).clamp(min=0), cap)

    a, invalid = survival(confidence)
    w = weights.to(torch.float32)
    w = torch.where(torch.isfinite(w) & (w > 0), w, 0.0)
    # A finite weight times a survival may still overflow to inf, whose bit pattern sorts last as it should.
    key = flush(w[:, None] * a).view(torch.int32).to(torch.int64)

    turn = torch.remainder(row + rotation.to(torch.int64), num_requests.to(torch.int64).clamp(min=1))
    slots = max_requests * block
    order = turn[:, None] * block + column
    candidate = (column >= floor[:, None]) & (column < cap[:, None])
    rank_key = torch.where(candidate, key * slots + (slots - 1 - order), -1).flatten()
    wanted = (budget.to(torch.int64) - floor.sum()).clamp(min=0).minimum(candidate.sum())
    descending = torch.sort(rank_key, descending=True).values
    last = descending.gather(0, (wanted - 1).clamp(min=0).reshape(1))
    taken = candidate & (rank_key >= last).view(max_requests, block) & (wanted > 0)
    drafts = floor + taken.sum(1)

    tokens = torch.where(
        live, torch.maximum(base.to(torch.int64).clamp(min=0), emits.to(torch.int64)) + drafts, 0
    )
    ends_q = tokens.cumsum(0)
    ends_logits = (emits + drafts).cumsum(0)
    lengths.copy_(drafts)
    for cu, ends in ((cu_q, ends_q), (cu_logits, ends_logits)):
        cu[:1].zero_()
        cu[1:].copy_(ends)

    token = torch.arange(token_request_ids.shape[0], device=device)
    owner, owned = _owner(ends_q, token)
    token_request_ids.copy_(torch.where(owned, owner, -1))
    positions.copy_(torch.where(owned, start.to(torch.int64)[owner] + token - (ends_q - tokens)[owner], 0))

    logits_row = torch.arange(logits_ids.shape[0], device=device)
    owner, owned = _owner(ends_logits, logits_row)
    logits_ids.copy_(torch.where(owned, ends_q[owner] - (ends_logits[owner] - logits_row), -1))

    admitted = column < drafts[:, None]
    stats.copy_(
        torch.stack(
            (
                ends_q[-1],
                ends_logits[-1],
                drafts.sum(),
                (invalid & (column < cap[:, None])).sum(),
                torch.where(admitted, (a * 2.0**24).to(torch.int64), 0).sum(),
            )
        )
    )


def _owner(ends: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
    """Row that owns each item under the inclusive sums ``ends``, and whether any does."""
    owner = torch.searchsorted(ends, item, right=True)
    return owner.clamp(max=ends.shape[0] - 1), owner < ends.shape[0]
