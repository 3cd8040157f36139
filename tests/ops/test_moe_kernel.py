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


def emulate_moe(x, ids, weights, experts, limit, shape, rows=16, shared=None):
    """`mxfp4_moe` launch by launch in the emulator. shape: (m_blocks, k_groups, native)."""
    (tokens, top_k), hidden, inter, n = ids.shape, experts.hidden, experts.inter, experts.num_experts
    m_blocks, k_groups, native = shape
    widths = (8, 16)
    macro = "#define DSV41_WIDTHS(X) " + " ".join(f"X({w})" for w in widths) + "\n"
    source = macro + device_source(
        HERE / "weights_gemm.cuh", SOURCE, wgmma={"bf16_rs": widths, "e4m3_rs": widths}
    )
    scratch = torch.full((mxfp4_moe_scratch(tokens, top_k, n, hidden, inter),), 255, dtype=torch.uint8)
    parts = scratch_parts(scratch, tokens, top_k, n, hidden, inter)
    begins, order, expanded, inner, inner_scale, assigned = parts
    values, scale = (t.view(torch.uint8) for t in quantize_mxfp8(x).flat())
    args = [ids, values, scale, tokens, top_k, n, begins, order, expanded, SHARED]
    flag = str(native).lower()
    emulate(source, f"moe::prepare<{hidden}, {flag}>", args, grid=n + 2, threads=256, shared_bytes=64)
    w13, w13_scale, w2, w2_scale, _ = experts.flat()
    kind = f"{rows}, {m_blocks}, {k_groups}, gemm::{'Native' if native else 'Bf16'}"
    operand = values if native else expanded
    launch = {"grid": 2, "threads": 128 + 256 * k_groups, "shared_bytes": 227 * 1024}
    emulate(
        source,
        f"moe::gate_up<{hidden}, {inter}, {kind}>",
        [w13, w13_scale, operand, expanded, begins, order, weights, n, top_k, float(limit), inner, inner_scale,
         SHARED],
        **launch,
    )  # fmt: skip
    emulate(
        source,
        f"moe::down<{hidden}, {inter}, {kind}>",
        [w2, w2_scale, inner, inner_scale, begins, order, n, assigned, SHARED],
        **launch,
    )
    out = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
    emulate(
        source,
        f"moe::combine<{hidden}, {top_k}, {str(shared is not None).lower()}>",
        [ids, assigned, shared if shared is not None else out, tokens, n, out],
        grid=4,
        threads=256,
    )
    return out


@needs_gpp
@pytest.mark.parametrize("shape", [(1, 2, True), (2, 1, False), (1, 1, False)])
def test_emulated_moe_is_the_reference(shape):
    torch.manual_seed(0)
    experts = make_experts(3, 256, 128)
    x = torch.randn(21, 256).bfloat16()
    ids = torch.randint(-1, 3, (21, 2), dtype=torch.int32)
    weights = torch.rand(21, 2)
    want = mxfp4_moe(x, ids, weights, experts, limit=7.0)
    got = emulate_moe(x, ids, weights, pack_experts(clone(experts)), 7.0, shape)
    assert distance(got, want) < 1e-5
