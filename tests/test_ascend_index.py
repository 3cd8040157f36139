"""The Ascend indexer: choice, blocks and runs of requests from the emitted Ascend C, scores of the reference.

The choice is exact for given scores. Those of the kernel are held against the reference in
`test_ascend_cube.py`.
"""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dsv41_reference import index as ref
from dsv41_reference.cache import in_range, read_rows

from dsv41 import ops
from dsv41._op import ops as operators
from dsv41.support import TARGETS
from tests.ops.test_index_hopper import Scene
from tests.tools import ascend_emu
from tests.tools.ascend_emu import EmulationError

pytest.importorskip("tilelang")
if not ascend_emu.available():
    pytest.skip("needs g++", allow_module_level=True)

HEADS = 32


def score(
    q: Any, q_scale: Any, weights: Any, requests: Any, lens: Any, keys: Any, layout: str, table: Any,
    first: int, out: Any,
) -> None:  # fmt: skip
    """What the cube kernel would write, and 7 where it writes nothing."""
    entries = first + torch.arange(out.shape[1])
    out.fill_(7)
    for t in range(len(q)):
        if int(lens[t]) <= first:
            continue
        page = entries // keys.shape[1]
        held = table[int(requests[t])].long()[page.clamp(max=table.shape[1] - 1)]
        slots = torch.where(held >= 0, held * keys.shape[1] + entries % keys.shape[1], -1)
        stored = read_rows(keys, layout, 2 * q.shape[2], torch.where(in_range(keys, slots), slots, -1))
        row = ref.index_scores(q[t : t + 1], q_scale[t : t + 1], weights[t : t + 1], stored)[0]
        row = torch.where(in_range(keys, slots), row, -torch.inf)
        seen = entries < lens[t]
        out[t, seen] = row[seen]


@pytest.fixture
def npu() -> Iterator[Any]:
    with ascend_emu.emulated("dsv41.ops.index.tilelang_npu") as kernels:
        kept, kernels.score = kernels.score, score
        yield kernels
        kernels.score = kept


def call(npu: Any, scene: Scene, k: int, blocks: int, candidates: Any, room: int) -> tuple[Any, Any]:
    """(ids, published blocks) with a scratch of ``room`` numbers a query."""
    tokens = len(scene.request)
    ids, new = (torch.full((tokens, n), 77, dtype=torch.int32) for n in (k, blocks))
    scratch = torch.full((4 * room * tokens,), 255, dtype=torch.uint8)
    npu.index_topk(*scene.args(), candidates, 8, ids, new, scratch)
    return ids, new


def reference(scene: Scene, k: int, blocks: int, candidates: Any) -> tuple[Any, Any]:
    tokens = len(scene.request)
    ids, new = (torch.full((tokens, n), 77, dtype=torch.int32) for n in (k, blocks))
    given: list[Any] = [*scene.args(), candidates, 8, ids, new, torch.empty(0)]
    ref.index_topk(*given)
    return ids, new


ROWS = [(0, 300), (0, 299), (1, 40), (0, 1), (-1, 9), (2, 30), (1, 0), (0, 170)]


@functools.cache
def scene(layout: str) -> Scene:
    made = Scene(layout, [300, 41, 0], ROWS, heads=HEADS)
    made.table[0, 4] = -1  # a page that is not held
    made.weights[1, 3] = torch.nan  # no score of this query is a number
    made.q[3], made.q[7] = 0, 0  # all scores equal: the lower entries
    return made


@pytest.mark.emulates("index_topk")
def test_choice_over_chunks(npu: Any) -> None:
    """One chunk or several; ties, NaN, pages that are not held, rows of padding, requests without entries."""
    for layout, room in (("mxfp4", 16 + 24 + 256 + 160), ("mxfp4", 4000), ("fp8", 1000)):
        got, want = call(npu, scene(layout), 24, 0, None, room), reference(scene(layout), 24, 0, None)
        assert torch.equal(got[0], want[0]), (layout, room)


