"""Bounded replay on the real model, in float64 accumulation: every claim is bit equality."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41 import V41FlashConfig
from dsv41.cache import PagedKV
from dsv41.layers import V41State, attention
from dsv41.layers.replayed import ReplayedForward
from dsv41.replay import ReplayConfig, ReplayGeometry, ReplayPlan, RequestSpan, plan_encoder_hit
from dsv41.replay.chunked import plan_prompt, planner, prefill
from dsv41.spec import generate
from tests import models
from tests.replay.model_runs import Cut, Run, lend, one, replaced, same_entries, same_rows, setting, variant

# P1, P11: identity, and every length around a boundary.

MODES = [("off", "empty"), ("compact", "empty"), ("mask", "empty"), ("mask", "windowed")]


def check_identity(mode: str, dead: str) -> None:
    cfg = variant(2, 6)
    keep = ReplayGeometry.from_config(cfg).recommended_keep
    texts = [models.text(cfg, n, n, images=True) for n in (keep, keep - 1, 5, 1)]
    with accumulate(torch.float64):
        plain = Run(cfg, [keep] * 4)  # without a plan
        bounds = torch.tensor([0, *map(len, texts)]).cumsum(0).to(torch.int32)
        place = torch.cat([models.positions(0, len(t)) for t in texts])
        want = models.model(cfg)(torch.cat(texts), place, plain.state, cu_seqlens=bounds)
        got = Run(cfg, [keep] * 4).prefill(setting(cfg, mode, keep, dead=dead), texts)
    rows = [got.out[r][p] for r, text in enumerate(texts) for p in range(len(text))]
    assert torch.equal(torch.stack(rows), want)
    for r, text in enumerate(texts):
        same_entries(got, plain, len(text), r)
        for i in range(cfg.num_layers):
            assert torch.equal(
                got.window(i, r, torch.arange(len(text))), plain.state.windows[i].pages[r, : len(text)]
            )


@pytest.mark.parametrize(("mode", "dead"), MODES)
def test_a_keep_as_long_as_the_prompt_changes_nothing(mode: str, dead: str) -> None:
    check_identity(mode, dead)


@pytest.mark.parametrize("first_layer_kv", ["segment", "all_rows"])
def test_lengths_around_every_boundary(first_layer_kv: Any) -> None:
    """compact = mask(windowed) on the segment; lengths 1, W and K and K_exact with their neighbours, 2W."""
    cfg = variant(3, 8)
    geom = ReplayGeometry.from_config(cfg)
    keep, exact = geom.min_keep, geom.exact_keep(first_layer_kv)
    lengths = [1, 7, 8, 9, keep - 1, keep, keep + 1, 16, exact - 1, exact, exact + 1, exact + 17]
    texts = [models.text(cfg, n, n) for n in lengths]
    with accumulate(torch.float64):
        runs = [
            Run(cfg, lengths).prefill(
                setting(cfg, mode, keep, first_layer_kv=first_layer_kv, dead="windowed"), texts
            )
            for mode in ("compact", "mask", "off")
        ]
    for r, n in enumerate(lengths):
        same_rows(runs[0], runs[1], range(max(0, n - keep), n), r)
        same_entries(runs[0], runs[2], n, r)
        assert len(runs[0].out[r]) == min(n, keep)
        if n <= keep:
            same_rows(runs[0], runs[2], range(n), r)


# P2, P3: exact where the formula says, and nowhere else.


def differing(a: Run, b: Run, length: int, requests: int) -> list[set[int]]:
    """Positions that differ in some request, by decoder layer (its input); the last set is the output's."""
    sets: list[set[int]] = []
    place = torch.arange(length)
    for layer in range(a.cfg.first_decoder_layer, a.cfg.num_layers):
        ran = [p for p in range(length) if p in a.out[0]]
        unequal = torch.zeros(length, dtype=torch.bool)
        for r in range(requests):
            unequal |= (a.window(layer, r, place) != b.window(layer, r, place)).any(-1)
        sets.append({p for p in ran if unequal[p]})
    sets.append({p for p in a.out[0] for r in range(requests) if not torch.equal(a.out[r][p], b.out[r][p])})
    return sets


