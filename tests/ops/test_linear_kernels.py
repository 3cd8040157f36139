"""The Hopper linears: device functions in the emulator, and the ops themselves where a GPU is present."""

import importlib
from typing import Any

import pytest
import torch
from dsv41_reference.quant import coarsen_mxfp8, e8m0_decode

from dsv41._op import batch_invariant, use
from dsv41.formats import E8M0, MXFP8, FP8Tiles, quantize_mxfp8
from dsv41.ops import block_linear, block_linear_scratch, grouped_linear, linear, linear_scratch, pack_linear
from dsv41.ops._tilelang import HERE, device_source
from dsv41.ops.linear import tilelang_cuda as hopper
from dsv41.ops.linear import tilelang_few_cuda as few
from dsv41.ops.linear.api import FEW, FEW_ROWS, last_tokens, num_splits
from dsv41.parity import distance
from tests.tools import triton_interp
from tests.tools.cuda_emu import SHARED, EmulationError, available, emulate, tensor_map

needs_gpp = pytest.mark.skipif(not available(), reason="needs g++")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FOLDER = HERE.parent / "linear"


def make_weight(rows, k, device="cpu", fp8=False) -> Any:
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


def emulate_block(x, w, tile, cluster, source=None, schedules=("late", "eager")):
    """`block_linear` launch by launch in the emulator; ``cluster`` blocks share k."""
    source = hopper.source() if source is None else source
    (values, scale), (wv, ws) = x.flat(), w.flat()
    (tokens, k), rows = values.shape, wv.shape[0]
    if isinstance(w, FP8Tiles):
        coarse, coarse_scale = torch.empty_like(values), scale.new_empty((tokens, k // 128))
        args = [values.view(torch.uint8), scale, tokens * k, coarse.view(torch.uint8), coarse_scale]
        emulate(source, "blocks::coarsen", args, grid=-(-tokens * k // 8192), threads=256)
        values, scale = coarse, coarse_scale
    out = torch.zeros(tokens, rows, dtype=torch.bfloat16)
    per = 4 if isinstance(w, FP8Tiles) else 1
    wm, wn, _, columns, _ = hopper.TILES[tile]
    call = f"blocks::linear<{', '.join(map(str, (*hopper.TILES[tile], per, cluster)))}>"
    height = hopper.tile_rows(tile)
    grid = 3 if cluster == 1 else -(-tokens // height) * -(-rows // columns) * cluster
    args = [tensor_map(values, height), scale, tensor_map(wv, columns), ws, tokens, rows, k, out, SHARED]
    size = hopper.shared_bytes(tile, 32 * per)
    emulate(
        source, call, args, grid=grid, threads=128 + 128 * wm * wn, shared_bytes=size, cluster=cluster,
        schedules=schedules,
    )  # fmt: skip
    return out


@needs_gpp
@pytest.mark.parametrize(
    "tile, tokens, cluster, fp8",
    [
        ("decode", 9, 1, False), ("decode", 70, 3, False), ("middle", 70, 1, False),
        ("decode256", 5, 1, False), ("decode", 9, 2, True), ("middle", 70, 1, True), ("large", 200, 1, True),
    ],
)  # fmt: skip
def test_emulated_block_linear_is_the_reference(tile, tokens, cluster, fp8):
    torch.manual_seed(0)
    x, w = make_rows(tokens, 384), make_weight(160, 384, fp8=fp8)
    assert distance(emulate_block(x, w, tile, cluster), block_linear(x, w)) < 1e-5


@needs_gpp
def test_emulated_tiles_have_the_same_bits():
    """Which tile a call takes, and which rows are beside one, changes nothing; a NaN stays in its row."""
    torch.manual_seed(0)
    x, w = make_rows(70, 384), make_weight(160, 384)
    want = emulate_block(x, w, "middle", 2)
    assert torch.equal(emulate_block(x, w, "decode192", 2), want)
    x.values.view(torch.uint8)[1, 3] = 0x7F
    got = emulate_block(MXFP8(x.values[:5], x.scale[:5]), w, "decode", 2)
    others = torch.arange(5) != 1
    assert got[1].isnan().all() and torch.equal(got[others], want[:5][others])


FAULTS = {
    "weights of another block ahead": ("(begin + ring.stage) * 128, tile.column", "begin * 128, tile.column"),
    "tokens of the first share": (
        "hopper::tile_copy(to, x, k * 128",
        "hopper::tile_copy(to, x, (k - begin) * 128",
    ),
    "another row's scale": ("min(tile.row + word, tokens - 1)", "min(tile.row + word + 1, tokens - 1)"),
    "another tile's scale": ("code[S::BM + n_group * SCALES + i]", "code[S::BM + i]"),
    "scales of the block before": ("from[i] + 4 * (k - begin)", "from[i] + 4 * max(k - begin - 1, 0)"),
    "a block of the cluster less": ("for (int r = 1; r < CLUSTER; ++r)", "for (int r = 2; r < CLUSTER; ++r)"),
    "the next block's product": ("a[c] + (m * 8192", "a[0] + (m * 8192"),
}


@needs_gpp
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_block_linear_are_seen(fault):
    torch.manual_seed(0)
    x, w = make_rows(9, 640), make_weight(128, 640)
    before, after = FAULTS[fault]
    source = hopper.source()
    assert source.count(before) == 1
    try:
        got = emulate_block(x, w, "decode", 2, source.replace(before, after), ("late",))
    except EmulationError:
        return  # the emulator stops it
    assert not distance(got, block_linear(x, w)) < 1e-5


def emulate_wide(x, w, tokens, groups, tile, splits=1, expanded=False):
    """The product of bf16 rows [tokens, groups * k]."""
    width, stages = tile
    files = [HERE / f"hopper_{name}.cuh" for name in ("launch", "cluster", "store")]
    files += [FOLDER / "block_gemm.cuh", FOLDER / "grouped_gemm.cuh"]
    source = device_source(*files, wgmma={"e4m3_ss": (64,), "bf16_rs": (width,)})
    values, scale = w.flat()
    rows, k = values.shape
    out = torch.zeros(tokens, groups, rows // groups, dtype=torch.bfloat16)
    out_map, parts = tensor_map(out.flatten(1), width), torch.zeros(splits * out.numel())
    args = [tensor_map(x, width), tensor_map(values, 128), scale]
    args += [tokens, groups, rows // groups, k, splits, out_map, parts, SHARED]
    call = f"grouped::linear<{width}, {stages}, {str(expanded).lower()}>"
    emulate(source, call, args, grid=3, threads=384, shared_bytes=232448)
    if splits > 1:
        args = [parts, splits, out.numel(), out]
        emulate(source, "blocks::reduce", args, grid=-(-out.numel() // 1024), threads=256)
        return out
    return out_map[1024:].view(torch.bfloat16).view(out.shape)


@needs_gpp
@pytest.mark.parametrize(
    "tile, tokens, splits", [((64, 8), 9, 2), ((128, 4), 140, 1), ((192, 4), 70, 2), ((256, 3), 280, 1)]
)
def test_emulated_grouped_linear_is_the_reference(tile, tokens, splits):
    torch.manual_seed(0)
    x, w = torch.randn(tokens, 2, 256).bfloat16(), make_weight(512, 256)
    assert distance(emulate_wide(x.flatten(1), w, tokens, 2, tile, splits), grouped_linear(x, w)) < 1e-5


@needs_gpp
def test_emulated_block_linear_of_many_tokens_is_the_reference():
    """Expanded to bf16, exactly; features that fill no tile."""
    torch.manual_seed(0)
    x, w = make_rows(133, 384), make_weight(160, 384)
    source, wide = hopper.source(), torch.empty(133, 384).bfloat16()
    values, scale = x.flat()
    args = [values.view(torch.uint8), scale, 133 * 384, wide]
    emulate(source, "blocks::expand", args, grid=-(-133 * 384 // 4096), threads=256)
    c, s, e, h = (torch.arange(n) for n in (4, 8, 2, 2))
    k = 32 * c[:, None] + 4 * s[:, None, None, None] + 2 * e + h[:, None, None]  # of place [s, h, c, e]
    order = (128 * torch.arange(3)[:, None] + k.flatten()).flatten()
    assert torch.equal(wide, x.dequantize()[:, order])
    got = emulate_wide(wide, w, 133, 1, (128, 4), expanded=True)
    assert distance(got[:, 0], block_linear(x, w)) < 1e-5


def test_folding_tiles_keeps_what_fits():
    """A spread of 2^4 moves small values below E4M3's smallest step only; `changed` counts just those."""
    torch.manual_seed(0)
    w = make_weight(160, 256)
    before = w.dequantize(torch.float64)
    packed: Any = pack_linear(MXFP8(w.values.clone(), w.scale, 32))
    after = packed.dequantize(torch.float64)
    assert packed.scale.shape == (2, 2)
    assert 0 < packed.changed == int((before != after).sum()) < before.numel() // 20
    assert float((before - after).abs().max()) <= 2.0**-10 * float(packed.scale.float().max())
    same = MXFP8(w.values.clone(), torch.full_like(w.scale.view(torch.uint8), 120).view(E8M0), 32)
    again: Any = pack_linear(same)
    assert again.changed == 0
    assert pack_linear(w, numerics="exact") is w


def test_packing_refuses():
    w = make_weight(32, 128)
    nan = MXFP8(w.values, torch.full_like(w.scale.view(torch.uint8), 255).view(E8M0), 32)
    with pytest.raises(ValueError, match="pack_linear: expected scale codes below 255"):
        pack_linear(nan)
    with pytest.raises(ValueError, match="in: a multiple of 128"):
        pack_linear(make_weight(32, 96))
    with pytest.raises(ValueError, match="numerics: exact or fp8, got int8"):
        pack_linear(w, numerics="int8")


def test_scratch_grows_with_tokens():
    sizes = [block_linear_scratch(n, 5120, 8192) for n in (0, 1, 64, 384, 385, 4096)]
    assert sizes == sorted(sizes) and sizes[0] == sizes[3] and sizes[4] > 385 * 8192 * 2
    assert sizes[5] == 4096 * 8192 * 2 + 256
    assert block_linear_scratch(4096, 5120, 8192, "fp8") < 4096 * 8192 * 1.01


def test_shares_of_k_depend_on_the_class_alone():
    for features, k in [(32768, 1280), (5120, 8192), (1792, 5120), (4608, 5120), (5120, 2304), (4096, 1280)]:
        last = last_tokens(features)
        classes = (range(FEW + 1), range(FEW + 1, last + 1), range(last + 1, last + 200))
        shares = [{num_splits(n, features, k) for n in tokens} for tokens in classes]
        assert [len(found) for found in shares] == [1, last > FEW, 1] and shares[2] == {1}


@pytest.mark.parametrize("fp8", [False, True], ids=["exact", "fp8"])
def test_library_path_is_the_reference(fp8):
    """The kernels of torch_cuda.py, on whatever device is here."""
    kernels = importlib.import_module("dsv41.ops.linear.torch_cuda")
    torch.manual_seed(0)
    x, w = make_rows(9, 256), make_weight(96, 256, fp8=fp8)
    out = torch.empty(9, 96, dtype=torch.bfloat16)
    kernels.block_linear(*x.flat(), *w.flat(), "fp8" if fp8 else "exact", out, None)
    assert distance(out, block_linear(x, w)) < 1e-5
    if not fp8:
        rows, got = torch.randn(9, 3, 256).bfloat16(), torch.empty(9, 3, 32, dtype=torch.bfloat16)
        kernels.grouped_linear(rows, *w.flat(), got, None)
        assert distance(got, grouped_linear(rows, w)) < 1e-5


@pytest.mark.skipif(not triton_interp.available(), reason="needs triton")
def test_interpreted_coarser_rows_are_the_reference():
    """Spreads of scales far beyond what E4M3 holds; scales with the tokens contiguous and padded."""
    torch.manual_seed(0)
    x = torch.randn(21, 8, 32) * torch.randint(-12, 5, (21, 8, 1)).exp2()
    values, scale = quantize_mxfp8(x.flatten(1)).flat()
    got, got_scale = torch.empty_like(values).view(torch.uint8), torch.zeros(2, 24)
    kernels = triton_interp.interpret("dsv41.ops._triton")
    kernels.coarsen_rows(values.view(torch.uint8), scale, got, got_scale)
    want, want_scale = coarsen_mxfp8(values, scale)
    assert torch.equal(got, want.view(torch.uint8))
    assert torch.equal(got_scale[:, :21].t(), e8m0_decode(want_scale))
    assert not got_scale[:, 21:].any()


def interpreted_linear(x, w, dtype, edit=None):
    """The launches of `linear` in the interpreter, over scratch of NaN."""
    kernels = triton_interp.interpret("dsv41.ops.linear.triton_cuda", edit)
    out = torch.full((x.shape[0], w.shape[0]), torch.nan, dtype=dtype)
    size = linear_scratch(x.shape[0], w.shape[0], x.shape[1])
    kernels.linear(x, w, out, torch.full((size,), 255, dtype=torch.uint8))
    return out


@pytest.mark.skipif(not triton_interp.available(), reason="needs triton")
@pytest.mark.parametrize("tokens, features, k", [(5, 70, 1100), (130, 200, 600), (3, 64, 96), (17, 1, 520)])
def test_interpreted_linear_is_the_reference(tokens, features, k):
    """In shares of k and without, rows with a stride, every order the same bits, a NaN in its row."""
    torch.manual_seed(0)
    x, w = torch.randn(tokens, k + 8).bfloat16()[:, :k], torch.randn(features, k).bfloat16()
    for dtype in (torch.float32, torch.bfloat16):
        got = interpreted_linear(x, w, dtype)
        assert distance(got, linear(x, w, dtype=dtype)) < 1e-11
        assert torch.equal(interpreted_linear(x[:2], w, dtype), got[:2])
        whole = interpreted_linear(
            x, w, dtype, {"rows, columns, split = ": "split, (rows, columns, _) = False, "}
        )
        assert torch.equal(whole, got)
    x[1, 3] = torch.nan
    got = interpreted_linear(x, w, torch.float32)
    assert got[1].isnan().all() and not got[torch.arange(tokens) != 1].isnan().any()


LINEAR_FAULTS = {
    "one share": ("begin = tl.program_id(2) * share if SPLIT else 0", "begin = 0"),
    "next feature": ("tl.minimum(row, features - 1)", "tl.minimum(row + 1, features - 1)"),
    "past k": ("inside = at + lane < k", "inside = at + lane < k + 64"),
    "next token": ("token = tl.program_id(0) * TOKENS", "token = 1 + tl.program_id(0) * TOKENS"),
    "shares from the second on": ("for share in range(shares)", "for share in range(1, shares)"),
}


@pytest.mark.skipif(not triton_interp.available(), reason="needs triton")
@pytest.mark.parametrize("fault", LINEAR_FAULTS)
def test_faults_of_linear_are_seen(fault):
    torch.manual_seed(0)
    x, w = torch.randn(4, 1100).bfloat16()[:, :1030], torch.randn(70, 1100).bfloat16()[:, :1030]
    got = interpreted_linear(x, w, torch.float32, dict([LINEAR_FAULTS[fault]]))
    assert not distance(got, linear(x, w, dtype=torch.float32)) < 1e-11


def emulated_few(x, w, dtype, source):
    """The launches of `tilelang_few_cuda` in the emulator, over sums of NaN."""
    (tokens, k), features = x.shape, w.shape[0]
    shares, out = -(-k // few.SHARE), torch.zeros(tokens, features, dtype=dtype)
    sums = torch.full((shares * tokens * features,), torch.nan)
    grid = (-(-features // few.FEATURES), shares, -(-tokens // (8 * few.TILES)))
    args = [x, x.stride(0), w, w.stride(0), tokens, features, k, sums, SHARED]
    call = f"few::product<{few.TILES}>"
    emulate(source, call, args, grid=grid, threads=few.THREADS, shared_bytes=few.BYTES)
    call = f"few::add<{str(dtype == torch.bfloat16).lower()}>"
    args = [sums, shares, tokens, features, out, out.stride(0)]
    emulate(source, call, args, grid=-(-tokens * features // 2 // few.THREADS), threads=few.THREADS)
    return out


@needs_gpp
@pytest.mark.parametrize("tokens, features, k", [(9, 24, 640), (70, 34, 1088)])
def test_emulated_linear_of_few_tokens_is_the_reference(tokens, features, k):
    """Rows with a stride, shares of k that are not whole, the same bits alone, a NaN in its row."""
    torch.manual_seed(0)
    x, w = torch.randn(tokens, k + 8).bfloat16()[:, :k], torch.randn(features, k).bfloat16()
    source = few.source()
    for dtype in (torch.float32, torch.bfloat16):
        got = emulated_few(x, w, dtype, source)
        assert distance(got, linear(x, w, dtype=dtype)) < 1e-11
        assert torch.equal(emulated_few(x[3:4], w, dtype, source), got[3:4])
    x[1, 3] = torch.nan
    got = emulated_few(x, w, torch.float32, source)
    assert got[1].isnan().all() and not got[torch.arange(tokens) != 1].isnan().any()


FEW_FAULTS = {
    "one share": ("blockIdx.y * SHARE + warp * DEEP", "warp * DEEP"),
    "before the end": ("if (begin < k)", "if (begin + DEEP < k)"),
    "another feature": ("feature + 8 * r, features - 1", "feature + 4 * r, features - 1"),
    "a warp less": ("for (int i = 0; i < WARPS; ++i)", "for (int i = 1; i < WARPS; ++i)"),
    "a share less": ("for (int s = 0; s < shares; ++s)", "for (int s = 1; s < shares; ++s)"),
}


@needs_gpp
@pytest.mark.parametrize("fault", FEW_FAULTS)
def test_faults_of_few_tokens_are_seen(fault):
    torch.manual_seed(0)
    x, w = torch.randn(9, 640).bfloat16(), torch.randn(24, 640).bfloat16()
    before, after = FEW_FAULTS[fault]
    source = few.source()
    assert source.count(before) == 1
    got = emulated_few(x, w, torch.float32, source.replace(before, after))
    assert not distance(got, linear(x, w, dtype=torch.float32)) < 1e-11


def rows_of(x, n):
    return MXFP8(x.values[:n], x.scale[:n]) if isinstance(x, MXFP8) else x[:n]


def gpu_calls(k):
    """Name: (call on rows, 4096 rows) of every op on the GPU; rows of k."""
    w, groups = make_weight(2304, k, "cuda"), torch.randn(4096, 2, k, device="cuda").bfloat16()
    packed, wide = pack_linear(MXFP8(w.values.clone(), w.scale, 32)), w.dequantize()
    x = make_rows(4096, k, "cuda")
    return {
        "exact": (lambda x: block_linear(x, w), x),
        "fp8": (lambda x: block_linear(x, packed), x),
        "grouped": (lambda x: grouped_linear(x, w), groups),
        "linear": (lambda x: linear(x, wide, dtype=torch.float32), x.dequantize()),
        "few": (lambda x: linear(x, wide[:384], dtype=torch.float32), x.dequantize()),
    }


@needs_gpu
@pytest.mark.parametrize("name", ["exact", "fp8", "grouped", "linear", "few"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 65, 300, 700, 4096])
def test_gpu(name, tokens):
    """The reference's values, the same bits again, no row depends on others, and a NaN stays in its row."""
    torch.manual_seed(tokens)
    torch.backends.cuda.matmul.allow_tf32 = False
    call, wide = gpu_calls(1280)[name]
    x = rows_of(wide, tokens)
    got = call(x)
    assert len(got) == tokens
    if tokens == 0:
        return
    with use("torch"):
        assert distance(got, call(x)) < 1e-5
    assert torch.equal(got, call(x))
    spoilt = rows_of(wide, tokens)
    first = spoilt.values.view(torch.uint8) if isinstance(spoilt, MXFP8) else spoilt
    row = tokens // 2
    kept = first[row].clone()
    first[row].view(-1)[3] = 0x7F if isinstance(spoilt, MXFP8) else torch.nan
    nan = call(spoilt)
    first[row] = kept
    others = torch.arange(tokens, device="cuda") != row
    assert nan[row].isnan().any() and torch.equal(nan[others], got[others])
    ends = (FEW, 256 if name == "grouped" else last_tokens(2304), 4096)
    if name in ("linear", "few"):  # the library, which takes the others, chooses by the number of rows
        ends = (FEW_ROWS,) if name == "few" and tokens <= FEW_ROWS else ()
    if ends:
        full = call(rows_of(wide, next(end for end in ends if tokens <= end)))
        assert torch.equal(full[:tokens], got)
    with batch_invariant():
        assert torch.equal(call(rows_of(wide, 4096))[:tokens], call(x))
