"""The indexer of SM100: its CUDA source in the emulator, with tensor memory, by the tests of Hopper's."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dsv41_reference import cache as ref_cache
from dsv41_reference import index as ref
from dsv41_reference.quant import from_mxfp4

from dsv41 import Target
from dsv41._op import ops as operators
from tests.ops import test_index_hopper as hopper
from tests.tools import cuda_emu, host_args, lowering

kernel: Any = pytest.importorskip("dsv41.ops.index.tilelang_sm100_cuda")
scans: Any = pytest.importorskip("dsv41.ops.index.tilelang_scan")
pytestmark = pytest.mark.skipif(hopper.GPU or not cuda_emu.available(), reason="emulated, with g++")


class Scene(hopper.Scene):
    """The same with the kernels of SM100."""

    kernel, form = kernel, {"mxfp4": "scaled"}


FEW = [(0, 300), (1, 129), (-1, 9), (0, 280), (1, 8)]


def small() -> Scene:
    made = Scene("mxfp4", [300, 130], FEW)
    made.weights = made.weights.abs()  # sums that nothing cancels
    return made


@pytest.fixture(autouse=True)
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "Scene", Scene)


def test_scores() -> None:
    hopper.test_scores("mxfp4", 1)


@pytest.mark.parametrize("schedule", cuda_emu.SCHEDULES)
def test_selection(schedule: str) -> None:
    hopper.test_selection("mxfp4", 1, schedule)


@pytest.mark.parametrize("block_size", [4, 8])
def test_blocks(block_size: int) -> None:
    hopper.test_blocks(1, block_size)


def test_ties_nan_and_pages_that_are_not_held() -> None:
    hopper.test_ties_and_nan()
    hopper.test_pages_that_are_not_held_and_nan_queries()


def test_few_heads_small_pages_and_scales_far_apart() -> None:
    hopper.test_few_heads_and_small_pages()
    hopper.test_queries_that_e4m3_cannot_hold()


def test_cutting_the_list() -> None:
    hopper.test_cutting_the_list()


@pytest.mark.parametrize(
    "kind, schedule", [("plain", "first"), ("publishing", "last"), ("restricted", "first")]
)
def test_full_lists(kind: str, schedule: str) -> None:
    hopper.check_full_lists(kind, 1, schedule)


@contextlib.contextmanager
def emulated(grid: int = 3) -> Iterator[None]:
    """Inside the context the launch functions run on CPU tensors, with few blocks."""

    def whole(x: torch.Tensor) -> torch.Tensor:
        """From the first element on, to the end of what it lies in: a kernel gets the address only."""
        room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return x.as_strided((room,), (1,))

    def scan(publish: bool, restrict: bool, select: bool, arch: str) -> Any:
        def run(q: torch.Tensor, *args: Any) -> None:
            given = [q, *args[:4], whole(args[4]), whole(args[5]), *args[6:10], *q.shape[:2], *args[10:]]
            cuda_emu.emulate(
                kernel.scan_source(), scans.scan_call("scaled", 1, publish, restrict, select),
                [*given, cuda_emu.SHARED], grid=args[-1], threads=scans.scan_threads(1),
                shared_bytes=scans.shared_bytes("scaled", 1, publish), uninitialised="allow",
            )  # fmt: skip

        return run

    def merge(publish: bool, restrict: bool, arch: str) -> Any:
        def run(requests: torch.Tensor, *args: Any) -> None:
            given = [requests, *args[:4], len(requests), *args[4:]]
            cuda_emu.emulate(
                kernel.scan_source(), scans.merge_call(1, publish, restrict), [*given, cuda_emu.SHARED],
                grid=args[-1], threads=scans.MERGE_THREADS, shared_bytes=scans.MERGE_BYTES,
                uninitialised="allow",
            )  # fmt: skip

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scans, "GRID", grid)
        patch.setattr(kernel, "_scan", scan)
        patch.setattr(kernel, "_merge", merge)
        yield


def test_launches() -> None:
    """`index_topk` as the op calls it, against the reference: blocks published and given in one call, too."""
    scene = small()
    named = torch.tensor([[0, 3, 9, 16, 37, -1]]).expand(len(FEW), 6).int().contiguous()
    functions: list[Any] = [ref.index_topk, kernel.index_topk]
    cases: list[Any] = [(None, 0), (None, 7), (named, 0), (named, 7), (named[:, :0], 7)]
    for candidates, blocks in cases:
        results = []
        for function in functions:
            ids, new = (torch.full((len(FEW), n), 77, dtype=torch.int32) for n in (24, blocks))
            scratch = torch.full((1 << 19,), 255, dtype=torch.uint8)
            with emulated():
                function(*scene.args(), candidates, 8, ids, new, scratch)
            results.append((ids, new))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("place, value", [(0, 0), (7, (2, 0)), (5, (0, 16, 68))])
def test_launches_of_nothing(place: int, value: Any) -> None:
    """No tokens; no pages of a request; no pages at all: no kernel, and no ids."""
    args = small().args()
    if place == 0:
        args[:5] = [x[:0] for x in args[:5]]
    else:
        args[place] = args[place].new_zeros(value)
    ids, new = (torch.full((len(args[0]), n), 77, dtype=torch.int32) for n in (24, 7))
    kernel.index_topk(*args, None, 8, ids, new, torch.zeros(0))
    assert (ids == -1).all() and (new == -1).all()


def test_refusals() -> None:
    """What no kernel of SM100 takes gets a sentence; the released model's calls get none."""
    op, target = operators()["index_topk"], Target("cuda", 100, frozenset({"tilelang", "nvcc"}))

    def told(place: int, value: Any) -> str | None:
        ids, new = (torch.zeros(len(FEW), n, dtype=torch.int32) for n in (24, 7))
        args: list[Any] = [*small().args(), None, 8, ids, new, torch.zeros(0)]
        args[place] = args[place] if value is None else value
        return dict(op.explain(target, tuple(args)))["tilelang_sm100_cuda"]

    tokens = len(FEW)
    assert told(0, None) is None
    assert told(6, "fp8") == "mxfp4 keys, got fp8"
    odd = torch.zeros(tokens * 32 * 64 + 4, dtype=torch.uint8)[4:].view(tokens, 32, 64)
    assert told(0, odd) == "queries at a multiple of 8 bytes, their scales of 4"
    assert (
        told(0, torch.zeros(tokens, 64, 64, dtype=torch.uint8))
        == "up to 32 heads of width 128, got 64 of 128"
    )
    assert told(9, 16) == "candidate blocks of 4 or 8 within a page, got 16 and 16"
    assert "top_k up to 512" in str(told(10, torch.zeros(tokens, 513, dtype=torch.int32)))


