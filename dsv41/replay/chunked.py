"""A whole prompt under bounded replay, chunk by chunk. Imports torch: not imported by `dsv41.replay`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .._op import check_tensor
from .config import ReplayConfig, ReplayGeometry, check, check_int, check_kind
from .device import DevicePlan, to_device
from .encoder import plan_encoder_hit
from .plan import plan_decoder
from .spans import RequestSpan


def planner(
    config: ReplayConfig, geometry: ReplayGeometry, device: torch.device | str = "cpu"
) -> Callable[[Iterable[tuple[int, int, int]]], DevicePlan]:
    """For loops that make their own steps (`dsv41.spec.generate`): (rows, end, prompt length)s to their
    plan.
    """

    def plan(steps: Iterable[tuple[int, int, int]]) -> DevicePlan:
        spans = [RequestSpan(rows, end, length) for rows, end, length in steps]
        return to_device(plan_decoder(config, geometry, spans), device)

    return plan


def plan_prompt(
    config: ReplayConfig,
    geometry: ReplayGeometry,
    length: int,
    chunk: int | None = None,
    *,
    start: int = 0,
    hit_end: int = 0,
    request: int = 0,
    num_requests: int = 1,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[int, int, DevicePlan]]:
    """Chunks of one prompt: (first position, end, plan of the chunk).

    Args:
        config, geometry: as in `plan_decoder`.
        length: tokens of the prompt.
        chunk: tokens a chunk at most; None is one chunk.
        start: first position that runs; more than 0 only behind a prefix hit (`EncoderReplay.start`).
        hit_end: end of that hit.
        request, num_requests: the prompt's place in a batch whose other requests have no row.
        device: of the plans.

    Raises, when the first chunk is asked for:
        ReplayConfigError: `chunk` below 1, `request` not one of `num_requests`, or as `plan_decoder`.
    """
    _check_request(request, num_requests)
    size = max(1, length - start) if chunk is None else chunk
    check_int("plan_prompt.chunk", size, 1)
    for first in range(start, length, size):
        end = min(first + size, length)
        spans = [RequestSpan(0, 0)] * num_requests
        spans[request] = RequestSpan(end - first, end, length, swa_start=start, hit_end=hit_end)
        yield first, end, to_device(plan_decoder(config, geometry, spans), device)


def _check_request(request: object, num_requests: int) -> None:
    # A negative one would count from the end in one place and name no rows in the next.
    check_int("prefill.request", request, 0)
    check(
        isinstance(request, int) and request < num_requests,
        f"prefill: expected request: below the {num_requests} of the batch, got {request}; pass its number",
    )


def prefill(
    model: Any,
    tokens: torch.Tensor,
    state: Any,
    config: ReplayConfig,
    *,
    geometry: ReplayGeometry | None = None,
    chunk: int | None = None,
    request: int = 0,
    hit_end: int = 0,
    draft_inputs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Prefill one request of a state and return the logits of its last token.

    Args:
        model: a `dsv41.layers.V41Flash`, or anything with its ``cfg`` and ``forward``.
        tokens: [length] int32 or int64, the whole prompt, at least one token.
        state: its caches; the request is empty, the others are left as they are.
        config: how much of the prompt runs in the decoder layers; with a hit in mode off, ``keep`` still says
            how far the encoder's replay reaches back.
        geometry: default, that of the model with its own draft block.
        chunk: tokens a forward at most; None is one forward.
        request: which request of the state.
        hit_end: tokens whose compressed entries the request's pages already hold (even); no window row is
            expected of them, `plan_encoder_hit` says which rows run again.
        draft_inputs: [length, *] bf16 as `V41Flash.forward` takes it, or None. Rows that do not run are not
            written.

    Returns:
        [1, vocab_size] f32.

    Raises:
        ReplayConfigError, before anything of `state` changes: no token, a request that is not there or not
            empty, a `chunk`, `keep` or `hit_end` that cannot be.
        ValueError: tokens of another shape or type, and what `model` refuses.
    """
    check_tensor("prefill", "tokens", tokens, (None,), torch.int32, torch.int64)
    check_kind("prefill.config", config, ReplayConfig)
    _check_request(request, state.num_requests)
    if chunk is not None:
        check_int("prefill.chunk", chunk, 1)
    check_int("prefill.hit_end", hit_end, 0)
    length = tokens.shape[0]
    check(length > 0, "prefill: expected tokens: at least 1, got 0; pass the prompt")
    held = int(state.lens[request])
    check(
        held == 0,
        f"prefill: expected request {request} to hold 0 tokens, got {held}; reset it, or plan the turn with "
        "RequestSpan(decoder_live_start=...)",
    )
    geometry = geometry or ReplayGeometry.from_config(model.cfg)
    config.check_keep(geometry)
    start = 0
    if hit_end:
        keep = max(config.keep, geometry.min_keep)
        start = plan_encoder_hit(geometry, hit_end, length, keep).start
        state.adopt(request, tokens[:start])
    bounds = torch.zeros(state.num_requests + 1, dtype=torch.int32, device=tokens.device)
    logits = torch.empty(0)
    plans = plan_prompt(
        config,
        geometry,
        length,
        chunk,
        start=start,
        hit_end=hit_end,
        request=request,
        num_requests=state.num_requests,
        device=tokens.device,
    )
    for first, end, plan in plans:
        bounds[request + 1 :] = end - first
        logits = model(
            tokens[first:end],
            torch.arange(first, end, dtype=torch.int32, device=tokens.device),
            state,
            cu_seqlens=bounds,
            max_len=end - first,
            rows=plan.logits_row[request : request + 1].long() if end == length else plan.rows[:0],
            draft_inputs=None if draft_inputs is None else draft_inputs[first:end],
            replay=plan,
        )
    return logits
