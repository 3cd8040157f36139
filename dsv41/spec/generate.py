"""Generation with drafts, offline: one batch, every request from its prompt to its end. Not an engine."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from .._op import check, check_tensor
from ..ops.draft import DraftBlock
from ..ops.verify import RaggedSplit, split_budget_ragged
from ..ops.verify.api import MODES
from ._values import integer, listed, numbers
from .accept import Accepted, accept
from .budget import solve_budget_lossless
from .confidence import Calibration, StaleConfidence, survival
from .cost import StepCost
from .streams import Streams

Budget = StepCost | Callable[[int, np.ndarray], int]
Bitmask = torch.Tensor | Callable[[int, list[int]], torch.Tensor]
Sampler = Callable[[torch.Tensor, int], torch.Tensor]
# (rows, end position, prompt length) of each request in a prefill step: its plan, as the target takes it.
Replay = Callable[[list[tuple[int, int, int]]], Any]


class TargetState(Protocol):
    """What `generate` needs of the caches; `dsv41.layers.V41State` has it."""

    @property
    def lens(self) -> torch.Tensor: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def max_rollback(self) -> int: ...
    def rollback(self, lens: torch.Tensor) -> None: ...


class Drafts(Protocol):
    """What `generate` needs of a drafter; `dsv41.layers.draft.Drafter` and `OracleDrafter` have it.

    input_width: columns of the target's ``draft_inputs``, 0 for a drafter that reads none.
    write_context: called after every step and its rollback.
    __call__: drafts behind ``anchors`` [num_requests] int64 (-1: none) at positions ``state.lens``.
    """

    @property
    def input_width(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    def write_context(
        self, inputs: torch.Tensor, positions: torch.Tensor, state: Any, *, cu_seqlens: torch.Tensor
    ) -> None: ...
    def __call__(self, anchors: torch.Tensor, state: Any, sample: Sampler | None = None) -> DraftBlock: ...


class OracleDrafter:
    """Drafts the given texts, corrupted at random: a stand-in for a trained drafter in tests and demos.

    Draft j is right with a probability drawn for it, which is also its confidence: exactly calibrated.
    All draws are a function of (seed, request, position of the anchor), whoever else is in the batch.

    Args:
        texts: of each request, prompt and continuation, ids below ``vocab_size``; where a text ends its
            drafts end.
        block_size: drafts a block.
        vocab_size: a wrong draft is another id below it.
        error: mean probability that a draft is wrong, 0 to 1.
        seed: of the draws, >= 0.
    """

    input_width = 0

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        block_size: int,
        vocab_size: int,
        *,
        error: float = 0.3,
        seed: int = 0,
    ):
        name = "OracleDrafter"
        check(0 <= error <= 1, name, "error: 0 to 1", error)
        block_size, seed = integer(name, "block_size", block_size), integer(name, "seed", seed, 0)
        check(block_size > 0 and vocab_size > 1, name, "a block and two tokens", block_size)
        self.texts = [_ids(name, "texts", text, vocab_size - 1) for text in texts]
        self.block_size, self.vocab_size, self.error, self.seed = block_size, vocab_size, error, seed

    def write_context(self, *_: Any, **__: Any) -> None:
        """Nothing to keep."""

    def __call__(self, anchors: torch.Tensor, state: TargetState, sample: Any = None) -> DraftBlock:
        """One-hot drafts: no logits, ``sample`` is not asked."""
        held = len(self.texts)
        check(held >= len(anchors), "OracleDrafter", f"texts of {len(anchors)} requests", held)
        tokens = np.full((len(anchors), self.block_size), -1, np.int64)
        logits = np.zeros(tokens.shape, np.float32)
        for r, (anchor, place) in enumerate(zip(anchors.tolist(), state.lens.tolist(), strict=True)):
            if anchor < 0:
                continue
            draw = np.random.default_rng((self.seed, r, place))
            wrong = np.clip(2 * self.error * draw.random(self.block_size), 1e-6, 1 - 1e-6)
            logits[r] = np.log1p(-wrong) - np.log(wrong)
            falls = draw.random(self.block_size) < wrong
            shift = draw.integers(1, self.vocab_size, self.block_size)
            right = np.array(self.texts[r][place + 1 : place + 1 + self.block_size], np.int64)
            wrong_token = (right + shift[: len(right)]) % self.vocab_size
            tokens[r, : len(right)] = np.where(falls[: len(right)], wrong_token, right)
        device = anchors.device
        return DraftBlock(torch.from_numpy(tokens).to(device), None, torch.from_numpy(logits).to(device))


@dataclass
class DraftCounts:
    """What drafting did, counted over the steps of every request behind its prompt.

    steps: target forwards behind the prompts. request_steps: live requests, summed over them.
    offered: [block] how often draft j was there. verified: [block] how often it was verified.
    reached: [block] how often it was verified and those before it stayed.
    accepted: [block] how often it stayed.
    lengths: [block + 1] how often exactly so many drafts of a request stayed.
    invalid: confidences that were NaN or infinite.
    """

    steps: int
    request_steps: int
    offered: np.ndarray
    verified: np.ndarray
    reached: np.ndarray
    accepted: np.ndarray
    lengths: np.ndarray
    invalid: int

    @classmethod
    def of(cls, block: int) -> "DraftCounts":
        """Nothing counted yet."""
        offered, verified, reached, accepted = (np.zeros(block, np.int64) for _ in range(4))
        return cls(0, 0, offered, verified, reached, accepted, np.zeros(block + 1, np.int64), 0)

    def add(self, offered: np.ndarray, verified: np.ndarray, accepted: np.ndarray, invalid: int) -> None:
        """Count one step: drafts [num_live] that were there, were verified, stayed."""
        draft = np.arange(len(self.offered))
        stayed, tried = accepted[:, None] > draft, verified[:, None] > draft
        self.offered += (offered[:, None] > draft).sum(0)
        self.verified += tried.sum(0)
        self.reached += (tried & (accepted[:, None] >= draft)).sum(0)
        self.accepted += stayed.sum(0)
        self.lengths += np.bincount(accepted, minlength=len(self.lengths))
        self.steps += 1
        self.request_steps += len(accepted)
        self.invalid += invalid

    @property
    def verified_rows(self) -> int:
        """Rows of the target behind the prompts, anchors included."""
        return self.request_steps + int(self.verified.sum())

    @property
    def saved_rows(self) -> int:
        """Rows that the drafts which were there would have taken, and the budget did not give them."""
        return int((self.offered - self.verified).sum())

    @property
    def acceptance(self) -> np.ndarray:
        """[block] share of draft j that stays once it is reached; NaN where it never is."""
        with np.errstate(invalid="ignore"):
            return self.accepted / self.reached


@dataclass(frozen=True)
class Generated:
    """tokens: new ids of each request. stopped: whether its last one is a stop id. counts: of the drafts."""

    tokens: list[list[int]]
    stopped: list[bool]
    counts: DraftCounts


class _Batch:
    """The requests of one `generate`: their texts on the host, and what every verification needs."""

    def __init__(
        self,
        prompts: list[list[int]],
        new: list[int],
        stop_ids: frozenset[int],
        block: int,
        law: dict[str, Any],
    ):
        self.prompts, self.texts = prompts, [list(prompt) for prompt in prompts]
        self.limits = [len(prompt) + count for prompt, count in zip(prompts, new, strict=True)]
        self.stop, self.block, self.law = stop_ids, block, law
        self.stopped = [False] * len(prompts)

    def remaining(self) -> np.ndarray:
        """[num_requests] tokens that each may still emit."""
        left = [limit - len(text) for limit, text in zip(self.limits, self.texts, strict=True)]
        return np.where(self.stopped, 0, left)

    def verify(
        self, logits: torch.Tensor, cu_logits: torch.Tensor, drafts: DraftBlock, positions: torch.Tensor
    ) -> Accepted:
        """What the target says to the drafts behind ``positions``, recorded in the texts."""
        law = dict(self.law)
        mask = law.pop("bitmask")
        if mask is not None:
            law["bitmask"] = self.mask_rows(mask, cu_logits.tolist(), drafts.tokens.tolist()).to(
                logits.device
            )
        result = accept(
            logits, cu_logits, drafts.tokens, positions=positions, draft_logits=drafts.logits, **law
        )
        for r, (emitted, left) in enumerate(zip(result.lists(), self.remaining(), strict=True)):
            emitted = emitted[:left]
            ends = [i for i, token in enumerate(emitted) if token in self.stop]
            self.texts[r] += emitted[: ends[0] + 1] if ends else emitted
            self.stopped[r] |= bool(ends)
        return result

    def mask_rows(self, mask: Bitmask, cu: list[int], drafts: list[list[int]]) -> torch.Tensor:
        """Bitmask [num_logits, words] int32: the request's own, or the one behind its text and drafts."""
        rows = []
        for r, text in enumerate(self.texts):
            for k in range(cu[r + 1] - cu[r]):
                row = mask[r] if isinstance(mask, torch.Tensor) else mask(r, text + drafts[r][:k])
                label = f"bitmask of request {self.law['names'][r]}"
                words = rows[0].shape[0] if rows else None
                check_tensor("generate", label, row, (words,), torch.int32, like=rows[0] if rows else None)
                rows.append(row)
        return torch.stack(rows)

    def lens(self, device: torch.device) -> torch.Tensor:
        """[num_requests] int32 tokens that the target keeps: all of a text but its last."""
        return torch.tensor([len(text) - 1 for text in self.texts], dtype=torch.int32, device=device)

    def anchors(self, device: torch.device) -> torch.Tensor:
        """[num_requests] int64 last tokens; -1 where nothing is left to emit."""
        left = self.remaining()
        last = [text[-1] if left[r] > 0 else -1 for r, text in enumerate(self.texts)]
        return torch.tensor(last, dtype=torch.int64, device=device)