def check_exactness(num_decoder: int, window: int, first_layer_kv: Any) -> None:
    """From K_exact on the last row and the last C window rows equal mode off; every row obeys the formula."""
    cfg = variant(num_decoder, window)
    geom = ReplayGeometry.from_config(cfg)
    exact = geom.exact_keep(first_layer_kv)
    length = max(exact, geom.min_keep) + window + 1
    requests = 8 if num_decoder == 5 else 4  # a cut row may coincide by luck (8 bits); not in every text
    texts = [models.text(cfg, length, seed) for seed in range(requests)]
    with accumulate(torch.float64):
        off = Run(cfg, [length] * requests).prefill(setting(cfg, "off"), texts)
        for keep in {max(exact, geom.min_keep), max(exact - 1, geom.min_keep)}:
            config = setting(cfg, "compact", keep, first_layer_kv=first_layer_kv)
            run = Run(cfg, [length] * requests).prefill(config, texts)
            for r in range(requests):
                same_entries(run, off, length, r)
            s = length - keep
            got = differing(run, off, length, requests)
            for m, rows in enumerate(got):
                formula = {p for p in range(s, length) if m and geom.exact_layers(p - s, first_layer_kv) < m}
                assert rows <= formula, f"layer {m}: rows {sorted(rows - formula)} must be exact"
                assert rows == formula, f"layer {m}: rows {sorted(formula - rows)} must differ"
            wanted = [rows & set(range(length - geom.cached_rows, length)) for rows in got[:-1]]
            whole = not any(wanted) and length - 1 not in got[-1]
            assert whole == (keep >= exact), f"keep {keep}, exact {exact}: {wanted}"


@pytest.mark.parametrize("first_layer_kv", ["segment", "all_rows"])
@pytest.mark.parametrize(("num_decoder", "window"), [*itertools.product((2, 3, 4, 5), (4, 5, 6, 7, 8))])
def test_exact_where_the_formula_says(num_decoder: int, window: int, first_layer_kv: str) -> None:
    check_exactness(num_decoder, window, first_layer_kv)


# P4: compact = mask(empty) = mask(windowed) on kept rows, mask(windowed) = off below them.


def check_modes(first_layer_kv: Any = "segment", cuts: Cut = (), policy: Any = "prompt_window") -> None:
    cfg, length = models.config("tiny"), 61
    keep = ReplayGeometry.from_config(cfg).min_keep
    text = models.text(cfg, length, 3, images=True)
    options: dict[str, Any] = {"first_layer_kv": first_layer_kv, "policy": policy}
    off = one(cfg, setting(cfg, "off"), text)
    compact, empty, windowed = (
        one(cfg, setting(cfg, mode, keep, dead=dead, **options), text, cuts) for mode, dead in MODES[1:]
    )
    kept = sorted(compact.out[0])
    assert kept[-keep:] == list(range(length - keep, length))
    assert sorted(empty.out[0]) == sorted(windowed.out[0]) == list(range(length))
    same_rows(compact, empty, kept)
    same_rows(compact, windowed, kept)
    for run in (compact, empty, windowed):
        same_entries(run, off, length)
    if policy == "prompt_window":
        same_rows(off, windowed, range(length - keep))
    assert not torch.equal(empty.out[0][20], off.out[0][20])


@pytest.mark.parametrize("first_layer_kv", ["segment", "all_rows"])
def test_the_three_modes_agree(first_layer_kv: str) -> None:
    check_modes(first_layer_kv)


@pytest.mark.parametrize("first_layer_kv", ["segment", "all_rows"])
def test_the_three_modes_agree_in_chunks(first_layer_kv: str) -> None:
    check_modes(first_layer_kv, [22, 23, 50])


