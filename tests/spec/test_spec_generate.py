"""The generation loop: a toy target for the many cases, the model for rollback through every cache."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from dsv41_reference import accumulate, keep_weights
from dsv41_reference.draft import V41ReferenceDraft
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.layers import V41State
from dsv41.ops.draft import DraftBlock
from dsv41.spec import Generated, OracleDrafter, StepCost, Streams, generate
from tests import models
from tests.layers.test_draft import assert_rings

VOCAB, BLOCK = 24, 5


@dataclasses.dataclass
class ToyState:
    """The texts themselves are the cache; a rejected token stays until it is overwritten."""

    lens: torch.Tensor
    held: torch.Tensor

    max_rollback = BLOCK

    @classmethod
    def of(cls, requests: int, room: int = 80) -> "ToyState":
        return cls(torch.zeros(requests, dtype=torch.int32), torch.zeros(requests, room, dtype=torch.int64))

    @property
    def num_requests(self) -> int:
        return len(self.lens)

    @property
    def capacity(self) -> int:
        return self.held.shape[1]

    def rollback(self, lens: torch.Tensor) -> None:
        assert (lens <= self.lens).all() and (lens >= self.lens - self.max_rollback).all()
        self.lens.copy_(lens)


class ToyTarget:
    """The law of a token depends on the two before it and on nothing else."""

    def __init__(self, vocab: int = VOCAB, heat: float = 2.0, seed: int = 0):
        draw = torch.Generator().manual_seed(seed)
        self.vocab, self.table = vocab, heat * torch.randn(vocab, vocab, vocab, generator=draw)

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, state: ToyState, **step: Any
    ) -> torch.Tensor:
        cu, rows = step["cu_seqlens"].tolist(), step["rows"]
        out = torch.empty(len(tokens), self.vocab)
        assert ((tokens >= 0) & (tokens < self.vocab)).all()
        for r in range(state.num_requests):
            for i in range(cu[r], cu[r + 1]):
                place = int(positions[i])
                assert place == int(state.lens[r]) + i - cu[r]
                state.held[r, place] = tokens[i]
                out[i] = self.table[state.held[r, place - 1] if place else 0, tokens[i]]
        state.lens.add_(step["cu_seqlens"].diff())
        return out if rows is None else out[rows]


class ToyDrafter:
    """Draws from a disturbed target law; confidences are arbitrary."""

    input_width, block_size = 0, BLOCK

    def __init__(self, target: ToyTarget, noise: float = 1.0, seed: int = 1):
        draw = torch.Generator().manual_seed(seed)
        self.table = target.table + noise * torch.randn(target.table.shape, generator=draw)

    def write_context(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a drafter without inputs is not shown any")

    def __call__(self, anchors: torch.Tensor, state: ToyState, sample: Any = None) -> DraftBlock:
        before = state.held[torch.arange(len(anchors)), (state.lens.long() - 1).clamp(min=0)]
        last, tokens, logits = anchors.clamp(min=0), [], []
        for column in range(self.block_size):
            logits.append(self.table[before, last])
            before, last = last, sample(logits[-1], column)
            tokens.append(last)
        chosen = torch.stack(tokens, 1)
        confidence = (chosen % 3).float() - 1
        return DraftBlock(torch.where(anchors[:, None] >= 0, chosen, -1), torch.stack(logits, 1), confidence)


def prompts(requests: int, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, vocab, draw.integers(1, 9)).tolist() for _ in range(requests)]


def schedule(budgets: Sequence[int]) -> Any:
    """A budget function that walks through ``budgets`` again and again."""
    return lambda step, survival: budgets[step % len(budgets)]


def assert_counts_agree(done: Generated, prefilled: int) -> None:
    """What was counted explains the texts, but for what a stop or a limit cut."""
    counts, emitted = done.counts, sum(map(len, done.tokens))
    assert counts.lengths.sum() == counts.request_steps
    assert (counts.lengths * np.arange(len(counts.lengths))).sum() == counts.accepted.sum()
    assert emitted <= prefilled + counts.request_steps + counts.accepted.sum()
    assert counts.verified_rows == counts.request_steps + counts.verified.sum()
    assert counts.saved_rows == (counts.offered - counts.verified).sum() >= 0
    assert (counts.accepted <= counts.reached).all() and (counts.reached <= counts.verified).all()


def check_greedy(
    requests: int = 3,
    budgets: Sequence[int] = (3, 0, 9, 15),
    error: float = 0.3,
    new: int = 20,
    seed: int = 0,
) -> None:
    """With drafts = without, token for token, and the caches hold the same."""
    target, starts = ToyTarget(seed=seed), prompts(requests, seed)
    state, other = ToyState.of(requests), ToyState.of(requests)
    plain = generate(target, state, starts, max_new_tokens=new)
    texts = [a + b for a, b in zip(starts, plain.tokens, strict=True)]
    for drafter in (OracleDrafter(texts, BLOCK, VOCAB, error=error, seed=seed), ToyDrafter(target)):
        other = ToyState.of(requests)
        drafted = generate(
            target, other, starts, max_new_tokens=new, drafter=drafter, budget=schedule(budgets), chunk=3
        )
        assert drafted.tokens == plain.tokens
        assert torch.equal(other.lens, state.lens)
        for r, length in enumerate(state.lens.tolist()):
            assert other.held[r, :length].tolist() == texts[r][:length]
        assert_counts_agree(drafted, requests)
        assert drafted.counts.steps <= plain.counts.steps == new - 1


@settings(max_examples=25)
@given(
    st.integers(1, 6),
    st.lists(st.integers(-2, 40), min_size=1, max_size=8),
    st.floats(0, 1),
    st.integers(1, 25),
    st.integers(0, 100),
)
def test_greedy_text_is_the_same_under_any_budgets(
    requests: int, budgets: list[int], error: float, new: int, seed: int
) -> None:
    check_greedy(requests, budgets, error, new, seed)


def test_every_accepted_length_occurs() -> None:
    target, starts = ToyTarget(), prompts(8)
    plain = generate(target, ToyState.of(8), starts, max_new_tokens=60)
    texts = [a + b for a, b in zip(starts, plain.tokens, strict=True)]
    drafted = generate(
        target,
        ToyState.of(8),
        starts,
        max_new_tokens=60,
        drafter=OracleDrafter(texts, BLOCK, VOCAB, error=0.25),
    )
    counts = drafted.counts
    assert drafted.tokens == plain.tokens and (counts.lengths > 0).all()
    print(f"\naccepted lengths 0 to {BLOCK}: {counts.lengths.tolist()}")
    print(f"kept by position: {counts.acceptance.round(2).tolist()}")
    assert counts.saved_rows == 0 and counts.accepted.sum() > 100
    # The oracle's drafts are right as often as it says.
    assert np.all(np.abs(counts.acceptance - 0.75) < 0.15)


def check_coupled(
    budgets: Sequence[int] = (2, 7, 0, 30),
    mates: int = 3,
    seed: int = 0,
    heat: float = 1.0,
    noise: float = 1.0,
) -> None:
    """One request alone and plain = the same request among others, drafted, under any budgets."""
    target, starts = ToyTarget(seed=seed), prompts(1 + mates, seed)
    keys = [7] * (1 + mates), list(range(40, 41 + mates))
    alone = generate(
        target,
        ToyState.of(1),
        starts[:1],
        max_new_tokens=20,
        mode="coupled",
        temperature=heat,
        streams=Streams.of(keys[0][:1], keys[1][:1]),
    )
    together = generate(
        target,
        ToyState.of(1 + mates),
        starts,
        max_new_tokens=20,
        mode="coupled",
        temperature=heat,
        streams=Streams.of(*keys),
        drafter=ToyDrafter(target, noise),
        budget=schedule(budgets),
        chunk=2,
    )
    assert together.tokens[0] == alone.tokens[0]
    if noise == 0:  # the same law and the same noise: every draft stays
        assert together.counts.accepted.sum() == together.counts.verified.sum()


@settings(max_examples=20)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6),
    st.integers(0, 4),
    st.integers(0, 50),
    st.floats(0.3, 2),
    st.sampled_from([0.0, 0.5, 2.0]),
)
def test_coupled_text_is_the_same_under_any_budgets_and_mates(
    budgets: list[int], mates: int, seed: int, heat: float, noise: float
) -> None:
    check_coupled(budgets, mates, seed, heat, noise)


@pytest.mark.parametrize("mode", ["chain", "block"])
def test_pinned_requests_are_reproducible(mode: str) -> None:
    target, starts = ToyTarget(), prompts(4)

    def first(requests: int, budgets: Sequence[int], pinned: bool) -> list[int]:
        done = generate(
            target,
            ToyState.of(requests),
            starts[:requests],
            max_new_tokens=20,
            mode=mode,
            temperature=1.0,
            streams=Streams.of([3] * requests, list(range(requests))),
            drafter=ToyDrafter(target),
            budget=schedule(budgets),
            pinned=[pinned] + [False] * (requests - 1),
        )
        return done.tokens[0]

    cases = [(1, [0]), (4, [2, 9]), (3, [0, 1, 20]), (4, [20])]
    assert len({tuple(first(*case, pinned=True)) for case in cases}) == 1
    assert len({tuple(first(*case, pinned=False)) for case in cases}) > 1


@pytest.mark.parametrize("mode", ["chain", "block", "coupled"])
def test_sampled_pairs_follow_the_target(mode: str) -> None:
    """The last two of four tokens of 3000 requests against the exact law."""
    vocab, requests = 6, 3000
    target = ToyTarget(vocab, heat=1.0)
    cost = StepCost([requests, 2 * requests, 4 * requests, 6 * requests], [1.0, 1.1, 1.6, 3.0])
    done = generate(
        target,
        ToyState.of(requests, 8),
        [[1, 2]] * requests,
        max_new_tokens=4,
        mode=mode,
        temperature=1.0,
        streams=Streams.of([5] * requests, list(range(requests))),
        drafter=ToyDrafter(target),
        budget=cost,
    )
    first = torch.softmax(target.table[1, 2].double(), 0)
    second = torch.softmax(target.table[2].double(), 1)
    third = torch.softmax(target.table.double(), 2)
    law = torch.einsum("a,ab,abc,bcd->cd", first, second, third, third).numpy() * requests
    seen = np.zeros((vocab, vocab))
    for text in done.tokens:
        seen[text[2], text[3]] += 1
    chi = ((seen - law) ** 2 / law).sum()
    print(f"\n{mode}: chi-square {chi:.1f} at 35 degrees of freedom")
    assert chi < 74  # p = 1e-4 at 35 degrees of freedom
    assert done.counts.verified.sum() > requests / 4


def check_stale_budget() -> None:
    """The budget sees the survivals of the block before, and a newcomer's are 1."""
    target, starts, seen, made = ToyTarget(), prompts(2), [], []

    class Watched(ToyDrafter):
        def __call__(self, *args: Any, **kwargs: Any) -> DraftBlock:
            block = super().__call__(*args, **kwargs)
            made.append(torch.sigmoid(block.confidence).numpy().cumprod(1))
            return block

    def budget(step: int, survival: np.ndarray) -> int:
        seen.append(survival)
        return 4

    generate(target, ToyState.of(2), starts, max_new_tokens=6, drafter=Watched(target), budget=budget)
    np.testing.assert_array_equal(seen[0], np.ones((2, BLOCK)))
    for before, shown in zip(made, seen[1:], strict=False):
        if len(shown) == 2:
            np.testing.assert_allclose(shown, before, rtol=1e-6)


