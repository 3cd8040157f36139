"""Sparse attention of SM100 from its kernel file on a CPU: what tests/tools/sm100_attn_emu.py says."""

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from dsv41_reference.cache import _parts

from dsv41 import Target, ops
from dsv41._op import ops as registered
from dsv41.ops.attn import sparse_attn_scratch
from tests.ops.attn_cases import CASES, Case, compare, inputs
from tests.tolerance import ATTN_DISTANCE, ATTN_ERROR, ATTN_LSE
from tests.tools import host_args, lowering
from tests.tools.sm100_attn_emu import MODULE, EmulationError, kernel_file

pytest.importorskip("tilelang")
KERNEL = MODULE.rpartition(".")[2]
MXFP8 = ("mxfp8", "mxfp8")


@contextlib.contextmanager
def on_sm100(launch: Any = None) -> Iterator[None]:
    """CPU tensors count as a B200's, without libraries; ``launch`` in place of the kernel's."""
    target = Target("cuda", 100, frozenset({"tilelang", "nvcc", "triton"}))
    launchers = {KERNEL: launch} if launch else {}
    with (
        mock.patch.object(Target, "of", staticmethod(lambda x: target)),
        mock.patch.object(registered()["sparse_attn"], "_launchers", launchers),
    ):
        yield


def run(case: Case, call: Any = None, edit: tuple[str, str] | None = None, late: bool = False) -> Any:
    """The public function with the kernel emulated, for a case or for arguments that were made of it."""
    args, keys = call or inputs(case, "cpu")
    splits = case.splits or 1
    size = sparse_attn_scratch(case.tokens, case.heads, case.width, case.near, case.far, splits)
    keys = {**keys, "num_splits": splits, "scratch": torch.full((size,), 0xFF, dtype=torch.uint8)}
    out = torch.full((*args[0].shape[:2], case.width + 8), torch.nan, dtype=torch.bfloat16)[..., : case.width]
    with on_sm100(kernel_file(edit, late).sparse_attn):
        return ops.sparse_attn(*args, **keys, out=out)


def right(case: Case, got: Any, call: Any) -> bool:
    with mock.patch.object(Target, "of", staticmethod(lambda x: Target("cpu"))):
        distance, error, lse = compare(case, got, *call)
    return distance < ATTN_DISTANCE and error < ATTN_ERROR and lse < ATTN_LSE


def small(name: str, **changes: Any) -> Case:
    """A case at a size for the emulation: two tiles of keys in each list."""
    case = CASES[name]
    kept = {"tokens": min(case.tokens, 2), "near": min(case.near, 129), "far": min(case.far, 130)}
    return dataclasses.replace(case, **{**kept, **changes})


RUN = {
    "decode": small("decode"),
    "every head turned, three parts": small("rope, split", heads=66, tokens=1),
    "turned": small("rope", near=5, far=9, heads=2),
    "window alone": small("window alone", gap=4096),
    "no ids": small("no ids"),
    "no ids, two parts": small("no ids", heads=1, splits=2),
    "a full tile": small("window alone", near=128),
    "drafter": small("drafter"),
    "holes": small("mostly holes", far=300),
    "all holes, four parts": small("all holes, split", heads=3),
    "steep": small("steep", heads=8, tokens=1),
    "no sink": small("no sink", near=3, far=7),
    "sink +inf": small("sink +inf", near=3, far=7),
    "sink -inf": small("sink -inf", near=3, far=7),
    "nvfp4 and mxfp8": small("nvfp4 and mxfp8", near=30, far=20),
}


@pytest.mark.parametrize("name", RUN)
def test_kernel(name: str) -> None:
    """The engines beside the warps are late in every second case; `decode` has both."""
    for late in (False, True) if name == "decode" else (list(RUN).index(name) % 2 == 0,):
        call = inputs(RUN[name], "cpu")
        assert right(RUN[name], run(RUN[name], call, late=late), call)


def test_no_rows() -> None:
    (q, window, near, compressed, far), keys = inputs(small("decode"), "cpu")
    call = ((q[:0], window, near[:0], compressed, far[:0]), keys)
    out, lse = run(small("decode", tokens=0), call)
    assert out.shape == (0, 64, 512) and lse.shape == (0, 64)


