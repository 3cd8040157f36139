"""The whole model on several ranks equals the model on one, bit for bit in float64."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate, keep_weights

from dsv41.layers import V41Flash, V41State
from dsv41.layers.expert_parallel import ExpertParallel, even_map, even_table, forward_complete
from dsv41.layers.weights import load, write_synthetic
from dsv41.ops.exchange import LocalTransport
from dsv41.replay import ReplayConfig, ReplayGeometry, ReplayMode
from dsv41.replay.chunked import prefill
from tests import models
from tests.ep.models import CFG, KIND, PROMPTS, build, generate, random_map
from tests.ep.ranks import on_ranks
from tests.ops.rows import assert_refused, same

STEPS = 2


@functools.cache
def alone(rank: int) -> torch.Tensor:
    """What one rank with all experts says to the prompt of ``rank``."""
    with accumulate(torch.float64), keep_weights():
        return generate(models.model(KIND), rank, STEPS)


def assert_equal_to_one_rank(ranks: int, physical: Any, capacity: int | None) -> None:
    with accumulate(torch.float64):
        got = on_ranks(ranks, lambda t: generate(build(t, physical, capacity), t.rank, STEPS))
    for rank, logits in enumerate(got):
        assert same(logits, alone(rank))


@pytest.mark.parametrize(
    "ranks, spare, capacity",
    [(2, 2, 2), (4, 1, None), (4, 2, 2), (3, 1, 2)],
)
def test_equals_one_rank(ranks: int, spare: int, capacity: int | None) -> None:
    """Random maps with copies; rank 2 has no request. Three ranks: experts that do not divide, slots do."""
    slots = CFG.num_experts + ranks * spare
    assert_equal_to_one_rank(ranks, random_map(ranks, slots - slots % ranks, slots), capacity)


@pytest.mark.parametrize("capacity", [None, 24])
def test_a_prefill_under_bounded_replay(capacity: int | None) -> None:
    """Decoder layers run fewer rows than encoder layers; both are exchanged and counted. With room for those
    of the decoder only the encoder's layers take the exact form: in the fixed one they would lose pairs.
    """
    geometry = ReplayGeometry.from_config(CFG)
    config = ReplayConfig(ReplayMode.COMPACT, geometry.min_keep, geometry=geometry)
    length = 3 * geometry.min_keep

    def replayed(model: V41Flash, rank: int) -> torch.Tensor:
        state = V41State.allocate(CFG, 1, 64)
        return prefill(model, models.text(KIND, length, seed=rank), state, config, geometry=geometry)

    def work(t: LocalTransport) -> torch.Tensor:
        model = build(t, random_map(2, 10, 4), capacity)
        assert model.ep is not None
        with model.ep.exactly(range(CFG.first_decoder_layer)):
            logits = replayed(model, t.rank)
        assert model.ep.exchange.lost() == [0, 0] and not model.ep.exact_layers
        rows = (model.ep.counts.sum(1) // CFG.top_k).tolist()
        first = CFG.first_decoder_layer
        assert rows[:first] == [length] * first and rows[-1] == geometry.min_keep
        return logits

    with accumulate(torch.float64):
        got = on_ranks(2, work)
        assert all(same(logits, replayed(models.model(KIND), rank)) for rank, logits in enumerate(got))


def prefer_the_last_four(model: Any) -> None:
    for layer in model.layers:
        for bias in (layer.ffn.gate.bias, layer.ffn.gate.bias_vl):
            bias.data[4:] += 50.0


def test_all_tokens_to_one_rank() -> None:
    """Every expert that is chosen has its copies on rank 1: the others hold experts that nobody wants."""

    def work(t: LocalTransport) -> torch.Tensor:
        model = build(t, even_map(CFG.num_layers, CFG.num_experts, 2))
        prefer_the_last_four(model)
        logits = generate(model, t.rank, 1)
        assert model.ep is not None and int(model.ep.counts[:, :4].sum()) == 0
        return logits

    whole = models.build(KIND)
    prefer_the_last_four(whole)
    with accumulate(torch.float64):
        got = on_ranks(2, work)
        assert all(same(logits, generate(whole, rank, 1)) for rank, logits in enumerate(got))


def test_an_overflow_is_counted_and_the_step_repeated_exactly() -> None:
    """Every layer of the decode steps wants two rows on a rank that takes one."""

    def work(t: LocalTransport) -> tuple[torch.Tensor, list[int]]:
        model = build(t, even_map(CFG.num_layers, CFG.num_experts, 2), capacity=1)
        assert model.ep is not None
        found: list[int] = []
        lost = model.ep.exchange.lost
        model.ep.exchange.lost = lambda: found.extend(lost()) or found[-2:]  # pyright: ignore
        logits = generate(model, t.rank, STEPS, forward=functools.partial(forward_complete, model))
        return logits, found

    with accumulate(torch.float64):
        got = on_ranks(2, work)
    assert got[0][1] == got[1][1] and sum(got[0][1]) > 0  # every rank knows what every rank lost
    for rank, (logits, _) in enumerate(got):
        assert same(logits, alone(rank))


def test_a_step_that_could_not_be_repeated_is_refused_before_it_is_written() -> None:
    """Five rows where four can be taken back. The exact form, more drafts, or two requests are fine."""
    (transport,) = LocalTransport.group(1)
    model = build(transport, even_map(CFG.num_layers, CFG.num_experts, 1), capacity=64)
    assert model.ep is not None
    state, tokens, place = V41State.allocate(CFG, 1, 64), models.text(KIND, 5), models.positions(0, 5)
    most = state.max_rollback
    assert most == CFG.draft.block_size + 1 == 4
    before = [t.clone() for t in written(state)]
    assert_refused(
        lambda: forward_complete(model, tokens, place, state),
        r"forward_complete: expected at most 4 rows a request \(drafts= of V41State.allocate; .*, got 5",
    )
    assert all(map(same, before, written(state))) and int(model.ep.step) == 0
    assert_refused(
        lambda: forward_complete(model, tokens[:4], place[:4], state, max_len=5), "4 rows .* got 5"
    )
    forward_complete(model, tokens[:4], place[:4], state)
    with model.ep.exactly():
        forward_complete(model, tokens, place, V41State.allocate(CFG, 1, 64))
    forward_complete(model, tokens, place, V41State.allocate(CFG, 1, 64, drafts=4))
    two = torch.cat([place[:4], place[:4]])
    cu = torch.tensor([0, 4, 8], dtype=torch.int32)
    forward_complete(model, models.text(KIND, 8), two, V41State.allocate(CFG, 2, 64), cu_seqlens=cu)


def written(state: V41State) -> list[torch.Tensor]:
    caches = [*state.windows, *state.compressed.values(), *state.index_keys.values()]
    return [state.lens, state.written, state.tokens, *state.carry.values(), *(c.pages for c in caches)]


def test_counts_are_of_real_tokens() -> None:
    """Padding rows are neither counted nor sent."""

    def work(t: LocalTransport) -> int:
        model = build(t, even_map(CFG.num_layers, CFG.num_experts, 2), capacity=8)
        state = V41State.allocate(CFG, 1, 64)
        tokens, cu = models.text(KIND, 6), torch.tensor([0, 4], dtype=torch.int32)
        model(tokens, models.positions(0, 6), state, cu_seqlens=cu)
        assert model.ep is not None and model.ep.exchange.lost() == [0, 0]
        assert model.ep.counts.sum(1).tolist() == [4 * CFG.top_k] * CFG.num_layers
        model(tokens[:0], models.positions(4, 0), state, cu_seqlens=cu * 0)
        return int(model.ep.counts.sum()) + int(model.ep.step)

    assert on_ranks(2, work) == [2, 2]


def test_ranks_load_their_own_experts(tmp_path: Path) -> None:
    write_synthetic(CFG, tmp_path, models.SEED)
    physical = random_map(2, 10, 5)

    def work(t: LocalTransport) -> int:
        group = ExpertParallel(t, physical, CFG.num_experts)
        model = V41Flash(CFG, models.token_map(KIND), ep_group=group)
        report = load(model, tmp_path, progress=False)
        stored = models.weights(KIND)
        for name, view in model.checkpoint_tensors().items():
            assert same(view.view(torch.uint8), stored[name].view(torch.uint8)), name
        assert all(name.startswith("mtp.") for name in report.skipped)
        assert report.elsewhere == len(model.elsewhere()) == 6 * 3 * CFG.num_layers  # 5 of 8 experts are here
        assert f"{report.elsewhere} are other ranks'" in str(report)
        return len(report.loaded)

    loaded = on_ranks(2, work)
    whole = load(V41Flash(CFG, models.token_map(KIND)), tmp_path, progress=False)
    assert loaded == [len(whole.loaded) - 6 * 3 * CFG.num_layers] * 2


def test_a_map_that_forgets_an_expert_elsewhere_is_noticed_when_loading(tmp_path: Path) -> None:
    """What no rank's map holds is refused, not left uninitialised."""
    write_synthetic(CFG, tmp_path, models.SEED)

    def work(t: LocalTransport) -> None:
        model = V41Flash(CFG, ep_group=ExpertParallel(t, even_map(6, 8, 2), 8))
        others = model.elsewhere()
        others.discard("layers.0.ffn.experts.7.w1.weight")
        others.discard("layers.0.ffn.experts.0.w1.weight")
        model.elsewhere = lambda: others
        load(model, tmp_path, progress=False)

    with pytest.raises(ValueError, match=r"1 not offered: layers.0.ffn.experts.[07].w1.weight"):
        on_ranks(2, work)


