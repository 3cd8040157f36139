"""Sparse attention kernels against the reference: emulated or interpreted on a CPU, launched on a GPU."""

import dataclasses
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv41 import ops, use
from dsv41._op import Target, Unsupported
from dsv41._op import ops as registered
from dsv41.cache import PagedKV, Record
from dsv41.ops._tilelang import device_source
from dsv41.ops.attn import api, sparse_attn_scratch
from tests.ops.attn_cases import CASES, SCALE, Case, choose, compare, inputs, random_cache
from tests.ops.rows import same
from tests.tolerance import ATTN_DISTANCE, ATTN_ERROR, ATTN_LSE
from tests.tools.cuda_emu import SHARED, EmulationError, available, emulate

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
emulated = pytest.mark.skipif(not available(), reason="needs g++")
FOLDER = Path(api.__file__).parent
FILES = (FOLDER / "records.cuh", FOLDER / "sparse_attn.cuh")
SOURCE = device_source(*FILES, wgmma={"bf16_ss": (64,), "bf16_rs_t": (256,)})
NUMBERS = {"mxfp8": 0, "nvfp4": 1, "v4": 2, "bf16": 3}


def emulate_attn(
    q: torch.Tensor, window: PagedKV, near: torch.Tensor, compressed: PagedKV, far: torch.Tensor, *,
    scale: float, sink: torch.Tensor | None, return_lse: bool = True, num_splits: int | None = None,
    blocks: int = 2, source: str = SOURCE,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``sparse_attn`` launch by launch, as tilelang_cuda.py does it."""
    rows, heads, _ = q.shape
    tiles = max(1, -(-near.shape[1] // 64) + -(-far.shape[1] // 64))
    splits = min(num_splits or api.num_splits_for(rows, heads, near.shape[1], far.shape[1]), tiles)
    size = sparse_attn_scratch(rows, heads, 512, near.shape[1], far.shape[1], splits)
    out, lse = torch.zeros_like(q), torch.zeros(rows, heads)
    scratch = torch.full((size,), 0xFF, dtype=torch.uint8)
    args: list[Any] = [q, q.stride(0), q.stride(1), rows, heads]
    for cache, ids in ((window, near), (compressed, far)):
        args += [cache.pages, cache.pages.stride(0), cache.page_size, cache.num_slots]
        args += [ids, ids.stride(0), ids.shape[1]]
    args += [sink, float(scale), splits, out, out.stride(0), out.stride(1), lse, scratch, SHARED]
    call = f"sparse_attn::attend<{NUMBERS[window.record.layout]}, {NUMBERS[compressed.record.layout]}>"
    emulate(source, call, args, grid=blocks, threads=384, shared_bytes=226304)
    if splits > 1:
        parts = [scratch, rows, heads, splits, sink, out, out.stride(0), out.stride(1), lse]
        emulate(source, "sparse_attn::combine", parts, grid=rows * heads, threads=128)
    return out, lse


def launch(*args: Any, kernel: str = "tilelang_cuda", **keys: Any) -> Any:
    with use(kernel):
        return ops.sparse_attn(*args, **keys)


def assert_near(case: Case, got: Any, args: tuple[Any, ...], keys: dict[str, Any]) -> None:
    distance, error, lse = compare(case, got, args, keys)
    assert distance < ATTN_DISTANCE and error < ATTN_ERROR and lse < ATTN_LSE, (distance, error, lse)


def small(case: Case) -> Case:
    """The case at a size for the emulator."""
    return dataclasses.replace(
        case, tokens=min(case.tokens, 3), near=min(case.near, 129), far=min(case.far, 130)
    )


@emulated
@pytest.mark.parametrize("name", CASES)
def test_emulated(name: str) -> None:
    case = small(CASES[name])
    args, keys = inputs(case, "cpu")
    assert_near(case, emulate_attn(*args, **keys, num_splits=case.splits), args, keys)


@on_gpu
@pytest.mark.parametrize("name", CASES)
def test_on_gpu(name: str) -> None:
    """Parity, and the same bits again."""
    case = CASES[name]
    args, keys = inputs(case, "cuda")
    got, again = (launch(*args, **keys, num_splits=case.splits) for _ in range(2))
    assert same(got[0], again[0]) and same(got[1], again[1])
    assert_near(case, got, args, keys)


FAULTS: dict[str, tuple[str, str]] = {
    "mask": ("if (keys != ~0ull)", "if (false)"),
    "fence": ("fence_async();\n        warp_arrive(&shared.full", "warp_arrive(&shared.full"),
    "buffer taken early": ("barrier_wait(&shared.empty[buffer][half], turn ^ 1);", ""),
    "buffer given early": ("      warp_arrive(&shared.taken);\n      sent_turn ^= 1", "      sent_turn ^= 1"),
    "q taken early": ("barrier_wait(&shared.q_empty, number & 1);", ""),
    "rescaling": ("scale_rows(out, rescale);\n      add_values(out, weights, tile, first);\n      warp_arrive"
                  "(&shared.empty[buffer][1]);", "add_values(out, weights, tile, first);\n      warp_arrive"
                  "(&shared.empty[buffer][1]);"),
    "bytes early": ("copy_wait<3>();", "copy_wait<4>();"),
    "bytes late": ("        __syncwarp();\n      } else {", "      } else {"),
    "swizzle": ("(segment & 1) * 4 + piece", "(segment & 1) * 4 + (piece ^ 1)"),
    "scale of the second group": ("piece < 2 ? 0x1010 : 0x3232", "0x1010"),
    "subnormal scales": ("(place_e4m3<0>(scale), TWO_126)", "(place_e4m3<0>(scale | 0x1010), TWO_126)"),
    "half of the sums": ("sum[r] += __shfl_xor_sync(~0u, sum[r], 2);", ""),
    "sink": ("if (sink != nullptr && at < work.heads)", "if (false)"),
    "combination": ("weight = exp2f(sums[2 * at] - base)", "weight = 1"),
}  # fmt: skip


@emulated
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_finds(fault: str) -> None:
    old, new = FAULTS[fault]
    assert SOURCE.count(old) == 1
    sink, splits = (30.0 if fault == "sink" else 0.5), (2 if fault == "combination" else 1)
    case = Case("", tokens=3, near=130, far=150, missing=0.2, sink=sink, splits=splits)
    args, keys = inputs(case, "cpu")
    with pytest.raises((AssertionError, EmulationError)):
        source = SOURCE.replace(old, new)
        got = emulate_attn(*args, **keys, num_splits=case.splits, blocks=1, source=source)
        assert_near(case, got, args, keys)


def spoil(cache: PagedKV, slot: int) -> None:
    """Something not finite in a record; where, depends on the layout."""
    record = cache.pages[slot // cache.page_size, slot % cache.page_size]
    at = {"mxfp8": 300, "nvfp4": 270, "bf16": 701}[cache.record.layout]
    record[at] = 0x7F
    if cache.record.layout == "bf16":
        record[at - 1] = 0x80


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("layout", ["mxfp8", "nvfp4", "bf16"])
@pytest.mark.parametrize(
    "call", [pytest.param(emulate_attn, marks=emulated), pytest.param(launch, marks=on_gpu)]
)
def test_bad_records_spoil_their_readers(call: Callable[..., Any], layout: str, splits: int) -> None:
    device = "cpu" if call is emulate_attn else "cuda"
    window, other = (random_cache(x, 96, 16, 0, device) for x in ("mxfp8", layout))
    near, far = choose(5, 20, 96, 0.2, device), choose(5, 70, 96, 0.2, device)
    q = torch.randn(5, 3, 512, device=device).bfloat16()
    far[1, 4], far[2], far[3, 0] = 5, torch.where(far[2] == 5, -1, far[2]), 5
    keys: dict[str, Any] = {"scale": SCALE, "sink": None, "return_lse": True, "num_splits": splits}
    want, want_lse = call(q, window, near, other, far, **keys)
    spoil(other, 5)
    got, lse = call(q, window, near, other, far, **keys)
    readers = (far == 5).any(1)
    assert got[readers].isnan().all() and lse[readers].isnan().all()
    assert same(got[~readers], want[~readers]) and same(lse[~readers], want_lse[~readers])


@emulated
def test_a_query_that_is_not_finite_stays_in_its_head() -> None:
    args, keys = inputs(Case("", tokens=2, heads=4, near=66, far=0), "cpu")
    want = emulate_attn(*args, **keys)
    args[0][0, 1], args[0][1, 2, 7] = torch.nan, torch.inf
    got = emulate_attn(*args, **keys)
    held = torch.ones(2, 4, dtype=torch.bool)
    held[0, 1] = held[1, 2] = False
    for a, b in zip(got, want, strict=True):
        assert same(a[held], b[held]) and a[~held].isnan().all()


@emulated
def test_one_record_is_its_value() -> None:
    """The weight of a key that stands alone is not rounded, in the first tile or in a later one."""
    (q, window, near, compressed, far), keys = inputs(Case("", tokens=2, heads=2, near=3, far=70), "cpu")
    kept = near[0, 1].clone(), far[1, 69].clone()
    near[:], far[:] = -1, -1
    near[0, 1], far[1, 69] = kept
    got, _ = emulate_attn(q, window, near, compressed, far, **{**keys, "sink": None}, num_splits=1)
    for row, value in ((0, window.read(near[0, 1:2])), (1, compressed.read(far[1, 69:]))):
        assert torch.equal(got[row], value.bfloat16().expand(2, 512))


@on_gpu
def test_pool_past_4_gib() -> None:
    count, stride = 5, (1 << 30) + 16 * 1024
    pool = torch.empty(count * stride, dtype=torch.uint8, device="cuda")
    (q, window, near, compressed, far), keys = inputs(Case("", far=250), "cuda")
    pages = pool.as_strided((count, 64, 288), (stride, 288, 1))
    pages.copy_(compressed.pages[:count])
    want = launch(q, window, near, compressed, far, **keys)
    got = launch(q, window, near, PagedKV(pages, compressed.record), far, **keys)
    assert same(got[0], want[0])


@on_gpu
def test_graph_replay_with_other_ids() -> None:
    (q, window, near, compressed, far), keys = inputs(Case("", tokens=7), "cuda")
    out = torch.empty_like(q)
    scratch = torch.empty(sparse_attn_scratch(7, 64, 512, 128, 512), dtype=torch.uint8, device="cuda")
    launch(q, window, near, compressed, far, **keys)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(q, window, near, compressed, far, **keys, out=out, scratch=scratch)
    for missing in (0.0, 0.5, 1.0):
        near.copy_(torch.where(torch.rand(near.shape, device="cuda") < missing, -1, near.roll(1, 0)))
        far.copy_(torch.where(torch.rand(far.shape, device="cuda") < missing, -1, far.roll(1, 0)))
        graph.replay()
        assert same(out, launch(q, window, near, compressed, far, **keys)[0])


@pytest.mark.parametrize(
    "call", [pytest.param(emulate_attn, marks=emulated), pytest.param(launch, marks=on_gpu)]
)
def test_fixed_splits_do_not_see_the_batch(call: Callable[..., Any]) -> None:
    device = "cpu" if call is emulate_attn else "cuda"
    (q, window, near, compressed, far), keys = inputs(Case("", tokens=4, near=70, far=130), device)
    for splits in (1, 3):
        whole = call(q, window, near, compressed, far, **keys, num_splits=splits)
        rows = slice(2, 3)
        part = call(q[rows], window, near[rows], compressed, far[rows], **keys, num_splits=splits)
        assert all(same(a[rows], b) for a, b in zip(whole, part, strict=True))


INTERPRETED = {
    "tiny": Case("the micro model", 3, 2, 9, 20, page=(4, 8), width=32),
    "holes": Case("-1", 3, 2, 9, 20, page=(4, 8), missing=0.6, width=32),
    "all holes": Case("no key", 2, 2, 5, 3, page=(4, 8), missing=1.0, width=32),
    "v4": Case("split records", 2, 2, 5, 7, ("v4", "fp8"), page=(4, 8), width=128),
    "odd width": Case("not a power of two", 2, 2, 5, 7, ("bf16", "mxfp4"), page=(4, 8), width=96),
    "no sink": Case("softmax alone", 2, 2, 5, 0, page=(4, 8), sink=None, width=32),
}


def interpret(name: str) -> None:
    """Triton's kernel in its interpreter, which a process chooses before it imports Triton."""
    module = importlib.import_module("dsv41.ops.attn.triton_cuda")
    case = INTERPRETED[name]
    torch.manual_seed(0)
    (q, window, near, compressed, far), keys = inputs(case, "cpu")
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2])
    sets = (window.pages, window.record.layout, near, compressed.pages, compressed.record.layout, far)
    module.sparse_attn(q, *sets, keys["sink"], keys["scale"], 1, out, lse, out)
    assert_near(case, (out, lse), (q, window, near, compressed, far), keys)