def generate(
    model: Callable[..., torch.Tensor],
    state: TargetState,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    drafter: Drafts | None = None,
    budget: Budget | None = None,
    calibration: Calibration | None = None,
    pinned: Sequence[bool] | None = None,
    mode: str = "chain",
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] | None = None,
    top_p: float | Sequence[float] | None = None,
    bitmask: Bitmask | None = None,
    stop_ids: Iterable[int] = (),
    streams: Streams | None = None,
    names: list[str] | None = None,
    chunk: int = 512,
    replay: Replay | None = None,
) -> Generated:
    """Continue every prompt: draft, choose a budget, split it, run the target, verify, take back what fell.

    What holds one value a request may be a list, a tuple, an array or a tensor.

    The text does not depend on drafter, budget or batch mates for greedy requests and in ``coupled`` mode, if
    the target's logits do not depend on how rows are batched; in the other modes its law does not.

    Args:
        model: the target, called as `dsv41.layers.V41Flash`.
        state: its caches for ``len(prompts)`` requests, empty; afterwards they hold every text but its last
            token.
        prompts: token ids of each request, at least one.
        max_new_tokens: tokens to emit at most, one number or one a request.
        drafter: what drafts, or None for plain decoding.
        budget: how many drafts a step verifies. None: all. A StepCost: the optimum over an earlier block's
            survivals, whatever the drafts of this block turn out to be. A function of (step, survivals
            [num_live, block] of an earlier block): the integer it says.
        calibration: applied to confidence logits; None is a plain sigmoid.
        pinned: requests whose drafts are all verified whatever the budget: reproducible from their seed
            beside adaptive ones. None is none.
        mode: ``chain``, ``block`` or ``coupled``.
        temperature: 0 is greedy; one finite number or one a request.
        top_k: one integer or one a request, or None.
        top_p: one finite number or one a request, or None.
        bitmask: [num_requests, words] int32 of allowed tokens, or a function of (request, its text with the
            drafts before the row) that gives [words] int32; or None.
        stop_ids: a request ends behind one of these, which it keeps.
        streams: random streams; None is seed 0 and the request's number.
        names: what errors call the requests; None is their numbers.
        chunk: prompt tokens of a request a step.
        replay: bounded replay of the prompts, `dsv41.replay.chunked.planner`; None runs all rows everywhere.

    Returns:
        Generated.

    Errors: ValueError, naming the request, for an empty prompt, ids that are none, a text that the state
        cannot hold, or a row of logits without a law; ValueError for options of other kinds or lengths.
    """
    name = "generate"
    check(isinstance(getattr(state, "num_requests", None), int), name, "state: V41State", state)
    check(hasattr(prompts, "__len__"), name, "prompts: a list of token ids a request", prompts)
    device, requests = state.lens.device, len(prompts)
    check(requests > 0 and state.num_requests == requests, name, f"{state.num_requests} prompts", requests)
    check(not bool(state.lens.any()), name, "an empty state", state.lens.tolist())
    chunk = integer(name, "chunk", chunk)
    check(chunk > 0, name, "chunk: at least 1", chunk)
    check(mode in MODES, name, f"mode: one of {', '.join(MODES)}", mode)
    solves = budget is None or isinstance(budget, StepCost) or callable(budget)
    check(solves, name, "budget: a StepCost, a function or None", budget)
    called = [str(r) for r in range(requests)] if names is None else names
    check(len(called) == requests, name, f"names: [{requests}]", called)
    ids = [_ids(name, f"token ids of request {called[r]}", prompt) for r, prompt in enumerate(prompts)]
    new = _whole(name, "max_new_tokens", max_new_tokens, requests)
    for r, (prompt, count) in enumerate(zip(ids, new, strict=True)):
        check(bool(prompt), name, f"a prompt of at least one token for request {called[r]}", "none")
        check(count > 0, name, f"at least one new token for request {called[r]}", count)
        room = len(prompt) + count - 1
        check(room <= state.capacity, name, f"room for {room} tokens of request {called[r]}", state.capacity)
    block = 1 if drafter is None else drafter.block_size
    back = drafter is None or block <= state.max_rollback
    check(back, name, f"a state that takes back {block} tokens", state.max_rollback)
    if streams is None:
        streams = Streams.of([0] * requests, list(range(requests)), device)
    check(len(streams.seeds) == requests, name, f"streams of {requests} requests", len(streams.seeds))
    masked = bitmask is None or callable(bitmask) or isinstance(bitmask, torch.Tensor)
    check(masked, name, "bitmask: a tensor, a function or None", bitmask)
    if isinstance(bitmask, torch.Tensor):
        check_tensor(name, "bitmask", bitmask, (requests, None), torch.int32)
    heat = _floats(name, "temperature", temperature, requests, device)
    cuts = None if top_k is None else _whole(name, "top_k", top_k, requests)
    law = {
        "streams": streams,
        "temperature": heat,
        "top_k": None if cuts is None else torch.tensor(cuts, dtype=torch.int64, device=device),
        "top_p": None if top_p is None else _floats(name, "top_p", top_p, requests, device),
        "bitmask": bitmask,
        "mode": mode,
        "names": called,
    }
    check(hasattr(stop_ids, "__iter__"), name, "stop_ids: token ids", stop_ids)
    ends = frozenset(integer(name, "stop_ids: token ids", i) for i in stop_ids)
    batch = _Batch(ids, new, ends, block, law)
    pins = np.zeros(requests, bool) if pinned is None else numbers(name, "pinned", pinned).astype(bool)
    check(pins.shape == (requests,), name, f"pinned: [{requests}]", pins.shape)
    plan = _Budgets(budget, pins, StaleConfidence(requests, block))
    counts = DraftCounts.of(block)

    none = torch.full((requests, block), -1, dtype=torch.int64, device=device)
    drafts = DraftBlock(none, None, torch.zeros((requests, block), device=device))
    logits = _prefill(model, state, ids, drafter, chunk, replay)
    batch.verify(
        logits, torch.arange(requests + 1, dtype=torch.int32, device=device), drafts, state.lens.long() - 1
    )

    def sample(z: torch.Tensor, column: int) -> torch.Tensor:
        return streams.draft(z, column, state.lens.long(), heat, mode=mode)

    while (left := batch.remaining()).any():
        anchors, live = batch.anchors(device), left > 0
        if drafter is not None:
            drafts = drafter(anchors, state, sample)
        there = (drafts.tokens >= 0).long().cumprod(1).sum(1).cpu().numpy()
        most = np.maximum(left - 1, 0)
        offered = np.minimum(there, most)
        zeta = drafts.confidence
        confidence = torch.sigmoid(zeta) if calibration is None else calibration.apply(zeta)
        most = np.minimum(most, 0 if drafter is None else block)
        split = plan.split(counts.steps, confidence, state.lens, live, offered, most)
        start, rows = state.lens.long(), int(split.stats[0])
        request, positions = split.token_request_ids[:rows].long(), split.positions[:rows]
        tokens = torch.cat([anchors[:, None], drafts.tokens], 1)[request, positions - start[request]]
        step = _Step(tokens, positions.int(), split.cu_q, block + 1)
        logits, inputs = step.run(model, state, drafter)
        result = batch.verify(logits, split.cu_logits, drafts, start)
        state.rollback(batch.lens(device))
        step.keep(inputs, state, drafter)
        verified, accepted = split.lengths.cpu().numpy(), result.num_accepted.cpu().numpy()
        counts.add(offered[live], verified[live], accepted[live], int(split.stats[3]))
    fresh = [text[len(prompt) :] for text, prompt in zip(batch.texts, ids, strict=True)]
    return Generated(fresh, batch.stopped, counts)