MAP = even_map(6, 8, 2, spare=1)


def make(change: Any = None, ranks: int = 2, **options: Any) -> Any:
    def work(t: LocalTransport) -> None:
        p2l = MAP.clone()
        if change is not None:
            change(p2l, t.rank)
        ExpertParallel(t, p2l, 8, **options)

    return lambda: on_ranks(ranks, work, patience=5)


def swap_two(p2l: torch.Tensor, rank: int) -> None:
    if rank == 1:
        p2l[3, [0, 1]] = p2l[3, [1, 0]]


def third(*experts: int) -> Any:
    return lambda p2l, rank: p2l[2].copy_(torch.tensor(experts))


def one(layers: int = 6) -> ExpertParallel:
    return ExpertParallel(LocalTransport.group(1)[0], even_map(layers, 8, 1), 8)


ERRORS: dict[str, Any] = {
    "does not divide": (make(ranks=3), r"slots that 3 ranks share evenly, got 10 on rank [012]"),
    "maps disagree": (make(swap_two), r"same on all 2 ranks, got map '\w{16}' on rank 1 where most have"),
    "missing": (make(third(0, 1, 2, 3, 4, 0, 5, 6, 4, 5)), "every expert 0 to 7 in layer 2, got"),
    "negative": (make(third(0, 1, 2, 3, 4, 5, 6, 7, -1, 0)), "every expert 0 to 7 in layer 2, got"),
    "twice": (make(third(0, 1, 2, 3, 3, 4, 5, 6, 7, 0)), r"twice on a rank, layer 2, got one on rank .0."),
    "capacity": (make(capacity=0), "capacity: an integer of 1 or more, got 0"),
    "layers": (lambda: V41Flash(CFG, ep_group=one(5)), r"an ep_group of \(6, 8\) layers and experts, got"),
    "even": (lambda: even_map(2, 8, 3), "experts that 3 ranks share evenly, got 8"),
    "spare": (lambda: even_map(2, 8, 2, spare=5), "at most 4 spare slots and two ranks, got 5"),
    "tensors": (lambda: one().tensors(0), "a model made with this, got none at 0"),
    "complete": (
        lambda: forward_complete(models.model(KIND), MAP, MAP, V41State.allocate(CFG, 1, 8)),
        "a model with an ep_group, got None",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error: str) -> None:
    assert_refused(*ERRORS[error])


def test_settings_of_the_caller_must_agree_too() -> None:
    def work(t: LocalTransport) -> None:
        ExpertParallel(t, MAP, 8, settings={"driver": f"58{t.rank // 2}"})

    with pytest.raises(ValueError, match=r"got driver '581' on rank 2 where most have '580'"):
        on_ranks(
            3, lambda t: ExpertParallel(t, even_map(6, 9, 3), 9, settings={"driver": f"58{t.rank // 2}"})
        )
    on_ranks(2, work)


def test_even_tables_share_every_expert_evenly() -> None:
    table = even_table(MAP, 8)
    for layer in range(6):
        for e in range(8):
            slots, counts = table[layer, e].unique(return_counts=True)
            assert slots.tolist() == (MAP[layer] == e).nonzero()[:, 0].tolist()
            assert int(counts.max() - counts.min()) <= 1


def test_prompts_have_a_rank_without_tokens() -> None:
    assert 0 in PROMPTS
