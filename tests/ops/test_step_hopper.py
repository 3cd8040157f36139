"""mHC's and Engram's Hopper kernels: in the emulator; on a GPU the ops' own tests run them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate

from dsv41 import ops
from dsv41.ops._tilelang import device_source
from dsv41.ops.engram.tilelang_cuda import shared_bytes
from dsv41.ops.hyper.api import CHUNK, ROWS, WIDTH, levels
from dsv41.ops.hyper.tilelang_cuda import cross_call, finish_call, source, streams_call
from tests.ops.test_step_kernels import MIXING, U8, assert_mixes, gating, mixing, rare
from tests.tools.cuda_emu import SHARED, EmulationError, available, emulate

ROOT = Path(ops.__file__).parent
MHC = source()
GATE = device_source(ROOT / "quant" / "quantize.cuh", ROOT / "engram" / "gate.cuh")
BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(not available(), reason="needs g++")


def emulate_mhc(
    x: torch.Tensor, params: Any, y: Any = None, mixes: Any = None, source: str = MHC, level: int = 2
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(streams, collapsed rows, next mixes), as tilelang_cuda.py does; without ``y`` the mixes of ``x``.

    ``level``: columns of a block, a group of sums, a sum, or a chunk (2, 1, 0).
    """
    tokens, _, hidden = x.shape
    fn, base, scale = params
    _, sums, per = levels(hidden)
    expand, chunks, groups = y is not None, (1, per, sums * per)[level], 2 if level else 1
    number, weight = hidden // CHUNK // chunks, torch.ones(hidden, dtype=BF16)
    out, norm = torch.zeros_like(x), torch.zeros(tokens, hidden, dtype=BF16)
    partial = torch.zeros(number * tokens * WIDTH)
    given = (mixes[1], mixes[2], mixes[0]) if expand else (None, None, None)
    call, threads, size = streams_call(hidden, groups, chunks, expand)
    args = [y, hidden, x, *given, fn, out, norm, partial, tokens, SHARED]
    grid = (-(-tokens // (ROWS * groups)), number)
    emulate(source, call, args, grid=grid, threads=threads, shared_bytes=size)
    new = [torch.zeros(tokens, 4), torch.zeros(tokens, 4), torch.zeros(tokens, 4, 4)]
    values, codes = torch.zeros(tokens, hidden, dtype=U8), torch.zeros(tokens, hidden // 32, dtype=U8)
    collapsed = norm.clone()
    call, threads, size, together = finish_call(hidden, chunks, expand)
    args = [partial, base, scale, MIXING["norm_eps"], MIXING["eps"], MIXING["iters"], *new, tokens]
    args += [norm, weight, 1e-4, values, codes, SHARED]
    blocks = -(-tokens // together) + (-(-tokens // cross_call(hidden)[-1]) if expand else 0)
    emulate(source, call, args, grid=blocks, threads=threads, shared_bytes=size)
    if expand:
        rare(norm, ops.rms_norm(collapsed, weight, eps=MIXING["norm_eps"]))
        again = ops.quantize_mxfp8(norm)
        assert torch.equal(values, again.values.view(U8)) and torch.equal(codes, again.scale.view(U8))
    return out, collapsed, new


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(p.nan_to_num(7), q.nan_to_num(7)) for p, q in zip(a, b, strict=True))


def check_boundary(source: str = MHC) -> tuple[Any, ...]:
    x, *params = mixing(70, 384)
    y = torch.randn(70, 384).to(BF16)
    with accumulate(torch.float64):
        mixes = ops.mhc_mixes(x.nan_to_num(1.0), *params, **MIXING)
    new, h, following = emulate_mhc(x, params, y, mixes, source)
    rare(new, ops.mhc_expand(y, x, *mixes[1:]), share=2e-3)
    rare(h, ops.mhc_collapse(new, mixes[0]), share=2e-3)
    with accumulate(torch.float64):
        assert_mixes(following, ops.mhc_mixes(new, *params, **MIXING))
    return x, params, y, mixes, new, following


def test_boundary() -> None:
    torch.manual_seed(1)
    x, params, y, mixes, new, following = check_boundary()
    assert equal(emulate_mhc(new, params)[2], following)  # mhc_mixes
    for level in (0, 1):  # the same bits in fewer rows, which are cut another way
        few = emulate_mhc(
            x[-3:].contiguous(), params, y[-3:], [m[-3:].contiguous() for m in mixes], level=level
        )
        assert equal((few[0], *few[2]), [t[-3:] for t in (new, *following)])


@pytest.mark.parametrize("hidden", [384, 2048, 5120])
def test_a_crossing_without_mixes_has_the_bits_of_the_boundary(hidden: int) -> None:
    torch.manual_seed(1)
    x, *params = mixing(5, hidden)
    y, weight = torch.randn(5, hidden).to(BF16), torch.ones(hidden, dtype=BF16)
    mixes = torch.rand(5, 4), torch.rand(5, 4), torch.rand(5, 4, 4)
    new, collapsed, _ = emulate_mhc(x, params, y, mixes)
    call, threads, size, rows = cross_call(hidden)
    got, norm = x.clone(), torch.zeros(5, hidden, dtype=BF16)  # in place
    values, codes = torch.zeros(5, hidden, dtype=U8), torch.zeros(5, hidden // 32, dtype=U8)
    args = [y, hidden, got, mixes[1], mixes[2], mixes[0], got, 5, weight, MIXING["norm_eps"], 1e-4]
    args += [norm, values, codes, SHARED]
    emulate(MHC, call, args, grid=-(-5 // rows), threads=threads, shared_bytes=size)
    assert equal([got], [new])
    rare(norm, ops.rms_norm(collapsed, weight, eps=MIXING["norm_eps"]))
    again = ops.quantize_mxfp8(norm)
    assert torch.equal(values, again.values.view(U8)) and torch.equal(codes, again.scale.view(U8))


def test_mixing_weights_keep_their_24_bits() -> None:
    x, fn = torch.zeros(1, 4, 64, dtype=BF16), torch.zeros(24, 256)
    x[0, 0, 0], fn[0, 0] = 1, 1 + 2**-12 + 2**-23
    partial = torch.zeros(2 * WIDTH)
    args = [None, 64, x, None, None, None, fn, x, None, partial, 1, SHARED]
    call, threads, size = streams_call(64, 1, 1, False)
    emulate(MHC, call, args, grid=(1, 2), threads=threads, shared_bytes=size)
    assert partial.view(-1, 32)[:, 16].sum() == 1 + 2**-12 + 2**-23


def check_gate(source: str = GATE) -> None:
    tokens, hidden = 7, 512
    x, kv, q, k, dead = gating(tokens, 4, hidden)
    for given in (dead, None):
        out = torch.zeros_like(x)
        mask = None if given is None else given.view(torch.uint8)
        args = [x, 4 * hidden, hidden, kv, 5 * hidden, q, hidden, k, hidden, mask, 1e-20]
        args += [out, 4 * hidden, hidden, tokens, SHARED]
        size = shared_bytes(hidden, 4)
        emulate(source, f"engram::gate<{hidden}, 4>", args, grid=2, threads=hidden // 8, shared_bytes=size)
        rare(out, ops.engram_gate(x, kv, q, k, dead=given), share=2e-3)


def test_gate() -> None:
    torch.manual_seed(2)
    check_gate()


FAULTS = {
    "two parts of a weight": (
        "(products[24 + 4 * n + i] + products[12 + 4 * n + i])",
        "products[12 + 4 * n + i]",
    ),
    "comb transposed": ("comb[4 * s + k], old0[s]", "comb[4 * k + s], old0[s]"),
    "rows swapped": ("{a[s][0], a[s][4], a[s][1], a[s][5]}", "{a[s][4], a[s][0], a[s][5], a[s][1]}"),
    "weights not seen by the tensor cores": (
        "hopper::fence_async();\n    hopper::barrier_arrive(full",
        "hopper::barrier_arrive(full",
    ),
    "weights of the last chunk": ("hopper::barrier_wait(full + buffer, c / T::BUFFERS & 1);", ""),
    "overwritten weights": ("hopper::barrier_wait(empty + buffer, (c / T::BUFFERS - 1) & 1);", ";"),
    "sums of a sum": ("total[n][i] += sum[n][i], sum[n][i] = 0;", "total[n][i] += sum[n][i];"),
    "columns before rows": ("mix = by_columns(mix, eps);", ""),
    "squares of one lane": ("size[r] += __shfl_xor_sync(~0u, size[r], 2);", ""),
    "norm of another row": ("HIDDEN / 32, memory, mixing);", "HIDDEN / 32, memory, mixing - 1);"),
}
GATE_FAULTS = {
    "one stage": ("const int stage = turn & 1;", "const int stage = 0;"),
    "overwritten too early": ("__syncthreads();  // all have read the stage, and written their shares", ""),
    "a warp's sums": ("w < G::WARPS", "w < 1"),
    "open for the dead": ("const bool closed = dead &&", "const bool closed = false &&"),
    "sign of the gate": ("? steep : -steep", "? -steep : steep"),
}


@pytest.mark.parametrize("fault", [*FAULTS, *GATE_FAULTS])
def test_faults_are_seen(fault: str) -> None:
    torch.manual_seed(3)
    (old, new), text, check = (
        (FAULTS[fault], MHC, check_boundary) if fault in FAULTS else (GATE_FAULTS[fault], GATE, check_gate)
    )
    assert old in text
    with pytest.raises((AssertionError, EmulationError)):
        check(text.replace(old, new))