def check_chunk_tails(first_layer_kv: Any) -> None:
    """per_chunk_tail: every chunk keeps its own last rows; a short chunk reads the tail before it."""
    cfg, length, cuts = variant(3, 6), 60, [25, 29, 48, 52]
    geom = ReplayGeometry.from_config(cfg)
    keep, text = geom.min_keep, models.text(cfg, length, 4)
    options: dict[str, Any] = {"policy": "per_chunk_tail", "first_layer_kv": first_layer_kv}
    run = one(cfg, setting(cfg, "compact", keep, **options), text, cuts)
    masked = one(cfg, setting(cfg, "mask", keep, **options), text, cuts)
    assert len(run.out[0]) == keep + 4 + keep + 4 + 8
    # Chunks 3 to 5 form one segment: the last two were kept whole and read on into the tail of chunk 3.
    joined = one(cfg, setting(cfg, "compact", length - 48 + keep, first_layer_kv=first_layer_kv), text)
    same_rows(run, masked, sorted(run.out[0]))
    same_rows(run, joined, range(48 - keep, length))


@pytest.mark.parametrize("first_layer_kv", ["segment", "all_rows"])
def test_chunk_tails(first_layer_kv: str) -> None:
    check_chunk_tails(first_layer_kv)


# P5, P6: neither chunks nor the rest of the batch matter.


def check_chunks(mode: str, first_layer_kv: Any, cuts: Cut, small_ring: bool = False) -> None:
    cfg, length = variant(2, 6), 48
    config = setting(cfg, mode, 11, first_layer_kv=first_layer_kv)
    text, drafts = models.text(cfg, length, 1, images=True), 2 if small_ring else None
    whole, cut = (one(cfg, config, text, c, drafts=drafts) for c in ([], cuts))
    assert sorted(whole.out[0]) == sorted(cut.out[0])
    for p in whole.out[0]:
        assert torch.equal(whole.out[0][p], cut.out[0][p]), f"logits of row {p}"
    last = torch.arange(length - whole.geom.cached_rows, length)
    for i in range(cfg.num_layers):
        assert torch.equal(whole.window(i, 0, last), cut.window(i, 0, last)), f"window of layer {i}"
    same_entries(whole, cut, length)
    for i, ring in whole.state.carry.items():
        assert torch.equal(ring[0, (length - 1) % 8], cut.state.carry[i][0, (length - 1) % 8])


@settings(max_examples=10)
@given(
    st.lists(st.integers(1, 47), max_size=6),
    st.sampled_from(["compact", "mask"]),
    st.sampled_from(["segment", "all_rows"]),
    st.booleans(),
)
def test_chunks_do_not_matter(cuts: list[int], mode: str, first_layer_kv: str, small_ring: bool) -> None:
    check_chunks(mode, first_layer_kv, cuts, small_ring)


def test_one_token_chunks() -> None:
    check_chunks("compact", "all_rows", list(range(30, 48)), small_ring=True)


def check_batch(order: Sequence[int], first_layer_kv: Any = "segment", pad: int = 0) -> None:
    """Decode rows, prompts, a chunk that keeps nothing and a prefix hit in one step: each as if alone."""
    cfg, keep = variant(3, 6), 9
    config = setting(cfg, "compact", keep, first_layer_kv=first_layer_kv)
    texts = [models.text(cfg, n, n) for n in (44, 30, 8, 40, 33)]
    hit = 24
    start = plan_encoder_hit(ReplayGeometry.from_config(cfg), hit, 33, keep).start
    before = [
        RequestSpan(40, 40, 40),
        RequestSpan(0, 0),
        RequestSpan(0, 0),
        RequestSpan(0, 0),
        RequestSpan(0, 0),
    ]
    now = [
        RequestSpan(4, 44, is_decode=True),
        RequestSpan(30, 30, 30),
        RequestSpan(8, 8, 8),
        RequestSpan(26, 26, 40),  # keeps nothing
        RequestSpan(33 - start, 33, 33, swa_start=start, hit_end=hit),
    ]

    def run(members: Sequence[int]) -> Run:
        with accumulate(torch.float64):
            out = Run(cfg, [len(texts[r]) for r in members])
            mine = [texts[r] for r in members]
            out.step(config, [before[r] for r in members], mine)
            if 4 in members:
                out.state.adopt(members.index(4), texts[4][:start])
                cached = one(cfg, setting(cfg, "off"), texts[4][:hit])
                lend(cached, out, members.index(4), hit)
            out.step(config, [now[r] for r in members], mine, pad)
        return out

    together = run(order)
    for place, r in enumerate(order):
        alone = run([r])
        assert sorted(together.out[place]) == sorted(alone.out[0])
        for p, row in alone.out[0].items():
            assert torch.equal(together.out[place][p], row), f"request {r}, row {p}"
        for x, y in zip(together.entries(place, now[r].end), alone.entries(0, now[r].end), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1)])