@pytest.mark.parametrize("tokens, splits", [(5, 1), (2, 2)])
def test_what_is_not_finite_stays_in_its_row(tokens: int, splits: int) -> None:
    """NaN in a value or a scale, and a value that a scale makes infinite: each in a row of its own."""
    case = small("decode", tokens=tokens, heads=1, near=3, far=4, splits=splits)
    (q, window, near, compressed, far), keys = inputs(case, "cpu")
    near = torch.arange(tokens * 3, dtype=torch.int32).view(tokens, 3)
    far = torch.arange(tokens * 4, dtype=torch.int32).view(tokens, 4)
    for cache, ids in ((window, near), (compressed, far)):
        values, scales = _parts(cache.pages, cache.record.layout, 512)
        page, at = ids.flatten() // cache.page_size, ids.flatten() % cache.page_size
        values[page.long(), at.long()] = 0x31
        scales[page.long(), at.long()] = 0x70 if cache is window else 0x38
    values, scales = _parts(window.pages, "mxfp8", 512)
    values[0, 4, 511] = 0x7F  # row 1
    scales[0, 7, 3] = 0xFF  # row 2
    scales[0, 10, 9], values[0, 10, 9 * 32 : 10 * 32] = 0xFE, 0x7E  # row 3
    _parts(compressed.pages, "nvfp4", 512)[1][0, 17, 31] = 0x7F  # row 4
    out, lse = run(case, ((q, window, near, compressed, far), keys))
    assert out[0].isfinite().all() and lse[0].isfinite().all()
    assert out[1:].isnan().all() and lse[1:].isnan().all()


