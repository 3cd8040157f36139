"""Indexer: the choice of entries against loops in Python."""

from typing import Any

import pytest
import torch
from dsv41_reference import accumulate
from dsv41_reference.rope import rope_table
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41 import ops
from dsv41.cache import PagedKV, Record
from dsv41.formats import MXFP4, quantize_mxfp4
from tests.ops.rows import assert_nan_stays, assert_refused, assert_rows_independent, same

BF16, DIM, HEADS, SIZE = torch.bfloat16, 32, 2, 4


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def padded(ids: list[int], width: int) -> list[int]:
    return sorted(ids) + [-1] * (width - len(ids))


def best(score: dict[int, float], k: int) -> list[int]:
    return sorted(score, key=lambda j: (-score[j], j))[:k]


def blocks_by_hand(score: dict[int, float], visible: int, size: int, count: int) -> list[int]:
    """The best blocks; the one of the query's own newest entry is always in."""
    if not visible:
        return []
    top: dict[int, float] = {}
    for j in range(visible):
        top[j // size] = max(top.get(j // size, -torch.inf), score[j])
    top[(visible - 1) // size] = torch.inf
    return best(top, count)


class Scene:
    """Two requests with keys in scattered pages, and queries of both in any order."""

    def __init__(self, tokens: int, entries: tuple[int, ...] = (13, 7), equal: bool = False):
        record = Record("mxfp4", DIM)
        pages = sum(-(-n // SIZE) for n in entries)
        self.keys = PagedKV(torch.full((pages + 1, SIZE, record.bytes), 0xFF, dtype=torch.uint8), record)
        order = iter((torch.randperm(pages) + 1).tolist())
        width = max(-(-n // SIZE) for n in entries)
        self.table = torch.full((len(entries), width), -1, dtype=torch.int32)
        self.stored: list[torch.Tensor] = []
        for r, n in enumerate(entries):
            for page in range(-(-n // SIZE)):
                self.table[r, page] = next(order)
            x = torch.ones(n, DIM) if equal else torch.randn(n, DIM)
            slots = self.table[r].long().repeat_interleave(SIZE)[:n] * SIZE + torch.arange(n) % SIZE
            still = torch.ones(n, 1), torch.zeros(n, 1)
            ops.write_cache(x.to(BF16), *still, slots.to(torch.int32), self.keys)
            self.stored.append(self.keys.read(slots).double())
        self.q = quantize_mxfp4(torch.ones(tokens, HEADS, DIM) if equal else torch.randn(tokens, HEADS, DIM))
        self.weights = torch.ones(tokens, HEADS) if equal else torch.randn(tokens, HEADS)
        self.request = torch.randint(0, len(entries), (tokens,), dtype=torch.int32)
        limit = torch.tensor(entries)[self.request.long()]
        self.visible = (torch.rand(tokens) * (limit + 1)).to(torch.int32)

    def call(self, rows: torch.Tensor | None = None, **keys: Any) -> Any:
        rows = torch.arange(len(self.request)) if rows is None else rows
        q = MXFP4(self.q.values[rows], self.q.flat()[1][rows].view(torch.float8_e8m0fnu))
        if keys.get("candidates") is not None:
            keys["candidates"] = keys["candidates"][rows]
        few = self.weights[rows], self.request[rows], self.visible[rows]
        return ops.index_topk(q, *few, self.keys, self.table, **keys)

    def scores(self, t: int) -> dict[int, float]:
        q, keys = self.q.dequantize(torch.float64)[t], self.stored[int(self.request[t])]
        out = {}
        for j in range(int(self.visible[t])):
            dots = [max(float(q[h] @ keys[j]), 0.0) for h in range(HEADS)]
            total = sum(w * d for w, d in zip(self.weights[t].tolist(), dots, strict=True))
            out[j] = torch.tensor(total).item()  # rounded to float32, as scores are
        return out


@pytest.mark.parametrize("top_k", [3, 20])
def test_closed_form(top_k: int) -> None:
    scene = Scene(12)
    with accumulate(torch.float64):
        ids, blocks = scene.call(top_k=top_k, num_candidates=2, block_size=2)
        again, none = scene.call(top_k=top_k, candidates=blocks, block_size=2)
    for t in range(12):
        score = scene.scores(t)
        chosen = blocks_by_hand(score, int(scene.visible[t]), 2, 2)
        assert blocks[t].tolist() == padded(chosen, 2)
        assert ids[t].tolist() == padded(best(score, top_k), top_k)  # not restricted by its own blocks
        inside = {j: s for j, s in score.items() if j // 2 in chosen}
        assert again[t].tolist() == padded(best(inside, top_k), top_k)
    assert none.shape == (12, 0)


def test_all_visible_entries_when_there_are_few() -> None:
    scene = Scene(8)
    ids, blocks = scene.call(top_k=16, num_candidates=16, block_size=4)
    for t in range(8):
        n = int(scene.visible[t])
        assert ids[t].tolist() == padded(list(range(n)), 16)
        assert blocks[t].tolist() == padded(list(range(-(-n // 4))), 16)


def test_the_newest_block_is_the_querys_own() -> None:
    """A query that sees fewer entries pins its own last block, though others of the call see more."""
    scene = Scene(3, entries=(12,))
    scene.visible = ints(5, 12, 1)
    scene.weights = -scene.weights.abs()  # all scores at most zero
    _, blocks = scene.call(top_k=1, num_candidates=1, block_size=2)
    assert blocks.flatten().tolist() == [2, 5, 0]


def test_ties_go_to_the_lower_entry() -> None:
    scene = Scene(4, equal=True)
    scene.visible, scene.request = ints(7, 6, 5, 3), ints(0, 0, 1, 1)
    ids, blocks = scene.call(top_k=4, num_candidates=2, block_size=2)
    assert ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, -1]]
    assert blocks.tolist() == [[0, 3], [0, 2], [0, 2], [0, 1]]


def test_nan_keys_are_never_chosen() -> None:
    scene = Scene(4, entries=(8,))
    scene.visible = ints(8, 8, 4, 8)
    page = int(scene.table[0, 0])
    scene.keys.pages[page].view(-1)[SIZE * DIM // 2] = 255  # the scale of entry 0
    ids, _ = scene.call(top_k=8)
    assert [0 in row for row in ids.tolist()] == [False] * 4
    assert ids[0].tolist() == [1, 2, 3, 4, 5, 6, 7, -1]


def test_pages_that_are_not_held() -> None:
    scene = Scene(2, entries=(8,))
    scene.visible, scene.table[0, 1] = ints(8, 8), -1
    ids, _ = scene.call(top_k=8)
    assert ids.tolist() == [padded([0, 1, 2, 3], 8)] * 2


def test_rows() -> None:
    scene = Scene(7)
    scene.request[3], scene.visible[5] = -1, -4  # a padding row, and a row that sees nothing
    keys: dict[str, Any] = {"top_k": 3, "num_candidates": 2, "block_size": 2}
    assert_rows_independent(lambda r: scene.call(r, **keys), 7)
    for out in scene.call(**keys):
        assert (out[[3, 5]] == -1).all()

    def poisoned(weights: torch.Tensor) -> Any:
        scene.weights = weights
        return scene.call(**keys)

    assert_nan_stays(poisoned, scene.weights)


def test_index_query() -> None:
    x, (cos, sin) = torch.randn(3, HEADS, DIM).to(BF16), rope_table(torch.arange(3) * 9, 8, 50.0)
    with accumulate(torch.float64):
        got = ops.index_query(x, cos, sin)
        want = ops.quantize_mxfp4(ops.rope(x, cos, sin).flatten(0, 1))
    assert same(got.values.flatten(0, 1), want.values) and same(got.scale.flatten(0, 1), want.scale)
    assert_rows_independent(lambda r: ops.index_query(x[r], cos[r], sin[r]), 3)


@settings(max_examples=40)
@given(st.data())
def test_topk(data: st.DataObject) -> None:
    rows, n, k = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 9)), data.draw(st.integers(1, 11))
    value = st.sampled_from([0.0, 1.0, -1.0, 2.5, -torch.inf, torch.nan, torch.inf])
    table = [[data.draw(value) for _ in range(n)] for _ in range(rows)]
    lens = [data.draw(st.integers(-2, n + 2)) for _ in range(rows)]  # negative counts as 0
    got = ops.topk(torch.tensor(table).view(rows, n), torch.tensor(lens, dtype=torch.int32), k=k)
    for row, length, ids in zip(table, lens, got.tolist(), strict=True):
        score = {j: s for j, s in enumerate(row[: max(length, 0)]) if s == s and s > -torch.inf}
        assert ids == padded(best(score, k), k)


def test_values_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_CHECK", "1")
    scene = Scene(3)
    scene.visible[1] = 99
    scene.request[1] = 0
    beyond = r"visible: at most 16 \(the page table\), got 99 \(token 1, request 0\)"
    assert_refused(lambda: scene.call(top_k=1), beyond)
    scene.request[1] = -1  # a padding row may say what it likes
    scene.call(top_k=1)
    scene.visible[1], scene.request[1] = 1, 2
    assert_refused(lambda: scene.call(top_k=1), "request_ids: below 2, got 2")
    scene.request[1], scene.table[0, 0] = 1, 999
    assert_refused(lambda: scene.call(top_k=1), "page_table: pages below")


S = Scene(2)
X, T, N = torch.zeros(2, HEADS, DIM, dtype=BF16), torch.zeros(2, 4), torch.zeros(2, 5)
F: tuple[Any, ...] = (S.weights, S.request, S.visible, S.keys, S.table)
WIDE = PagedKV(torch.zeros(1, 1, 34, dtype=torch.uint8), Record("mxfp4", 64))


def refuse(**change: Any) -> Any:
    """`index_topk` with one argument replaced."""
    names = ("q", "head_weights", "request_ids", "visible", "keys", "page_table")
    call: dict[str, Any] = {**dict(zip(names, (S.q, *F), strict=True)), "top_k": 1, **change}
    return lambda: ops.index_topk(*[call.pop(n) for n in names], **call)


ERRORS: dict[str, Any] = {
    "query x": (
        lambda: ops.index_query(X[0], T, T),
        r"index_query: expected x: \[\*, \*, \*\] bfloat16, got",
    ),
    "query width": (lambda: ops.index_query(X[..., :16], T, T), "index_dim a multiple of 32, got"),
    "query cos": (lambda: ops.index_query(X, T[:1], T), r"cos: \[2, \*\] float32, got \[1, 4\]"),
    "topk scores": (
        lambda: ops.topk(N.to(BF16), ints(1, 1), k=1),
        r"topk: expected scores: \[\*, \*\] float32",
    ),
    "topk lens": (lambda: ops.topk(N, ints(1), k=1), r"lens: \[2\] int32, got \[1\]"),
    "topk k": (lambda: ops.topk(N, ints(1, 1), k=0), "k: an integer of 1 or more, got 0"),
    "topk out apart": (
        lambda: ops.topk(N, ints(1, 1), k=1, out=ints(1).expand(2, 1)),
        r"topk: expected out: elements apart in memory, got strides \(0, 1\)",
    ),
    "topk out": (lambda: ops.topk(N, ints(1, 1), k=1, out=N), r"out: \[2, 1\] int32, got \[2, 5\] float32"),
    "q": (refuse(q=X), r"index_topk: expected q: MXFP4 \[num_tokens, index_heads, index_dim/2\], got"),
    "keys": (refuse(keys=WIDE), "keys: records of width 32, got Record"),
    "device": (refuse(keys=PagedKV(S.keys.pages.to("meta"), S.keys.record)), "q on meta, got cpu"),
    "weights": (refuse(head_weights=N), r"head_weights: \[2, 2\] float32, got \[2, 5\]"),
    "requests": (refuse(request_ids=N), r"request_ids: \[2\] int32, got \[2, 5\] float32"),
    "visible": (refuse(visible=N), r"visible: \[2\] int32, got \[2, 5\] float32"),
    "table": (refuse(page_table=S.visible), r"page_table: \[\*, \*\] int32, got \[2\] int32"),
    "top_k": (refuse(top_k=0), "top_k: an integer of 1 or more, got 0"),
    "candidates": (refuse(candidates=N), r"candidates: \[2, \*\] int32, got \[2, 5\] float32"),
    "out apart": (refuse(out=ints(1).expand(2, 1)), r"out: elements apart in memory, got strides \(0, 1\)"),
    "out": (refuse(out=N), r"out: \[2, 1\] int32, got \[2, 5\] float32"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error: str) -> None:
    assert_refused(*ERRORS[error])