def test_a_mixed_batch(order: tuple[int, ...]) -> None:
    check_batch(order)


def test_a_mixed_batch_all_rows_and_padding() -> None:
    check_batch((3, 4, 1, 0, 2), "all_rows", pad=3)


# P7, P8: who writes, and who reads.


def check_writes(mode: str = "compact", first_layer_kv: Any = "all_rows") -> None:
    """Every entry and index key is written exactly once; decoder rings get kept rows only."""
    cfg, length, keep = variant(2, 6), 40, 9
    text, writes, real = models.text(cfg, length, 2), Counter[tuple[int, int]](), attention.write_cache

    def counted(values: Any, cos: Any, sin: Any, slots: torch.Tensor, cache: PagedKV, **options: Any) -> Any:
        writes.update((cache.pages.data_ptr(), slot) for slot in slots.tolist() if slot >= 0)
        return real(values, cos, sin, slots, cache, **options)

    with replaced(attention, "write_cache", counted):
        run = one(cfg, setting(cfg, mode, keep, first_layer_kv=first_layer_kv), text, [13, 34])
    for caches in (run.state.compressed, run.state.index_keys):
        for i, cache in caches.items():
            counts = [n for (where, _), n in writes.items() if where == cache.pages.data_ptr()]
            assert counts == [1] * (length // cfg.compress_ratios[i]), f"writes of layer {i}: {counts}"
    for i, ring in enumerate(run.state.windows):
        written = {slot for where, slot in writes if where == ring.pages.data_ptr()}
        every = mode == "mask" or i < cfg.first_decoder_layer + (first_layer_kv == "all_rows")
        assert written == set(range(0 if every else length - keep, length)), f"ring of layer {i}"


@pytest.mark.parametrize(
    ("mode", "first_layer_kv"), [("compact", "segment"), ("compact", "all_rows"), ("mask", "segment")]
)
def test_entries_are_written_once(mode: str, first_layer_kv: str) -> None:
    check_writes(mode, first_layer_kv)


def check_poison(first_layer_kv: Any) -> None:
    """NaN in every dropped row and every padded row behind the boundary changes no output."""
    cfg, length, keep = variant(3, 6), 40, 9
    texts = [models.text(cfg, n, n) for n in (length, 17)]
    config = setting(cfg, "compact", keep, first_layer_kv=first_layer_kv)
    want, got = (Run(cfg, [length, 17]) for _ in range(2))
    decode = ReplayedForward.decode_rows

    def spoiled(self: ReplayedForward, kept: tuple[torch.Tensor, ...], plan: ReplayPlan) -> Any:
        dropped = torch.ones(plan.num_input_rows, dtype=torch.bool)
        dropped[self.replay.rows] = False
        assert plan.is_padding.sum() == 5 and dropped.any()
        self.x[dropped], self.pre[dropped] = torch.nan, torch.nan
        for values in kept[:2]:
            values[torch.from_numpy(plan.is_padding)] = torch.nan
        return decode(self, kept, plan)

    with accumulate(torch.float64):
        want.prefill(config, texts)
        with replaced(ReplayedForward, "decode_rows", spoiled):
            got.prefill(config, texts, pad=5)
    for r, text in enumerate(texts):
        assert all(row.isfinite().all() for row in got.out[r].values())
        same_rows(got, want, range(max(0, len(text) - keep), len(text)), r)


@pytest.mark.parametrize("first_layer_kv", ["segment", "all_rows"])
def test_poison_never_shows(first_layer_kv: str) -> None:
    check_poison(first_layer_kv)


# P10: the window lists themselves.


def check_windows(
    length: int = 35, first_layer_kv: Any = "all_rows", mode: str = "mask", dead: Any = "empty"
) -> None:
    """Positions that each kept row attends, in every decoder layer, by brute force."""
    cfg, cut = variant(3, 8), 4
    geom = ReplayGeometry.from_config(cfg)
    keep, real = geom.min_keep, attention.sparse_attn
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def recorded(q: Any, window: Any, window_ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
        seen.append((window_ids, rest[1] if rest and rest[1] is not None else window_ids.new_empty(0)))
        return real(q, window, window_ids, *rest, **options)

    with replaced(attention, "sparse_attn", recorded):
        run = one(
            cfg, setting(cfg, mode, keep, first_layer_kv=first_layer_kv, dead=dead), models.text(cfg, length)
        )
    assert len(seen) == cfg.num_layers
    s = max(0, length - keep)
    for layer, (ids, entries) in list(enumerate(seen))[cut:]:
        for row, p in enumerate(sorted(run.out[0])):
            low = 0 if layer == cut and first_layer_kv == "all_rows" else s
            low = 0 if p < s and dead == "windowed" else low
            want = [] if p < s and dead == "empty" else list(range(max(low, p - cfg.window + 1), p + 1))
            assert sorted(x for x in ids[row].tolist() if x >= 0) == want, f"layer {layer}, row {p}"
            assert bool((entries[row] >= 0).any()) == bool(want), f"entries of layer {layer}, row {p}"


@pytest.mark.parametrize("length", [2, 34, 45])
@pytest.mark.parametrize("first_layer_kv", ["segment", "all_rows"])
def test_window_lists(length: int, first_layer_kv: str) -> None:
    check_windows(length, first_layer_kv, "compact")


@pytest.mark.parametrize("dead", ["empty", "windowed"])
def test_window_lists_under_mask(dead: str) -> None:
    check_windows(dead=dead)


# P9: rings of window + drafts slots.


def decode(run: Run, text: torch.Tensor, at: int, steps: Iterator[tuple[int, int]]) -> list[torch.Tensor]:
    """Verify and roll back, (rows, rows that stay) a step, until the text ends; logits of those that stay."""
    out = []
    for size, accepted in steps:
        size = min(size, len(text) - at)
        if size <= 0:
            break
        accepted = min(accepted, size)
        drafts = text[at : at + size].clone()
        drafts[accepted:] = (drafts[accepted:] + 1) % run.cfg.image_token
        out.append(models.model(run.cfg)(drafts, models.positions(at, size), run.state)[:accepted])
        at += accepted
        run.state.rollback(torch.tensor([at], dtype=torch.int32))
    return out


def check_backtrack(first_layer_kv: Any, short: int = 0) -> bool:
    """After a prefill with K_exact - short in the smallest rings: decoding from L - b equals mode off."""
    cfg = variant(3, 6)
    geom = ReplayGeometry.from_config(cfg)
    length = 46
    text = models.text(cfg, length + 8, 6)
    keep = geom.exact_keep(first_layer_kv) - short
    outs = []
    for config in (setting(cfg, "off"), setting(cfg, "compact", keep, first_layer_kv=first_layer_kv)):
        with accumulate(torch.float64):
            run = Run(cfg, [length], drafts=geom.draft_tokens).prefill(config, [text[:length]])
            assert (
                run.state.windows[0].page_size == geom.cached_rows
                and run.state.max_rollback == geom.backtrack
            )
            at = length - geom.backtrack
            run.state.rollback(torch.tensor([at], dtype=torch.int32))
            outs.append(torch.cat(decode(run, text, at, iter([(3, 3), (3, 2), (3, 3), (3, 3)]))))
    return torch.equal(*outs)


@pytest.mark.parametrize("first_layer_kv", ["segment", "all_rows"])
def test_backtrack_into_the_prompt(first_layer_kv: str) -> None:
    assert check_backtrack(first_layer_kv)
    assert not check_backtrack(first_layer_kv, short=3)


def check_rings(steps: list[tuple[int, int]], first_layer_kv: Any = "segment") -> None:
    """Window 128, five drafts, keep 140: rings of 133 slots against rings that lose nothing."""
    cfg, length = variant(2, 128, drafts=5), 150
    geom = ReplayGeometry.from_config(cfg)
    text = models.text(cfg, length + 12, 8)
    assert (geom.cached_rows, geom.min_keep, geom.recommended_keep) == (133, 134, 140)
    outs = []
    for drafts in (geom.draft_tokens, None):
        with accumulate(torch.float64):
            config = setting(cfg, "compact", 140, first_layer_kv=first_layer_kv)
            run = Run(cfg, [length], drafts=drafts).prefill(config, [text[:length]], [90])
            at = length - geom.backtrack
            run.state.rollback(torch.tensor([at], dtype=torch.int32))
            outs.append(torch.cat(decode(run, text, at, iter(steps))))
    assert torch.equal(*outs) and bool(outs[0].isfinite().all())


@settings(max_examples=3)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=3, max_size=6),
    st.sampled_from(["segment", "all_rows"]),
)
def test_rings_of_133_slots(steps: list[tuple[int, int]], first_layer_kv: str) -> None:
    check_rings(steps, first_layer_kv)