def test_triton_interpreted() -> None:
    pytest.importorskip("triton")
    code = "from tests.ops.test_attn_kernels import *\nfor name in INTERPRETED: interpret(name)"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, cwd=root, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]


@on_gpu
@pytest.mark.parametrize("name", INTERPRETED)
def test_triton_on_gpu(name: str) -> None:
    case = INTERPRETED[name]
    args, keys = inputs(case, "cuda")
    assert_near(case, launch(*args, kernel="triton_cuda", **keys), args, keys)


def test_splits_are_a_function_of_the_sizes() -> None:
    split = api.num_splits_for
    assert [split(b, 64, 128, 512) for b in (1, 13, 14, 16, 64, 66, 67, 128, 384)] == [
        10,
        10,
        5,
        5,
        2,
        2,
        1,
        1,
        1,
    ]
    assert split(1, 64, 0, 0) == 1 and split(0, 64, 128, 512) == 10 and split(1, 128, 128, 0) == 2
    assert sparse_attn_scratch(2, 64, 512, 128, 512, 1) == 0
    assert sparse_attn_scratch(2, 64, 512, 128, 512, 4) == 2 * 64 * 4 * 514 * 4


def test_selection() -> None:
    """What the Hopper kernel takes, and what it says otherwise."""
    op, hopper = registered()["sparse_attn"], Target("cuda", 90, frozenset({"tilelang", "triton"}))

    def chosen(layout: str = "mxfp8", width: int = 512, stride: int | None = None, step: int = 0) -> str:
        record = Record(layout, width)
        size = stride or record.bytes * 4
        pages = torch.zeros(3 * size, dtype=torch.uint8).as_strided(
            (3, 4, record.bytes), (size, record.bytes, 1)
        )
        q = torch.zeros(2, 5, width + step).bfloat16()[..., :width]
        ids, none = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(0)
        args = (
            q,
            pages,
            layout,
            ids,
            None,
            "",
            None,
            None,
            1.0,
            1,
            torch.zeros(2, 5, width).bfloat16(),
            none,
            none,
        )
        reason = op.kernels[0].refusal(hopper, args)
        assert op.select(hopper, args) == ("triton_cuda" if reason else "tilelang_cuda")
        return reason or ""

    assert chosen() == chosen("v4") == chosen("bf16") == chosen("nvfp4") == chosen(stride=2112 + 16) == ""
    assert "head_dim must be 512, got 32" in chosen(width=32)
    assert "records mxfp8, nvfp4, v4 or bf16, got mxfp4" in chosen("mxfp4")
    assert "multiples of 16 bytes, got a stride of 2120" in chosen(stride=2120)
    assert "multiples of 16 bytes, got strides" in chosen(step=1)
    with pytest.raises(Unsupported, match="head_dim at most 1024"):
        chosen(width=2048)