def test_blocks(npu: Any) -> None:
    """Published blocks are not restricted; the newest is among them; a restriction names some of them."""
    one = scene("mxfp4")
    want = reference(one, 24, 16, None)
    got = call(npu, one, 24, 16, None, 16 + 24 + 256 + 160)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    named = want[1][:, :11].sort().values.flip(1)  # any ids; ascending, -1 behind
    named = torch.where(named < 0, 1 << 20, named).sort().values
    named = torch.where(named == 1 << 20, -1, named).int()
    got, want = call(npu, one, 24, 16, named, 700), reference(one, 24, 16, named)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_tokens_that_share_keys(npu: Any) -> None:
    """The first token of a tile's request stands for the others of it."""
    requests = torch.tensor([0, 0, 1, 0, 2, 2, 2, 2, 3], dtype=torch.int32)
    lens = torch.tensor([5, 9, 4, 7, 0, 0, 1, 3, 8], dtype=torch.int32)
    most = torch.full((9,), 99, dtype=torch.int32)
    npu._longest(4)(requests, lens, most)
    assert most.tolist() == [9, 0, 4, 0, 3, 0, 0, 0, 8]


# Planted into the emitted Ascend C: an entry one too high, a place left out, the newest block not pinned, a
# restriction turned around.
FAULTS = {
    "entry": ("i_2) - 24)", "i_2) - 23)"),
    "place": ("place = (place + 1)", "place = (place + 2)"),
    "newest": ("tl::limits::kFloatInf", "top"),
    "restriction": ("found != ", "found == "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    def edit(source: str) -> str:
        assert FAULTS[fault][0] in source, source
        return source.replace(*FAULTS[fault])

    scores, lens = torch.randn(3, 128), torch.tensor([128, 90, 0], dtype=torch.int32)
    many = torch.randn(3, 700)
    named = torch.tensor([[1, 4, 15, -1]], dtype=torch.int32).expand(3, 4).contiguous()
    with ascend_emu.emulated("dsv41.ops.index.tilelang_npu", edit) as broken:
        try:
            if fault == "newest":
                got, want = torch.zeros(3, 16), scores.unflatten(1, (16, 8)).amax(-1)
                want[0, 15], want[1, 11], want[1, 12:], want[2] = torch.inf, torch.inf, 0, 0
                broken._maxima(8)(scores, lens, 0, got)
            elif fault == "restriction":
                got, want = scores.clone(), torch.full_like(scores, -torch.inf)
                for block in (1, 4, 15):
                    want[:, block * 8 : block * 8 + 8] = scores[:, block * 8 : block * 8 + 8]
                want = torch.where(torch.arange(128) < lens[:, None], want, scores)
                broken._restrict(8, 4)(named, lens, 0, got)
            else:
                got, want = torch.full((3, 24), -1, dtype=torch.int32), ops.topk(many, lens * 5, k=24)
                broken._merge(24)(many, lens * 5, 0, torch.full((3, 24), -torch.inf), got)
            assert not torch.equal(got, want)
        except EmulationError:
            pass


@pytest.mark.parametrize(
    "place, value, reason",
    [
        (
            0,
            torch.zeros(8, 24, 64, dtype=torch.uint8),
            "heads, a power of two, of a multiple of 64, got 24 of 128",
        ),
        (6, "v4", "mxfp4 or fp8 keys, got v4"),
        (9, 12, "candidate blocks of a power of two up to 128, got 12"),
        (10, torch.zeros(8, 4096, dtype=torch.int32), "top_k and num_candidates up to 2048, got 4096 and 16"),
        (3, torch.zeros(16, dtype=torch.int32)[::2], "contiguous tensors beside keys and page table"),
    ],
)
def test_refusals(place: int, value: Any, reason: str) -> None:
    """A sentence for what the kernels do not take; what they take has none."""
    ids, new = (torch.zeros(8, n, dtype=torch.int32) for n in (24, 16))
    args: list[Any] = [*scene("mxfp4").args(), None, 8, ids, new, torch.zeros(0)]
    told = dict(operators()["index_topk"].explain(TARGETS["Ascend 950"], tuple(args)))
    assert told["tilelang_npu"] is None
    args[place] = value
    told = dict(operators()["index_topk"].explain(TARGETS["Ascend 950"], tuple(args)))
    assert (told["tilelang_npu"] or "").endswith(reason)
