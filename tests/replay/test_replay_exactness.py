"""Where bounded replay equals the full prefill and where it cannot, shown on the toy stack."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_toy import Numeric, State, Structure, Toy, examples, same

from dsv41.replay import ReplayConfig, ReplayGeometry, ReplayMode, RequestSpan

ENCODER = 2
VARIANTS = ("segment", "all_rows")
CASES = list(product(range(2, 6), range(4, 9), VARIANTS))  # decoder layers, window, first-layer variant


def make(depth: int, window: int, drafts: int = 1, kind: str = "structure", ring: int | None = None) -> Toy:
    geom = ReplayGeometry(window, ENCODER, depth, drafts, topk=3, align=2)
    return Toy(
        Structure() if kind == "structure" else Numeric(ENCODER + depth, depth * 10 + window), geom, ring
    )


def config(toy: Toy, mode: str, keep: int, **kwargs) -> ReplayConfig:
    return ReplayConfig(ReplayMode(mode), keep, geometry=toy.geom, **kwargs)


def words(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([length, seed]).integers(0, 64, length)


def equal_rows(toy: Toy, a: State, b: State, low: int) -> bool:
    """The last output and the window KV from `low` on in all decoder layers are the same bits."""
    last = len(a.tokens) - 1
    return same(a.out.get(last), b.out.get(last)) and all(
        same(a.window_at(layer, p), b.window_at(layer, p))
        for layer in range(toy.encoder, toy.layers)
        for p in range(low, last + 1)
    )


@pytest.mark.parametrize("kind", ["structure", "numeric"])
@pytest.mark.parametrize(
    ("depth", "window", "variant"), [(2, 4, "segment"), (3, 5, "all_rows"), (5, 8, "segment")]
)
def test_off_is_the_definition(depth, window, variant, kind):
    toy, tokens = make(depth, window, kind=kind), words(40)
    state = toy.prefill(ReplayConfig(), tokens, cuts=(7, 8, 30))
    want = toy.define(tokens)
    assert all(same(state.out[p], want[-1][p]) for p in range(40))


@pytest.mark.parametrize("kind", ["structure", "numeric"])
@pytest.mark.parametrize(("depth", "window", "variant"), CASES)
def test_compact_is_the_definition_and_its_depth_formula(depth, window, variant, kind):
    """Every kept row of every layer: the definition, and equal to mode off iff the formula says so."""
    toy = make(depth, window, kind=kind)
    keep = max(toy.geom.exact_keep(variant) - 1, toy.geom.min_keep)
    tokens = words(keep + 5)
    s = len(tokens) - keep
    off, cut = toy.define(tokens), toy.define(tokens, s, variant == "all_rows")
    got = toy.prefill(config(toy, "compact", keep, first_layer_kv=variant), tokens)
    for p in range(s, len(tokens)):
        assert same(got.out[p], cut[-1][p])
        exact = toy.geom.exact_layers(p - s, variant)
        for m in range(depth):
            assert same(cut[ENCODER + m + 1][p], off[ENCODER + m + 1][p]) == (exact >= m + 1), (p, m)


@pytest.mark.parametrize("kind", ["structure", "numeric"])
@pytest.mark.parametrize(("depth", "window", "variant"), CASES)
def test_exact_keep_is_exact_and_smallest(depth, window, variant, kind):
    toy = make(depth, window, kind=kind)
    keep, rows = toy.geom.exact_keep(variant), toy.geom.cached_rows
    if keep <= toy.geom.min_keep:  # two layers: a smaller keep is refused, the next test goes below it
        keep = toy.geom.min_keep
    tokens = words(keep + 6)
    off = toy.prefill(ReplayConfig(), tokens)
    exact = toy.prefill(config(toy, "compact", keep, first_layer_kv=variant), tokens)
    assert equal_rows(toy, exact, off, len(tokens) - rows)
    if keep > toy.geom.min_keep:
        short = toy.prefill(config(toy, "compact", keep - 1, first_layer_kv=variant), tokens)
        assert not equal_rows(toy, short, off, len(tokens) - rows)


@pytest.mark.parametrize(("depth", "window", "variant"), CASES)
def test_exact_keep_for_other_numbers_of_cached_rows(depth, window, variant):
    """The formula's max: up to `window` cached rows the last output decides, above it the oldest row."""
    toy = make(depth, window)
    for rows in (1, window - 1, window, window + 1, window + 4):
        keep = toy.geom.exact_keep(variant, rows)
        tokens = words(keep + 4)
        off = toy.define(tokens)
        for given_keep, wanted in ((keep, True), (keep - 1, False)):
            s = len(tokens) - given_keep
            cut = toy.define(tokens, s, variant == "all_rows")
            inputs = all(
                same(cut[layer].get(p), off[layer][p])
                for layer in range(ENCODER, toy.layers)
                for p in range(len(tokens) - rows, len(tokens))
            )
            assert (inputs and same(cut[-1][len(tokens) - 1], off[-1][len(tokens) - 1])) == wanted


