"""Linears: E4M3 weights with 32 x 32 scale tiles, the grouped output projection, and plain bf16."""

import functools
import math
from typing import Any

import torch

from ..._op import (
    Kernel,
    Op,
    Parts,
    check,
    check_sizes,
    check_tensor,
    in_batch_invariant,
    output,
    parts_bytes,
    tiling_tokens,
    workspace,
)
from ...formats import MXFP8, FP8Tiles, fold_tiles
from ..quant.api import check_scales, mxfp8_operand, unaligned


def _unaligned(**tensors: Any) -> str | None:
    for label, tensor in tensors.items():
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            return f"{label} must be contiguous and aligned to 16 bytes"
    return None


def _hopper(x: Any, x_scale: Any, w: Any, w_scale: Any, numerics: str, out: Any, scratch: Any) -> str | None:
    if x.shape[1] % 128:
        return "in must be a multiple of 128"
    return _unaligned(x=x, x_scale=x_scale, w=w, w_scale=w_scale, out=out)


def _whole_groups(x: Any, w: Any, w_scale: Any, out: Any, scratch: Any) -> str | None:
    if x.shape[2] % 128 or out.shape[2] % 128:
        return "in and rank must be multiples of 128"
    return _unaligned(x=x, w=w, w_scale=w_scale, out=out)


def _sm100(x: Any, x_scale: Any, w: Any, w_scale: Any, numerics: str, out: Any, scratch: Any) -> str | None:
    if numerics != "exact":
        return f"exact numerics, got {numerics}"
    if x.shape[1] % 128 or w.shape[0] % 128:
        return f"in and out must be multiples of 128, got {x.shape[1]} and {w.shape[0]}"
    return _unaligned(x=x, x_scale=x_scale, w=w, w_scale=w_scale, out=out)


def _deepgemm_fp8(
    x: Any, x_scale: Any, w: Any, w_scale: Any, numerics: str, out: Any, scratch: Any
) -> str | None:
    return None if numerics == "fp8" else f"fp8 numerics, got {numerics}"


def _npu_groups(x: Any, w: Any, w_scale: Any, out: Any, scratch: Any) -> str | None:
    if x.shape[2] % 128 or out.shape[2] % 128:
        return f"in and rank multiples of 128, got {x.shape[2]} and {out.shape[2]}"
    return _unaligned(w=w, w_scale=w_scale)


def _library(*_: Any) -> str | None:
    return "inside batch_invariant(): a library promises no order of sums" if in_batch_invariant() else None


def _few_rows(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, scratch: Any) -> str | None:
    (tokens, k), features = x.shape, w.shape[0]
    if in_batch_invariant():
        return "inside batch_invariant(): built for few tokens, where others sum in another order"
    if not 0 < tokens <= FEW_ROWS:
        return f"built for 1 to {FEW_ROWS} tokens, not {tokens}"
    if features > FEW_FEATURES or features % 2:
        return f"built for an even number of up to {FEW_FEATURES} features, not {features}"
    if k % 64 or k <= share_of(features, k):
        return f"built for more than 512 values of k, a multiple of 64, not {k}"
    return unaligned(x=x, w=w, out=out)


def _npu_plain(x: Any, w: Any, out: Any, scratch: Any) -> str | None:
    return "in must be a multiple of 128" if x.shape[1] % 128 else _unaligned(x=x, w=w, out=out)


_BLOCK = Op(
    "block_linear(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, str numerics, Tensor(a!) out,"
    " Tensor(b!) scratch) -> ()",
    reference="dsv41_reference.linear:block_linear",
    package=__package__,
    kernels=(
        Kernel("tilelang_cuda", "cuda", needs=("tilelang",), archs=(90,), supports=_hopper),
        Kernel("deepgemm_cuda", "cuda", needs=("deep_gemm",), archs=(90,), supports=_deepgemm_fp8),
        Kernel("deepgemm_cuda", "cuda", needs=("deep_gemm",), archs=(100, 103), supports=_sm100),
        Kernel("tilelang_sm100_cuda", "cuda", needs=("tilelang",), archs=(100, 103), supports=_sm100),
        Kernel("torch_cuda", "cuda"),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu"), supports=_sm100),
    ),
)
_GROUPED = Op(
    "grouped_linear(Tensor x, Tensor w, Tensor w_scale, Tensor(a!) out, Tensor(b!) scratch) -> ()",
    reference="dsv41_reference.linear:grouped_linear",
    package=__package__,
    kernels=(
        Kernel("tilelang_cuda", "cuda", needs=("tilelang",), archs=(90,), supports=_whole_groups),
        Kernel("tilelang_sm100_cuda", "cuda", needs=("tilelang",), archs=(100, 103), supports=_whole_groups),
        Kernel("torch_cuda", "cuda"),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu"), supports=_npu_groups),
    ),
)
_LINEAR = Op(
    "linear(Tensor x, Tensor w, Tensor(a!) out, Tensor(b!) scratch) -> ()",
    reference="dsv41_reference.linear:linear",
    package=__package__,
    kernels=(
        Kernel("tilelang_few_cuda", "cuda", needs=("tilelang",), archs=(90,), supports=_few_rows),
        Kernel("torch_cuda", "cuda", supports=_library),
        Kernel("triton_cuda", "cuda", needs=("triton",)),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu"), supports=_npu_plain),
    ),
)