def test_the_budget_is_stale() -> None:
    check_stale_budget()


def test_a_cost_table_saves_rows() -> None:
    target, starts = ToyTarget(), prompts(6)
    plain = generate(target, ToyState.of(6), starts, max_new_tokens=40)
    texts = [a + b for a, b in zip(starts, plain.tokens, strict=True)]
    oracle = OracleDrafter(texts, BLOCK, VOCAB, error=0.5)
    cost = StepCost([8, 16, 24, 36], [1.0, 1.2, 2.0, 4.0])
    done = generate(target, ToyState.of(6), starts, max_new_tokens=40, drafter=oracle, budget=cost)
    assert done.tokens == plain.tokens and done.counts.saved_rows > 100
    # The split takes the likeliest drafts, so those that are verified stay more often than those offered.
    assert done.counts.accepted.sum() / done.counts.verified.sum() > 0.4


def test_stop_ids_and_limits() -> None:
    target, starts = ToyTarget(), prompts(4)
    plain = generate(target, ToyState.of(4), starts, max_new_tokens=30)
    stop = plain.tokens[0][9]
    limits = [30, 1, 7, 30]
    texts = [a + b for a, b in zip(starts, plain.tokens, strict=True)]
    for drafter in (None, OracleDrafter(texts, BLOCK, VOCAB, error=0.1)):
        state = ToyState.of(4)
        done = generate(
            target,
            state,
            starts,
            max_new_tokens=limits,
            stop_ids=[stop],
            drafter=drafter,
            budget=schedule([9, 20]),
        )
        for r, text in enumerate(plain.tokens):
            want = text[: limits[r]]
            end = want.index(stop) + 1 if stop in want else len(want)
            assert done.tokens[r] == want[:end] and done.stopped[r] == (stop in want)
            assert int(state.lens[r]) == len(starts[r]) + end - 1