# ---- Mistakes planted into the source ----

PRODUCT = {
    "parity of the wait for a product": ("[group][stage], phase);", "[group][stage], phase ^ 1);"),
    "no wait for a product": ("hopper::barrier_wait(&s.multiplied[group][stage], phase);", ""),
    "another stage's product": ("(&s.multiplied[group][stage]);", "(&s.multiplied[group][0]);"),
    "no wait for the scales of keys": ("codes);\n    sm100::tensor_wait_stores();\n", "codes);\n"),
    "no wait for the scales of queries": ("codes);\n      sm100::tensor_wait_stores();\n", "codes);\n"),
    "no fence behind the scales of keys": ("sm100::fence_before();\n    hopper::fence", "hopper::fence"),
    "no fence behind the scales of queries": ("sm100::fence_before();\n    }", "}"),
    "no fence before the scales of queries": ("sm100::fence_after();  // products", "// products"),
    "no fence before the product": ("sm100::fence_after();\n        const", "const"),
    "no fence before the sums are read": ("sm100::fence_after();\n    float", "float"),
    "keys that the tensor cores do not see yet": ("hopper::fence_async();  // the keys", "// the keys"),
    "no barrier before the product": ("hopper::named_barrier(9 + group, 128);", ""),
    "a barrier of the other group": ("named_barrier(9 + group, 128)", "named_barrier(9, 128)"),
    "sums of the other group": ("product = columns + 32 * group", "product = columns"),
    "key scales of the other group": ("kKeyScales + 4 * group", "kKeyScales"),
    "query scales where key scales are": ("kQueryScales = 72", "kQueryScales = 68"),
    "scales of one warp": ("if (tid < 128) {  // the same", "if (tid < 32) {  // the same"),
    "the other order of scales": ("[group][stage][32 * i + lane]", "[group][stage][4 * lane + i]"),
    "scales of the first half": ("mxfp4_instruction(kHeads, half)", "mxfp4_instruction(kHeads, 0)"),
    "fewer heads": ("mxfp4_instruction(kHeads, half)", "mxfp4_instruction(kHeads / 2, half)"),
    "the other type of scales": ("kUE8M0 = 1", "kUE8M0 = 0"),
    "scales exchanged": ("key_scales, columns + kQueryScales", "columns + kQueryScales, key_scales"),
    "heads for keys": ("core_descriptor(keys + half", "core_descriptor(heads + half"),
    "distances exchanged": ("keys + half * kHalf, 128, 512", "keys + half * kHalf, 512, 128"),
    "the next half": ("kHalf = 2 * 128", "kHalf = 128"),
    "the last half only": ("half > 0);", "false);"),
    "sums of the tile before": ("half > 0);", "true);"),
    "pieces of another row": ("piece * 128 + key % 8 * 16", "piece * 128 + (key + 1) % 8 * 16"),
    "a key's neighbour": ("(stage, 32 * warp + lane)", "(stage, 32 * warp + (lane ^ 1))"),
    "lanes of another warp": ("lanes(32 * warp << 16)", "lanes(32 * (warp ^ 1) << 16)"),
    "weights of another head": ("fmaf(w.y, hopper", "fmaf(w.x, hopper"),
    "negative products": ("hopper::max_or_nan(d[4 * i + 2], 0.0f)", "d[4 * i + 2]"),
    "the first token's weights": ("args.weights[first + lane]", "args.weights[lane]"),
    "the first token's scales": ("args.q_scale + (first + lane) * 4", "args.q_scale + lane * 4"),
    "the first token's heads": ("args.q + (first + head) * 64", "args.q + head * 64"),
    "tensor memory that is kept": ("if (tid < 32) sm100::tensor_free(s.columns, kColumns);", ""),
    "too little tensor memory": ("kColumns = 128", "kColumns = 64"),
    "two arrivals": ("barrier_init(&s.multiplied[i][j], 1)", "barrier_init(&s.multiplied[i][j], 2)"),
    "an entry too many": ("(entry) < static_cast", "(entry) <= static_cast"),
    "a chunk too few": ("number << shift < most)", "number << shift < most - 1)"),
    "half a tile": ("(most + kTile - 1) / kTile", "(most + kTile / 2) / kTile"),
}  # fmt: skip
CHOICE = {
    "the newest block is not pinned": ("block_shift) best = kInfinite;", "block_shift) best = best;"),
    "the block before the newest": ("block == (look.visible - 1) >>", "block == (look.visible - 9) >>"),
    "blocks of one key": ("step < kApart << block_shift", "step < kApart"),
    "rows apart as on Hopper": ("kApart = FORMAT == kScaled ? 1 : 4", "kApart = 4"),
    "all but the last candidate": ("number < args.num_candidates)", "number < args.num_candidates - 1)"),
    "the newest candidate is not seen": ("block < (most + args.block_size - 1)", "block < most"),
    "another token's candidates": ("static_cast<int64_t>(t) * args.num_candidates", "0"),
    "one entry fewer": ("cut<THREADS>(k, whole", "cut<THREADS>(k - 1, whole"),
    "ties to the higher entry": ("static_cast<uint32_t>(~index)", "static_cast<uint32_t>(index)"),
}  # fmt: skip