def test_a_single_decoder_layer_with_all_rows_needs_only_its_cached_rows():
    geom = ReplayGeometry(8, ENCODER, 1, 2)
    assert geom.exact_keep("all_rows") == geom.cached_rows == 10
    assert geom.exact_keep("all_rows", 3) == 3


lengths = st.sampled_from(["1", "W-1", "W", "W+1", "K-1", "K", "K+1", "2W", "2K+3", "E", "E+1"])


@st.composite
def problems(draw, kind: str | None = None):
    depth, window = draw(st.integers(2, 4)), draw(st.integers(4, 8))
    toy = make(
        depth, window, draw(st.integers(0, 3)), kind or draw(st.sampled_from(["structure", "numeric"]))
    )
    keep = toy.geom.min_keep + draw(st.integers(0, 9))
    name = draw(lengths)
    length = {
        "1": 1, "W-1": window - 1, "W": window, "W+1": window + 1, "K-1": keep - 1, "K": keep,
        "K+1": keep + 1, "2W": 2 * window, "2K+3": 2 * keep + 3,
        "E": toy.geom.exact_keep(), "E+1": toy.geom.exact_keep() + 1,
    }[name]  # fmt: skip
    return toy, keep, words(length, draw(st.integers(0, 3))), draw(st.sampled_from(VARIANTS))


@examples(25)
@given(problems(), st.sampled_from(["compact", "mask"]), st.sampled_from(["empty", "windowed"]))
def test_keep_of_the_whole_prompt_is_the_identity(problem, mode, dead):
    toy, keep, tokens, variant = problem
    keep = max(keep, len(tokens))
    off = toy.prefill(ReplayConfig(), tokens)
    state = toy.state(tokens)
    cfg = config(toy, mode, keep, first_layer_kv=variant, dead=dead)
    plan = toy.step(cfg, [(state, RequestSpan(len(tokens), len(tokens), len(tokens)))])
    assert plan.is_identity
    assert equal_rows(toy, state, off, 0)
    assert all(same(state.out[p], off.out[p]) for p in range(len(tokens)))


@examples(40)
@given(problems())
def test_modes_agree_on_kept_rows_and_windowed_equals_off_below(problem):
    toy, keep, tokens, variant = problem
    s = max(len(tokens) - keep, 0)
    off = toy.prefill(ReplayConfig(), tokens)
    compact, empty, windowed = (
        toy.prefill(config(toy, mode, keep, first_layer_kv=variant, dead=dead), tokens)
        for mode, dead in (("compact", "empty"), ("mask", "empty"), ("mask", "windowed"))
    )
    kept_all = toy.prefill(config(toy, "compact", keep, first_layer_kv=variant), tokens, keep_all=True)
    assert sorted(compact.out) == list(range(s, len(tokens)))
    for state in (empty, windowed, kept_all):
        assert equal_rows(toy, compact, state, s)
        assert all(same(compact.out[p], state.out[p]) for p in range(s, len(tokens)))
    for state in (windowed, kept_all):
        assert all(same(state.out[p], off.out[p]) for p in range(s))
        for layer in range(toy.encoder, toy.layers):
            assert all(same(state.window_at(layer, p), off.window_at(layer, p)) for p in range(s))
    # Dead rows see nothing: their output is the layer stack with no key at all.
    x = toy.define(tokens)[ENCODER]
    for p in range(s):
        want = x[p]
        for layer in range(toy.encoder, toy.layers):
            want = toy.values.layer(layer, want, p, [], [])
        assert same(empty.out[p], want)


