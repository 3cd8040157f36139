"""The Hopper indexer and memory: lengths, addresses, bytes that it must not read, calls that it must refuse.

On a CPU its CUDA source in the emulator, on a GPU the kernels; see test_index_hopper.
"""

import re
from typing import Any

import pytest
import torch

from dsv41._op import Target
from dsv41._op import ops as registered
from dsv41.ops.index import api
from tests.ops.test_index_hopper import (
    BYTES,
    DEVICE,
    GPU,
    HEADS,
    Scene,
    best,
    best_blocks,
    gpu_only,
    pytestmark,  # noqa: F401
    tilelang_cuda,
)
from tests.tools import cuda_emu

LENGTHS = [0, 1, 127, 128, 129, 511, 512, 513]


@pytest.mark.parametrize("together", [1, 6])
def test_lengths(together: int) -> None:
    """All visible entries and then -1 where there are no more than k; the best k of the rest."""
    scene = Scene("mxfp4", [513], [(0, n) for n in LENGTHS], heads=4, page=64)
    ids, _ = scene.launch(512, together=together)
    for row, n in zip(ids[:-1].tolist(), LENGTHS, strict=False):
        assert row == [*range(n), *[-1] * (512 - n)]
    assert torch.equal(ids, best(scene.own_scores(together=together), 512))