FEW = Case("two tiles", tokens=1, heads=3, near=5, far=9, layouts=MXFP8, page=(3, 4), gap=64)
TURNED = dataclasses.replace(FEW, rope=64)
NVFP4 = dataclasses.replace(FEW, layouts=("mxfp8", "nvfp4"))
ROWS = dataclasses.replace(TURNED, tokens=2, far=0)
LONG = dataclasses.replace(FEW, near=130, far=0)
WIDE = dataclasses.replace(FEW, heads=66, far=0)
PARTS = dataclasses.replace(TURNED, splits=2)
FAULTS: dict[str, tuple[Case, str, str]] = {
    # Barriers and fences.
    "no fence": (FEW, "T.fence_proxy_async()", "pass"),
    "no barrier behind the fence": (FEW, "async()\n                T.sync_threads()", "async()"),
    "no wait for scores": (FEW, "T.mbarrier_wait_parity(scored[0], (tile - begin) & 1)", "pass"),
    "no wait for sums": (FEW, "T.mbarrier_wait_parity(added[0], (tile - begin) & 1)", "pass"),
    "the other parity of scores": (
        FEW,
        "(scored[0], (tile - begin) & 1)",
        "(scored[0], (tile - begin) & 1 ^ 1)",
    ),
    "one parity of sums": (LONG, "(added[0], (tile - begin) & 1)", "(added[0], 0)"),
    "no fence behind a wait": (FEW, "T.tcgen05_after_thread_sync()", "pass"),
    "two arrivals": (FEW, "added = T.alloc_barrier([1])", "added = T.alloc_barrier([2])"),
    "products of every warp": (
        FEW,
        "thread < 32:\n                    T.t",
        "thread < 128:\n                    T.t",
    ),
    "no barrier for the staged": (
        FEW,
        "h]  # so that neither way banks meet\n        T.sync_threads()",
        "h]",
    ),
    "no barrier for warps' parts": (FEW, "+ lane] = made\n        T.sync_threads()", "+ lane] = made"),
    "no barrier for the maximum": (
        FEW,
        "T.exp(old - top))\n                T.sync_threads()",
        "T.exp(old - top))",
    ),
    "no barrier for the shares": (FEW, "T.sync_threads()\n            for j", "for j"),
    "no barrier for the results": (FEW, "T.sync_threads()  # nobody", "pass  # nobody"),
    "no barrier at the end": (PARTS, "T.sync_threads()  # nobody", "pass  # nobody"),
    "no barrier for the turned": (TURNED, "T.bfloat16)\n                    T.sync_threads()", "T.bfloat16)"),
    # Sums.
    "every tile begins anew": (FEW, "clear_accum=tile == begin", "clear_accum=True"),
    "no tile begins anew": (FEW, "clear_accum=tile == begin", "clear_accum=False"),
    "scores on scores": (FEW, "mbar=scored, clear_accum=True", "mbar=scored, clear_accum=False"),
    "sums of an old maximum": (FEW, "z[i, h] = z[i, h] * factor[h]", "z[i, h] = z[i, h]"),
    "weights of an old maximum": (FEW, "mass[i, h] * factor[h] + z", "mass[i, h] + z"),
    "weights of this tile": (FEW, "mass[i, h] * factor[h] + z[i, h]", "z[i, h]"),
    "the same columns": (FEW, "keys[:, j * 128 : j * 128 + 128]", "keys[:, 0:128]"),
    "sums of other columns": (FEW, "total[:, j * HEADS : j * HEADS + HEADS],\n", "total[:, 0:HEADS],\n"),
    "values as rows": (FEW, "transpose_A=True", "transpose_A=False"),
    "another lane's key": (FEW, "k, lane ^ k]", "k, lane]"),
    "the other half's parts": (WIDE, "parts[warp, half * HALF + lane]", "parts[warp, lane]"),
    # Which keys.
    "mask": (FEW, "T.if_then_else(marks[i] > 0, known, -T.infinity(T.float32))", "known"),
    "not finite": (FEW, "T.if_then_else(marks[i] > 1", "T.if_then_else(marks[i] > 0"),
    "ids behind the last": (FEW, "(at < count) & ", ""),
    "ids of none": (FEW, "(slot >= 0) & ", ""),
    "ids past the cache": (FEW, " & (slot < slots)", ""),
    "ids of the first row": (ROWS, "ids[row, T.min", "ids[0, T.min"),
    "ids of the first tile": (LONG, "at = tile * KEYS + thread", "at = T.min(tile, 0) * KEYS + thread"),
    "the list behind the other": (FEW, "row, tile - near_tiles, keys", "row, tile, keys"),
    "a page for a record": (FEW, "slot % page * pieces", "slot // page * pieces"),
    "a record for a page": (FEW, "slot // page, T.int64", "slot % page, T.int64"),
    # Records.
    "another block's power": (FEW, "codes[first + 32, block]", "codes[first + 32, block ^ 1]"),
    "half the columns": (FEW, "values[first + block * 2 + half, i]", "values[first + block * 2, i]"),
    "powers of four": (FEW, "power << 23", "power << 24"),
    "the other nibble": (NVFP4, "(pair & 7) << 22", "(pair & 0x70) << 18"),
    "no sign": (NVFP4, "| (pair & 0x80) << 24", ""),
    "scales of the first half": (NVFP4, "16 + place // 16,", "16,"),
    "another scale": (NVFP4, "place % 16]", "place % 8]"),
    "half a power": (NVFP4, "high * T.float32(2.0**126)", "high * T.float32(2.0**125)"),
    # Heads, rows and the end.
    "queries of the first row": (ROWS, "row * q_row", "0 * q_row"),
    "queries of the first heads": (WIDE, "(first_head + head, heads - 1) * q", "(head, heads - 1) * q"),
    "results of the first heads": (WIDE, "(first_head + head, heads - 1) * out", "(head, heads - 1) * out"),
    "one sink": (FEW, "logit = sink[head]", "logit = sink[0]"),
    "no sink": (FEW, "if has_sink > 0", "if has_sink > 1"),
    "sink of the first heads": (
        WIDE,
        "own = T.min(first_head + thread % HEADS",
        "own = T.min(thread % HEADS",
    ),
    "no maximum in the lse": (FEW, "T.log(held) + largest", "T.log(held)"),
    "lse of the first row": (ROWS, "lse[row * heads + own]", "lse[own]"),
    "turned on": (TURNED, "T.cast(x * c + y * s", "T.cast(x * c - y * s"),
    "turned by the first row": (ROWS, "cos[row, turn], sin[row, turn]", "cos[0, turn], sin[0, turn]"),
    "turned elsewhere": (TURNED, "column = WIDTH - 64", "column = WIDTH - 128"),
    # Parts.
    "every part takes all": (PARTS, "begin, end = split * tiles // splits", "begin, end = 0 * tiles"),
    "parts over parts": (PARTS, "row, split = item // splits, item % splits", "row, split = item, 0"),
    "values of one part": (PARTS, "(first + heads * split) * WIDTH", "first * WIDTH"),
    "weights as they are": (PARTS, "split + 1] * factor", "split + 1]"),
    "pairs over pairs": (PARTS, "2 * (part + own)", "part + own"),
    "parts turned on": (PARTS, "= y * c - x * s", "= y * c + x * s"),
    # The launch.
    "caches exchanged": (
        NVFP4,
        "((window, window_ids), (compressed, compressed_ids))",
        "((compressed, compressed_ids), (window, window_ids))",
    ),
    "page size and stride exchanged": (
        FEW,
        "codes, stride, page, slots, ids, count]",
        "codes, page, stride, slots, ids, count]",
    ),
    "slots and ids exchanged": (
        FEW,
        "page, slots, ids, count]",
        "page, count, ids, slots]",
    ),
    "steps of q exchanged": (ROWS, "queries, *q_steps", "queries, *q_steps[::-1]"),
    "steps of out exchanged": (ROWS, "results, *out_steps", "results, *out_steps[::-1]"),
    "sine and cosine exchanged": (
        TURNED,
        "given(cos, torch.float32, 2), given(sin",
        "given(sin, torch.float32, 2), given(cos",
    ),
    "records in the other order": (
        NVFP4,
        "_attend(window_layout, compressed_layout or",
        "_attend(compressed_layout, window_layout or",
    ),
    "rows and heads exchanged": (
        ROWS,
        "rows, heads, num_splits, scale, queries",
        "heads, rows, num_splits, scale, queries",
    ),
}


