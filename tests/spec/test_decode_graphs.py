"""Decode steps over fixed memory give the texts of the plain loop, in every size; captured, on a GPU."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate, keep_weights

from dsv41 import V41FlashConfig, no_compile, prepare
from dsv41.layers import V41State
from dsv41.ops.verify import sample_tokens
from dsv41.replay import ReplayConfig, ReplayGeometry, ReplayMode, RequestSpan, plan_decoder
from dsv41.replay.device import to_device
from dsv41.spec import DecodeGraphs, OracleDrafter, Streams, default_sizes, generate
from tests import models
from tests.spec.test_spec_generate import BLOCK, VOCAB, ToyDrafter, ToyState, ToyTarget

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3], [2, 7]]
NEW = [9, 1, 14, 6]
TARGET = ToyTarget()


@dataclasses.dataclass
class Toy(ToyState):
    """With the views that a decode step takes."""

    def first(self, requests: int) -> "Toy":
        return Toy(self.lens[:requests], self.held[:requests])


def prefill(model: Any, state: Any, drafter: Any) -> torch.Tensor:
    """The prompts into the caches; the logits behind them."""
    inputs = None
    tokens = torch.tensor([t for p in PROMPTS for t in p])
    place = torch.cat([models.positions(0, len(p)) for p in PROMPTS])
    cu = torch.tensor([0, *(len(p) for p in PROMPTS)]).cumsum(0).int()
    if drafter is not None and drafter.input_width:
        inputs = torch.empty(len(tokens), drafter.input_width, dtype=torch.bfloat16)
    logits = model(tokens, place, state, cu_seqlens=cu, rows=cu[1:].long() - 1, draft_inputs=inputs)
    if inputs is not None:
        assert drafter is not None
        drafter.write_context(inputs, place, state, cu_seqlens=cu)
    return logits


def first_tokens(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """What `generate` emits behind the prompts."""
    count = len(logits)
    streams = Streams.of([0] * count, list(range(count)))
    heat, place = torch.full((count,), temperature), torch.tensor([len(p) for p in PROMPTS])
    return sample_tokens(
        logits, temperature=heat, seeds=streams.seeds, uids=streams.uids, positions=place, stream="emit"
    )


def decode(
    model: Any,
    state: Any,
    drafter: Any,
    *,
    budget: Callable[[int], int | None] = lambda step: None,
    temperature: float = 0.0,
    stops: tuple[int, ...] = (),
    pad: tuple[int, int] = (0, 0),
    lag: bool = False,
    cancel: int | None = None,
    news: list[int] = NEW,
    **options: Any,
) -> tuple[list[list[int]], DecodeGraphs]:
    """Texts of all prompts; every step in a size larger by ``pad``; ``cancel`` ends with the first step."""
    first = first_tokens(prefill(model, state, drafter), temperature)
    graphs = DecodeGraphs(model, state, drafter=drafter, stop_ids=stops, **options)
    texts = [[int(t)] for t in first]
    for r, (prompt, new) in enumerate(zip(PROMPTS, news, strict=True)):
        if new > 1 and texts[r][0] not in stops:
            graphs.admit(r, first[r], length=len(prompt), left=new - 1, temperature=temperature)
    if pad != (0, 0):
        run, most = graphs.run, len(PROMPTS)
        graphs.run = lambda r, n: run(min(r + pad[0], most), n + pad[1])  # type: ignore[method-assign]
    waiting = []

    def read(keep: int) -> None:
        while len(waiting) > keep:
            for r, tokens in waiting.pop(0).read().items():
                texts[r] += tokens

    while graphs.live:
        waiting.append(graphs.step(budget(graphs.steps)))
        read(1 if lag else 0)
        if cancel is not None and graphs.steps == 1:
            graphs.cancel(cancel)
    read(0)
    return texts, graphs


def drafters(kind: str) -> Any:
    texts = [
        p + t
        for p, t in zip(PROMPTS, generate(TARGET, Toy.of(4), PROMPTS, max_new_tokens=NEW).tokens, strict=True)
    ]
    return {
        "none": None,
        "drawn": ToyDrafter(TARGET),
        "oracle": OracleDrafter(texts, BLOCK, VOCAB, error=0.4),
        "right": OracleDrafter(texts, BLOCK, VOCAB, error=0.0),
    }[kind]


def check_texts(
    kind: str = "oracle", budgets: tuple[int, ...] | None = (3, 0, 9, 15), mode: str = "chain", **options: Any
) -> None:
    drafter, state, other = drafters(kind), Toy.of(4), Toy.of(4)
    heat = {"temperature": options.pop("temperature", 0.0), "mode": mode}
    given = {} if budgets is None else {"budget": lambda step, survivals: budgets[step % len(budgets)]}
    want = generate(TARGET, state, PROMPTS, max_new_tokens=NEW, drafter=drafter, **given, **heat)
    if budgets is not None:
        options["budget"] = lambda step: budgets[step % len(budgets)]
    got, _ = decode(TARGET, other, drafter, **heat, **options)
    assert got == want.tokens and torch.equal(other.lens, state.lens)


@pytest.mark.parametrize("kind", ["none", "drawn", "oracle", "right"])
@pytest.mark.parametrize("budgets", [None, (0,), (3, 0, 9, 15), (1,)])
def test_greedy_texts_are_those_of_the_plain_loop(kind: str, budgets: tuple[int, ...] | None) -> None:
    check_texts(kind, budgets)


@pytest.mark.parametrize("mode", ["chain", "block", "coupled"])
@pytest.mark.parametrize("kind", ["none", "drawn", "oracle"])
def test_sampled_texts_are_those_of_the_plain_loop(kind: str, mode: str) -> None:
    check_texts(kind, None, mode, temperature=0.8)


@pytest.mark.parametrize("pad", [(1, 0), (0, 3), (2, 17)])
@pytest.mark.parametrize("kind", ["none", "drawn"])
def test_larger_sizes_change_nothing(pad: tuple[int, int], kind: str) -> None:
    check_texts(kind, pad=pad, temperature=0.7)


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("kind", ["none", "oracle"])
def test_the_host_may_lag_behind(depth: int, kind: str) -> None:
    check_texts(kind, None, depth=depth, lag=True)


def test_the_model_with_its_drafter() -> None:
    model, news = models.drafting_model("micro"), [4, 1, 3, 2]

    def state() -> V41State:
        return V41State.allocate(models.config("micro"), 4, 40, block=8, drafter=True)

    with accumulate(torch.float64), keep_weights():
        want, kept = generate(model, state(), PROMPTS, max_new_tokens=news, drafter=model.mtp).tokens, state()
        got, _ = decode(model, kept, model.mtp, pad=(1, 2), lag=True, news=news)
    assert got == want
    assert kept.lens.tolist() == [len(p) + len(t) - 1 for p, t in zip(PROMPTS, want, strict=True)]


def test_a_stop_id_ends_a_text_behind_it() -> None:
    state, other = Toy.of(4), Toy.of(4)
    drafter = drafters("right")
    stop = generate(TARGET, Toy.of(4), PROMPTS, max_new_tokens=NEW).tokens[2][7]
    want = generate(TARGET, state, PROMPTS, max_new_tokens=NEW, drafter=drafter, stop_ids=[stop])
    got, _ = decode(TARGET, other, drafter, stops=(stop,))
    assert got == want.tokens and want.stopped[2]
    assert torch.equal(other.lens, state.lens)


def test_a_cancelled_request_leaves_the_others_alone() -> None:
    want = generate(TARGET, Toy.of(4), PROMPTS, max_new_tokens=NEW).tokens
    got, _ = decode(TARGET, Toy.of(4), drafters("oracle"), cancel=2)
    assert got[0] == want[0] and got[3] == want[3]
    assert got[2] == want[2][: len(got[2])] and len(got[2]) < NEW[2]


def test_logits_without_a_law_end_their_request() -> None:
    class Broken(ToyTarget):
        def __call__(self, *args: Any, **step: Any) -> torch.Tensor:
            out = super().__call__(*args, **step)
            if step["rows"] is None:
                out[0] = torch.nan
            return out

    want = generate(TARGET, Toy.of(4), PROMPTS, max_new_tokens=NEW).tokens
    got, graphs = decode(Broken(), Toy.of(4), None)
    assert got[0] == want[0][:1] and not graphs.live


def test_the_grid() -> None:
    assert set(default_sizes(6, 5)) == {(r, r * k) for r in (1, 2, 4, 6) for k in (1, 2, 3, 4, 6)}
    assert set(default_sizes(1, 0)) == {(1, 1)}
    graphs = DecodeGraphs(TARGET, Toy.of(6), sizes=[(2, 4), (4, 8), (4, 4)])
    graphs._graphs = dict.fromkeys(graphs.sizes)  # type: ignore[arg-type]
    assert graphs.size(1, 1) == (2, 4) and graphs.size(2, 5) == (4, 8) and graphs.size(3, 3) == (4, 4)
    assert graphs.size(4, 9) == (4, 9) and graphs.size(5, 5) == (5, 5)  # beyond the grid: as it is


def test_out_of_pages_is_refused_before_anything_is_written() -> None:
    state = Toy.of(4)
    first = first_tokens(prefill(TARGET, state, None), 0.0)
    graphs = DecodeGraphs(TARGET, state, drafter=drafters("oracle"))
    with pytest.raises(ValueError, match=r"room for 6 tokens of request 0, got 5"):
        graphs.admit(0, first[0], length=5, left=40, room=5)
    graphs.admit(0, first[0], length=5, left=40, room=8)
    before = state.held.clone()
    with pytest.raises(ValueError, match=r"pages for 11 tokens of request 0 \(grow\), got 8"):
        graphs.step()
    assert torch.equal(before, state.held) and graphs.steps == 0
    assert state.lens.tolist() == [len(p) for p in PROMPTS]
    graphs.grow(0, 11)
    assert graphs.step().read()
    # A request never writes past what it may still emit.
    graphs.admit(3, first[3], length=2, left=2, room=4)
    graphs.grow(0, 17)
    assert 3 in graphs.step().read()


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "mode": (lambda: DecodeGraphs(TARGET, Toy.of(2), mode="best"), "mode: one of"),
    "stop": (lambda: DecodeGraphs(TARGET, Toy.of(2), stop_ids=[2**70]), "stop_ids: token ids"),
    "no request": (lambda: default_sizes(0, 2), "default_sizes: expected requests: an integer of 1 or more"),
    "prefetcher": (
        lambda: models.build("micro").attach_prefetcher(5),  # type: ignore[arg-type]
        r"a prefetcher \(submit, wait\)",
    ),
    "size": (lambda: DecodeGraphs(TARGET, Toy.of(2), sizes=[(2, 1)]), r"sizes: \(requests up to 2"),
    "nobody": (lambda: DecodeGraphs(TARGET, Toy.of(2)).step(), "a request that decodes"),
    "request": (
        lambda: DecodeGraphs(TARGET, Toy.of(2)).admit(2, 1, length=0, left=1),
        "request: an integer of 0 to 1",
    ),
    "left": (
        lambda: DecodeGraphs(TARGET, Toy.of(2)).admit(0, 1, length=0, left=0),
        "left: an integer of 1 to 2147483647, got 0",
    ),
    "length": (
        lambda: DecodeGraphs(TARGET, Toy.of(2)).admit(0, 1, length=3, left=1),
        "length 0 of request 0, got 3",
    ),
    "capture": (lambda: DecodeGraphs(TARGET, Toy.of(2)).capture(), "a state on a CUDA device, got cpu"),
    "twice": (
        lambda: [g.admit(0, 1, length=0, left=2) for g in [DecodeGraphs(TARGET, Toy.of(2))] * 2],
        "a request that is not live",
    ),
    "uid": (
        lambda: [
            g.admit(r, 1, length=0, left=2, uid=7) for g in [DecodeGraphs(TARGET, Toy.of(2))] for r in (0, 1)
        ],
        "uid: of no other live request",
    ),
    "cancel": (lambda: DecodeGraphs(TARGET, Toy.of(2)).cancel(1), "a live request"),
    "budget": (
        lambda: [(g.admit(0, 1, length=0, left=2), g.step(-1)) for g in [DecodeGraphs(TARGET, Toy.of(2))]],
        "budget: an integer of 0 or more",
    ),
}


@pytest.mark.parametrize("anchor", [-1, torch.tensor(-1), 101, torch.tensor([10**6])], ids=str)
def test_an_anchor_that_is_no_token(anchor: Any) -> None:
    """It would never end, or end in the model."""
    model = models.model("micro")
    state = V41State.allocate(model.cfg, 1, 64)
    graphs = DecodeGraphs(model, state)
    with pytest.raises(ValueError, match=r"DecodeGraphs\.admit: expected anchor: an integer of 0 "):
        graphs.admit(0, anchor, length=0, left=2)
    assert not graphs.live


@pytest.mark.parametrize("pages", [1, 3])
def test_the_page_table_says_how_far_a_request_goes(pages: int) -> None:
    """A pool that requests share, and no room told: a step ends where the pages do, with nothing written."""
    model = models.model("micro")
    state = V41State.allocate(model.cfg, 2, 64, block=8, pages=16)
    state.page_table[0, :pages] = torch.arange(pages, dtype=torch.int32)
    state.page_table[1] = torch.arange(8, 16, dtype=torch.int32)
    ids = torch.tensor([3, 1, 4, 5, 9], dtype=torch.int64)
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    place = torch.tensor([0, 1, 2, 0, 1], dtype=torch.int32)
    logits = model(ids, place, state, cu_seqlens=cu, rows=torch.tensor([2, 4]))
    graphs = DecodeGraphs(model, state)
    for r in range(2):
        graphs.admit(r, logits[r].argmax(), length=3 - r, left=40)
    with pytest.raises(ValueError, match=rf"pages for {8 * pages + 1} tokens of request 0 \(grow\), got"):
        for _ in range(40):
            before = [t.pages.clone() for t in state.compressed.values()]
            lens = state.lens.clone()
            graphs.step()
    assert torch.equal(state.lens, lens) and int(lens[0]) == 8 * pages
    assert all(torch.equal(a, b.pages) for a, b in zip(before, state.compressed.values(), strict=True))
    state.page_table[0, pages] = 7
    graphs.grow(0, 64)
    graphs.step().read()
    assert int(state.lens[0]) == 8 * pages + 1


@pytest.mark.parametrize("error", ERRORS)
def test_refusals(error: str) -> None:
    call, message = ERRORS[error]
    with pytest.raises(ValueError, match=message):
        call()


def on_a_gpu() -> tuple[V41FlashConfig, Any]:
    """A small model with its drafter, packed and prepared."""
    cfg = V41FlashConfig.tiny(hidden=256, inter=128)
    model: Any = models.on_gpu(cfg)
    prepare(cfg, max_requests=8, step_tokens=64)
    return cfg, model


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("keep", [None, 24])
def test_a_captured_prefill_on_the_gpu(keep: int | None) -> None:
    """Captured once for a number of tokens, with replay or without: logits and caches of any such prompt."""
    cfg, model = on_a_gpu()
    length, replay = 60, None
    if keep is not None:
        geometry = ReplayGeometry.from_config(cfg)
        kept = ReplayConfig(ReplayMode.COMPACT, max(keep, geometry.min_keep), geometry=geometry)
        replay = to_device(plan_decoder(kept, geometry, [RequestSpan(length, length, length)]), "cuda")
    place = torch.arange(length, device="cuda").int()
    cu = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    last = torch.tensor([length - 1 if replay is None else replay.plan.num_rows - 1], device="cuda")

    def call(tokens: torch.Tensor, state: V41State, inputs: torch.Tensor) -> torch.Tensor:
        state.lens.zero_()
        logits = model(
            tokens, place, state,
            cu_seqlens=cu, max_len=length, rows=last, draft_inputs=inputs, replay=replay,
        )  # fmt: skip
        model.mtp.write_context(inputs, place, state, cu_seqlens=cu)
        return logits

    def memory() -> tuple[torch.Tensor, V41State, torch.Tensor]:
        state = V41State.allocate(cfg, 1, 128, drafter=True, device="cuda")
        inputs = torch.zeros(length, model.mtp.input_width, dtype=torch.bfloat16, device="cuda")
        return torch.zeros(length, dtype=torch.long, device="cuda"), state, inputs

    held, graph = memory(), torch.cuda.CUDAGraph()
    call(*held)
    with no_compile(), torch.cuda.graph(graph):
        logits = call(*held)
    for seed in (3, 5):
        torch.manual_seed(seed)
        held[0].random_(0, 490)
        graph.replay()
        tokens, state, inputs = memory()
        want = call(tokens.copy_(held[0]), state, inputs)
        assert torch.equal(logits, want) and want.any()
        assert torch.equal(held[2], inputs) and torch.equal(held[1].lens, state.lens)
        for mine, eager in zip(held[1].windows, state.windows, strict=True):
            assert torch.equal(mine.pages, eager.pages)
        for layer, eager in state.compressed.items():
            assert torch.equal(held[1].compressed[layer].pages, eager.pages)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_steps_on_the_gpu() -> None:
    """Prepared, captured, without a host sync: the texts of the same steps run one by one."""
    cfg, model = on_a_gpu()
    texts = []
    for captured in (False, True):
        state = V41State.allocate(cfg, 8, 256, drafter=True, device="cuda")
        inputs = torch.empty(40, model.mtp.input_width, dtype=torch.bfloat16, device="cuda")
        tokens = torch.arange(40, device="cuda") * 7 % 490
        place = torch.arange(5, device="cuda").repeat(8).int()
        cu = torch.arange(9, device="cuda").int() * 5
        logits = model(
            tokens, place, state, cu_seqlens=cu, max_len=5, rows=cu[1:].long() - 1, draft_inputs=inputs
        )
        model.mtp.write_context(inputs, place, state, cu_seqlens=cu)
        graphs = DecodeGraphs(model, state, drafter=model.mtp, sizes=[(4, 24), (8, 24), (8, 48)], depth=3)
        if captured:
            graphs.capture()
        else:  # in the same sizes, so that a row meets the same tiles in both runs
            sizes = graphs.sizes
            graphs.size = lambda r, n, of=sizes: min(s for s in of if s[0] >= r and s[1] >= n)  # type: ignore
        first = logits.argmax(1)
        for r in range(8):
            graphs.admit(r, first[r], length=5, left=30 + r, temperature=0.5 * (r % 2), seed=r)
        said: dict[int, list[int]] = {r: [] for r in range(8)}
        torch.cuda.synchronize()
        with no_compile():
            torch.cuda.set_sync_debug_mode("error")
            try:
                emissions = [graphs.step(16), graphs.step(None), graphs.step(0)]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            while graphs.live:
                emissions.append(graphs.step())
        for emission in emissions:
            for r, tokens_of in emission.read().items():
                said[r] += tokens_of
        assert [len(text) for text in said.values()] == [30 + r for r in range(8)]
        texts.append(said)
    assert texts[0] == texts[1]
