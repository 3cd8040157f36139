"""The Hopper linears: device functions in the emulator, and the ops themselves where a GPU is present."""

import pytest
import torch

from dsv41.formats import FP8Tiles, quantize_mxfp8
from dsv41.ops import block_linear, grouped_linear, pack_linear
from dsv41.ops._tilelang import HERE, device_source
from tests.tools.cuda_emu import SHARED, available, emulate

needs_gpp = pytest.mark.skipif(not available(), reason="needs g++")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FOLDER = HERE.parent / "linear"
# As in tilelang_cuda.py.
TILES = {"decode": (1, 2, 1, 128, 64), "middle": (2, 1, 1, 128, 64), "prefill": (2, 1, 2, 128, 64)}


def distance(a, b):
    a, b = a.double(), b.double()
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def make_weight(rows, k, device="cpu", fp8=False):
    """Weights whose tiles' scales spread over 2^4."""
    w = torch.randn(rows, k, device=device) * 0.1
    w = w.unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
    w *= torch.randint(-2, 3, (rows // 32, 1, k // 32, 1), device=device).exp2()
    w = quantize_mxfp8(w.flatten(2).flatten(0, 1), tile_rows=32)
    return pack_linear(w) if fp8 else w


def make_rows(tokens, k, device="cpu"):
    """Rows whose blocks' scales spread."""
    x = torch.randn(tokens, k // 32, 32, device=device)
    x *= torch.randint(-3, 4, (tokens, k // 32, 1), device=device).exp2()
    return quantize_mxfp8(x.flatten(1))


def emulate_block(x, w, tile, splits):
    """`block_linear` launch by launch in the emulator."""
    source = device_source(FOLDER / "block_gemm.cuh", wgmma={"e4m3_ss": (64, 128)})
    (values, scale), (wv, ws) = x.flat(), w.flat()
    (tokens, k), rows = values.shape, wv.shape[0]
    if isinstance(w, FP8Tiles):
        coarse, coarse_scale = torch.empty_like(values), scale.new_empty((tokens, k // 128))
        args = [values.view(torch.uint8), scale, tokens * k, coarse.view(torch.uint8), coarse_scale]
        emulate(source, "blocks::coarsen", args, grid=-(-tokens * k // 4096), threads=256)
        values, scale = coarse, coarse_scale
    out = torch.zeros(tokens, rows, dtype=torch.bfloat16)
    parts = torch.zeros(splits * tokens * rows)
    template = ", ".join(map(str, (*TILES[tile], 4 if isinstance(w, FP8Tiles) else 1)))
    args = [
        values.view(torch.uint8),
        scale,
        wv.view(torch.uint8),
        ws,
        tokens,
        rows,
        k,
        splits,
        out,
        parts,
        SHARED,
    ]
    emulate(source, f"blocks::linear<{template}>", args, grid=3, threads=384, shared_bytes=232448)
    if splits > 1:
        args = [parts, splits, tokens * rows, out]
        emulate(source, "blocks::reduce", args, grid=-(-tokens * rows // 1024), threads=256)
    return out


@needs_gpp
@pytest.mark.parametrize("fp8", [False, True], ids=["exact", "fp8"])
@pytest.mark.parametrize(
    "tile, tokens, splits", [("decode", 9, 1), ("decode", 3, 2), ("middle", 70, 1), ("prefill", 200, 1)]
)
def test_emulated_block_linear_is_the_reference(tile, tokens, splits, fp8):
    torch.manual_seed(0)
    x, w = make_rows(tokens, 384), make_weight(160, 384, fp8=fp8)
    assert distance(emulate_block(x, w, tile, splits), block_linear(x, w)) < 1e-5


@needs_gpp
@pytest.mark.parametrize("m_blocks, width, tokens, splits", [(1, 64, 9, 2), (2, 128, 150, 1)])
def test_emulated_grouped_linear_is_the_reference(m_blocks, width, tokens, splits):
    torch.manual_seed(0)
    groups, rank, k = 2, 256, 256
    x, w = torch.randn(tokens, groups, k).bfloat16(), make_weight(groups * rank, k)
    files = [FOLDER / name for name in ("block_gemm.cuh", "grouped_gemm.cuh")]
    source = device_source(*files, wgmma={"e4m3_ss": (64,), "bf16_rs": (width,)})
    out = torch.zeros(tokens, groups, rank, dtype=torch.bfloat16)
    parts = torch.zeros(splits * out.numel())
    values, scale = w.flat()
    args = [x, values.view(torch.uint8), scale, tokens, groups, rank, k, splits, out, parts, SHARED]
    call = f"grouped::linear<{m_blocks}, {width}>"
    emulate(source, call, args, grid=3, threads=384, shared_bytes=232448)
    if splits > 1:
        args = [parts, splits, out.numel(), out]
        emulate(source, "blocks::reduce", args, grid=-(-out.numel() // 1024), threads=256)
    assert distance(out, grouped_linear(x, w)) < 1e-5
