"""Number formats: E2M1, E4M3, E8M0 codes and the block formats MXFP8, MXFP4 and NVFP4 without a global scale.

Rules: round to nearest even, saturate, keep the sign of zero. A UE8M0 scale is the smallest power of two that
brings the block's maximum within range, by integer arithmetic. Sources: OCP MX v1.0; the layouts of the
published checkpoint.
"""

import functools

import torch

from .numerics import bf16, narrow, silu, wide

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FLOOR_MXFP8 = 1e-4
FLOOR_MXFP4 = 6 * 2.0**-126
FLOOR_NVFP4 = 6 * 2.0**-9

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between neighbours, with how many of them a magnitude must pass; ties go to the even code.
_E2M1_EDGES = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)


@functools.cache
def _table(name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Values of every code. Decoding through a table is several times quicker than PyTorch's casts."""
    code = torch.arange(256, dtype=torch.int32)
    if name == "e8m0":
        # 0 is 2^-127, a subnormal, and 255 is NaN: both are wrong as plain exponent bits.
        bits = torch.where(code == 0, 0x00400000, code << 23)
        values = torch.where(code == 255, 0x7FC00000, bits).view(torch.float32)
    elif name == "e4m3":
        values = code.to(torch.uint8).view(torch.float8_e4m3fn).float()
    else:  # e2m1: both nibbles of a byte, the low one first
        nibble = torch.tensor([*_E2M1, *(-v for v in _E2M1)])
        values = torch.stack([nibble[code & 15], nibble[code >> 4]], 1)
    return values.to(device, dtype)


def _look_up(name: str, code: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    table = _table(name, code.device, dtype)
    return table.index_select(0, code.reshape(-1).to(torch.int32)).view((*code.shape, *table.shape[1:]))


def e8m0_decode(code: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """uint8 codes to float: 2^(code-127); 0 is 2^-127 (not zero), 255 is NaN."""
    return _look_up("e8m0", code, dtype)


def e4m3_decode(values: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """E4M3 to float; exact."""
    return _look_up("e4m3", values.view(torch.uint8), dtype)


def ue8m0_code(amax: torch.Tensor, limit: float) -> torch.Tensor:
    """The code of the smallest power of two >= amax / limit, for limit 448 (E4M3) or 6 (E2M1).

    Integer arithmetic on the bits of ``amax`` (float32, >= 0); never log2, never a cast. In [1, 254].
    """
    shift, mantissa = {E4M3_MAX: (8, 0x600000), E2M1_MAX: (2, 0x400000)}[limit]
    bits = amax.to(torch.float32).view(torch.int32)
    code = (bits >> 23) - shift + ((bits & 0x7FFFFF) > mantissa).to(torch.int32)
    return code.clamp(1, 254).to(torch.uint8)


def _amax(blocks: torch.Tensor, floor: float) -> torch.Tensor:
    """Largest magnitude over the last dimension, at least ``floor``; a NaN does not count, as on GPUs."""
    return blocks.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1).clamp(min=floor)


def _power(code: torch.Tensor) -> torch.Tensor:
    """2^(127 - code): the exact multiplier that undoes a UE8M0 scale. ``code`` in [1, 254]."""
    return e8m0_decode((254 - code.to(torch.int32)).to(torch.uint8))


def e4m3_round(x: torch.Tensor) -> torch.Tensor:
    """float to E4M3, saturating at ±448 (older PyTorch gives NaN past 464, so the clamp is explicit)."""
    return narrow(x.clamp(-E4M3_MAX, E4M3_MAX), torch.float8_e4m3fn)


def e2m1_encode(x: torch.Tensor) -> torch.Tensor:
    """float to 4-bit codes (uint8, sign in bit 3), nearest even, saturating at ±6; NaN gives ±0."""
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for edge, inclusive in _E2M1_EDGES:
        code += (magnitude >= edge) if inclusive else (magnitude > edge)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_decode(packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[..., K/2] bytes of two codes, the even element in the low nibble, to float [..., K]; exact."""
    return _look_up("e2m1", packed.view(torch.uint8), dtype).flatten(-2)


def pack_nibbles(code: torch.Tensor) -> torch.Tensor:
    """[..., K] codes to [..., K/2] bytes, the even element in the low nibble."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., K/2] bytes to [..., K] codes."""
    packed = packed.view(torch.uint8)
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


# Block formats. `to_*` quantise over the last dimension, `from_*` give float32 back.


def to_mxfp8(
    x: torch.Tensor, group: int = 32, floor: float = FLOOR_MXFP8
) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., K] to E4M3 [..., K] and UE8M0 codes uint8 [..., K/group]."""
    blocks = x.float().unflatten(-1, (-1, group))
    code = ue8m0_code(_amax(blocks, floor), E4M3_MAX)
    return e4m3_round(blocks * _power(code)[..., None]).flatten(-2), code


def from_mxfp8(values: torch.Tensor, code: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """E4M3 [..., K] and codes [..., K/group] to ``dtype``; exact."""
    blocks = e4m3_decode(values, dtype).unflatten(-1, (code.shape[-1], -1))
    return (blocks * e8m0_decode(code, dtype)[..., None]).flatten(-2)


def to_mxfp8_tiles(w: torch.Tensor, floor: float = FLOOR_MXFP8) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] to E4M3 and one UE8M0 code a 32 x 32 tile, uint8 [out/32, in/32]."""
    tiles = w.float().unflatten(-1, (-1, 32)).unflatten(-3, (-1, 32)).transpose(-2, -3)
    code = ue8m0_code(_amax(tiles.flatten(-2), floor), E4M3_MAX)
    values = e4m3_round(tiles * _power(code)[..., None, None])
    return values.transpose(-2, -3).flatten(-2).flatten(-3, -2), code


def from_mxfp8_tiles(
    values: torch.Tensor, code: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """E4M3 [..., out, in] and codes [..., out/32, in/32] to ``dtype``; exact."""
    tiles = e4m3_decode(values, dtype).unflatten(-1, (-1, 32)).unflatten(-3, (-1, 32))
    return (tiles * e8m0_decode(code, dtype)[..., :, None, :, None]).flatten(-2).flatten(-3, -2)


def coarsen_mxfp8(values: torch.Tensor, code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP8 rows with a scale a 32 values to one a 128, the largest of the four; small values may round."""
    coarse = code.unflatten(-1, (-1, 4)).amax(-1)
    shift = code.int() - coarse.int().repeat_interleave(4, -1)
    blocks = e4m3_decode(values).unflatten(-1, (-1, 32))
    return e4m3_round(torch.ldexp(blocks, shift[..., None])).flatten(-2), coarse


def coarsen_tiles(values: torch.Tensor, code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 [out, in] of 32 x 32 tiles to 128 x 128 tiles with the largest code; in is a multiple of 128."""
    rows = code.shape[0]
    padded = torch.cat([code, code.new_zeros((-rows % 4, code.shape[1]))])
    coarse = padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 4)).amax((1, 3))
    shift = code.int() - _each_tile(coarse, 4)[:rows].int()
    wide = shift.repeat_interleave(32, 0).repeat_interleave(32, 1)
    return e4m3_round(torch.ldexp(e4m3_decode(values), wide)), coarse


def _each_tile(code: torch.Tensor, count: int) -> torch.Tensor:
    return code.repeat_interleave(count, 0).repeat_interleave(count, 1)


def from_fp8_tiles(
    values: torch.Tensor, code: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """E4M3 [out, in] and codes [ceil(out/128), in/128] to ``dtype``."""
    rows = values.shape[0]
    scale = e8m0_decode(code, dtype).repeat_interleave(128, 0)[:rows]
    return (e4m3_decode(values, dtype).unflatten(1, (-1, 128)) * scale[..., None]).flatten(1)


def to_mxfp4(x: torch.Tensor, floor: float = FLOOR_MXFP4) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., K] to packed E2M1 uint8 [..., K/2] and UE8M0 codes uint8 [..., K/32]."""
    blocks = x.float().unflatten(-1, (-1, 32))
    code = ue8m0_code(_amax(blocks, floor), E2M1_MAX)
    return pack_nibbles(e2m1_encode(blocks * _power(code)[..., None]).flatten(-2)), code


def from_mxfp4(packed: torch.Tensor, code: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Packed E2M1 [..., K/2] and codes [..., K/32] to ``dtype``; exact."""
    blocks = e2m1_decode(packed, dtype).unflatten(-1, (-1, 32))
    return (blocks * e8m0_decode(code, dtype)[..., None]).flatten(-2)


def to_nvfp4(x: torch.Tensor, floor: float = FLOOR_NVFP4) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., K] to packed E2M1 uint8 [..., K/2] and E4M3 scales [..., K/16]; no global scale.

    The element is divided by the *decoded* scale with correct rounding: a reciprocal moves ties.
    """
    blocks = x.float().unflatten(-1, (-1, 16))
    scale = e4m3_round(_amax(blocks, floor) / E2M1_MAX)
    return pack_nibbles(e2m1_encode(blocks / scale.float()[..., None]).flatten(-2)), scale


def from_nvfp4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Packed E2M1 [..., K/2] and E4M3 scales [..., K/16] to ``dtype``; exact."""
    blocks = e2m1_decode(packed, dtype).unflatten(-1, (-1, 16))
    return (blocks * e4m3_decode(scale, dtype)[..., None]).flatten(-2)


def fold_mxfp4(packed: torch.Tensor, code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fold the MXFP4 blocks of a row group to one shared E4M3 scale.

    Args:
        packed: [..., groups * 16] uint8, 32 values a group.
        code: [..., groups] uint8, the groups that shall share a scale.

    Returns:
        E4M3 [..., groups * 32], shared code uint8 [...], and exact bool [...]: lossless when the codes of the
        blocks that are not all zero spread by 14 at most and the largest is at least 7.
    """
    values = e2m1_decode(packed).unflatten(-1, (-1, 32))
    live = values.ne(0).any(-1)
    wide_code = code.to(torch.int32)
    top = torch.where(live, wide_code, 0).amax(-1)
    low = torch.where(live, wide_code, 255).amin(-1)
    shared = (top - 6).clamp(min=1)
    shift = (wide_code - shared[..., None]).clamp(-126, 127)
    elements = values * e8m0_decode((shift + 127).to(torch.uint8))[..., None]
    exact = ~live.any(-1) | ((top - low <= 14) & (top >= 7))
    return e4m3_round(elements).flatten(-2), shared.to(torch.uint8), exact


# Elementary fake-quantisation: a value as it comes back from its stored form.


def q8(x: torch.Tensor) -> torch.Tensor:
    """A row as an MXFP8 operand carries it: quantised per 32 and back, float32 [..., K]."""
    return from_mxfp8(*to_mxfp8(x))


def q4mx(x: torch.Tensor) -> torch.Tensor:
    """A row as MXFP4 carries it, float32 [..., K]."""
    return from_mxfp4(*to_mxfp4(x))


def q4nv(x: torch.Tensor) -> torch.Tensor:
    """A row as NVFP4 without a global scale carries it, float32 [..., K]."""
    return from_nvfp4(*to_nvfp4(x))


def swiglu(gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor | None, limit: float) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, ±limit) * weight, not rounded; the gate has no lower clamp.

    Args:
        gate, up: [..., inter] bf16 (already rounded), weight: [...] routing weight or None.
    """
    y = silu(wide(gate).clamp(max=limit)) * wide(up).clamp(-limit, limit)
    return y if weight is None else y * wide(weight)[..., None]


# References of the ops in dsv41/ops/quant: the same flat arguments, results written into the last ones.


def quantize_mxfp8(x: torch.Tensor, floor: float, values: torch.Tensor, scale: torch.Tensor) -> None:
    """Reference of ``dsv41.ops.quantize_mxfp8``."""
    q, code = to_mxfp8(x, floor=floor)
    values.copy_(q)
    scale.copy_(code)


def quantize_mxfp4(x: torch.Tensor, floor: float, values: torch.Tensor, scale: torch.Tensor) -> None:
    """Reference of ``dsv41.ops.quantize_mxfp4``."""
    q, code = to_mxfp4(x, floor)
    values.copy_(q)
    scale.copy_(code)


def quantize_nvfp4(x: torch.Tensor, floor: float, values: torch.Tensor, scale: torch.Tensor) -> None:
    """Reference of ``dsv41.ops.quantize_nvfp4``."""
    q, e4m3 = to_nvfp4(x, floor)
    values.copy_(q)
    scale.copy_(e4m3)


def swiglu_quantize(
    gate_up: torch.Tensor,
    weight: torch.Tensor | None,
    limit: float,
    round_bf16: bool,
    values: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    """Reference of ``dsv41.ops.swiglu_quantize``."""
    gate, up = gate_up.chunk(2, -1)
    y = swiglu(gate, up, weight, limit)
    q, code = to_mxfp8(bf16(y) if round_bf16 else y)
    values.copy_(q)
    scale.copy_(code)