# P12: prefix hits.


def check_hit(hit: int = 30, new: int = 2, keep: int = 9, cuts: Cut = (), mode: str = "compact") -> None:
    """The cached entries stay, the encoder starts at f, and what only depends on the tokens is exact."""
    cfg = variant(2, 6)
    geom = ReplayGeometry.from_config(cfg)
    text = models.text(cfg, hit + new, hit)
    length = len(text)
    replay = plan_encoder_hit(geom, hit, length, keep)
    config = setting(cfg, mode, keep)
    with accumulate(torch.float64):
        cached = Run(cfg, [hit]).prefill(setting(cfg, "off"), [text[:hit]])
        run = Run(cfg, [length])
        lend(cached, run, 0, hit)
        run.state.adopt(0, text[: replay.start])
        edges = sorted({*(c for c in cuts if replay.start < c < length), length})
        for a, b in itertools.pairwise([replay.start, *edges]):
            run.step(config, [RequestSpan(b - a, b, length, swa_start=replay.start, hit_end=hit)], [text])
        full = Run(cfg, [length]).prefill(config, [text])
    if mode == "compact":
        assert len(run.out[0]) == min(length, keep)
    same_entries(run, cached, hit)
    assert all(row.isfinite().all() for row in run.out[0].values())
    if replay.is_exact:
        same_rows(run, full, sorted(full.out[0]))
        same_entries(run, full, length)
        return
    for layer in (0, 1):  # row p of layer 1 is exact from f + window - 1 on; layer 0 sees the token alone
        place = torch.arange(replay.start + layer * (cfg.window - 1), length)
        assert torch.equal(run.window(layer, 0, place), full.window(layer, 0, place)), (
            f"window of layer {layer}"
        )
    early = torch.arange(replay.start, replay.start + cfg.window - 1)
    assert not torch.equal(run.window(1, 0, early), full.window(1, 0, early))
    other = one_hit(cfg, config, text, hit)
    assert torch.equal(other, run.out[0][length - 1]), "prefill(hit_end=...)"


