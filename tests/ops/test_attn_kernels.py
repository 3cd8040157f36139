"""Sparse attention kernels against the reference: emulated or interpreted on a CPU, launched on a GPU."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv41 import ops, use
from dsv41._op import Target, Unsupported
from dsv41._op import ops as registered
from dsv41.cache import PagedKV, Record, page_slots
from dsv41.ops._tilelang import HERE, device_source
from dsv41.ops.attn import api, sparse_attn_scratch
from tests.ops.attn_cases import CASES, SCALE, Case, choose, compare, inputs, random_cache
from tests.ops.rows import same
from tests.tolerance import ATTN_DISTANCE, ATTN_ERROR, ATTN_LSE
from tests.tools import triton_interp
from tests.tools.cuda_emu import SHARED, EmulationError, available, emulate

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
emulated = pytest.mark.skipif(not available(), reason="needs g++")
FOLDER = Path(api.__file__).parent
FILES = [
    HERE / "hopper_cluster.cuh",
    *(FOLDER / f"{name}.cuh" for name in ("records", "tiles", "output", "sparse_attn", "combine")),
]
SOURCE = device_source(*FILES, wgmma={"bf16_ss": (64,), "bf16_rs_t": (128,)})
NUMBERS = {"mxfp8": 0, "nvfp4": 1, "v4": 2, "bf16": 3}


def emulate_attn(
    q: torch.Tensor, window: PagedKV, near: torch.Tensor, compressed: PagedKV, far: torch.Tensor, *,
    scale: float, sink: torch.Tensor | None, inverse_rope: Any = None, return_lse: bool = True,
    num_splits: int | None = None, blocks: int = 2, clusters: bool = True, source: str = SOURCE,
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
    angles = (
        [None, 0, None, 0] if inverse_rope is None else [v for x in inverse_rope for v in (x, x.stride(0))]
    )
    args += [sink, *angles, float(scale), splits, out, out.stride(0), out.stride(1), lse, scratch, SHARED]
    pair = window.record.layout, compressed.record.layout
    cluster = splits if clusters and splits in api.CLUSTERS.get(pair, ()) else 1
    if cluster > 1:
        blocks = rows * -(-heads // 64) * splits
    call = f"sparse_attn::attend<{NUMBERS[pair[0]]}, {NUMBERS[pair[1]]}, {cluster}>"
    emulate(source, call, args, grid=blocks, threads=512, shared_bytes=230400, cluster=cluster)
    if splits > cluster:
        parts = [scratch, rows, heads, splits, sink, *angles, out, out.stride(0), out.stride(1), lse]
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


@emulated
@pytest.mark.parametrize("splits, layout", [(2, "nvfp4"), (3, "mxfp8"), (5, "nvfp4")])
def test_a_cluster_makes_the_bits_of_the_combination(splits: int, layout: str) -> None:
    case = Case("", tokens=2, heads=80, near=130, far=130, missing=0.2, rope=64, layouts=("mxfp8", layout))
    args, keys = inputs(case, "cpu")
    got, want = (emulate_attn(*args, **keys, num_splits=splits, clusters=c) for c in (True, False))
    assert same(got[0], want[0]) and same(got[1], want[1])
    assert_near(case, got, args, keys)


@emulated
def test_the_form_for_racecheck_is_the_kernel() -> None:
    pytest.importorskip("tilelang")
    from tests.tools.sanitize_attn import racecheck_source

    case = Case("", tokens=1, heads=64, near=130, far=130, missing=0.2, rope=64, layouts=("mxfp8", "nvfp4"))
    args, keys = inputs(case, "cpu")
    got, want = (
        emulate_attn(*args, **keys, num_splits=2, source=text) for text in (racecheck_source(SOURCE), SOURCE)
    )
    assert same(got[0], want[0]) and same(got[1], want[1])


FAULTS: dict[str, tuple[str, str]] = {
    "mask": ("if (keys != ~0ull)", "if (false)"),
    "fence": ("fence_async();\n        warp_arrive(&shared.full", "warp_arrive(&shared.full"),
    "buffer taken early": ("barrier_wait(empty, turn);\n      if (simple)", "if (simple)"),
    "tile read early": ("barrier_wait(&shared.posted[number % TILES], number / TILES & 1);", ""),
    "tiles overwritten": ("AHEAD = 6, TILES = 8", "AHEAD = 8, TILES = 8"),
    "buffer given early": ("warp_arrive(&shared.taken);\n      sent_turn ^= 1;\n      if",
                           "sent_turn ^= 1;\n      if"),
    "q read early": ("copy_wait<0>();\n    fence_async();\n", ""),
    "q taken early": ("named_barrier(1, 128);  // all four warps are done with Q", ""),
    "rescaling": ("scale_rows(out, rescale);\n      add_values(out, weights, tile, first);\n      warp_arrive"
                  "(&shared.empty[buffer][1]);", "add_values(out, weights, tile, first);\n      warp_arrive"
                  "(&shared.empty[buffer][1]);"),
    "bytes early": ("        copy_wait<0>();\n        __syncwarp();\n      }", "      }"),
    "bytes late": ("const bool simple = !__any_sync(~0u, unusual<LAYOUT>(scales[0] | scales[1]));\n"
                   "      __syncwarp();", "const bool simple = false;"),
    "one product": ("return (scales & (LAYOUT == MXFP8 ? 0x80u : 0x4040u)) != 0;", "return false;"),
    "swizzle": ("(to ^ piece * 16)", "(to ^ (piece ^ 1) * 16)"),
    "scale of the second group": ("piece < 2 ? 0x1010 : 0x3232", "0x1010"),
    "subnormal scales": ("(place_e4m3<0>(scale), TWO_126)", "(place_e4m3<0>(scale | 0x1010), TWO_126)"),
    "half of the sums": ("sum[r] += __shfl_xor_sync(~0u, sum[r], 2);", ""),
    "sink": ("if (sink != nullptr && at < work.heads)", "if (false)"),
    "growing maximum": ("!(new_top[r] > top[r] + 16)", "top[r] > -INFINITY"),
    "angles": ("s = -by.y;", "s = by.y;"),
    "combination": ("weight = exp2f(sums[2 * at] - base)", "weight = 1"),
    "cluster, parts early": ("cluster_barrier();  // no block needs its tiles any more", ""),
    "cluster, parts read early": ("cluster_barrier();  // everything has arrived", ""),
    "cluster, sums": ("weight = exp2f(weight - base)", "weight = 1"),
    "cluster, places": ("2 * rank * PIECE", "2 * (rank ^ 1) * PIECE"),
}  # fmt: skip


@emulated
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_finds(fault: str) -> None:
    old, new = FAULTS[fault]
    assert SOURCE.count(old) == 1
    sink, splits = (30.0 if fault == "sink" else 0.5), (2 if fault[:2] in ("co", "cl") else 1)
    steep = {"rescaling": 4, "growing maximum": 64}.get(fault, 1)
    case = Case("", tokens=3, near=130, far=150, missing=0.2, sink=sink, splits=splits, rope=64, steep=steep)
    args, keys = inputs(case, "cpu")
    with pytest.raises((AssertionError, EmulationError)):
        source = SOURCE.replace(old, new)
        clusters = fault != "combination"
        got = emulate_attn(*args, **keys, num_splits=splits, blocks=1, clusters=clusters, source=source)
        assert_near(case, got, args, keys)


BYTES = {"mxfp8": 528, "nvfp4": 288, "v4": 576, "bf16": 1024}  # from record to record


def spoil(cache: PagedKV, slot: int) -> None:
    """Something not finite in a record; where, depends on the layout."""
    record = cache.pages[slot // cache.page_size].flatten()[
        slot % cache.page_size * BYTES[cache.record.layout] :
    ]
    at = {"mxfp8": 300, "nvfp4": 270, "v4": 441, "bf16": 701}[cache.record.layout]
    record[at] = 0x7F
    if cache.record.layout == "bf16":
        record[at - 1] = 0x80


CALLS = [pytest.param(emulate_attn, marks=emulated), pytest.param(launch, marks=on_gpu)]


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("layout", ["mxfp8", "nvfp4", "v4", "bf16"])
@pytest.mark.parametrize("call", CALLS)
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


SHORT, LONG = (0, 1, 127, 128, 129), (511, 512, 513, 16383, 16384, 16385, 1 << 20)


@pytest.mark.parametrize("layout", ["mxfp8", "nvfp4", "v4", "bf16"])
@pytest.mark.parametrize("call", CALLS)
def test_lengths_of_every_record(call: Callable[..., Any], layout: str) -> None:
    """Both lists as long as the context, up to what the model selects, from a cache that holds all of it."""
    for n in SHORT if call is emulate_attn else SHORT + LONG:
        case = Case("", 2, near=min(n, 129), far=min(n, 513), layouts=(layout, layout), context=n)
        args, keys = inputs(case, "cpu" if call is emulate_attn else "cuda")
        assert_near(case, call(*args, **keys), args, keys)


@pytest.mark.parametrize("call", CALLS)
def test_first_rows_of_a_prompt(call: Callable[..., Any]) -> None:
    """Rows that see 1, 2, 64, 65 and 128 window records and half as many entries; some tiles are empty."""
    case = Case("", tokens=5, far=130, splits=1)
    args, keys = inputs(case, "cpu" if call is emulate_attn else "cuda")
    for row, seen in enumerate((1, 2, 64, 65, 128)):
        args[2][row, seen:], args[4][row, seen // 2 :] = -1, -1
    assert_near(case, call(*args, **keys, num_splits=1), args, keys)


PLACES = """
namespace sparse_attn {
__device__ void places(const void* pages, long long stride, int size, const void* slots, int count, int bytes,
                       void* to) {
  const Records records = {static_cast<const uint8_t*>(pages), stride, static_cast<uint32_t>(size), 0,
                           nullptr, 0, 0};
  for (int i = 0; i < count; ++i)
    static_cast<long long*>(to)[i] = records.record(static_cast<const int*>(slots)[i], bytes) - records.pages;
}
}
"""


@emulated
@pytest.mark.parametrize("size", [64, 133, 1 << 20])
def test_addresses_past_32_bits(size: int) -> None:
    """Where the kernel looks for a record, for pages up to a terabyte apart and a million slots."""
    slots = torch.tensor([0, 1, size - 1, size, 7 * size + 5, 1 << 20, 2**28 - 1], dtype=torch.int32)
    for stride, width in ((1 << 40, 288), ((1 << 31) + 16, 528), (2**32 - 16, 1024)):
        found = torch.zeros(len(slots), dtype=torch.int64)
        args = [torch.zeros(1), stride, size, slots, len(slots), width, found]
        emulate(SOURCE + PLACES, "sparse_attn::places", args, grid=1, threads=1)
        assert found.tolist() == [s // size * stride + s % size * width for s in slots.tolist()]


@on_gpu
@pytest.mark.parametrize("layout", ["mxfp8", "nvfp4", "v4", "bf16"])
def test_pool_past_4_gib(layout: str) -> None:
    """Pages of one allocation more than 2^32 bytes apart; what lies between them is NaN."""
    (q, window, near, compressed, far), keys = inputs(Case("", far=250, layouts=("mxfp8", layout)), "cuda")
    count, *rest = compressed.pages.shape
    stride = (1 << 30) + 16 * 1024
    pool = torch.full((count * stride,), 0xFF, dtype=torch.uint8, device="cuda")
    pages = pool.as_strided((count, *rest), (stride, rest[1], 1))
    pages.copy_(compressed.pages)
    want = launch(q, window, near, compressed, far, **keys)
    got = launch(q, window, near, PagedKV(pages, compressed.record), far, **keys)
    assert count > 4 and same(got[0], want[0]) and same(got[1], want[1])


@on_gpu
@pytest.mark.parametrize("splits", [1, None])
def test_graph_replay_with_other_lengths_tables_and_ids(splits: int | None) -> None:
    tokens, page = 7, 64
    case = Case("", tokens=tokens, rope=64)
    (q, window, near, compressed, far), keys = inputs(case, "cuda")
    pages = compressed.pages.shape[0]
    requests = torch.arange(tokens, dtype=torch.int32, device="cuda")
    table = torch.arange(pages, dtype=torch.int32, device="cuda").repeat(tokens, 1)
    ids, lens = far.clone(), torch.full((tokens, 1), 512, dtype=torch.int32, device="cuda")
    column = torch.arange(512, dtype=torch.int32, device="cuda")

    def step(**more: Any) -> Any:
        seen = page_slots(torch.where(column < lens, ids, -1), requests, table, page)
        return launch(q, window, near, compressed, seen, **keys, num_splits=splits, **more)

    compressed.pages.copy_(random_cache("nvfp4", pages * page, page, 0, "cuda").pages)
    out = torch.empty_like(q)
    size = sparse_attn_scratch(tokens, 64, 512, 128, 512, splits)
    scratch = torch.empty(size, dtype=torch.uint8, device="cuda")
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(out=out, scratch=scratch)
    for most in (512, 1, 300, 0):
        lens.copy_(torch.randint(0, most + 1, lens.shape, device="cuda"))
        table.copy_(torch.rand(table.shape, device="cuda").argsort(1))
        near.copy_(torch.where(torch.rand(near.shape, device="cuda") < 0.3, -1, near.roll(1, 0)))
        ids.copy_(ids.roll(1, 0))
        scratch.fill_(0xFF)
        graph.replay()
        assert same(out, step()[0])


@pytest.mark.parametrize("call", CALLS)
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
    "rope": Case("rotated back", 3, 2, 5, 4, page=(4, 8), width=32, rope=8),
    "no sink": Case("softmax alone", 2, 2, 5, 0, page=(4, 8), sink=None, width=32),
}


@pytest.mark.skipif(not triton_interp.available(), reason="no Triton whose interpreter works")
@pytest.mark.parametrize("name", INTERPRETED)
def test_triton_interpreted(name: str) -> None:
    module = triton_interp.interpret("dsv41.ops.attn.triton_cuda")
    (q, window, near, compressed, far), keys = inputs(INTERPRETED[name], "cpu")
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2])
    sets = (window.pages, window.record.layout, near, compressed.pages, compressed.record.layout, far)
    angles = keys["inverse_rope"] or (None, None)
    module.sparse_attn(q, *sets, keys["sink"], *angles, keys["scale"], 1, out, lse, out)
    assert_near(INTERPRETED[name], (out, lse), (q, window, near, compressed, far), keys)


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
    op, hopper = registered()["sparse_attn"], Target("cuda", 90, frozenset({"tilelang", "triton", "nvcc"}))

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
    stride = r"triton_cuda +window: pages at multiples of 16 bytes, got a stride of 2120"
    with pytest.raises(Unsupported, match=stride):
        chosen(stride=2120)
    assert "multiples of 16 bytes, got strides" in chosen(step=1)
    with pytest.raises(Unsupported, match="head_dim at most 1024"):
        chosen(width=2048)