@dataclass(frozen=True)
class _Step:
    """Rows of one target forward."""

    tokens: torch.Tensor
    positions: torch.Tensor
    cu: torch.Tensor
    max_len: int
    replay: Any = None

    def run(
        self, model: Callable[..., torch.Tensor], state: TargetState, drafter: Drafts | None, rows: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of ``rows`` (None: all), and what the drafter wants to see of all of them."""
        inputs = None
        if drafter is not None and drafter.input_width:
            shape = (len(self.tokens), drafter.input_width)
            inputs = torch.empty(shape, dtype=torch.bfloat16, device=self.tokens.device)
        logits = model(
            self.tokens,
            self.positions,
            state,
            cu_seqlens=self.cu,
            max_len=self.max_len,
            rows=rows,
            draft_inputs=inputs,
            **({} if self.replay is None else {"replay": self.replay}),
        )
        return logits, inputs

    def keep(self, inputs: torch.Tensor | None, state: TargetState, drafter: Drafts | None) -> None:
        """Let the drafter see the rows that stayed."""
        if drafter is not None and inputs is not None:
            drafter.write_context(inputs, self.positions, state, cu_seqlens=self.cu)


def _prefill(
    model: Callable[..., torch.Tensor],
    state: TargetState,
    prompts: list[list[int]],
    drafter: Drafts | None,
    chunk: int,
    replay: Replay | None,
) -> torch.Tensor:
    """Process all prompts in chunks; logits [num_requests, vocab] of their last tokens."""
    device, last = state.lens.device, {}
    for start in range(0, max(map(len, prompts)), chunk):
        pieces = [prompt[start : start + chunk] for prompt in prompts]
        ends = np.cumsum([0, *map(len, pieces)])
        done = [r for r, piece in enumerate(pieces) if piece and start + len(piece) == len(prompts[r])]
        spans = [(len(p), min(start + len(p), len(t)), len(t)) for p, t in zip(pieces, prompts, strict=True)]
        step = _Step(
            torch.tensor([token for piece in pieces for token in piece], dtype=torch.int64, device=device),
            torch.cat([torch.arange(start, start + len(piece)) for piece in pieces]).int().to(device),
            torch.from_numpy(ends).int().to(device),
            chunk,
            None if replay is None else replay(spans),
        )
        rows = torch.tensor([ends[r + 1] - 1 for r in done], dtype=torch.int64, device=device)
        if step.replay is not None:
            rows = step.replay.logits_row.long()[done]
        logits, inputs = step.run(model, state, drafter, rows)
        step.keep(inputs, state, drafter)
        last.update(zip(done, logits, strict=True))
    return torch.stack([last[r] for r in range(len(prompts))])


@dataclass(frozen=True)
class _Budgets:
    """Where each step's budget comes from."""

    budget: Budget | None
    pinned: np.ndarray
    stale: StaleConfidence

    def split(
        self,
        step: int,
        confidence: torch.Tensor,
        lens: torch.Tensor,
        live: np.ndarray,
        offered: np.ndarray,
        most: np.ndarray,
    ) -> RaggedSplit:
        """Choose the budget from the block before this one, and give it to this block's drafts.

        ``offered`` [num_requests] is how many drafts are there, ``most`` how many there can be: where a block
        ends shows what was drafted, so the search for the budget may only see the latter.
        """
        slots, first = np.flatnonzero(live), np.zeros(int(live.sum()), np.int64)
        earlier = survival(self.stale.read(step, slots, first))[0]
        self.stale.write(step, slots, first, confidence.cpu().numpy()[slots])
        lo = np.where(self.pinned, offered, 0)
        if self.budget is None:
            drafts = int(offered.sum())
        elif isinstance(self.budget, StepCost):
            drafts = solve_budget_lossless(
                self.budget,
                base_tokens=len(slots),
                stale=earlier,
                lo=np.where(self.pinned, most, 0)[slots],
                hi=most[slots],
            )
        else:
            said = integer("generate", f"budget of step {step}", self.budget(step, earlier))
            drafts = min(max(said, 0), int(offered.sum()))

        def ints(values: Any) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values, np.int32), device=lens.device)

        return split_budget_ragged(
            confidence.float().contiguous(),
            ints([drafts]),
            lo=ints(lo),
            hi=ints(offered),
            base=ints(live),
            bonus=ints(live),
            start=lens.long(),
            rotation=ints([step]),
        )


def _each(name: str, label: str, value: Any, requests: int) -> list[Any]:
    """One value a request, of one for all or a list of any kind."""
    many = isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0
    values = listed(name, label, value) if many else [value] * requests
    check(len(values) == requests, name, f"{label}: one, or {requests}", len(values))
    return values


def _whole(name: str, label: str, value: Any, requests: int) -> list[int]:
    """One integer a request; those past int32, which nothing here reaches, are its largest."""
    each = (integer(name, label, entry) for entry in _each(name, label, value, requests))
    return [min(entry, 2**31 - 1) for entry in each]


def _floats(name: str, label: str, value: Any, requests: int, device: torch.device) -> torch.Tensor:
    """[num_requests] f32, finite."""
    each = numbers(name, label, _each(name, label, value, requests)).astype(np.float32)
    finite = each.shape == (requests,) and bool(np.isfinite(each).all())
    check(finite, name, f"{label}: finite numbers", value)
    return torch.from_numpy(each).to(device)


def _ids(name: str, label: str, text: Any, high: int | None = None) -> list[int]:
    """Token ids of a list of any kind."""
    return [integer(name, label, token, 0, high) for token in listed(name, label, text)]
