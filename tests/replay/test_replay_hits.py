"""Prefix hits: which rows run again, and what the result equals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_toy import Numeric, State, Structure, Toy, examples, same

from dsv41.replay import ReplayConfig, ReplayGeometry, ReplayMode, RequestSpan, plan_decoder, plan_encoder_hit

FLASH = ReplayGeometry()
COMPACT = ReplayConfig(ReplayMode.COMPACT)


@pytest.mark.parametrize(
    ("hit", "length", "start", "why"),
    [
        (0, 500, 0, "no hit"),
        (100, 500, 0, "shorter than a window: everything runs, exact"),
        (128, 500, 0, "exactly a window"),
        (1000, 1500, 872, "many new tokens: one window"),
        (1000, 1012, 872, "12 new tokens still give 140 rows"),
        (1000, 1011, 870, "11 new: 129 rows wanted, rounded to an even start"),
        (1000, 1004, 864, "4 new: 136 rows, so that 140 decoder rows remain"),
        (1000, 1000, 860, "a full hit: 140 rows, the last one gives the logits"),
        (138, 138, 0, "a full hit shorter than keep"),
        (131072, 131572, 130944, "a long hit: 628 rows"),
    ],
)
def test_the_table(hit, length, start, why):
    replay = plan_encoder_hit(FLASH, hit, length, 140)
    assert replay.start == start, why
    assert replay.replayed == hit - start and replay.is_exact == (start == 0)
    assert replay.rows.tolist() == list(range(start, length)) and replay.rows.dtype == np.int64
    assert replay.write_mask.tolist() == [p >= hit for p in range(start, length)]


@examples(200)
@given(
    st.integers(0, 3000),
    st.integers(0, 3000),
    st.integers(134, 400),
    st.sampled_from([None, 1, 2, 3, 16, 64]),
)
def test_random_hits(half, new, keep, align):
    hit, length = 2 * half, 2 * half + new
    replay = plan_encoder_hit(FLASH, hit, length, keep, align)
    assert replay.start % 2 == 0 and replay.start % (align or 1) == 0
    assert 0 <= replay.start <= hit and len(replay.rows) == length - replay.start
    assert replay.replayed >= min(hit, 128)
    assert len(replay.rows) >= min(length, keep)
    if length == 0:
        return
    # The whole suffix in one forward, folded with the new rows: never fewer decoder rows than without a hit.
    span = RequestSpan(len(replay.rows), length, length, swa_start=replay.start)
    plan = plan_decoder(ReplayConfig(ReplayMode.COMPACT, keep), FLASH, [span])
    assert plan.num_rows == min(length, keep)
    assert plan.swa_floor[0] == max(replay.start, length - keep, 0) and plan.encoder_floor[0] == replay.start


def resume(toy: Toy, base: State, hit: int) -> State:
    """What a prefix cache gives back: entries of the hit, no window KV."""
    state = toy.state(base.tokens)
    for source in (0, 1):
        state.entries[source] = {p: base.entries[source][p] for p in range(hit)}
    return state


@st.composite
def problems(draw):
    geom = ReplayGeometry(draw(st.integers(4, 6)), 2, draw(st.integers(2, 3)), draw(st.integers(0, 2)))
    toy = Toy(
        draw(st.sampled_from([Structure(), Numeric(geom.first_decoder_layer + geom.num_decoder_layers, 3)])),
        geom,
    )
    hit, new = 2 * draw(st.integers(0, 18)), draw(st.integers(0, 14))
    length = max(hit + new, 1)
    return (
        toy,
        np.random.default_rng(length).integers(0, 64, length),
        hit,
        geom.min_keep + draw(st.integers(0, 6)),
    )


@examples(40)
@given(problems(), st.sampled_from(["off", "compact"]), st.sampled_from(["segment", "all_rows"]), st.data())
def test_replayed_prefixes_on_the_toy(problem, mode, variant, data):
    toy, tokens, hit, keep = problem
    length, window = len(tokens), toy.geom.window
    cold = toy.prefill(ReplayConfig(), tokens)
    state = resume(toy, cold, hit)
    replay = plan_encoder_hit(toy.geom, hit, length, keep)
    cfg = ReplayConfig(ReplayMode(mode), keep, first_layer_kv=variant, geometry=toy.geom)
    cuts = sorted({*data.draw(st.sets(st.integers(replay.start + 1, length), max_size=3)), length})
    start = replay.start
    for end in cuts:
        toy.step(cfg, [(state, RequestSpan(end - start, end, length, replay.start))], write_from=[hit])
        start = end
    # Cached entries were read, never written; entries of the new rows exactly once.
    for source in (0, 1):
        assert dict(state.entry_writes[source]) == {p: 1 for p in range(hit, length)}
        assert all(same(state.entries[source][p], cold.entries[source][p]) for p in range(hit))
    # The state holds the rows that the next queries may read, in every layer.
    for layer in range(toy.layers):
        for p in range(max(0, length - toy.geom.cached_rows), length):
            assert state.window_at(layer, p) is not None
    assert (length - 1 in state.out) and len(state.out) >= min(length, keep)
    if replay.is_exact:
        reference = toy.prefill(cfg, tokens)
        assert all(same(state.out[p], reference.out[p]) for p in reference.out)
    # Encoder window KV: layer 0 is exact everywhere, layer 1 one window above the start.
    for p in range(replay.start, hit):
        assert same(state.window_at(0, p), cold.window_at(0, p))
        if isinstance(toy.values, Structure):
            exact = replay.start == 0 or p - replay.start >= window - 1
            assert same(state.window_at(1, p), cold.window_at(1, p)) == exact


@examples(30)
@given(st.integers(20, 30), st.integers(1, 30), st.sampled_from(["segment", "all_rows"]), st.data())
def test_a_second_turn_on_live_windows(first_length, new, variant, data):
    """Same session, windows still there: no replay, and few new rows read on into the first turn's rows."""
    geom = ReplayGeometry(5, 2, 3, 1)
    toy = Toy(Structure(), geom)
    cfg = ReplayConfig(ReplayMode.COMPACT, 9, first_layer_kv=variant, geometry=geom)
    tokens = np.random.default_rng(first_length).integers(0, 64, first_length + new)
    length = first_length + new
    results = []
    for cuts in ([length], sorted({*data.draw(st.sets(st.integers(first_length + 1, length))), length})):
        state = toy.state(tokens)
        toy.step(cfg, [(state, RequestSpan(first_length, first_length, first_length))])
        live, start = first_length - 9, first_length
        for end in cuts:
            span = RequestSpan(end - start, end, length, decoder_live_start=live)
            plan = toy.step(cfg, [(state, span)])  # poison below the floor: reading there raises
            dropped = plan.n_kept[0] < span.q_len
            live, start = (int(plan.cached_lens[0]) if dropped else live), end
        results.append(state)
    assert results[0].out.keys() == results[1].out.keys()
    assert all(same(results[0].out[p], results[1].out[p]) for p in results[0].out)
    span = RequestSpan(new, length, length, decoder_live_start=first_length - 9)
    plan = plan_decoder(cfg, geom, [span])
    assert plan.swa_floor[0] == (first_length - 9 if new <= 9 else length - 9)