FEW = 128  # tokens of the first class
FEW_ROWS, FEW_FEATURES = 64, 512  # of a plain product that the kernel of few tokens takes
# Blocks of a cluster, and how many clusters an H200 runs at once; any numbers are right.
AT_ONCE = {1: 132, 2: 66, 3: 39, 4: 30}


def few(tokens: int) -> bool:
    """Whether a call is of the first class."""
    return tiling_tokens(tokens) <= FEW


def last_tokens(features: int) -> int:
    """The most tokens of a call of block_linear that is not of the last class, measured."""
    return 512 if features <= 4096 else 384 if features <= 8192 else FEW


def native(tokens: int, features: int) -> bool:
    """Whether an exact call multiplies in FP8: in the classes before the last."""
    return tiling_tokens(tokens) <= last_tokens(features)


def num_splits(tokens: int, features: int, k: int) -> int:
    """In how many shares block_linear sums over k on Hopper: where tiles are few, clusters share them.

    A pure function of (features, k) in each of the three classes; in the last there is one share.
    """
    if not native(tokens, features):
        return 1
    # Tiles of 128 features; the second class has about three of tokens.
    tiles, blocks = -(-features // 128) * (1 if few(tokens) else 3), max(1, -(-k // 128))
    best, least = 1, math.inf
    for splits, at_once in AT_ONCE.items():  # a plain loop: torch.compile follows no min() by a key
        # In blocks of k. The sums of a cluster take about as long as one for each of its blocks.
        cost = -(-tiles // at_once) * (-(-blocks // splits) + (splits if splits > 1 else 0))
        if splits <= blocks and cost < least:
            best, least = splits, cost
    return best


def group_splits(tokens: int, rows: int, k: int) -> int:
    """In how many shares grouped_linear sums over k on Hopper.

    A pure function of (rows, k) in each of the classes: up to 128 tokens, up to 256 (512 with up to 2,048
    rows) and more. In the last there is one share.
    """
    if tiling_tokens(tokens) > (512 if rows <= 2048 else 256):
        return 1
    launch, sums = (4, 1) if few(tokens) else (2, 8)  # the second pass, measured
    tiles, blocks = -(-rows // 128), max(1, -(-k // 128))
    best, least = 1, math.inf
    for splits in range(1, min(12, blocks) + 1):
        second = launch + sums * splits * tiles / 132 if splits > 1 else 0
        # In tiles of one block of k, of the busiest multiprocessor.
        cost = -(-tiles * splits // 132) * -(-blocks // splits) + second
        if cost < least:
            best, least = splits, cost
    return best


def scratch_parts(tokens: int, features: int, k: int, numerics: str) -> Parts:
    """The scratch of a call: activations of many tokens in bf16 ("exact") or coarser ones and their scales
    ("fp8"); for "bf16" ones, those of grouped_linear, the sums of the shares of k.
    """
    wide = 0 if numerics != "exact" or native(tokens, features) else tokens
    coarse = tokens if numerics == "fp8" else 0
    splits = group_splits(tokens, features, k) if numerics == "bf16" else 1
    return [
        (torch.bfloat16, (wide, k)),
        (torch.uint8, (coarse, k)),
        (torch.uint8, (coarse, k // 128)),
        (torch.float32, (splits * tokens * features if splits > 1 else 4,)),
    ]


def block_linear_scratch(
    num_tokens: int, out_features: int, in_features: int, numerics: str = "exact"
) -> int:
    """Bytes of scratch that ``block_linear`` needs on an accelerator for at most ``num_tokens`` tokens.

    Args:
        num_tokens, out_features, in_features: sizes of the call.
        numerics: "exact" for MXFP8 weights, "fp8" for packed ones.

    Returns:
        A pure function of the sizes and of ``batch_invariant()``: the activations once for "fp8", in bf16 for
        more than 512 tokens of "exact" (384 with more than 4,096 features, 128 with more than 8,192, any
        number inside).
    """
    name = "block_linear_scratch"
    check_sizes(name, num_tokens=num_tokens)
    check_sizes(name, 1, out_features=out_features, in_features=in_features)
    check(numerics in ("exact", "fp8", "bf16"), name, "numerics: exact or fp8", numerics)
    known = _scratch_bytes.__wrapped__ if torch.compiler.is_compiling() else _scratch_bytes
    return known(num_tokens, out_features, in_features, numerics, in_batch_invariant())


@functools.lru_cache(4096)
def _scratch_bytes(tokens: int, features: int, k: int, numerics: str, _: bool) -> int:
    """Asked for in every call: an eager step is as fast as its host."""
    ends = (min(tokens, end) for end in (tokens, 512, 384, 256, FEW))  # of the classes
    return max(parts_bytes(scratch_parts(n, features, k, numerics)) for n in ends)


def _check_weight(name: str, w: Any) -> None:
    good = isinstance(w, MXFP8) and w.tile_rows == 32 and w.values.dim() == 2
    check(good, name, "w: MXFP8 of 32 x 32 tiles", w)
    check(w.values.numel() > 0, name, "w of at least one tile", w.values)
    check_scales(name, {"w.scale": w.scale})


def pack_linear(w: MXFP8, *, numerics: str = "fp8") -> FP8Tiles | MXFP8:
    """Weights for faster numerics, in place: values folded to one scale a 128 x 128 tile.

    Args:
        w: MXFP8 tiles: values [out, in] e4m3, scale [out/32, in/32] e8m0, codes below 255.
        numerics: "fp8" adds up 128 k on the tensor cores before a scale is applied; "exact" needs no packing
            and returns ``w``.

    Returns:
        FP8Tiles over the memory of ``w.values`` (``w`` is no longer valid) with a new, smaller scale; its
        ``changed`` counts the values that did not fit their tile's scale and were rounded.

    Errors: ValueError before anything is written. Works 1,024 rows at a time.
    """
    name = "pack_linear"
    _check_weight(name, w)
    check(numerics in ("exact", "fp8"), name, "numerics: exact or fp8", numerics)
    if numerics == "exact":
        return w
    values, code = w.flat()
    check(values.shape[1] % 128 == 0, name, "in: a multiple of 128", values)
    check(not values.is_meta, name, "w with values", values)
    check(values.is_contiguous(), name, "contiguous values", f"strides {tuple(values.stride())}")
    high = int(code.max()) if code.numel() else 0
    check(high < 255, name, "scale codes below 255 (255 is NaN)", high)
    return fold_tiles(w)


def block_linear(
    x: torch.Tensor | MXFP8,
    w: MXFP8 | FP8Tiles,
    *,
    out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Linear with E4M3 weights in 32 x 32 tiles and MXFP8 activations.

        out = dequantize(x) @ dequantize(w).T, accumulated in f32, rounded once

    Args:
        x: [num_tokens, in] bf16, quantised here, or an MXFP8 view of values [num_tokens, in] e4m3.
        w: MXFP8 tiles: values [out, in] e4m3, scale [out/32, in/32] e8m0. Or FP8Tiles of ``pack_linear``:
            then x too is folded to one scale a 128 values, the largest of four.
        out: [num_tokens, out] bf16 to write into.
        scratch: [bytes] uint8, at least ``block_linear_scratch(...)``; contents need no preparation.

    Returns:
        [num_tokens, out] bf16; ``out`` itself when it was given.

    Contract: no host sync; graph-safe; allocates only what is None (and the quantised x); the same bits on
        every run; on Hopper a row's bits do not depend on the other rows, nor on their number within 0 to 128
        tokens, 129 to 512 (384 with more than 4,096 features, none with more than 8,192) and more; "exact"
        multiplies the last class in bf16, for w's scales of 2^-69 to 2^55. There w may be read while the
        launch in front of this one runs, which must not write it.
    Reference: dsv41_reference.linear.block_linear
    """
    name = "block_linear"
    if isinstance(w, FP8Tiles):
        check_scales(name, {"w.scale": w.scale})
    else:
        _check_weight(name, w)
    numerics = "fp8" if isinstance(w, FP8Tiles) else "exact"
    x = mxfp8_operand(name, x, w.values.shape[1], w.values)
    shape = (x.values.shape[0], w.values.shape[0])
    out = output(name, out, shape, torch.bfloat16, w.values)
    scratch = workspace(name, scratch, block_linear_scratch(*shape, w.values.shape[1], numerics), out)
    _BLOCK(*x.flat(), *w.flat(), numerics, out, scratch)
    return out


def grouped_linear_scratch(num_tokens: int, groups: int, rank: int, in_features: int) -> int:
    """Bytes of scratch that ``grouped_linear`` needs on an accelerator for at most ``num_tokens`` tokens."""
    check_sizes("grouped_linear_scratch", num_tokens=num_tokens)
    check_sizes("grouped_linear_scratch", 1, groups=groups, rank=rank, in_features=in_features)
    return block_linear_scratch(num_tokens, groups * rank, in_features, "bf16")


def grouped_linear(
    x: torch.Tensor, w: MXFP8, *, out: torch.Tensor | None = None, scratch: torch.Tensor | None = None
) -> torch.Tensor:
    """One linear a group (``wo_a``): bf16 activations, not quantised, and E4M3 weights in 32 x 32 tiles.

        out[t, g] = dequantize(w)[g] @ x[t, g], w viewed as [groups, rank, in]

    Args:
        x: [num_tokens, groups, in] bf16.
        w: MXFP8 tiles: values [groups * rank, in] e4m3, any rank that fills whole tiles in all.
        out: [num_tokens, groups, rank] bf16 to write into.
        scratch: [bytes] uint8, at least ``grouped_linear_scratch(...)``; contents need no preparation.

    Returns:
        [num_tokens, groups, rank] bf16; ``out`` itself when it was given.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run; on Hopper a
        row's bits do not depend on the other rows, nor on their number within 0 to 128 tokens, 129 to 256
        (512 with at most 2,048 rows of w) and more, for scales of 2^-69 to 2^55.
    Reference: dsv41_reference.linear.grouped_linear
    """
    name = "grouped_linear"
    _check_weight(name, w)
    check_tensor(name, "x", x, (None, None, w.values.shape[1]), torch.bfloat16, like=w.values)
    groups = x.shape[1]
    check(groups > 0 and w.values.shape[0] % groups == 0, name, "w: [groups * rank, in]", w.values)
    shape = (x.shape[0], groups, w.values.shape[0] // groups)
    out = output(name, out, shape, torch.bfloat16, x)
    scratch = workspace(name, scratch, grouped_linear_scratch(*shape, w.values.shape[1]), out)
    _GROUPED(x, *w.flat(), out, scratch)
    return out


TOKEN_TILES = (16, 32, 64, 128)  # tokens of a tile of `linear`


def share_of(features: int, k: int) -> int:
    """Values of k that `linear` adds up as one share: all where output tiles are many, else 512."""
    return k if features >= 4096 else 512


def linear_tile(tokens: int, features: int, k: int) -> tuple[int, int, bool]:
    """Features and tokens of a tile, and whether shares of k have blocks of their own."""
    rows = 128 if features >= 4096 else 64
    columns = next((n for n in TOKEN_TILES if tokens <= n), TOKEN_TILES[-1])
    tiles = -(-tokens // columns) * -(-features // rows)
    return rows, columns, share_of(features, k) < k and tiles < 132


def linear_parts(tokens: int, features: int, k: int) -> Parts:
    """The scratch of a call of `linear`: sums of the shares of k."""
    split = linear_tile(tokens, features, k)[2]
    return [(torch.float32, (-(-k // share_of(features, k)) if split else 0, tokens, features))]


def linear_scratch(num_tokens: int, out_features: int, in_features: int) -> int:
    """Bytes of scratch that ``linear`` needs on an accelerator for at most ``num_tokens`` tokens.

    A pure function of the sizes: f32 results of each 512 of ``in_features`` where output tiles are few.
    """
    check_sizes("linear_scratch", num_tokens=num_tokens)
    check_sizes("linear_scratch", 1, out_features=out_features, in_features=in_features)
    most = TOKEN_TILES[-1] * (131 // -(-out_features // 64))  # tokens of the last calls whose tiles are few
    sizes = (min(num_tokens, n) for n in (*TOKEN_TILES, most))
    return max(parts_bytes(linear_parts(n, out_features, in_features)) for n in sizes)


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain linear with f32 accumulation: router, compressor, index projections, logits.

        out = x @ w.T, rounded once to the output type

    Args:
        x: [num_tokens, in] bf16.
        w: [out, in] bf16.
        dtype: output type, float32 or bfloat16 (default).
        out: [num_tokens, out] of that type to write into.
        scratch: [bytes] uint8, at least ``linear_scratch(...)``; contents need no preparation.

    Returns:
        [num_tokens, out]; ``out`` itself when it was given.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run, and on an
        accelerator inside ``batch_invariant()`` whatever other rows are in the call.
    Reference: dsv41_reference.linear.linear
    """
    check_tensor("linear", "w", w, (None, None), torch.bfloat16)
    check_tensor("linear", "x", x, (None, w.shape[1]), torch.bfloat16, like=w)
    dtype = dtype or (out.dtype if isinstance(out, torch.Tensor) else torch.bfloat16)
    check(dtype in (torch.float32, torch.bfloat16), "linear", "dtype: float32 or bfloat16", dtype)
    shape = (x.shape[0], w.shape[0])
    out = output("linear", out, shape, dtype, x)
    size = parts_bytes(linear_parts(*shape, x.shape[1]))
    _LINEAR(x, w, out, workspace("linear", scratch, size, x))
    return out