def one_hit(cfg: V41FlashConfig, config: ReplayConfig, text: torch.Tensor, hit: int) -> torch.Tensor:
    """The same through `prefill`, in one state whose second request shares the pages of the first."""
    with accumulate(torch.float64):
        state = V41State.allocate(cfg, 2, len(text) + 2, block=2)
        model = models.model(cfg)
        prefill(model, text[:hit], state, setting(cfg, "off"))
        state.page_table[1, : hit // 2] = state.page_table[0, : hit // 2]
        return prefill(model, text, state, config, request=1, hit_end=hit, chunk=7)[0]


@pytest.mark.parametrize(
    ("hit", "new", "why"),
    [
        (6, 20, "no longer than a window: everything runs, exact"),
        (30, 20, "many new tokens: one window"),
        (30, 2, "few new tokens: enough rows for the decoder"),
        (30, 0, "a full hit: the replayed rows give the logits"),
        (8, 0, "a full hit shorter than keep"),
    ],
)
def test_the_table_of_hits(hit: int, new: int, why: str) -> None:
    check_hit(hit, new, 9)


@settings(max_examples=5)
@given(st.integers(1, 16), st.integers(0, 12), st.integers(9, 14), st.lists(st.integers(1, 40), max_size=3))
def test_random_hits(half: int, new: int, keep: int, cuts: list[int]) -> None:
    check_hit(2 * half, new, keep, cuts)


def test_a_hit_with_the_decoder_off() -> None:
    check_hit(20, 11, 9, [18, 25], mode="off")


# What is around it.


def check_prefill(chunk: int | None = 10) -> None:
    cfg = variant(2, 6)
    text, config = models.text(cfg, 37, 5), setting(cfg, "compact", 11)
    want = one(cfg, config, text)
    drafts = torch.zeros((37, cfg.hidden), dtype=torch.bfloat16)
    with accumulate(torch.float64):
        state = V41State.allocate(cfg, 3, 40, block=2)
        got = prefill(models.model(cfg), text, state, config, request=1, chunk=chunk, draft_inputs=drafts)
    assert torch.equal(got[0], want.out[0][36]) and state.lens.tolist() == [0, 37, 0]
    assert bool((drafts[:26] == 0).all()) and bool((drafts[26:] != 0).any(1).all())


@pytest.mark.parametrize("chunk", [None, 10])
def test_prefill(chunk: int | None) -> None:
    check_prefill(chunk)


def test_generate_with_an_exact_keep() -> None:
    """The loop's prefill under a plan; at an exact keep the text is that of mode off."""
    cfg = variant(2, 6)
    geom = ReplayGeometry.from_config(cfg)
    prompts = [models.text(cfg, n, n).tolist() for n in (40, 3, 26)]
    config = setting(cfg, "compact", geom.exact_keep())
    done = []
    with accumulate(torch.float64):
        for replay in (None, planner(config, geom)):
            state = V41State.allocate(cfg, 3, 48, block=2)
            model = models.model(cfg)
            done.append(generate(model, state, prompts, max_new_tokens=4, chunk=17, replay=replay).tokens)
    assert done[0] == done[1] and all(len(tokens) == 4 for tokens in done[0])


def refuse(match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=match):
        call()


def test_refusals() -> None:
    cfg, other = variant(2, 6), variant(3, 6)
    model, text = models.model(cfg), models.text(cfg, 20)
    state = V41State.allocate(cfg, 1, 32, block=2)

    def step(source: V41FlashConfig, length: int) -> Any:
        geom = ReplayGeometry.from_config(source)
        ((_, _, plan),) = plan_prompt(setting(source, "compact"), geom, length)
        return lambda: model(text, models.positions(0, 20), state, replay=plan)

    refuse(
        r"V41Flash: expected a replay plan for window, encoder and decoder layers \(6, 4, 2\)",
        step(other, 20),
    )
    refuse(r"V41Flash: expected a replay plan of 20 rows", step(cfg, 19))
    refuse("an even prefix", lambda: state.adopt(0, text[:5]))
    refuse(
        "prefill: expected tokens: at least 1, got 0",
        lambda: prefill(model, text[:0], state, setting(cfg, "off")),
    )
    state.lens[0] = 4
    refuse(
        "expected request 0 to hold 0 tokens, got 4", lambda: prefill(model, text, state, setting(cfg, "off"))
    )
    refuse(
        "plan_prompt: expected chunk: an int of at least 1",
        lambda: list(plan_prompt(setting(cfg, "off"), Run(cfg, [1]).geom, 4, 0)),
    )
    refuse("RequestSpan: expected hit_end: in 4..9", lambda: RequestSpan(5, 9, 9, swa_start=4, hit_end=2))