def call_of(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Its arguments; an id is past the cache and one is -1, which are both none."""
    args, keys = inputs(case, "cpu")
    args[2][:, 0], args[2][:, 1] = args[1].num_slots + 1, -1
    return args, keys


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    """A planted mistake shows in one of the two orders of the engines."""
    case, *edit = FAULTS[fault]
    call = call_of(case)
    for late in (False, True):
        try:
            if not right(case, run(case, call, (edit[0], edit[1]), late), call):
                return
        except (EmulationError, AssertionError):
            return
    raise RuntimeError("not seen")


@pytest.mark.parametrize("case", [FEW, TURNED, NVFP4, ROWS, LONG, WIDE, PARTS])
def test_their_cases_are_right(case: Case) -> None:
    call = call_of(case)
    assert right(case, run(case, call), call)


@pytest.mark.parametrize("name", ["v4", "bf16"])
def test_refusals(name: str) -> None:
    """Its reason, and the portable kernel takes the call."""
    layout = CASES[name].layouts[0]
    (q, window, near, compressed, far), _ = inputs(small(name, tokens=1), "cpu")
    args = [q, window.pages, layout, near, compressed.pages, layout, far, None, None, None, 1.0, 1, q, q, q]
    target = Target("cuda", 100, frozenset({"tilelang", "nvcc", "triton"}))
    found = dict(registered()["sparse_attn"].explain(target, tuple(args)))
    assert found[KERNEL] == f"records mxfp8 or nvfp4, got {layout}+{layout}" and found["triton_cuda"] is None
    args[2], args[5], args[10] = "mxfp8", "nvfp4", -1.0
    assert "positive scale" in str(dict(registered()["sparse_attn"].explain(target, tuple(args)))[KERNEL])


@pytest.mark.skipif(lowering.nvcc() is None or torch.cuda.is_available(), reason="needs nvcc and no GPU")
def test_the_compiled_kernels_take_what_they_are_given() -> None:
    """TileLang's own checks of types, sizes and strides; and that they would say something."""
    loaded: Any = importlib.import_module(MODULE)
    launched: dict[str, Any] = {}

    def instead(name: str) -> Any:
        return lambda *args: lambda *given: launched.update({name: (args, given)})

    names = ("_attend", "_combine")
    case = small("window alone", tokens=1, heads=2, splits=2)
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(loaded, name, instead(name)))
        stack.enter_context(mock.patch.object(loaded, "arch_of", lambda x: "sm_100a"))
        args, keys = inputs(case, "cpu")
        scratch = torch.zeros(sparse_attn_scratch(1, 2, 512, case.near, 0, 2), dtype=torch.uint8)
        with on_sm100(loaded.sparse_attn):
            ops.sparse_attn(*args[:3], **keys, num_splits=2, scratch=scratch)
    for name in names:
        args, given = launched[name]
        kernel = getattr(loaded, name)(*args)
        assert host_args.refusal(kernel, *given) is None
        assert "scratch dtype" in str(host_args.refusal(kernel, *given[:-1], scratch))