def test_bitmasks() -> None:
    """A fixed mask a request, and one that looks at the text: even tokens alternate with odd ones."""
    target, starts = ToyTarget(), prompts(3)
    even = sum(1 << i for i in range(0, VOCAB, 2))
    fixed = torch.tensor([[even], [even << 1], [-1]], dtype=torch.int32)

    def alternate(request: int, text: list[int]) -> torch.Tensor:
        return torch.tensor([even if text[-1] % 2 else even << 1], dtype=torch.int32)

    for mask in (fixed, alternate):
        texts: list[list[list[int]]] = []
        for drafter in (None, ToyDrafter(target)):
            done = generate(
                target,
                ToyState.of(3),
                starts,
                max_new_tokens=15,
                bitmask=mask,
                drafter=drafter,
                budget=schedule([4, 15]),
            )
            texts.append(done.tokens)
        assert texts[0] == texts[1]
        if mask is fixed:
            assert all(t % 2 == 0 for t in texts[0][0]) and all(t % 2 for t in texts[0][1])
        else:
            for start, text in zip(starts, texts[0], strict=True):
                assert all((a + b) % 2 for a, b in zip([start[-1], *text], text, strict=False))


def test_broken_confidences_are_counted() -> None:
    target = ToyTarget()

    class Broken(ToyDrafter):
        def __call__(self, *args: Any, **kwargs: Any) -> DraftBlock:
            block = super().__call__(*args, **kwargs)
            return block._replace(confidence=block.confidence.fill_(torch.nan))

    plain = generate(target, ToyState.of(2), prompts(2), max_new_tokens=8)
    done = generate(
        target, ToyState.of(2), prompts(2), max_new_tokens=8, drafter=Broken(target), budget=schedule([3])
    )
    assert done.tokens == plain.tokens and done.counts.invalid == done.counts.offered.sum() > 0