@examples(50)
@given(problems(), st.data())
def test_any_chunking_gives_the_same_bits(problem, data):
    """Random cuts, one-token chunks and cuts inside the segment included; on pages and on a ring."""
    toy, keep, tokens, variant = problem
    cfg = config(
        toy, data.draw(st.sampled_from(["compact", "mask"])), keep,
        first_layer_kv=variant, dead=data.draw(st.sampled_from(["empty", "windowed"])),
    )  # fmt: skip
    whole = toy.prefill(cfg, tokens)
    cuts = data.draw(st.one_of(st.sets(st.integers(1, len(tokens))), st.just(range(1, len(tokens)))))
    parts = toy.prefill(cfg, tokens, cuts)
    assert sorted(parts.out) == sorted(whole.out)
    assert all(same(parts.out[p], whole.out[p]) for p in whole.out)
    assert equal_rows(toy, parts, whole, max(len(tokens) - keep, 0))
    ring = toy.geom.cached_rows if variant == "segment" else keep + toy.geom.window - 1
    ringed = Toy(toy.values, toy.geom, ring).prefill(cfg, tokens, cuts)
    assert all(same(ringed.out[p], whole.out[p]) for p in whole.out)
    assert equal_rows(toy, ringed, whole, max(len(tokens) - toy.geom.cached_rows, 0))


@examples(25)
@given(problems(), st.data())
def test_the_tail_of_every_chunk_is_at_least_as_deep(problem, data):
    """Policy per_chunk_tail: every chunk keeps its tail, reads only rows that ran; exact at exact_keep."""
    toy, _, tokens, variant = problem
    cuts = data.draw(st.sets(st.integers(1, len(tokens))))
    keep = max(toy.geom.exact_keep(variant), toy.geom.min_keep)
    cfg = config(toy, "compact", keep, policy="per_chunk_tail", first_layer_kv=variant)
    off = toy.prefill(ReplayConfig(), tokens)
    known = data.draw(st.booleans())
    state = toy.prefill(cfg, tokens, cuts, **({} if known else {"target_end": None}))
    assert equal_rows(toy, state, off, max(len(tokens) - toy.geom.cached_rows, 0))
    short = config(toy, "compact", toy.geom.min_keep, policy="per_chunk_tail", first_layer_kv=variant)
    toy.prefill(short, tokens, cuts)  # poison: reading a row that never ran raises


@examples(30)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 3),
    st.data(),
)
def test_the_rest_of_the_batch_and_padding_change_nothing(requests, pad, data):
    toy = make(3, 5, 1)
    cfg = config(toy, data.draw(st.sampled_from(["compact", "mask"])), 9)
    prompts = [words(n, i) for i, (n, _) in enumerate(requests)]
    spans = [RequestSpan(n, n, n, keep_all=keep_all) for n, keep_all in requests]
    alone = []
    for tokens, span in zip(prompts, spans, strict=True):
        state = toy.state(tokens)
        toy.step(cfg, [(state, span)])
        alone.append(state)
    order = data.draw(st.permutations(range(len(requests))))
    together = [toy.state(prompts[i]) for i in order]
    toy.step(cfg, [(state, spans[i]) for state, i in zip(together, order, strict=True)], pad)
    for state, i in zip(together, order, strict=True):
        assert state.out.keys() == alone[i].out.keys()
        assert all(same(state.out[p], alone[i].out[p]) for p in state.out)