def moved(scene: Scene, page: int, between: int, fill: int) -> Scene:
    """The same queries and keys in other pages, of another size, with ``between`` bytes of another cache's
    page behind each; every byte that no query sees is ``fill``.
    """
    other, layout = Scene.__new__(Scene), scene.layout
    vars(other).update(vars(scene), page=page)
    sees = [0] * len(scene.table)
    for r, n in zip(scene.request.tolist(), scene.visible.tolist(), strict=True):
        if r >= 0:
            sees[r] = max(sees[r], n)
    held, size = [-(-n // page) for n in sees], BYTES[layout] * page
    count = sum(held) + 2
    other.pool = torch.full((count, size + between), fill, dtype=torch.uint8)
    other.pages = other.pool.as_strided((count, page, BYTES[layout]), (size + between, BYTES[layout], 1))
    other.table = torch.full((len(sees), max(held) + 1), -1, dtype=torch.int32)
    order = iter(torch.randperm(count).tolist())
    values = BYTES[layout] - 4
    for r, n in enumerate(sees):
        for p in range(held[r]):
            other.table[r, p] = next(order)
        for old, new in zip(scene.slots(r, n).tolist(), other.slots(r, n).tolist(), strict=True):
            a, b = (x.flatten(1) for x in (scene.pages, other.pages))
            (i, s), (j, t) = divmod(old, scene.page), divmod(new, page)
            b[j, t * values :][:values] = a[i, s * values :][:values]
            b[j, page * values + 4 * t :][:4] = a[i, scene.page * values + 4 * s :][:4]
    return other


@pytest.mark.parametrize("layout", ["mxfp4", "fp8"])
def test_where_keys_lie_changes_nothing(layout: str) -> None:
    """Permuted pages of another size, interleaved with another cache; NaN, and anything else, in freed pages
    and behind the last key; another number of blocks: all the same bits.
    """
    scene = Scene(layout, [300, 150, 40], [(0, 300), (1, 131), (0, 7), (2, 40)])
    keys: dict[str, Any] = {"blocks": 20}
    want, want_blocks = scene.launch(64, **keys)
    score = scene.own_scores()[:, :300]
    for page, between, fill in ((8, 0, 255), (64, 112, 255), (16, 16, 0x3B)):
        other = moved(scene, page, between, fill)
        ids, blocks = other.launch(64, **keys, grid=5)
        assert torch.equal(ids, want) and torch.equal(blocks, want_blocks)
        assert torch.equal(other.own_scores()[:, :300], score)
        again = other.launch(64, **keys)
        assert torch.equal(again[0], want) and torch.equal(again[1], want_blocks)


@gpu_only
def test_pool_beyond_4_gib() -> None:
    """Three pages, 2.2 GiB apart."""
    scene = Scene("mxfp4", [48], [(0, 48), (0, 30)])
    scene.table = scene.table[:, :3]
    far, size = (2200 << 20) + 48, BYTES["mxfp4"] * 16
    pool = torch.zeros(2 * far + size, dtype=torch.uint8, device="cuda")
    pages = pool.as_strided((3, 16, BYTES["mxfp4"]), (far, BYTES["mxfp4"], 1))
    for p in range(3):
        pages[p] = scene.pages[int(scene.table[0, p])].to("cuda")
    want = scene.launch(40)[0]
    call = scene.args()
    call[5], call[7] = pages, torch.arange(3, dtype=torch.int32, device="cuda")[None]
    ids = torch.empty((2, 40), dtype=torch.int32, device="cuda")
    scratch = torch.empty(api.index_topk_scratch(2), dtype=torch.uint8, device="cuda")
    tilelang_cuda.launch(*call, None, 8, ids, ids[:, :0], scratch)
    assert torch.equal(ids.cpu(), want)


@pytest.mark.skipif(GPU, reason="the emulator says which address was asked for")
def test_address_of_a_far_page() -> None:
    """Page 3 of a pool whose pages lie 2^31 + 16 bytes apart: the copy asks for just that address."""
    scene, far = Scene("mxfp4", [16], [(0, 16)]), 2**31 + 16
    scene.table[0, 0] = 3
    scene.pages = torch.zeros(4, 16, 68, dtype=torch.uint8, device="meta").as_strided(
        (4, 16, 68), (far, 68, 1)
    )
    with pytest.raises(cuda_emu.EmulationError, match="outside global memory") as caught:
        scene.launch(8)
    found = re.search(r"ending (\d+) bytes past its end", str(caught.value))
    assert found and abs(int(found[1]) - 3 * far) < 1 << 20


def test_scratch_does_not_grow_with_the_context() -> None:
    """A function of the number of queries, and bounded for any; the kernels' own layout fits."""
    queries = (0, 1, 64, 128, 129, 4096, 10**6)
    assert max(api.index_topk_scratch(n) for n in queries) == 9_744_768
    assert max(api.index_topk_scratch(n, 2048) for n in queries) == 28_123_392
    assert {api.topk_scratch(n) for n in queries} == {3_246_144}
    text = tilelang_cuda.source("index_plan.cuh")
    most, blocks, slack, more = (
        int(re.search(rf"\b{name} = (\d+)", text)[1])  # type: ignore[index]
        for name in ("kMost", "kBlockMost", "kSlack", "kBlockSlack")
    )
    assert (most, blocks) == (api.MOST, api.MOST_BLOCKS)
    assert (most + slack, blocks + more) == (api.ROOM, api.BLOCK_ROOM)


def refusal(
    layout: str = "mxfp4",
    heads: int = HEADS,
    width: int = 64,
    page: int = 16,
    gap: int = 0,
    k: int = 512,
    blocks: int = 0,
    block_size: int = 8,
    step: int = 1,
) -> str:
    """Why the Hopper kernel does not take a call; empty when it does."""
    record = BYTES.get(layout, 136)
    pool = torch.zeros(3 * (record * page + gap), dtype=torch.uint8)
    pages = pool.as_strided((3, page, record), (record * page + gap, record, 1))
    q, scale = torch.zeros(2 * step, heads, width), torch.zeros(2, heads, 4)
    few = torch.zeros(2, heads), torch.zeros(2), torch.zeros(2)
    out = torch.zeros(2, k), torch.zeros(2, blocks), torch.zeros(0)
    args = (q[::step], scale, *few, pages, layout, torch.zeros(1, 3), None, block_size, *out)
    kernel = registered()["index_topk"].kernels[0]
    return kernel.refusal(Target("cuda", 90, frozenset({"tilelang", "nvcc"})), args) or ""


def test_refusals() -> None:
    """Records, strides and sizes that the Hopper kernel has no code for, each with a sentence."""
    assert refusal() == refusal("fp8") == refusal(heads=1) == refusal(gap=48) == refusal(blocks=2048) == ""
    assert "mxfp4 or fp8 keys, got nvfp4" in refusal("nvfp4")
    assert "up to 32 heads of width 128, got 64 of 128" in refusal(heads=64)
    assert "up to 32 heads of width 128, got 32 of 64" in refusal(width=32)
    assert "16 bytes apart, got 16 and 1096 bytes" in refusal(gap=8)
    assert "a multiple of 4 keys, 16 bytes apart, got 6" in refusal(page=6)
    assert "top_k up to 512" in refusal(k=513) and "num_candidates up to 2048" in refusal(blocks=2049)
    assert "candidate blocks of 4 or 8 within a page, got 2 and 16" in refusal(blocks=8, block_size=2)
    assert "candidate blocks of 4 or 8 within a page, got 8 and 4" in refusal(blocks=8, page=4)
    assert "contiguous tensors" in refusal(step=2)


@gpu_only
@pytest.mark.parametrize("kind", ["plain", "publishing", "restricted"])
def test_graph_replay(kind: str) -> None:
    """Lengths, tables and candidates change between replays of one graph."""
    scene = Scene("mxfp4", [3000, 2000, 900], [(0, 3000), (1, 2000), (2, 900)])
    few, blocks = scene.args(), 64 if kind == "publishing" else 0
    candidates = torch.full((3, 64), -1, dtype=torch.int32, device=DEVICE)
    ids, new = (torch.empty((3, n), dtype=torch.int32, device=DEVICE) for n in (512, blocks))
    scratch = torch.empty(api.index_topk_scratch(3, blocks), dtype=torch.uint8, device=DEVICE)
    call = [*few, candidates if kind == "restricted" else None, 8, ids, new, scratch]
    tilelang_cuda.launch(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tilelang_cuda.launch(*call)
    for rows in ([(1, 1999), (0, 1), (2, 513)], [(2, 0), (-1, 5), (0, 2999)]):
        scene.request, scene.visible = (torch.tensor(x, dtype=torch.int32) for x in zip(*rows, strict=True))
        scene.table = scene.table.flip(0)
        few[3].copy_(scene.request)
        few[4].copy_(scene.visible)
        few[7].copy_(scene.table)
        score = scene.own_scores()
        chosen = best_blocks(score, scene.visible.where(scene.request >= 0, 0), 8, 64)
        candidates.copy_(chosen)
        graph.replay()
        if kind == "restricted":
            assert torch.equal(ids.cpu(), scene.launch(512, candidates=chosen)[0])
        else:
            assert torch.equal(ids.cpu(), best(score, 512))
            assert torch.equal(new.cpu(), chosen[:, :blocks])