def test_callers_mistakes_are_named() -> None:
    target = ToyTarget()

    def call(starts: Any = ((1, 2), (3,)), requests: int = 2, **options: Any) -> Generated:
        options = {"max_new_tokens": 4, "names": ["ann", "bob"]} | options
        return generate(target, ToyState.of(requests, 16), starts, **options)

    with pytest.raises(ValueError, match="expected a prompt of at least one token for request bob, got none"):
        call(((1, 2), ()))
    with pytest.raises(ValueError, match="expected 2 prompts, got 1"):
        call(((1, 2),))
    with pytest.raises(ValueError, match=r"expected room for 17 tokens of request ann, got 16"):
        call(max_new_tokens=16)
    with pytest.raises(ValueError, match="expected at least one new token for request ann, got 0"):
        call(max_new_tokens=[0, 3])
    with pytest.raises(ValueError, match="expected max_new_tokens: one, or 2, got 3"):
        call(max_new_tokens=[1, 2, 3])
    with pytest.raises(ValueError, match="expected mode: one of chain, block, coupled, got other"):
        call(mode="other")
    with pytest.raises(ValueError, match=r"expected pinned: \[2\], got"):
        call(pinned=[True])
    options: Any
    for options, message in (
        ({"max_new_tokens": 2.5}, "max_new_tokens: an integer"),
        ({"max_new_tokens": None}, "max_new_tokens: an integer"),
        ({"temperature": float("nan")}, "temperature: finite numbers"),
        ({"temperature": float("inf")}, "temperature: finite numbers"),
        ({"temperature": "hot"}, "temperature: "),
        ({"top_k": [1.5, 2]}, "top_k: an integer"),
        ({"top_k": [3]}, "top_k: one, or 2, got 1"),
        ({"top_p": [float("nan"), 1.0]}, "top_p: finite numbers"),
        ({"bitmask": torch.ones(1, 1, dtype=torch.int32)}, r"bitmask: \[2, \*\] int32"),
        ({"bitmask": [[-1], [-1]]}, "bitmask: a tensor, a function or None"),
        ({"bitmask": lambda r, text: None}, r"bitmask of request ann: \[\*\] int32, got None"),
        ({"stop_ids": 3}, "stop_ids: token ids"),
        ({"stop_ids": [1.5]}, "stop_ids: token ids"),
        ({"streams": Streams.of([0], [0])}, "streams of 2 requests"),
        ({"names": ["ann"]}, r"names: \[2\]"),
        ({"chunk": 1.5}, "chunk: an integer"),
        ({"budget": 3}, "budget: a StepCost, a function or None, got 3"),
        ({"budget": lambda step, a: None, "drafter": ToyDrafter(target)}, "budget of step 0: an integer"),
        (
            {"budget": lambda step, a: float("nan"), "drafter": ToyDrafter(target)},
            "budget of step 0: an integer",
        ),
        ({"starts": ((1, 2), (1.5,))}, "token ids of request bob: an integer"),
        ({"starts": ((-1, 2), (1,))}, "token ids of request ann: an integer from 0"),
        ({"starts": (1, 2)}, "token ids of request ann"),
        ({"drafter": OracleDrafter([[1, 2]], BLOCK, VOCAB)}, "texts of 2 requests, got 1"),
    ):
        with pytest.raises(ValueError, match=f": expected {message}"):
            call(**options)
    for wrong in ((1, VOCAB), (-1,)):
        with pytest.raises(
            ValueError, match=f"OracleDrafter: expected texts: an integer from 0 to {VOCAB - 1}"
        ):
            OracleDrafter([wrong], BLOCK, VOCAB)
    with pytest.raises(ValueError, match="expected an empty state"):
        state = ToyState.of(1)
        state.lens.fill_(1)
        generate(target, state, [[1]], max_new_tokens=1)
    with pytest.raises(ValueError, match=r"no NaN or \+inf, got .* only -inf in row 0 of request bob"):
        call(bitmask=torch.tensor([[-1], [0]], dtype=torch.int32))
    target.table[4].fill_(-torch.inf)  # whatever follows a 4
    with pytest.raises(ValueError, match=r"only -inf in row . of request ann"):
        call(((4, 4), (3,)), drafter=ToyDrafter(target))


