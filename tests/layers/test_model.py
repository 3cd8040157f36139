"""Incremental, paged, quantised = dense, cacheless: to the bit in float64 accumulation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41 import V41FlashConfig
from dsv41.cache import PagedKV
from dsv41.layers import V41State
from dsv41.layers.attention import Compressor
from dsv41.layers.engram import EngramPrefetcher
from dsv41.layers.moe import Experts
from tests import models
from tests.tolerance import MODEL_KL_MEDIAN, MODEL_TOP1

# So few candidate blocks that a short text meets the limit.
MINI = V41FlashConfig.mini(candidate_blocks=8)


def dense(kind: models.Kind, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    trace: dict[str, torch.Tensor] = {}
    return models.reference(kind).forward(ids, trace=trace), trace


def run_chunks(kind: models.Kind, ids: torch.Tensor, cuts: list[int], state: V41State) -> torch.Tensor:
    """Logits of all rows, fed in pieces of the lengths ``cuts``; the last piece takes the rest."""
    out, start = [], 0
    for length in [*cuts, len(ids)]:
        piece = ids[start : start + length]
        out.append(models.model(kind)(piece, models.positions(start, len(piece)), state))
        start += len(piece)
    return torch.cat(out)


def check_incremental(
    kind: models.Kind, length: int, cuts: list[int], images: bool = False, seed: int = 0
) -> None:
    ids = models.text(kind, length, seed, images)
    with accumulate(torch.float64):
        want, trace = dense(kind, ids)
        state = V41State.allocate(models.config(kind), 1, length + 8, block=8)
        got = run_chunks(kind, ids, cuts, state)
    assert torch.equal(got, want)
    models.assert_state_equals(state, 0, trace, length)


@pytest.mark.parametrize("kind", ["micro", "tiny"])
def test_one_pass_equals_dense(kind: str) -> None:
    check_incremental(kind, 75, [], images=True)


@pytest.mark.parametrize("kind", ["micro", "tiny"])
def test_token_by_token_equals_dense(kind: str) -> None:
    check_incremental(kind, 37, [1] * 37)


def test_mini_equals_dense() -> None:
    """The real 40-layer schedule, with selection and candidates at work; `python -m dsv41 demo` runs 3,000
    tokens.
    """
    check_incremental(MINI, 160, [1, 60, 37])


@settings(max_examples=12)
@given(st.lists(st.integers(1, 30), max_size=8), st.integers(1, 90), st.booleans(), st.integers(0, 1000))
def test_random_chunks_equal_dense(cuts: list[int], length: int, images: bool, seed: int) -> None:
    check_incremental("tiny", length, cuts, images, seed)


@settings(max_examples=10)
@given(st.data())
def test_rollback_equals_dense(data: st.DataObject) -> None:
    """Wrong tokens are processed and taken back, again and again; nothing of them remains."""
    kind, length = "tiny", data.draw(st.integers(20, 60))
    cfg, ids = models.config(kind), models.text(kind, length)
    model = models.model(kind)
    with accumulate(torch.float64):
        want, trace = dense(kind, ids)
        state = V41State.allocate(cfg, 1, length + 8, block=4)
        start = data.draw(st.integers(1, 18))
        out = [model(ids[:start], models.positions(0, start), state)]
        while start < length:
            step = min(data.draw(st.integers(1, 6)), length - start)
            accepted = data.draw(st.integers(1, step))
            drafts = ids[start : start + step].clone()
            drafts[accepted:] = (drafts[accepted:] + 1) % cfg.image_token
            out.append(model(drafts, models.positions(start, step), state)[:accepted])
            start += accepted
            state.rollback(torch.tensor([start], dtype=torch.int32))
    assert torch.equal(torch.cat(out), want)
    models.assert_state_equals(state, 0, trace, length)


def test_rollback_after_a_long_chunk() -> None:
    """A prefill chunk wraps every ring; the deepest allowed rollback and another text follow."""
    kind, cfg = "tiny", models.config("tiny")
    model, ids = models.model(kind), models.text(kind, 70)
    with accumulate(torch.float64):
        state = V41State.allocate(cfg, 1, 80)
        model(models.text(kind, 70, seed=5), models.positions(0, 70), state)
        state.rollback(torch.tensor([0], dtype=torch.int32)) if state.windows[
            0
        ].page_size > 70 else state.reset(0)
        model(ids[:50], models.positions(0, 50), state)
        back = state.max_rollback
        kept = 50 - back
        state.rollback(torch.tensor([kept], dtype=torch.int32))
        other = torch.cat([ids[:kept], models.text(kind, 20, seed=9)])
        got = model(other[kept:], models.positions(kept, 20), state)
        want, trace = dense(kind, other)
    assert back >= cfg.draft.block_size
    assert torch.equal(got, want[kept:])
    models.assert_state_equals(state, 0, trace, len(other))


def test_rollbacks_do_not_add_up() -> None:
    """What a ring lost stays lost: the limit counts from the furthest position ever written."""
    kind, cfg = "tiny", models.config("tiny")
    state = V41State.allocate(cfg, 1, 64)
    models.model(kind)(models.text(kind, 60), models.positions(0, 60), state)
    back = state.max_rollback
    state.rollback(torch.tensor([60 - back], dtype=torch.int32))
    with pytest.raises(ValueError, match=f"request 0: {60 - back} to {60 - back} tokens, got {59 - back}"):
        state.rollback(torch.tensor([59 - back], dtype=torch.int32))
    state.reset(0)
    models.model(kind)(models.text(kind, 12), models.positions(0, 12), state)
    state.rollback(torch.tensor([3], dtype=torch.int32))
    with pytest.raises(ValueError, match="request: an integer of 0 to 0, got -1"):
        state.reset(-1)


def check_batch(change: Callable[[V41State], V41State] | None = None) -> None:
    """Requests of several lengths, one of them empty, in chunks with padding rows: each equals its dense
    run.
    """
    kind, lengths = "tiny", [33, 0, 1, 52, 16]
    cfg, model = models.config(kind), models.model(kind)
    texts = [models.text(kind, n, seed=n) for n in lengths]
    done = [0] * len(lengths)
    out: list[list[torch.Tensor]] = [[] for _ in lengths]
    with accumulate(torch.float64):
        state = V41State.allocate(cfg, len(lengths), 64, block=8)
        if change is not None:
            state = change(state)
        for sizes in ([9, 0, 0, 30, 1], [1, 0, 1, 1, 1], [20, 0, 0, 0, 7], [3, 0, 0, 21, 7]):
            cu = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
            pieces = [t[a : a + n] for t, a, n in zip(texts, done, sizes, strict=True)]
            place = [models.positions(a, n) for a, n in zip(done, sizes, strict=True)]
            padded = torch.cat([*pieces, torch.tensor([3, 4])]), torch.cat([*place, models.positions(0, 2)])
            logits = model(*padded, state, cu_seqlens=cu)
            for r, n in enumerate(sizes):
                out[r].append(logits[int(cu[r]) : int(cu[r]) + n])
                done[r] += n
        for r, ids in enumerate(texts):
            want, trace = dense(kind, ids)
            assert torch.equal(torch.cat(out[r]), want), f"request {r}"
            models.assert_state_equals(state, r, trace, len(ids))


def test_batch_equals_dense() -> None:
    check_batch()


@pytest.mark.parametrize("gap", [0, 16, 1000])
def test_pages_in_any_order_and_at_any_stride(gap: int) -> None:
    def scatter(state: V41State) -> V41State:
        count = state.page_table.numel()
        order = torch.randperm(count).to(torch.int32)

        def spread(cache: PagedKV) -> PagedKV:
            _, size, width = cache.pages.shape
            pool = torch.full((count, size * width + gap), 0x7F, dtype=torch.uint8)  # NaN wherever it is read
            return PagedKV(pool[:, : size * width].unflatten(1, (size, width)), cache.record)

        return dataclasses.replace(
            state,
            page_table=order.view_as(state.page_table),
            compressed={i: spread(c) for i, c in state.compressed.items()},
            index_keys={i: spread(c) for i, c in state.index_keys.items()},
        )

    check_batch(scatter)


def test_poisoned_memory_never_shows() -> None:
    """Bytes that must not be read are NaN: free pages, page tails, ring slots that hold no row yet."""

    def poison(state: V41State) -> V41State:
        for cache in (*state.windows, *state.compressed.values(), *state.index_keys.values()):
            cache.pages.fill_(0x7F)
        for ring in state.carry.values():
            ring.fill_(torch.nan)
        return state

    check_batch(poison)


def test_a_full_request_does_not_disturb_its_batch() -> None:
    """Without checks, what no page holds is not stored; the other requests go on."""
    kind, cfg = "tiny", models.config("tiny")
    ids = models.text(kind, 24)
    with accumulate(torch.float64):
        want, _ = dense(kind, ids)
        state = V41State.allocate(cfg, 2, 16, block=8)
        state.page_table[0, 1] = 9999
        full = models.text(kind, 16, seed=3)
        models.model(kind)(
            full, models.positions(0, 16), state, cu_seqlens=torch.tensor([0, 16, 16], dtype=torch.int32)
        )
        roomy = dataclasses.replace(
            state, page_table=torch.tensor([[0, 9999, -1], [2, 3, 1]], dtype=torch.int32)
        )
        place = torch.cat([models.positions(16, 24), models.positions(0, 24)])
        both = torch.cat([models.text(kind, 24, seed=4), ids])
        got = models.model(kind)(both, place, roomy, cu_seqlens=torch.tensor([0, 24, 48], dtype=torch.int32))
    assert torch.equal(got[24:], want)
    assert got.isfinite().all()


def test_rows_choose_logits() -> None:
    kind, ids = "tiny", models.text("tiny", 30)
    model, cfg = models.model(kind), models.config(kind)
    with accumulate(torch.float64):
        want = model(ids, models.positions(0, 30), V41State.allocate(cfg, 1, 32))
        rows = torch.tensor([29, 0, 7])
        got = model(ids, models.positions(0, 30), V41State.allocate(cfg, 1, 32), rows=rows)
    assert torch.equal(got, want[rows])


def test_draft_inputs_are_the_streams_entering_the_target_layers() -> None:
    kind, ids = "tiny", models.text("tiny", 40)
    cfg = models.config(kind)
    out = torch.empty((40, len(cfg.draft.target_layers) * cfg.hidden), dtype=torch.bfloat16)
    with accumulate(torch.float64):
        _, trace = dense(kind, ids)
        state = V41State.allocate(cfg, 1, 40)
        models.model(kind)(ids, models.positions(0, 40), state, draft_inputs=out)
    assert torch.equal(out, torch.cat([trace[f"target.{i}"] for i in cfg.draft.target_layers], 1))


@pytest.mark.parametrize("kind", ["micro", "tiny"])
def test_default_accumulation_is_close(kind: str) -> None:
    """float32: not bit-equal, because sums run in another order; a rounding flips here and there."""
    ids = models.text(kind, 60)
    want, _ = dense(kind, ids)
    got = models.model(kind)(ids, models.positions(0, 60), V41State.allocate(models.config(kind), 1, 60))
    law = torch.log_softmax(want, -1)
    divergence = (law.exp() * (law - torch.log_softmax(got, -1))).sum(-1)
    assert divergence.median() < MODEL_KL_MEDIAN
    assert (want.argmax(-1) == got.argmax(-1)).double().mean() > MODEL_TOP1


def test_index_head_weights_are_rounded_once() -> None:
    """The scale is no power of two with four heads: rounding it first moves last bits, and with them
    near-ties.
    """
    layers: Any = models.model(MINI).layers
    indexer = layers[2].attn.indexer
    h = torch.randn(50, MINI.hidden).bfloat16()
    with accumulate(torch.float64):
        got = indexer.head_weights(h)
    plain = (h.double() @ indexer.weights_proj.weight.double().T).to(torch.bfloat16).double()
    assert torch.equal(got, (plain * MINI.index_dim**-0.5 * MINI.index_heads**-0.5).float())


def test_sequence_at_the_maximum_length() -> None:
    kind = "micro"
    cfg = dataclasses.replace(models.config(kind), max_positions=48)
    assert V41State.allocate(cfg, 1, 48, block=16).capacity == 48
    check_incremental(kind, 48, [47])


def test_rows_out_of_range_are_refused_before_anything_is_written() -> None:
    state = V41State.allocate(models.config("tiny"), 1, 16)
    with pytest.raises(ValueError, match="rows: 0 to 3, got 99 to 99"):
        models.model("tiny")(models.text("tiny", 4), models.positions(0, 4), state, rows=torch.tensor([99]))
    assert int(state.lens[0]) == 0


def test_no_tokens() -> None:
    cfg = models.config("tiny")
    state = V41State.allocate(cfg, 2, 16)
    cu = torch.zeros(3, dtype=torch.int32)
    none = torch.empty(0, dtype=torch.int64)
    logits = models.model("tiny")(none, models.positions(0, 0), state, cu_seqlens=cu)
    assert logits.shape == (0, cfg.vocab_size) and state.lens.tolist() == [0, 0]
    empty = V41State.allocate(cfg, 0, 16)
    assert models.model("tiny")(none, models.positions(0, 0), empty, cu_seqlens=cu[:1]).shape[0] == 0


ERRORS = {
    "token": ("token ids 0 to", lambda a: a["tokens"].__setitem__(2, 9999)),
    "negative token": ("token ids 0 to", lambda a: a["tokens"].__setitem__(2, -1)),
    "position": ("to continue its state at 0", lambda a: a["positions"].add_(1)),
    "gap": ("to continue its state", lambda a: a["positions"].__setitem__(3, 9)),
    "cu": ("cu_seqlens: rising", lambda a: a["cu_seqlens"].__setitem__(1, 99)),
    "rows": ("rows: 0 to", lambda a: a["rows"].__setitem__(0, 77)),
    "page": ("a page in range", lambda a: a["state"].page_table.__setitem__((0, 0), 7777)),
    "no page": ("a page in range", lambda a: a["state"].page_table.__setitem__((0, 0), -1)),
}


@pytest.mark.parametrize("error", ERRORS)
def test_values_are_checked_before_anything_is_written(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_CHECK", "1")
    message, spoil = ERRORS[error]
    state = V41State.allocate(models.config("tiny"), 1, 16, block=8)
    call = {
        "tokens": models.text("tiny", 6),
        "positions": models.positions(0, 6),
        "state": state,
        "cu_seqlens": torch.tensor([0, 6], dtype=torch.int32),
        "rows": torch.tensor([5]),
    }
    spoil(call)
    before = [c.pages.clone() for c in (*state.windows, *state.compressed.values())]
    with pytest.raises(ValueError, match=message):
        models.model("tiny")(**call)
    assert all(
        torch.equal(a, c.pages)
        for a, c in zip(before, (*state.windows, *state.compressed.values()), strict=True)
    )
    assert int(state.lens[0]) == 0


def test_a_full_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_CHECK", "1")
    state = V41State.allocate(models.config("tiny"), 1, 8, block=8)
    with pytest.raises(ValueError, match=r"room for 9 tokens of request 0, got 8"):
        models.model("tiny")(models.text("tiny", 9), models.positions(0, 9), state)


def test_wrong_values_are_contained() -> None:
    """Without checks: an unknown id is a row of zeros, and other requests do not notice anything."""
    kind, cfg = "tiny", models.config("tiny")
    ids = models.text(kind, 24)
    bad = ids.clone()
    bad[3], bad[4] = 10**9, -5
    cu = torch.tensor([0, 24, 48], dtype=torch.int32)
    place = torch.cat([models.positions(0, 24)] * 2)
    with accumulate(torch.float64):
        want, _ = dense(kind, ids)
        state = V41State.allocate(cfg, 2, 32, block=8)
        state.page_table[0, 1] = -1  # a page that is not held
        got = models.model(kind)(torch.cat([bad, ids]), place, state, cu_seqlens=cu)
    assert torch.equal(got[24:], want)
    assert got.isfinite().all()


def test_packing_changes_nothing() -> None:
    """Joined weights are the checkpoint's, seen as one; moving the model keeps them joined."""
    packed, ids, cfg = models.build("tiny", drafter=True), models.text("tiny", 21), models.config("tiny")
    stored = {name: view.clone() for name, view in packed.checkpoint_tensors().items()}
    assert packed.pack() is packed
    for moved in (False, True):
        if moved:
            packed._apply(lambda t: t.clone())
        attn: Any = packed.layers[0].attn
        assert attn.joined.values.data_ptr() == attn.wq_a.weight.data_ptr()
        assert attn.joined.flat()[1].data_ptr() == attn.wq_a.scale.data_ptr()
        gated = [m for m in packed.modules() if isinstance(m, Compressor) and m.ratio == 2]
        assert gated
        for m in gated:
            assert m.joined is not None and m.joined.data_ptr() == m.wkv.weight.data_ptr()
        for name, view in packed.checkpoint_tensors().items():
            assert torch.equal(view.view(torch.uint8), stored[name].view(torch.uint8)), name
    model = models.drafting_model("tiny")
    assert model.mtp is not None and packed.mtp is not None
    with accumulate(torch.float64):
        states = [V41State.allocate(cfg, 1, 32, drafter=True) for _ in range(2)]
        want, got = (m(ids, models.positions(0, 21), s) for m, s in zip((model, packed), states, strict=True))
        a, b = (m(torch.tensor([5]), s) for m, s in zip((model.mtp, packed.mtp), states, strict=True))
    assert torch.equal(want, got) and torch.equal(a.logits, b.logits)