def check_product(schedule: str) -> None:
    """Scores of a few tiles are those of the definition."""
    scene = small()
    got = scene.own_scores(schedule=schedule, grid=2)
    q = from_mxfp4(scene.q, scene.q_scale).double()
    for t, (r, n) in enumerate(FEW):
        if r >= 0:
            keys = ref_cache.read_rows(scene.pages, "mxfp4", hopper.DIM, scene.slots(r, n)).double()
            want = scene.weights[t].double() @ (q[t] @ keys.T).clamp(min=0)
            assert torch.allclose(got[t, :n].double(), want, rtol=1e-5, atol=1e-5)


def check_choice(schedule: str) -> None:
    """Published blocks, and entries of blocks that are given; a block's last entry may not be seen."""
    scene = small()
    q = from_mxfp4(scene.q, scene.q_scale).double()
    score = torch.full((len(FEW), scene.table.shape[1] * scene.page), -torch.inf)
    for t, (r, n) in enumerate(FEW):
        if r >= 0:
            keys = ref_cache.read_rows(scene.pages, "mxfp4", hopper.DIM, scene.slots(r, n)).double()
            score[t, :n] = (scene.weights[t].double() @ (q[t] @ keys.T).clamp(min=0)).float()
    visible = scene.visible.where(scene.request >= 0, 0)
    ids, blocks = scene.launch(40, blocks=9, schedule=schedule, grid=2)
    assert torch.equal(ids, hopper.best(score, 40))
    assert torch.equal(blocks, hopper.best_blocks(score, visible, 8, 9))
    ids, _ = scene.launch(40, candidates=blocks, schedule=schedule, grid=2)
    inside = torch.zeros((len(FEW), score.shape[1] // 8 + 1), dtype=torch.bool)
    inside.scatter_(1, torch.where(blocks < 0, inside.shape[1] - 1, blocks).long(), True)
    inside = inside[:, :-1].repeat_interleave(8, 1)
    assert torch.equal(ids, hopper.best(torch.where(inside, score, -torch.inf), 40))


def seen(check: Any, edit: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What one of the schedules says about a mistake."""
    text = kernel.scan_source()
    assert text.count(edit[0]) == 1, (text.count(edit[0]), edit[0])
    monkeypatch.setattr(kernel, "scan_source", lambda _=1: text.replace(*edit))
    for schedule in ("late", "eager", "last"):
        try:
            check(schedule)
        except AssertionError as error:
            return str(error) or "other results"
    return ""


def test_what_faults_are_planted_into() -> None:
    for schedule in ("late", "eager", "last"):
        check_product(schedule)
        check_choice(schedule)


@pytest.mark.parametrize("fault", PRODUCT)
def test_faults_of_the_product_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(check_product, PRODUCT[fault], monkeypatch)


@pytest.mark.parametrize("fault", CHOICE)
def test_faults_of_the_choice_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(check_choice, CHOICE[fault], monkeypatch)


# ---- What the emulation takes for granted, against TileLang's own ----


def test_instruction_as_tilelang_makes_it() -> None:
    """Where the bits of an instruction are; the type is another: four bits and nothing else."""
    made = pytest.importorskip("tilelang._ffi_api").get_tcgen5_blockscaled_instr_desc
    for half in (0, 1):
        own = torch.zeros(1, dtype=torch.int32)
        probe = "__device__ void probe(int* out, int half) { *out = sm100::mxfp4_instruction(32, half); }"
        cuda_emu.emulate(kernel.scan_source() + probe, "probe", [own, half], grid=1, threads=1)
        theirs = made(128, 32, "float4_e2m1fn", "float4_e2m1fn", True, True, 1, 1, 2 * half, 2 * half)
        assert int(own) == int(theirs) - (5 << 7 | 5 << 10) + (1 << 7 | 1 << 10)


@pytest.mark.skipif(lowering.nvcc() is None or torch.cuda.is_available(), reason="needs nvcc and no GPU")
def test_the_compiled_kernels_take_what_they_are_given() -> None:
    """TileLang's own checks of types, sizes and strides; and that they would say something."""
    launched: list[Any] = []
    ids, new = (torch.zeros(len(FEW), n, dtype=torch.int32) for n in (24, 7))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_scan", "_merge"):
            build = getattr(kernel, name)
            patch.setattr(
                kernel, name, lambda *flags, b=build: lambda *args: launched.append((b, flags[:-1], args))
            )
        kernel.index_topk(*small().args(), None, 8, ids, new, torch.zeros(1 << 19, dtype=torch.uint8))
    assert len(launched) == 2
    for build, flags, args in launched:
        compiled = build(*flags, "sm_100a")
        assert host_args.refusal(compiled, *args) is None
        wrong = [args[0].view(torch.int8) if args[0].dtype == torch.uint8 else args[0].float(), *args[1:]]
        assert "dtype" in str(host_args.refusal(compiled, *wrong))
