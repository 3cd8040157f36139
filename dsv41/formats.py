"""Number formats as types: views over plain tensors, and their conversions.

A view checks shapes at construction and owns nothing. E8M0 scales are ``torch.float8_e8m0fnu``: a scale that
is not a power of two cannot be expressed. ``flat()`` is the one place where they become bytes for an op call.

``quantize_*`` here are plain PyTorch on whatever device the input is on, for packing weights and for tests; a
step uses ``dsv41.ops.quantize_*``, the same numerics through the op's kernels.
"""

import re
from dataclasses import dataclass

import torch
from dsv41_reference import quant as _quant

from ._op import check, check_last, check_numbers, check_sizes, check_tensor

E8M0 = torch.float8_e8m0fnu
E4M3 = torch.float8_e4m3fn


def _bytes(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.uint8)


def _check_pair(name: str, values: object, scale: object) -> None:
    tensors = isinstance(values, torch.Tensor) and isinstance(scale, torch.Tensor)
    check(tensors, name, "values and scale: tensors", (type(values).__name__, type(scale).__name__))
    if isinstance(values, torch.Tensor) and isinstance(scale, torch.Tensor):
        _check_device(name, values, scale=scale)
        check_last(name, "values", values)
        check_last(name, "scale", scale)


def _check_scale(name: str, scale: torch.Tensor, shape: list[int], dtype: torch.dtype) -> None:
    if list(scale.shape) != shape or scale.dtype != dtype:
        check(False, name, f"scale: {shape} {str(dtype).removeprefix('torch.')}", scale)


def _check_device(name: str, like: torch.Tensor, **others: torch.Tensor) -> None:
    """One device for all tensors of a view: "meta" too, if all are there."""
    for label, x in others.items():
        if x.device != like.device:  # views are made in every call of an op: no message unless it is needed
            check(False, name, f"{label} on {like.device}", f"{x.device}")