# The model.


def prompts_of(kind: str, lengths: Sequence[int]) -> list[list[int]]:
    return [models.text(kind, n, seed=n).tolist() for n in lengths]


def check_model(
    kind: str, lengths: Sequence[int], new: int, budgets: Sequence[int], own: bool = True, caches: bool = True
) -> np.ndarray:
    """Greedy with drafts of the oracle and of its own = without, and every cache and ring as after one pass.

    Returns how often each number of the oracle's drafts stayed.
    """
    cfg, model, starts = models.config(kind), models.drafting_model(kind), prompts_of(kind, lengths)
    room = max(lengths) + new
    assert model.mtp is not None
    with accumulate(torch.float64), keep_weights():

        def run(**options: Any) -> tuple[Generated, V41State]:
            state = V41State.allocate(cfg, len(starts), room, block=8, drafter=True)
            return generate(model, state, starts, max_new_tokens=new, chunk=9, **options), state

        plain, _ = run()
        texts = [a + b for a, b in zip(starts, plain.tokens, strict=True)]
        oracle = OracleDrafter(texts, cfg.draft.block_size, cfg.vocab_size, error=0.25)
        for drafter in (model.mtp, oracle) if own else (oracle,):
            done, state = run(drafter=drafter, budget=schedule(budgets))
            assert done.tokens == plain.tokens
            for r, text in enumerate(texts if caches else []):
                trace = dense_trace(kind, text[:-1])
                models.assert_state_equals(state, r, trace, len(text) - 1)
                if drafter is model.mtp:
                    assert_rings(kind, state, r, draft_trace(kind, trace))
    return done.counts.lengths


def dense_trace(kind: str, text: list[int]) -> dict[str, torch.Tensor]:
    trace: dict[str, torch.Tensor] = {}
    models.reference(kind).forward(torch.tensor(text), trace=trace)
    return trace


