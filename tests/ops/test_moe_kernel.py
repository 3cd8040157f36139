"""The Hopper MoE kernel: its device functions in the emulator, and the op itself where a GPU is present."""

import pytest
import torch

from dsv41.formats import MXFP4Experts, quantize_mxfp4, quantize_mxfp8
from dsv41.ops import mxfp4_moe, pack_experts
from dsv41.ops._tilelang import HERE, device_source
from dsv41.ops.moe.api import mxfp4_moe_scratch, scratch_parts
from tests.tools.cuda_emu import SHARED, available, emulate

needs_gpp = pytest.mark.skipif(not available(), reason="needs g++")
SOURCE = HERE.parent / "moe" / "mxfp4_moe.cuh"


def make_experts(num_experts, hidden, inter, device="cpu"):
    w13 = quantize_mxfp4(torch.randn(num_experts, 2 * inter, hidden, device=device) * 0.1)
    w2 = quantize_mxfp4(torch.randn(num_experts, hidden, inter, device=device) * 0.1)
    return MXFP4Experts(w13.values, w13.scale, w2.values, w2.scale)


def clone(e):
    return MXFP4Experts(e.w13.clone(), e.w13_scale.clone(), e.w2.clone(), e.w2_scale.clone())


def distance(a, b):
    a, b = a.double(), b.double()
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def emulate_moe(x, ids, weights, experts, limit, rows=16, shape=(1, 2), shared=None):
    """`mxfp4_moe` launch by launch in the emulator."""
    (tokens, top_k), hidden, inter, n = ids.shape, experts.hidden, experts.inter, experts.num_experts
    widths = tuple(w for w in (8, 16, 64) if w <= rows)
    macro = "#define DSV41_WIDTHS(X) " + " ".join(f"X({w})" for w in widths) + "\n"
    source = macro + device_source(HERE / "weights_gemm.cuh", SOURCE, wgmma={"bf16_rs": widths})
    scratch = torch.zeros(mxfp4_moe_scratch(tokens, top_k, n, hidden, inter), dtype=torch.uint8)
    begins, order, expanded, inner, parts = scratch_parts(scratch, tokens, top_k, n, hidden, inter)
    q = quantize_mxfp8(x)
    values, scale = q.flat()
    args = [ids, values.view(torch.uint8), scale, tokens, top_k, n, begins, order, expanded, SHARED]
    emulate(source, f"moe::prepare<{hidden}>", args, grid=n + 2, threads=256, shared_bytes=64)
    w13, w13_scale, w2, w2_scale, _ = experts.flat()
    size = 227 * 1024
    emulate(
        source,
        f"moe::gate_up<{hidden}, {inter}, {rows}, {shape[0]}, {shape[1]}>",
        [w13, w13_scale, expanded, begins, order, weights, n, top_k, float(limit), inner, SHARED],
        grid=2,
        threads=128 + 256 * shape[1],
        shared_bytes=size,
    )
    emulate(
        source,
        f"moe::down<{hidden}, {inter}, {rows}, {shape[0]}, {shape[1]}>",
        [w2, w2_scale, inner, begins, order, n, parts, SHARED],
        grid=2,
        threads=128 + 256 * shape[1],
        shared_bytes=size,
    )
    out = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
    emulate(
        source,
        f"moe::combine<{hidden}, {top_k}, {str(shared is not None).lower()}>",
        [ids, parts, shared if shared is not None else out, tokens, n, out],
        grid=4,
        threads=256,
    )
    return out


@needs_gpp
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_emulated_moe_is_the_reference(shape):
    torch.manual_seed(0)
    experts = make_experts(3, 256, 128)
    x = torch.randn(21, 256).bfloat16()
    ids = torch.randint(-1, 3, (21, 2), dtype=torch.int32)
    weights = torch.rand(21, 2)
    want = mxfp4_moe(x, ids, weights, experts, limit=7.0)
    got = emulate_moe(x, ids, weights, pack_experts(clone(experts)), 7.0, shape=shape)
    assert distance(got, want) < 1e-5