def test_experts_that_were_not_packed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device's kernel reads another order: the message is the call to make."""
    monkeypatch.setattr(Experts, "packable", True)
    state = V41State.allocate(models.config("tiny"), 1, 16)
    with pytest.raises(ValueError, match=r"packed experts: model.pack\(\) once the weights are there"):
        models.model("tiny")(models.text("tiny", 4), models.positions(0, 4), state)


def test_rows_read_ahead_are_the_rows() -> None:
    """In steps of several sizes; Engram does not look anything up by itself then."""
    model, ids, cfg = models.build("tiny"), models.text("tiny", 20), models.config("tiny")
    stores = {i: model.layers[i].engram.store for i in cfg.engram.layers}  # type: ignore[union-attr]
    with accumulate(torch.float64), EngramPrefetcher(stores, 16, cfg.engram.columns) as ahead:  # type: ignore[arg-type]
        want = run_chunks("tiny", ids, [1, 9, 3], V41State.allocate(cfg, 1, 32))
        model.attach_prefetcher(ahead)
        for i in cfg.engram.layers:
            model.layers[i].engram.store = None  # type: ignore[union-attr]
        state, out, start = V41State.allocate(cfg, 1, 32), [], 0
        for length in (1, 9, 3, 7):
            piece = ids[start : start + length]
            out.append(model(piece, models.positions(start, length), state))
            start += length
    assert torch.equal(torch.cat(out), want)