@dataclass(frozen=True)
class MXFP8:
    """E4M3 values with UE8M0 scales, one a 1 x 32 block along the last dimension or one a 32 x 32 tile.

    Args:
        values: [..., rows, K] float8_e4m3fn, K a multiple of 32.
        scale: [..., rows, K/32] float8_e8m0fnu, or [..., rows/32, K/32] for tiles.
        tile_rows: 1 or 32.
    """

    values: torch.Tensor
    scale: torch.Tensor
    tile_rows: int = 1

    def __post_init__(self) -> None:
        v, s, rows = self.values, self.scale, self.tile_rows
        check(rows in (1, 32), "MXFP8", "tile_rows: 1 or 32", rows)
        _check_pair("MXFP8", v, s)
        check(v.dtype == E4M3 and v.dim() >= rows // 32 + 1, "MXFP8", "values: [..., K] float8_e4m3fn", v)
        wanted = [*v.shape[:-1], v.shape[-1] // 32]
        if rows == 32:
            wanted[-2] //= 32
        whole = v.shape[-1] % 32 == 0 and (rows == 1 or v.shape[-2] % 32 == 0)
        check(whole, "MXFP8", "values: quantised dimensions multiples of 32", v)
        _check_scale("MXFP8", s, wanted, E8M0)

    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, scale as uint8): how the view travels into an op."""
        return self.values, _bytes(self.scale)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[..., rows, K] in ``dtype``; exact in float32, and in bfloat16 for scale codes 3..246."""
        unpack = _quant.from_mxfp8 if self.tile_rows == 1 else _quant.from_mxfp8_tiles
        return unpack(*self.flat()).to(dtype)


@dataclass(frozen=True)
class FP8Tiles:
    """E4M3 weights with one UE8M0 scale a 128 x 128 tile: what ``dsv41.ops.pack_linear`` makes for speed.

    Args:
        values: [rows, K] float8_e4m3fn, K a multiple of 128.
        scale: [ceil(rows/128), K/128] float8_e8m0fnu.
        changed: values that the packing had to round, out of all.
    """

    values: torch.Tensor
    scale: torch.Tensor
    changed: int = 0

    def __post_init__(self) -> None:
        v, s = self.values, self.scale
        _check_pair("FP8Tiles", v, s)
        good = v.dtype == E4M3 and v.dim() == 2 and v.shape[1] % 128 == 0
        check(good, "FP8Tiles", "values: [rows, K] float8_e4m3fn, K a multiple of 128", v)
        wanted = [-(-v.shape[0] // 128), v.shape[1] // 128]
        _check_scale("FP8Tiles", s, wanted, E8M0)

    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, scale as uint8): how the view travels into an op."""
        return self.values, _bytes(self.scale)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[rows, K] in ``dtype``."""
        return _quant.from_fp8_tiles(*self.flat()).to(dtype)


@dataclass(frozen=True)
class MXFP4:
    """Two E2M1 values a byte (even element low) with one UE8M0 scale a 1 x 32 block.

    Args:
        values: [..., K/2] uint8.
        scale: [..., K/32] float8_e8m0fnu.
    """

    values: torch.Tensor
    scale: torch.Tensor

    def __post_init__(self) -> None:
        v, s = self.values, self.scale
        _check_pair("MXFP4", v, s)
        check(v.dtype == torch.uint8 and v.dim() >= 1, "MXFP4", "values: [..., K/2] uint8", v)
        check(v.shape[-1] % 16 == 0, "MXFP4", "values: K a multiple of 32 (16 bytes)", v)
        wanted = [*v.shape[:-1], v.shape[-1] // 16]
        _check_scale("MXFP4", s, wanted, E8M0)

    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, scale as uint8): how the view travels into an op."""
        return self.values, _bytes(self.scale)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[..., K] in ``dtype``; exact in float32, and in bfloat16 for scale codes 2..252."""
        return _quant.from_mxfp4(*self.flat()).to(dtype)


@dataclass(frozen=True)
class NVFP4:
    """Two E2M1 values a byte (even element low) with one E4M3 scale a 1 x 16 block and no global scale.

    Args:
        values: [..., K/2] uint8.
        scale: [..., K/16] float8_e4m3fn.
    """

    values: torch.Tensor
    scale: torch.Tensor

    def __post_init__(self) -> None:
        v, s = self.values, self.scale
        _check_pair("NVFP4", v, s)
        check(v.dtype == torch.uint8 and v.dim() >= 1, "NVFP4", "values: [..., K/2] uint8", v)
        check(v.shape[-1] % 8 == 0, "NVFP4", "values: K a multiple of 16 (8 bytes)", v)
        wanted = [*v.shape[:-1], v.shape[-1] // 8]
        _check_scale("NVFP4", s, wanted, E4M3)

    def flat(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(values, scale): how the view travels into an op."""
        return self.values, self.scale

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[..., K] in ``dtype``; always exact in float32 and bfloat16."""
        return _quant.from_nvfp4(self.values, self.scale).to(dtype)


# The numbers are middle codes of scales: tilelang_cuda.py of the experts.
_LAYOUT = re.compile(
    r"plain|plain fp8|hopper (exact|fp8) ([1-9]\d?|1\d\d|2[0-4]\d) ([1-9]\d?|1\d\d|2[0-4]\d)( mixed)?"
)


@dataclass(frozen=True)
class MXFP4Experts:
    """The routed experts of one layer, stacked.

    Args:
        w13: [num_experts, 2 * inter, hidden/2] uint8, the gate's rows first, then up.
        w13_scale: [num_experts, 2 * inter, hidden/32] float8_e8m0fnu.
        w2: [num_experts, hidden, inter/2] uint8.
        w2_scale: [num_experts, hidden, inter/32] float8_e8m0fnu.
        layout: "plain" is the checkpoint's; "plain fp8" the same, for the reference of fp8 numerics; "hopper
            ..." is written by ``dsv41.ops.pack_experts``, "moved" by it into the view that it took. Other
            names belong to the kernel that packed the weights; its shapes are not looked at.
        unfolded, routed: blocks whose scales packing could not fold, and experts that take the exact path
            because of them (see ``dsv41.ops.pack_experts``).
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    layout: str = "plain"
    unfolded: int = 0
    routed: int = 0

    def __post_init__(self) -> None:
        name = "MXFP4Experts"
        tensors = all(isinstance(t, torch.Tensor) for t in (self.w13, self.w13_scale, self.w2, self.w2_scale))
        check(tensors, name, "four tensors", type(self.w13).__name__)
        _check_device(name, self.w13, w13_scale=self.w13_scale, w2=self.w2, w2_scale=self.w2_scale)
        check(self.w13.dim() == 3, name, "w13: [num_experts, 2 * inter, hidden/2] uint8", self.w13)
        check(isinstance(self.layout, str), name, "layout: a name", self.layout)
        if not self.layout.startswith(("plain", "hopper")):
            return
        known = _LAYOUT.fullmatch(self.layout) is not None
        check(known, name, "layout: plain, plain fp8 or that of pack_experts", self.layout)
        experts, inter, hidden = self.w13.shape[0], self.w13.shape[1] // 2, self.w13.shape[2] * 2
        check_tensor(name, "w13", self.w13, (experts, 2 * inter, hidden // 2), torch.uint8)
        check(hidden % 32 == 0 and inter % 32 == 0, name, "hidden and inter multiples of 32", self.w13)
        check_tensor(name, "w13_scale", self.w13_scale, (experts, 2 * inter, hidden // 32), E8M0)
        check_tensor(name, "w2", self.w2, (experts, hidden, inter // 2), torch.uint8)
        check_tensor(name, "w2_scale", self.w2_scale, (experts, hidden, inter // 32), E8M0)

    @property
    def num_experts(self) -> int:
        """Experts of this view: those of the rank."""
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        """Width of the rows that go in and come out."""
        return self.w13.shape[2] * 2

    @property
    def inter(self) -> int:
        """Width between the two products."""
        return self.w13.shape[1] // 2

    def flat(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, str]:
        """The five op arguments: scales as uint8, then the layout tag."""
        return self.w13, _bytes(self.w13_scale), self.w2, _bytes(self.w2_scale), self.layout


def quantize_mxfp8(x: torch.Tensor, *, tile_rows: int = 1, floor: float = _quant.FLOOR_MXFP8) -> MXFP8:
    """Quantise to E4M3 with UE8M0 scales (round to nearest even, smallest power of two >= amax / 448).

    Args:
        x: [..., K] float, K a multiple of 32; for tiles [rows, K] with rows a multiple of 32.
        tile_rows: 1 for one scale a 1 x 32 block, 32 for one a 32 x 32 tile.
        floor: smallest block maximum that the scale is chosen for.

    Returns:
        MXFP8 view over new tensors on the device of ``x``. A NaN stays in its element.
    """
    check_sizes("quantize_mxfp8", 1, 32, tile_rows=tile_rows)
    check(tile_rows in (1, 32), "quantize_mxfp8", "tile_rows: 1 or 32", tile_rows)
    _check_blocks("quantize_mxfp8", x, 32, floor)
    if tile_rows == 1:
        values, code = _quant.to_mxfp8(x, floor=floor)
    else:
        check(
            x.dim() == 2 and x.shape[0] % 32 == 0, "quantize_mxfp8", "x: [rows, K], rows a multiple of 32", x
        )
        values, code = _quant.to_mxfp8_tiles(x, floor)
    return MXFP8(values, code.view(E8M0), tile_rows)


def fold_tiles(w: MXFP8) -> FP8Tiles:
    """Move 32 x 32 tiles to one scale a 128 x 128 tile, the largest of its sixteen, in place.

    Args:
        w: MXFP8 tiles, values [rows, K] contiguous, K a multiple of 128. No longer valid afterwards.

    Returns:
        FP8Tiles over the same values; ``changed`` counts those that were rounded. Works 1,024 rows at a time.
    """
    values, code = w.flat()
    changed, scales = 0, []
    for first in range(0, values.shape[0], 1024):
        part, codes = values[first : first + 1024], code[first // 32 : first // 32 + 32]
        folded, coarse = _quant.coarsen_tiles(part, codes)
        after = _quant.from_fp8_tiles(folded, coarse, torch.float64)
        changed += int((_quant.from_mxfp8_tiles(part, codes, torch.float64) != after).sum())
        part.copy_(folded)
        scales.append(coarse)
    scale = torch.cat(scales) if scales else code.new_empty((0, values.shape[1] // 128))
    return FP8Tiles(values, scale.view(E8M0), changed)


def quantize_mxfp4(x: torch.Tensor, *, floor: float = _quant.FLOOR_MXFP4) -> MXFP4:
    """Quantise to E2M1 with UE8M0 scales (round to nearest even, smallest power of two >= amax / 6).

    Args:
        x: [..., K] float, K a multiple of 32.
        floor: smallest block maximum that the scale is chosen for.

    Returns:
        MXFP4 view over new tensors on the device of ``x``. A NaN becomes 0: E2M1 has none.
    """
    _check_blocks("quantize_mxfp4", x, 32, floor)
    values, code = _quant.to_mxfp4(x, floor)
    return MXFP4(values, code.view(E8M0))


def quantize_nvfp4(x: torch.Tensor, *, floor: float = _quant.FLOOR_NVFP4) -> NVFP4:
    """Quantise to E2M1 with E4M3 scales (amax / 6 to nearest even) and true division; no global scale.

    Args:
        x: [..., K] float, K a multiple of 16.
        floor: smallest block maximum that the scale is chosen for.

    Returns:
        NVFP4 view over new tensors on the device of ``x``. A NaN becomes 0: E2M1 has none.
    """
    _check_blocks("quantize_nvfp4", x, 16, floor)
    return NVFP4(*_quant.to_nvfp4(x, floor))


def _check_blocks(name: str, x: torch.Tensor, block: int, floor: float) -> None:
    good = isinstance(x, torch.Tensor) and x.dim() >= 1
    good = good and x.is_floating_point() and x.shape[-1] % block == 0
    check(good, name, f"x: [..., K] float with K a multiple of {block}", x)
    check_numbers(name, floor=floor)


def f8_128x4_offset(row: int, group: int, num_groups: int) -> int:
    """Byte offset of the scale of (row, group) in the 128 x 4 swizzle that cuBLASLt block scaling reads."""
    tiles = -(-num_groups // 4)
    return ((row // 128) * tiles + group // 4) * 512 + (row % 32) * 16 + (row // 32) % 4 * 4 + group % 4


def utccp_row(row: int) -> int:
    """Where row ``row`` of each 128 goes in the layout that SM100 copies scales from."""
    return row // 128 * 128 + (row % 32) * 4 + row % 128 // 32


def interleave8_row(is_up: bool, row: int) -> int:
    """Row of a gate (or up) row when both are interleaved in groups of eight, gate first."""
    return row // 8 * 16 + row % 8 + 8 * is_up
