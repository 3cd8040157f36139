"""The Hopper indexer: on a CPU its CUDA source in the emulator, on a GPU the kernels through the op.

The selection must be exactly the best of the kernel's own scores; those are held against float64.
"""

from typing import Any

import pytest
import torch
from dsv41_reference import cache as ref_cache
from dsv41_reference import index as ref
from dsv41_reference.quant import from_mxfp4, to_mxfp4
from dsv41_reference.rope import rope_table

from dsv41 import ops
from dsv41.ops.index.api import BLOCK_ROOM, ROOM
from tests.tools import cuda_emu

tilelang_cuda: Any = pytest.importorskip("dsv41.ops.index.tilelang_cuda")
scans: Any = pytest.importorskip("dsv41.ops.index.tilelang_scan")
GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not (GPU or cuda_emu.available()), reason="neither a Hopper GPU nor g++")
DEVICE = "cuda" if GPU else "cpu"
# The tensor cores add E4M3 products with 13 bits below the largest; in the emulator sums are float32.
SCORE_BOUND = 2.0**-11 if GPU else 2.0**-20
HEADS, DIM, PAGE = 32, 128, 16
BYTES = {"mxfp4": 68, "fp8": 132}
SCHEDULES = ("late", "eager")


def ints(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(DEVICE)


class Scene:
    """Requests with ``entries`` keys each in scattered pages of a strided pool; all other bytes are 255.

    ``kernel``: the file whose scans are emulated, ``form``: what it calls keys of a layout.
    """

    kernel, form = tilelang_cuda, {"mxfp4": "mxfp4", "fp8": "fp8"}

    def __init__(
        self,
        layout: str,
        entries: list[int],
        rows: list[tuple[int, int]],
        heads: int = HEADS,
        page: int = PAGE,
    ):
        self.layout, self.page, size = layout, page, BYTES[layout] * page
        held = [-(-n // page) for n in entries]
        count = sum(held) + 3
        self.pool = torch.full((count, size + 48), 255, dtype=torch.uint8)
        self.pages = self.pool.as_strided((count, page, BYTES[layout]), (size + 48, BYTES[layout], 1))
        self.table = torch.full((len(entries), max(max(held), 1) + 2), -1, dtype=torch.int32)
        order, at = torch.randperm(count).int(), 0
        for r, n in enumerate(entries):
            self.table[r, : held[r]] = order[at : at + held[r]]
            at += held[r]
            if n:
                # Group scales of a key differ; some groups and keys are zero, one is far out of range.
                x = torch.randn(n, DIM) * torch.exp2(torch.randint(-2, 3, (n, 4)).float()).repeat_interleave(
                    32, 1
                )
                x[1::97], x[3::89, :32] = 0, 0
                x[5::101, 64:96] *= 2.0**30
                ref_cache.write_rows(self.pages, layout, self.slots(r, n), x.bfloat16())
        tokens = len(rows)
        self.q, self.q_scale = to_mxfp4(torch.randn(tokens, heads, DIM))
        self.weights = torch.randn(tokens, heads)
        self.request = torch.tensor([r for r, _ in rows], dtype=torch.int32)
        self.visible = torch.tensor([n for _, n in rows], dtype=torch.int32)

    def slots(self, r: int, n: int) -> torch.Tensor:
        entry = torch.arange(n)
        page = self.table[r].long()[entry // self.page]
        return torch.where(page >= 0, page * self.page + entry % self.page, -1)

    def args(self) -> list[Any]:
        names = ("q", "q_scale", "weights", "request", "visible", "pages")
        few = [getattr(self, name) for name in names]
        moved = [*few[:5], self.pool.to(DEVICE).as_strided(few[5].shape, few[5].stride())] if GPU else few
        return [x.to(DEVICE) for x in moved[:5]] + [moved[5], self.layout, self.table.to(DEVICE)]

    def launch(
        self,
        k: int,
        *,
        together: int = 1,
        blocks: int = 0,
        candidates: torch.Tensor | None = None,
        block_size: int = 8,
        scores: bool = False,
        schedule: str = "late",
        grid: int = 3,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids or scores, published blocks) of the kernels; `grid` counts in the emulator only."""
        tokens, heads = self.weights.shape
        ids = torch.full((tokens, k), 77, dtype=torch.float32 if scores else torch.int32, device=DEVICE)
        new = torch.full((tokens, blocks), 77, dtype=torch.int32, device=DEVICE)
        publish, restrict, select = blocks > 0, candidates is not None, not scores
        if GPU:
            scratch = torch.full((32 << 20,), 255, dtype=torch.uint8, device=DEVICE)
            few = [
                *self.args(),
                None if candidates is None else candidates.to(DEVICE),
                block_size,
                ids,
                new,
                scratch,
            ]
            tilelang_cuda.launch(*few, select=select, together=together)
            return ids.cpu(), new.cpu()
        lists = 2 * grid * together
        scratch = torch.full(
            (lists * (8 * (ROOM + (BLOCK_ROOM if publish else 0)) + 8),), 255, dtype=torch.uint8
        )
        text = self.kernel.scan_source(together)
        named = 0 if candidates is None else candidates.shape[1]
        sizes = [
            tokens,
            heads,
            *self.table.shape,
            self.table.stride(0),
            self.page,
            len(self.pages),
            self.pages.stride(0),
        ]
        q = [
            self.q,
            self.q_scale,
            self.weights,
            self.request,
            self.visible,
            self.pool,
            self.table,
            candidates,
        ]
        out = [ids, new if publish else None, scratch]
        cuda_emu.emulate(
            text,
            scans.scan_call(self.form[self.layout], together, publish, restrict, select),
            [*q, *out, *sizes, named, blocks, block_size, k, grid, cuda_emu.SHARED],
            grid=grid,
            threads=scans.scan_threads(together),
            shared_bytes=scans.shared_bytes(self.form[self.layout], together, publish),
            schedules=(schedule,),
            uninitialised="allow",
        )
        if select:
            cuda_emu.emulate(
                text,
                scans.merge_call(together, publish, restrict),
                [
                    self.request,
                    self.visible,
                    *out,
                    tokens,
                    *self.table.shape,
                    self.page,
                    named,
                    blocks,
                    block_size,
                    k,
                    grid,
                    cuda_emu.SHARED,
                ],
                grid=(grid, together),
                threads=scans.MERGE_THREADS,
                shared_bytes=scans.MERGE_BYTES,
                schedules=(schedule,),
                uninitialised="allow",
            )
        return ids, new

    def own_scores(self, **keys: Any) -> torch.Tensor:
        """The kernel's scores [num_tokens, n], -inf where an entry is not visible or not held."""
        width = self.table.shape[1] * self.page
        scores, _ = self.launch(width, scores=True, **keys)
        for t, (r, n) in enumerate(zip(self.request.tolist(), self.visible.tolist(), strict=True)):
            held = (
                self.slots(r, width) >= 0
                if 0 <= r < len(self.table)
                else torch.zeros(width, dtype=torch.bool)
            )
            assert (scores[t, n:] == 77).all() and (scores[t, :n][~held[:n]] == 77).all(), (
                "wrote what is not visible"
            )
            scores[t, ~held] = -torch.inf
            scores[t, n:] = -torch.inf
        return scores


def best(score: torch.Tensor, k: int) -> torch.Tensor:
    ids = torch.empty((len(score), k), dtype=torch.int32)
    ref.mask_to_ids(ref.topk_mask(score, k), ids)
    return ids


def best_blocks(score: torch.Tensor, visible: torch.Tensor, size: int, count: int) -> torch.Tensor:
    ids = torch.empty((len(score), count), dtype=torch.int32)
    ref.mask_to_ids(ref.candidate_mask(score, visible, size, count), ids)
    return ids


ROWS = {
    1: [(0, 513), (1, 512), (2, 0), (0, 511), (-1, 9), (3, 1)],
    6: [(0, 513), (0, 400), (0, 512), (1, 512), (1, 1), (-1, 9), (2, 0)],
}
ENTRIES = [520, 512, 30, 1]


@pytest.mark.parametrize("layout", ["mxfp4", "fp8"])
@pytest.mark.parametrize("together", [1, 6])
def test_scores(layout: str, together: int) -> None:
    """Within the bound of float64 and not a bit different for the number of queries that share a pass."""
    scene = Scene(layout, ENTRIES, ROWS[together])
    got = scene.own_scores(together=together)
    q = from_mxfp4(scene.q, scene.q_scale).double()
    for t, (r, n) in enumerate(ROWS[together]):
        if r < 0 or n == 0:
            continue
        keys = ref_cache.read_rows(scene.pages, layout, DIM, scene.slots(r, n)).double()
        want = scene.weights[t].double() @ (q[t] @ keys.T).clamp(min=0)
        size = scene.weights[t].double().abs() @ (q[t].abs() @ keys.abs().T)
        assert ((got[t, :n] - want).abs() <= SCORE_BOUND * size).all()
    if together > 1:
        assert torch.equal(got, scene.own_scores(together=1))


@pytest.mark.parametrize("layout", ["mxfp4", "fp8"])
@pytest.mark.parametrize("together", [1, 6])
@pytest.mark.parametrize("schedule", SCHEDULES[: 1 if GPU else 2])
def test_selection(layout: str, together: int, schedule: str) -> None:
    scene = Scene(layout, ENTRIES, ROWS[together])
    score = scene.own_scores(together=together)
    for k in (512, 40):
        ids, _ = scene.launch(k, together=together, schedule=schedule)
        assert torch.equal(ids, best(score, k))


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("block_size", [4, 8])
def test_blocks(together: int, block_size: int) -> None:
    """Published blocks, then the selection that they restrict."""
    scene = Scene("mxfp4", ENTRIES, ROWS[6])
    score = scene.own_scores()
    ids, blocks = scene.launch(32, together=together, blocks=20, block_size=block_size)
    assert torch.equal(ids, best(score, 32))
    assert torch.equal(blocks, best_blocks(score, scene.visible.where(scene.request >= 0, 0), block_size, 20))
    ids, _ = scene.launch(32, candidates=blocks, block_size=block_size)
    inside = torch.zeros((len(score), score.shape[1] // block_size + 1), dtype=torch.bool)
    inside.scatter_(1, torch.where(blocks < 0, inside.shape[1] - 1, blocks).long(), True)
    inside = inside[:, :-1].repeat_interleave(block_size, 1)
    assert torch.equal(ids, best(torch.where(inside, score, -torch.inf), 32))


def test_ties_and_nan() -> None:
    """Equal keys go by their number; NaN keys, NaN weights and infinite scores as the definition says."""
    scene = Scene("mxfp4", [200, 200], [(0, 200), (0, 150), (1, 200), (1, 200)])
    slots = scene.slots(0, 200)
    ref_cache.write_rows(scene.pages, "mxfp4", slots, torch.ones(200, DIM).bfloat16())
    scene.pages[slots[3] // PAGE].view(-1)[PAGE * 64 + 4 * int(slots[3] % PAGE) + 2] = 255
    scene.weights[3, 7] = torch.nan
    scene.weights[2] = -scene.weights[2].abs()
    ids, blocks = scene.launch(20, blocks=5)
    kept = [j for j in range(21) if j != 3]
    assert ids[0].tolist() == kept and ids[1].tolist() == kept
    assert (ids[3] == -1).all()
    assert blocks[0].tolist() == [0, 1, 2, 3, 24] and blocks[3].tolist() == [24, -1, -1, -1, -1]
    scores = scene.own_scores()
    assert torch.equal(ids, best(scores, 20))


def test_pages_that_are_not_held_and_nan_queries() -> None:
    scene = Scene("mxfp4", [200, 64], [(0, 200), (1, 64), (1, 64)])
    scene.table[0, 2], scene.table[0, 5] = -1, 10_000
    scene.q_scale[2, 9, 1] = 255
    ids, _ = scene.launch(512)
    held = [j for j in range(200) if j // PAGE not in (2, 5)]
    assert ids[0, : len(held)].tolist() == held and (ids[0, len(held) :] == -1).all()
    assert ids[1, :64].tolist() == list(range(64)) and (ids[2] == -1).all()


def test_cutting_the_list() -> None:
    """Longer than the list in shared memory, scores ascending, so that every entry passes the bar; and one
    tie after another.
    """
    n = 70_000 if GPU else 2600
    for kind in ("ascending", "equal"):
        scene = Scene("mxfp4", [n], [(0, n)], heads=1)
        x = torch.zeros(n, DIM)
        x[:, 0] = torch.arange(n) // 64 * 64.0 if kind == "ascending" else 1.0
        ref_cache.write_rows(scene.pages, "mxfp4", scene.slots(0, n), x.bfloat16())
        scene.q, scene.q_scale = to_mxfp4(torch.ones(1, 1, DIM))
        scene.weights.fill_(1.0)
        ids, blocks = scene.launch(512, grid=1, blocks=100)
        score = scene.own_scores()
        assert torch.equal(ids, best(score, 512))
        assert torch.equal(blocks, best_blocks(score, scene.visible, 8, 100))


def rise(scene: Scene, every: int = 1) -> None:
    """Scores rise by steps, so that every key passes the bar; with ``every`` one of so many keys does."""
    scene.weights = scene.weights.abs()
    for r in range(len(scene.table)):
        n = int((scene.table[r] >= 0).sum()) * scene.page
        step = torch.arange(n) * 400 // n
        x = torch.where(step % 2 == 1, 1.5, 1.0) * torch.exp2((step // 2 - 100).float())
        x[torch.arange(n) % every != 0] = 0
        ref_cache.write_rows(
            scene.pages, scene.layout, scene.slots(r, n), x[:, None].expand(n, DIM).bfloat16()
        )


def check_full_lists(kind: str, together: int, schedule: str) -> None:
    """Every key passes the bar, and one warp of every four is as far ahead of the others as barriers let it:
    no list grows past its end. The emulator stops where one does.
    """
    if GPU or not cuda_emu.available():
        pytest.skip("the emulator's schedules")
    n, blocks = 6000, 20 if kind == "publishing" else 0
    scene = Scene("mxfp4", [n], [(0, n)] * together, heads=4)
    candidates = torch.arange(n // 8, dtype=torch.int32).expand(together, -1).contiguous()
    keys: dict[str, Any] = {"together": together, "blocks": blocks, "schedule": schedule, "grid": 1}
    keys |= {"block_size": 4} if blocks else {"candidates": candidates} if kind == "restricted" else {}
    text, old = scene.kernel.scan_source, "kBlockCap = NQ > 1 ? 3072 : 4096"
    assert old in text(together)
    with pytest.MonkeyPatch.context() as patch:
        # Lists of blocks that so few keys fill; where one key of a block passes, before the other lists.
        patch.setattr(scene.kernel, "scan_source", lambda n: text(n).replace(old, "kBlockCap = 512"))
        for every, k in ((1, 512), (1, 312)) + ((4, 512),) * (blocks > 0):
            rise(scene, every)
            score = scene.own_scores()
            ids, new = scene.launch(k, **keys)
            assert torch.equal(ids, best(score, k))
            assert not blocks or torch.equal(new, best_blocks(score, scene.visible, 4, blocks))


@pytest.mark.parametrize("schedule", ["first", "last"])
@pytest.mark.parametrize(
    ("kind", "together"),
    [("plain", 1), ("plain", 6), ("publishing", 1), ("publishing", 4), ("restricted", 1)],
)
def test_full_lists(kind: str, together: int, schedule: str) -> None:
    check_full_lists(kind, together, schedule)


def test_few_heads_and_small_pages() -> None:
    scene = Scene("mxfp4", [100, 7], [(0, 100), (1, 7), (0, 3)], heads=2, page=4)
    assert torch.equal(scene.launch(8)[0], best(scene.own_scores(), 8))


def test_queries_that_e4m3_cannot_hold() -> None:
    scene = Scene("mxfp4", [90], [(0, 90)])
    scene.q_scale[0, 3] = torch.tensor([90, 127, 127, 120])
    score = scene.own_scores()
    keys = ref_cache.read_rows(scene.pages, "mxfp4", DIM, scene.slots(0, 90)).double()
    want = scene.weights[0].double() @ (from_mxfp4(scene.q, scene.q_scale)[0].double() @ keys.T).clamp(min=0)
    assert torch.allclose(score[0, :90].double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def run_topk(
    scores: torch.Tensor, lens: torch.Tensor, k: int, schedule: str = "late", grid: int = 3
) -> torch.Tensor:
    if GPU:
        return ops.topk(scores.to(DEVICE), lens.to(DEVICE), k=k).cpu()
    rows, width = scores.shape
    ids = torch.full((rows, k), 77, dtype=torch.int32)
    scratch = torch.full((2 * grid * (8 * ROOM + 4),), 255, dtype=torch.uint8)
    size, text = tilelang_cuda.TOPK_BYTES, tilelang_cuda.source("topk.cuh")
    merged = tilelang_cuda.MERGE_BYTES
    keys: dict[str, Any] = {"grid": grid, "schedules": (schedule,)}
    few = [ids, scratch, rows, width]
    cuda_emu.emulate(
        text,
        f"topk_rows::scan<{size}>",
        [scores, lens, *few, scores.stride(0), k, grid, cuda_emu.SHARED],
        threads=256,
        shared_bytes=size,
        **keys,
    )
    cuda_emu.emulate(
        text,
        f"topk_rows::merge<{merged}>",
        [lens, *few, k, grid, cuda_emu.SHARED],
        threads=tilelang_cuda.MERGE_THREADS,
        shared_bytes=merged,
        **keys,
    )
    return ids


@pytest.mark.parametrize("schedule", ["late"] if GPU else [*SCHEDULES, "first", "last"])
def test_topk(schedule: str) -> None:
    n = 40_001
    scores = torch.randn(6, n + 3)[:, :n]
    scores[1] = scores[1].round()
    scores[2, 5], scores[2, 8], scores[2, 9] = torch.nan, torch.inf, -torch.inf
    scores[3] = torch.arange(n) / n
    scores[4] = torch.where(torch.arange(n) % 2 == 0, 0.0, -0.0)
    lens = torch.tensor([n, n - 9, 513, n, n, 0], dtype=torch.int32)
    visible = torch.arange(n) < lens[:, None]
    beyond = torch.where(visible, scores, torch.nan)
    for k in (512, 3):
        got = run_topk(beyond, lens, k, schedule)
        assert torch.equal(got, best(torch.where(visible, scores, -torch.inf), k))


def test_index_query() -> None:
    x = torch.randn(3, 6, DIM).bfloat16()[:, :5]
    cos, sin = rope_table(torch.arange(3) * 999, 64, 160_000.0, 16.0)
    want_values, want_scale = (
        torch.empty(3, 5, 64, dtype=torch.uint8),
        torch.empty(3, 5, 4, dtype=torch.uint8),
    )
    ref.index_query(x, cos, sin, want_values, want_scale)
    values, scale = torch.full_like(want_values, 77), torch.full_like(want_scale, 77)
    if GPU:
        out = ops.index_query(x.to(DEVICE), cos.to(DEVICE), sin.to(DEVICE))
        values, scale = out.values.cpu(), out.scale.view(torch.uint8).cpu()
    else:
        text = tilelang_cuda.query_source()
        few = [x, x.stride(0), x.stride(1), cos, sin, cos.stride(0), sin.stride(0), 3, 5, values, scale]
        cuda_emu.emulate(text, "index_query::prepare<128, 32>", few, grid=1, threads=256)
    assert torch.equal(values, want_values) and torch.equal(scale, want_scale)


gpu_only = pytest.mark.skipif(not GPU, reason="needs a Hopper GPU")


@gpu_only
@pytest.mark.parametrize("n", [16_383, 16_384, 16_385, 1_048_576])
def test_long(n: int) -> None:
    scene = Scene("mxfp4", [n, n // 2], [(0, n), (1, n // 2), (0, n - 1), (0, n // 3)], page=64)
    ids, blocks = scene.launch(512, blocks=2048)
    score = scene.own_scores()
    assert torch.equal(ids, best(score, 512))
    assert torch.equal(blocks, best_blocks(score, scene.visible, 8, 2048))
    again, same = scene.launch(512, blocks=2048)
    assert torch.equal(ids, again) and torch.equal(blocks, same)