@examples(25)
@given(problems(), st.integers(0, 3), st.data())
def test_shared_entries_are_those_of_mode_off_and_written_once(problem, pad, data):
    toy, keep, tokens, variant = problem
    cuts = data.draw(st.sets(st.integers(1, len(tokens))))
    off = toy.prefill(ReplayConfig(), tokens)
    compact = toy.prefill(config(toy, "compact", keep, first_layer_kv=variant), tokens, cuts, pad)
    for source in (0, 1):
        assert sorted(compact.entries[source]) == list(range(len(tokens)))
        assert all(same(compact.entries[source][p], off.entries[source][p]) for p in range(len(tokens)))
        assert set(compact.entry_writes[source].values()) == {1}
    for layer in range(toy.encoder):
        assert all(same(compact.window_at(layer, p), off.window_at(layer, p)) for p in range(len(tokens)))


@examples(15)
@given(problems("numeric"), st.integers(0, 3), st.data())
def test_poison_never_reaches_an_output(problem, pad, data):
    """NaN in dropped rows, padding and slots below a floor; then decode from as far back as allowed."""
    toy, keep, tokens, variant = problem
    cuts = data.draw(st.sets(st.integers(1, len(tokens))))
    cfg = config(toy, "compact", keep, first_layer_kv=variant)
    state = toy.prefill(cfg, tokens, cuts, pad)
    assert all(np.isfinite(v).all() for v in state.out.values())
    length = len(tokens)
    back = data.draw(st.integers(0, min(toy.geom.backtrack, length - 1)))
    state.tokens = np.concatenate([tokens, words(8)])
    for layer in range(toy.encoder, toy.layers):  # nothing older than the promised rows may be needed
        for slot, (p, _) in state.window[layer].items():
            if p < length - toy.geom.cached_rows:
                state.window[layer][slot] = (p, np.full(4, np.nan))
    verified = length - back + toy.geom.backtrack
    toy.step(cfg, [(state, RequestSpan(toy.geom.backtrack, verified, is_decode=True))], pad)
    for end in range(verified + 1, length + 8):
        toy.step(cfg, [(state, RequestSpan(1, end, is_decode=True))], pad)
    assert all(np.isfinite(v).all() for v in state.out.values())


@examples(30)
@given(problems(), st.data())
def test_decoding_from_a_rollback_equals_mode_off_at_exact_keep(problem, data):
    toy, _, tokens, variant = problem
    keep = max(toy.geom.exact_keep(variant), toy.geom.min_keep)
    cfg = config(toy, "compact", keep, first_layer_kv=variant)
    back = data.draw(st.integers(0, min(toy.geom.backtrack, len(tokens) - 1)))
    start = len(tokens) - back
    results = []
    for setting in (ReplayConfig(), cfg):
        state = toy.prefill(setting, tokens)
        state.tokens = np.concatenate([tokens, words(toy.geom.backtrack, 9)])
        span = RequestSpan(toy.geom.backtrack, start + toy.geom.backtrack, is_decode=True)
        toy.step(setting, [(state, span)])
        results.append([state.out[p] for p in range(start, span.end)])
    assert all(same(a, b) for a, b in zip(*results, strict=True))


def test_error_falls_over_the_decades_of_keep():
    """Mean over seeds at {W, 2W, 4W, exact}: end points and trend only; single steps need not be monotone."""
    depth, window = 5, 6
    geom = ReplayGeometry(window, ENCODER, depth, 0)
    keeps = (window, 2 * window, 4 * window, geom.exact_keep())
    assert list(keeps) == sorted(keeps)
    errors = np.zeros(len(keeps))
    for seed in range(32):
        toy, tokens = Toy(Numeric(ENCODER + depth, seed), geom), words(geom.exact_keep() + 4, seed)
        off = toy.define(tokens)[-1][len(tokens) - 1]
        for i, keep in enumerate(keeps):
            errors[i] += np.abs(toy.define(tokens, len(tokens) - keep)[-1][len(tokens) - 1] - off).mean() / 32
    assert errors[-1] == 0 and (np.diff(errors) < 0).all()