def draft_trace(kind: str, trace: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    cfg, rings = models.config(kind), {}
    targets = torch.cat([trace[f"target.{i}"] for i in cfg.draft.target_layers], 1)
    V41ReferenceDraft(cfg, models.weights(kind)).forward(targets, 0, trace=rings)
    return rings


@settings(max_examples=2)
@given(st.lists(st.integers(0, 10), min_size=2, max_size=5), st.integers(1, 25))
def test_tiny_greedy_text_is_the_same_under_any_budgets(budgets: list[int], length: int) -> None:
    check_model("tiny", (length, 12), 7, budgets)


def test_tiny_every_accepted_length_occurs() -> None:
    seen = check_model("tiny", (5, 21, 14), 24, (15,), own=False)
    print(f"\ntiny, accepted lengths 0 to 5: {seen.tolist()}")
    assert (seen > 0).all()


def test_mini_greedy_text_is_the_same() -> None:
    check_model("mini", (7,), 4, (2, 5), caches=False)


def test_tiny_coupled_text_is_the_same() -> None:
    kind, starts = "tiny", prompts_of("tiny", (9, 4, 17))
    model, cfg = models.drafting_model(kind), models.config(kind)
    with accumulate(torch.float64), keep_weights():

        def run(requests: int, **options: Any) -> list[list[int]]:
            state = V41State.allocate(cfg, requests, 40, block=8, drafter=True)
            streams = Streams.of([1] * requests, list(range(requests)))
            done = generate(
                model,
                state,
                starts[:requests],
                max_new_tokens=8,
                mode="coupled",
                temperature=1.0,
                streams=streams,
                **options,
            )
            return done.tokens

        alone = run(1)
        plain = run(3)
        texts = [a + b for a, b in zip(starts, plain, strict=True)]
        oracle = OracleDrafter(texts, cfg.draft.block_size, cfg.vocab_size)
        assert plain[:1] == alone
        assert run(3, drafter=model.mtp, budget=schedule([4, 0, 15])) == plain
        assert run(2, drafter=oracle, budget=schedule([7, 2])) == plain[:2]


def test_options_of_requests_come_in_any_kind_of_list() -> None:
    """Arrays and tensors mean what lists mean: a tensor of stop ids must not be a set of objects."""
    target, starts = ToyTarget(), prompts(2)
    options: dict[str, Any] = {"max_new_tokens": [9, 7], "temperature": [0.5, 1.0], "top_k": [9, 2**40]}
    options |= {"top_p": [0.9, 1.0], "stop_ids": [3, 8, 11], "pinned": [True, False]}

    def run(**kinds: Any) -> Generated:
        drafter = ToyDrafter(target)
        state = ToyState.of(2)
        return generate(target, state, kinds.pop("starts", starts), drafter=drafter, **options | kinds)

    want = run()
    assert any(want.stopped)
    for kind in (np.array, torch.tensor, tuple):
        kinds = {label: kind(values) for label, values in options.items()}
        assert run(**kinds, starts=[kind(start) for start in starts]).tokens == want.tokens
    for budget in (10**12, -(10**12)):
        drafter, state = ToyDrafter(target), ToyState.of(2)
        done = generate(
            target, state, starts, max_new_tokens=9, drafter=drafter, budget=lambda *_, b=budget: b
        )
        assert done.counts.saved_rows == (0 if budget > 0 else done.counts.offered.sum())


def check_ends_are_not_read() -> None:
    """Where this block's drafts end is known from the drafts: the budget's search must not see it."""
    target = ToyTarget()

    class Ending(ToyDrafter):
        ends = BLOCK

        def __call__(self, *args: Any, **kwargs: Any) -> DraftBlock:
            block = super().__call__(*args, **kwargs)
            tokens = block.tokens.clone()
            tokens[:, self.ends :] = -1
            return DraftBlock(tokens, block.logits, block.confidence)

    # One draft does not pay for its bucket, five do: whether it is verified may not depend on the others.
    cost, seen = StepCost([1, 2, 6], [1.0, 2.1, 2.2]), []
    for ends in (1, 2, BLOCK):
        drafter = Ending(target)
        drafter.ends = ends
        done = generate(target, ToyState.of(1), [[1, 2]], max_new_tokens=7, drafter=drafter, budget=cost)
        seen.append(int(done.counts.verified[0] > 0))
        plain = generate(target, ToyState.of(1), [[1, 2]], max_new_tokens=7)
        assert done.tokens == plain.tokens
    assert seen == [1, 1, 1]


def test_the_budget_does_not_see_where_the_drafts_end() -> None:
    check_ends_are_not_read()
