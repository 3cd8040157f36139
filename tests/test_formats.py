"""Number formats against the golden vectors, to the bit, and their properties."""

import itertools
import json
import math
import pathlib
import zlib
from fractions import Fraction
from typing import Any

import pytest
import torch
from dsv41_reference import accumulate, quant
from dsv41_reference.cache import decode, encode
from dsv41_reference.numerics import narrow
from hypothesis import given
from hypothesis import strategies as st

from dsv41.formats import (
    E4M3,
    E8M0,
    MXFP4,
    MXFP8,
    NVFP4,
    FP8Tiles,
    MXFP4Experts,
    f8_128x4_offset,
    interleave8_row,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
    utccp_row,
)
from dsv41.ops import swiglu_quantize

GOLDEN: dict[str, Any] = json.loads(
    (pathlib.Path(__file__).parent / "golden/formats_golden.json").read_text()
)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TINY = 2.0**-128


def golden(group: str) -> Any:
    """The vectors of ``G<n>``; names go on with a description."""
    return next(v for k, v in GOLDEN.items() if k.partition("_")[0] == group or k.partition("(")[0] == group)


def lcg(n: int, seed: int, amplitude: float) -> list[float]:
    """Deterministic values of the golden vectors: a linear congruential generator, rounded to bf16."""
    out = []
    for _ in range(n):
        seed = (1103515245 * seed + 12345) % 2**31
        out.append((seed / 2**30 - 1) * amplitude)
    return narrow(torch.tensor(out, dtype=torch.float64), torch.bfloat16).tolist()


def raw(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def crc(x: torch.Tensor) -> str:
    return f"{zlib.crc32(raw(x)):08x}"


def row(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def exact(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Scalar codes.


@pytest.mark.parametrize(("text", "code", "value"), golden("G1"))
def test_golden_e2m1(text: str, code: int, value: str) -> None:
    got = quant.e2m1_encode(exact([float(text)]))
    assert got.item() == code
    pair = quant.pack_nibbles(torch.cat([got, got]))
    assert quant.e2m1_decode(pair).tolist() == [float(value)] * 2


@pytest.mark.parametrize(("text", "code", "value"), golden("G2"))
def test_golden_e4m3(text: str, code: str, value: float) -> None:
    got = quant.e4m3_round(exact([float(text)]))
    assert got.view(torch.uint8).item() == int(code, 16)
    assert quant.e4m3_decode(got).item() == value


@pytest.mark.parametrize(("amax", "e2m1", "e4m3", "e2m1_floor", "e4m3_floor"), golden("G3"))
def test_golden_scale_codes(amax: str, e2m1: int, e4m3: int, e2m1_floor: Any, e4m3_floor: Any) -> None:
    x = row([float(amax)])
    assert quant.ue8m0_code(x.clamp(min=quant.FLOOR_MXFP4), 6.0).item() == e2m1
    assert quant.ue8m0_code(x.clamp(min=quant.FLOOR_MXFP8), 448.0).item() == e4m3
    # The rule is round-up; the other rule in the field is never above it.
    assert all(a is None or a <= b for a, b in ((e2m1_floor, e2m1), (e4m3_floor, e4m3)))


def test_every_e4m3_byte() -> None:
    byte = torch.arange(256).to(torch.uint8)
    value = quant.e4m3_decode(byte.view(E4M3))
    for b in range(256):
        exponent, mantissa = b >> 3 & 15, b & 7
        size = (
            Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7) if exponent else Fraction(mantissa, 512)
        )
        if b & 127 == 127:
            assert math.isnan(value[b])
        else:
            assert value[b].item() == math.copysign(float(size), -1 if b > 127 else 1)
    real = ~value.isnan()
    assert torch.equal(quant.e4m3_round(value)[real].view(torch.uint8), byte[real])


def test_every_e8m0_exponent() -> None:
    byte = torch.arange(256).to(torch.uint8)
    for dtype in (torch.float32, torch.float64):
        value = quant.e8m0_decode(byte, dtype)
        assert value[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
        assert math.isnan(value[255])
    # A power of two in a block is stored as itself under the scale that the rule names, for every exponent.
    power = torch.arange(-126, 128).double().exp2().float()
    view = quantize_mxfp8(power[:, None].expand(-1, 32), floor=0.0)
    assert torch.equal(view.dequantize(torch.float32)[:, 0], power)
    assert view.flat()[1][:, 0].tolist() == [max(e + 127 - 8, 1) for e in range(-126, 128)]
    view4 = quantize_mxfp4(power[:, None].expand(-1, 32))
    assert torch.equal(view4.dequantize(torch.float32)[:, 0], power)
    assert view4.flat()[1][:, 0].tolist() == [max(e + 127 - 2, 1) for e in range(-126, 128)]


def test_every_packed_byte() -> None:
    """All 256 bytes survive unpack and pack, the low nibble is the even element, and values come back."""
    byte = torch.arange(256).to(torch.uint8)
    code = quant.unpack_nibbles(byte)
    assert code[0::2].tolist() == [b & 15 for b in range(256)]
    assert code[1::2].tolist() == [b >> 4 for b in range(256)]
    assert torch.equal(quant.pack_nibbles(code), byte)
    value = quant.e2m1_decode(byte)
    assert value.tolist() == [E2M1[c & 7] * (-1 if c & 8 else 1) for c in code.tolist()]
    assert torch.equal(quant.pack_nibbles(quant.e2m1_encode(value)), byte)  # signed zeros included
    assert torch.equal(quant.e2m1_decode(byte.view(torch.int8)), value)


@pytest.mark.parametrize("sign", [1, -1])
def test_ties_go_to_even(sign: int) -> None:
    """All seven ties of E2M1 and their neighbours; ties between every two neighbouring E4M3 values."""
    edges = [(a + b) / 2 for a, b in itertools.pairwise(E2M1)]
    for i, edge in enumerate(edges):
        x = row([edge, math.nextafter(edge, 0), math.nextafter(edge, 9)]) * sign
        x[1:] = torch.nextafter(x[:1].expand(2), row([0.0, sign * 9.0]))
        even = i if i % 2 == 0 else i + 1
        assert (quant.e2m1_encode(x) & 7).tolist() == [even, i, i + 1]
    values = quant.e4m3_decode(torch.arange(127).to(torch.uint8).view(E4M3))
    middle = (values[:-1] + values[1:]) / 2
    got = quant.e4m3_round(middle * sign).view(torch.uint8) & 127
    assert got.tolist() == [c if c % 2 == 0 else c + 1 for c in range(126)]


def test_rounding_from_float64_is_single() -> None:
    """A value that float32 rounds onto a tie of the shorter format goes where the exact value belongs."""
    above = 1.0625 + 2.0**-40  # 1.0625 is a tie of E4M3, and float32 cannot hold the rest
    x = torch.tensor([above, -above, 2 - above + 0.125], dtype=torch.float64)
    with accumulate(torch.float64):
        assert quant.e4m3_round(x).float().tolist() == [1.125, -1.125, 1.0]
    tie = torch.tensor([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 - 2.0**-40], dtype=torch.float64)
    assert narrow(tie, torch.bfloat16).tolist() == [1 + 2.0**-7, 1.0]


# Block formats.

TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
DOWN = [3.5, 2.5, 1.75, 1.25, 0.75, 0.25]
UP = [-v for v in reversed(DOWN)]
STEP = 0.05859375  # the E4M3 value of byte 0x17
MXFP4_ROWS = {
    "G4": [0.0] * 32,
    "G5": [(i - 16) / 4 for i in range(32)],
    "G6": [6.0, -6.0, 5.0, -5.0, *DOWN, *UP, *[0.0] * 15, -0.0],
    "G7": [6.03125, *((-1) ** i * i / 8 for i in range(1, 32))],
    "G8": lcg(32, 1, 3),
    "G9": [i * TINY for i in range(32)],
}
NVFP4_ROWS = {
    "G10": [0.0] * 16,
    "G11": [6.0, 5.0, *DOWN, *UP, -5.0, -6.0],
    "G12": [6.375, *(0.375 * i for i in range(15))],
    "G13": [6 * STEP, *[t * STEP for t in TIES], *[-t * STEP for t in TIES], 0.0],
    "G14": [0.05 * (16 - i) / 16 * (-1) ** i for i in range(16)],
    "G15": [4096.0, -3000.0, 2688.0, 1000.0, *[100.0 * i for i in range(12)]],
    "G16": lcg(16, 7, 2),
}
FP8_ROWS = {
    "G17": [0.0] * 32,
    "G18": lcg(32, 3, 5),
    "G19": lcg(128, 4, 448),
    "G20": [448, -448, 440, 17, 19, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9, *[0.0] * 24],
    "G21": [450, -448, 440, 17, 19, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9, *[0.0] * 24],
}


@pytest.mark.parametrize("group", MXFP4_ROWS)
def test_golden_mxfp4(group: str) -> None:
    want = golden(group)
    x = row(MXFP4_ROWS[group])
    view = quantize_mxfp4(x)
    assert crc(x) == want["crc32_values_f32"]  # the input is what it should be
    assert raw(view.values).hex() == want["packed"]
    assert view.flat()[1].item() == want["scale"]
    assert view.dequantize(torch.float32)[:8].tolist() == want["deq_first8"]


def test_golden_mxfp4_floor() -> None:
    want = golden("G4b")
    view = quantize_mxfp4(torch.zeros(32), floor=1e-4)
    assert (raw(view.values).hex(), view.flat()[1].item()) == (want["packed"], want["scale"])


@pytest.mark.parametrize("group", NVFP4_ROWS)
def test_golden_nvfp4(group: str) -> None:
    want = golden(group)
    view = quantize_nvfp4(row(NVFP4_ROWS[group]))
    assert raw(view.values).hex() == want["packed"]
    assert view.scale.view(torch.uint8).item() == int(want["scale"], 16)
    assert view.scale.float().item() == want["scale_val"]
    for dtype in (torch.float32, torch.bfloat16):
        assert view.dequantize(dtype).tolist() == want["deq"]


@pytest.mark.parametrize("group", FP8_ROWS)
def test_golden_fp8(group: str) -> None:
    want = golden(group)
    values, code = quant.to_mxfp8(row(FP8_ROWS[group]), group=want["n"])
    assert raw(values).hex() == want["all_hex"] and want["all_hex"].startswith(want["first16"])
    assert crc(values) == want["crc32"]
    assert code.tolist() == [want["scale"]]


def test_golden_refold() -> None:
    want = golden("G22")
    codes = torch.tensor(want["in_codes"], dtype=torch.uint8)
    nibbles = [(5 * i + 3 * b) % 16 for b in range(4) for i in range(32)]
    packed = quant.pack_nibbles(torch.tensor(nibbles, dtype=torch.uint8))
    values, shared, exact = quant.fold_mxfp4(packed, codes)
    assert [raw(values.view(4, 32)[b, :8]).hex() for b in range(4)] == want["first8"]
    assert (shared.item(), bool(exact), crc(values)) == (want["out_code"], want["exact"], want["crc32"])
    whole = quant.e4m3_decode(values) * quant.e8m0_decode(shared)
    assert torch.equal(whole, quant.from_mxfp4(packed, codes))


RECORDS = {"528": ("mxfp8", 512, 11, 4.0), "288": ("nvfp4", 512, 11, 4.0), "584": ("v4", 512, 11, 4.0)}


@pytest.mark.parametrize("size", [*RECORDS, "68"])
def test_golden_records(size: str) -> None:
    """Values and scales of whole records; the checksum is of both, or of the values alone."""
    want = golden("G24") if size == "68" else golden("G23")[size]
    layout, dim, seed, amplitude = RECORDS.get(size, ("mxfp4", 128, 13, 2.0))
    x = row(lcg(dim, seed, amplitude))[None]
    values, scale = encode(layout, x)
    assert raw(values)[:8].hex() == want["head"]
    assert raw(scale).hex() == want["scales"]
    assert values.shape[1] + scale.shape[1] == int(size) == want.get("bytes", 68)
    assert want.get("crc32_data", crc(values)) == crc(values)
    assert want.get("crc32", crc(torch.cat([values, scale], 1))) == crc(torch.cat([values, scale], 1))
    if size == "68":
        assert int.from_bytes(raw(scale), "little") == want["as_int32_le"]
    assert decode(layout, values, scale).shape == x.shape


def test_golden_layout() -> None:
    want = golden("G25")
    for at, offset in want["F8_128x4 offset (row,g,G=8)"].items():
        r, g = json.loads(at.replace("(", "[").replace(")", "]"))
        assert f8_128x4_offset(r, g, 8) == offset
    assert {str(r): utccp_row(int(r)) for r in want["UTCCP row permutation"]} == want["UTCCP row permutation"]
    for at, place in want["gate/up gran-8 row for (is_up,i)"].items():
        up, i = json.loads(at.replace("(", "[").replace(")", "]"))
        assert interleave8_row(bool(up), i) == place


@pytest.mark.parametrize(("rows", "groups"), [(256, 8), (128, 5)])
def test_swizzles_are_permutations(rows: int, groups: int) -> None:
    places = {f8_128x4_offset(r, g, groups) for r in range(rows) for g in range(groups)}
    assert len(places) == rows * groups and max(places) < rows * -(-groups // 4) * 4
    assert sorted(utccp_row(r) for r in range(rows)) == list(range(rows))
    both = [interleave8_row(up, r) for up in (False, True) for r in range(rows)]
    assert sorted(both) == list(range(2 * rows))


def test_golden_swiglu() -> None:
    """The direct form: float64, the routing weight before the quantiser, no rounding to bf16 in between."""
    want = golden("G26")
    gate, up = row(lcg(32, 21, 14)), row(lcg(32, 22, 14))
    pair = torch.cat([gate, up])[None].to(torch.bfloat16)
    with accumulate(torch.float64):
        y = quant.swiglu(gate[None], up[None], row([0.3125]), 10.0)
        view = swiglu_quantize(pair, limit=10.0, weight=row([0.3125]), round_bf16=False)
    assert y[0, :4].tolist() == pytest.approx(want["y_first4"], rel=1e-15)
    assert view.flat()[1].item() == want["scale"]
    assert raw(view.values).hex() == want["all_hex"] and crc(view.values) == want["crc32"]


def test_every_golden_group_is_used() -> None:
    used = {*MXFP4_ROWS, *NVFP4_ROWS, *FP8_ROWS, "G1", "G2", "G3", "G4b", *(f"G{n}" for n in range(22, 27))}
    assert {k.partition("_")[0] for k in GOLDEN} == used


# Saturation, floors, NaN.

QUANTIZERS = {"mxfp8": (quantize_mxfp8, 32), "mxfp4": (quantize_mxfp4, 32), "nvfp4": (quantize_nvfp4, 16)}


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_saturation(kind: str) -> None:
    """Infinity ends at the largest code under a finite scale, its sign kept; so do values past the format."""
    quantize, block = QUANTIZERS[kind]
    x = torch.zeros(block)
    x[0], x[1], x[2] = math.inf, -math.inf, 1.0
    view = quantize(x)
    codes = view.values.view(torch.uint8) if kind == "mxfp8" else quant.unpack_nibbles(view.values)
    assert codes[:3].tolist() == ([0x7E, 0xFE, 0] if kind == "mxfp8" else [7, 15, 0])
    assert view.flat()[1].view(torch.uint8).item() == {"mxfp8": 247, "mxfp4": 253, "nvfp4": 0x7E}[kind]
    past = torch.tensor([449.0, 464.0, 480.0, 1e9, math.inf])
    assert quant.e4m3_round(past).float().tolist() == [448.0] * 5
    assert quant.e2m1_encode(-past).tolist() == [15] * 5


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_a_nan_spoils_its_own_block_only(kind: str) -> None:
    quantize, block = QUANTIZERS[kind]
    x = torch.randn(3, 4 * block)
    bad = x.clone()
    bad[1, block + 3] = math.nan
    for want, got in zip(quantize(x).flat(), quantize(bad).flat(), strict=True):
        per = want.shape[1] // 4
        same = (want.view(torch.uint8) == got.view(torch.uint8)).unflatten(1, (4, per)).all(-1)
        same[1, 1] = True
        assert same.all()
    value = quantize(bad).dequantize(torch.float32)[1, block + 3]
    assert math.isnan(value) if kind == "mxfp8" else value == 0


@pytest.mark.parametrize(("kind", "code"), [("mxfp8", 105), ("mxfp4", 1), ("nvfp4", 1)])
def test_zero_blocks(kind: str, code: int) -> None:
    quantize, block = QUANTIZERS[kind]
    view = quantize(torch.tensor([0.0, -0.0] * (block // 2)))
    assert view.flat()[1].view(torch.uint8).tolist() == [code]
    back = view.dequantize(torch.float32)
    assert (back == 0).all() and back.signbit().tolist() == [False, True] * (block // 2)


def test_subnormal_scales() -> None:
    """NVFP4 below 6 · 2^-6 has coarse scales; below 6 · 2^-9 the scale stays at 2^-9 and values vanish."""
    assert quantize_nvfp4(torch.full((16,), 2.0**-12)).dequantize().unique().tolist() == [0.0]
    view = quantize_nvfp4(torch.full((16,), 6 * 2.0**-9))
    assert (view.scale.view(torch.uint8) == 1).all() and (view.dequantize() == 6 * 2.0**-9).all()


def test_nvfp4_divides_by_the_decoded_scale() -> None:
    """All E4M3 scales times the seven ties of E2M1: division keeps every tie, a reciprocal moves 42."""
    scale = quant.e4m3_decode(torch.arange(1, 127).to(torch.uint8).view(E4M3))[:, None]
    tie = row(TIES)[None]
    want = torch.tensor([0, 2, 2, 4, 4, 6, 6], dtype=torch.uint8).expand(126, 7)
    assert torch.equal(quant.e2m1_encode(tie * scale / scale), want)
    moved = (quant.e2m1_encode(tie * scale * (1 / scale)) != want).sum()
    assert moved == 42
    block = torch.zeros(126, 16)
    block[:, :1], block[:, 1:8] = 6 * scale, tie * scale
    codes = quant.unpack_nibbles(quantize_nvfp4(block).values)
    assert torch.equal(codes[:, 1:8], want)


# Properties.

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
BLOCK = st.lists(FINITE, min_size=32, max_size=32)


@given(BLOCK)
def test_scale_is_the_smallest_power_that_fits(values: list[float]) -> None:
    for quantize, largest, low in ((quantize_mxfp8, 448, 1e-4), (quantize_mxfp4, 6, 6 * 2.0**-126)):
        code = int(quantize(row(values)).flat()[1].item())
        top = Fraction(max(*(abs(float(torch.tensor(v))) for v in values), float(torch.tensor(low))))
        fits = [c for c in range(1, 255) if largest * Fraction(2) ** (c - 127) >= top]
        assert code == min(fits, default=254)


@given(BLOCK)
def test_error_is_half_a_step(values: list[float]) -> None:
    x = row(values).double()
    for quantize, decoder, largest, least, bits in (
        (quantize_mxfp8, quant.from_mxfp8, 448.0, 2.0**-6, 3),
        (quantize_mxfp4, quant.from_mxfp4, 6.0, 1.0, 1),
    ):
        flat = quantize(x).flat()
        scale = quant.e8m0_decode(flat[1], torch.float64)
        error = (decoder(*flat, torch.float64) - x).abs() / scale
        step = (x.abs() / scale).clamp(least, largest).log2().floor().exp2() * 2.0**-bits
        assert (error <= step / 2).all()


@given(BLOCK, st.integers(-20, 20))
def test_power_of_two_covariance(values: list[float], shift: int) -> None:
    """Away from the floors a power of two moves into the scale and changes no element."""
    x = row([math.copysign(min(max(abs(v), 1e-10), 1e10), v) for v in values])
    x[0] = 1e10
    for quantize in (quantize_mxfp8, quantize_mxfp4):
        a, b = quantize(x), quantize(x * 2.0**shift)
        assert raw(a.values) == raw(b.values)
        assert int(b.flat()[1]) - int(a.flat()[1]) == shift


@given(BLOCK)
def test_quantising_twice_is_quantising_once(values: list[float]) -> None:
    x = row([min(max(v, -1e30), 1e30) for v in values])
    for quantize in (quantize_mxfp8, quantize_mxfp4):
        once = quantize(x).dequantize(torch.float32)
        assert torch.equal(quantize(once).dequantize(torch.float32), once)


@given(BLOCK, st.permutations(range(32)))
def test_order_in_a_block_does_not_matter(values: list[float], order: list[int]) -> None:
    x = row(values)
    for quantize in (quantize_mxfp8, quantize_mxfp4, quantize_nvfp4):
        width = 16 if quantize is quantize_nvfp4 else 32
        picked = order if width == 32 else [i for i in order if i < 16]
        want = quantize(x[:width]).dequantize(torch.float32)
        assert torch.equal(quantize(x[:width][picked]).dequantize(torch.float32), want[picked])


def test_tiles_share_one_scale() -> None:
    """A 32 x 32 tile is the row format with the tile's maximum in every row of it."""
    w = torch.randn(64, 96) * torch.logspace(-3, 3, 96)
    view = quantize_mxfp8(w, tile_rows=32)
    assert view.scale.shape == (2, 3)
    top = w.abs().unflatten(0, (2, 32)).unflatten(2, (3, 32)).amax((1, 3))
    assert torch.equal(view.flat()[1], quant.ue8m0_code(top, 448.0))
    spread = view.flat()[1].repeat_interleave(32, 0)
    assert torch.equal(view.dequantize(torch.float32), quant.from_mxfp8(view.values, spread))
    for r in range(2):
        for c in range(3):
            tile = w[32 * r : 32 * r + 32, 32 * c : 32 * c + 32].reshape(-1)
            values, code = quant.to_mxfp8(tile, group=1024)
            assert torch.equal(quant.from_mxfp8(values, code).view(32, 32), view.dequantize(torch.float32)[
                32 * r : 32 * r + 32, 32 * c : 32 * c + 32
            ])  # fmt: skip


@given(st.lists(st.integers(1, 254), min_size=4, max_size=4), st.integers(0, 2**32))
def test_folding_is_exact_where_it_says_so(codes: list[int], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (64,), dtype=torch.uint8, generator=draw)
    packed[:16] = torch.arange(16).to(torch.uint8) * 17  # every code in the first block
    code = torch.tensor(codes, dtype=torch.uint8)
    values, shared, exact = quant.fold_mxfp4(packed, code)
    want = quant.from_mxfp4(packed, code, torch.float64)
    got = quant.from_mxfp8(values, shared[..., None], torch.float64)
    assert bool(exact) == (max(codes) - min(codes) <= 14 and max(codes) >= 7)
    if bool(exact):
        assert torch.equal(got, want)


def test_dead_blocks_do_not_hinder_folding() -> None:
    packed = torch.zeros(64, dtype=torch.uint8)
    packed[16:32] = 0x21
    values, shared, exact = quant.fold_mxfp4(packed, torch.tensor([1, 127, 254, 3], dtype=torch.uint8))
    assert bool(exact) and shared.item() == 121
    assert torch.equal(quant.from_mxfp8(values, shared[None])[32:64], row([0.5, 1.0] * 16))
    _, _, exact = quant.fold_mxfp4(torch.zeros(64, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8))
    assert bool(exact)


# Views.

B8 = torch.zeros(2, 64, dtype=torch.uint8)


def experts(device: str = "cpu") -> dict[str, Any]:
    """The tensors of two experts of hidden and inter 32."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(2, *shape, dtype=torch.uint8, device=device)

    scales = {"w13_scale": zeros(64, 1).view(E8M0), "w2_scale": zeros(32, 1).view(E8M0)}
    return {"w13": zeros(64, 16), "w2": zeros(32, 16), **scales}


DEVICES: dict[Any, Any] = {
    MXFP8: lambda v, s: MXFP8(v.view(E4M3), s[:, :2].view(E8M0)),
    FP8Tiles: lambda v, s: FP8Tiles(v.view(1, 128).view(E4M3), s[:1, :1].view(E8M0)),
    MXFP4: lambda v, s: MXFP4(v, s[:, :4].view(E8M0)),
    NVFP4: lambda v, s: NVFP4(v, s[:, :8].view(E4M3)),
}
VIEW_ERRORS = {
    "rows": (lambda: MXFP8(B8.view(E4M3), B8.view(E8M0), 16), "MXFP8: expected tile_rows: 1 or 32, got 16"),
    "values": (lambda: MXFP8(B8, B8[:, :2].view(E8M0)), r"MXFP8: expected values: \[..., K\] float8_e4m3fn"),
    "width": (
        lambda: MXFP8(B8[:, :40].view(E4M3), B8[:, :1].view(E8M0)),
        "MXFP8: expected values: quantised dimensions multiples of 32",
    ),
    "scale": (
        lambda: MXFP8(B8.view(E4M3), B8[:, :2]),
        r"MXFP8: expected scale: \[2, 2\] float8_e8m0fnu, got \[2, 2\] uint8",
    ),
    "fp4 values": (lambda: MXFP4(B8.view(E4M3), B8.view(E8M0)), r"MXFP4: expected values: \[..., K/2\]"),
    "fp4 width": (lambda: MXFP4(B8[:, :8], B8.view(E8M0)), "MXFP4: expected values: K a multiple of 32"),
    "fp4 scale": (lambda: MXFP4(B8, B8.view(E8M0)), r"MXFP4: expected scale: \[2, 4\] float8_e8m0fnu"),
    "nv values": (lambda: NVFP4(B8.view(E4M3), B8.view(E4M3)), r"NVFP4: expected values: \[..., K/2\] uint8"),
    "nv width": (lambda: NVFP4(B8[:, :4], B8.view(E4M3)), "NVFP4: expected values: K a multiple of 16"),
    "nv scale": (lambda: NVFP4(B8, B8.view(E8M0)), r"NVFP4: expected scale: \[2, 8\] float8_e4m3fn"),
    **{
        f"{kind.__name__} {where} on meta": (
            lambda make=make, a=a, b=b: make(B8.to(a), B8.to(b)),
            f"{kind.__name__}: expected scale on {a}, got {b}",
        )
        for where, a, b in (("scale", "cpu", "meta"), ("values", "meta", "cpu"))
        for kind, make in DEVICES.items()
    },
    "experts": (lambda: MXFP4Experts(B8, B8, B8, B8), "MXFP4Experts: expected w13"),
    **{
        f"experts {label} on meta": (
            lambda label=label: MXFP4Experts(**(experts() | {label: experts("meta")[label]})),
            f"MXFP4Experts: expected {label} on cpu, got meta",
        )
        for label in ("w13_scale", "w2", "w2_scale")
    },
    "experts foreign": (
        lambda: MXFP4Experts(torch.zeros(1, 2, 3), B8, B8, B8.to("meta"), layout="somebody_cuda"),
        "MXFP4Experts: expected w2_scale on cpu, got meta",
    ),
    "experts w2": (
        lambda: MXFP4Experts(
            torch.zeros(2, 64, 16, dtype=torch.uint8),
            torch.zeros(2, 64, 1, dtype=torch.uint8).view(E8M0),
            torch.zeros(2, 32, 17, dtype=torch.uint8),
            torch.zeros(2, 32, 1, dtype=torch.uint8).view(E8M0),
        ),
        r"MXFP4Experts: expected w2: \[2, 32, 16\] uint8, got \[2, 32, 17\] uint8",
    ),
    "quantize_mxfp8": (
        lambda: quantize_mxfp8(torch.zeros(2, 33)),
        r"quantize_mxfp8: expected x: \[..., K\] float with K a multiple of 32, got \[2, 33\] float32",
    ),
    "quantize tiles": (lambda: quantize_mxfp8(torch.zeros(8, 32), tile_rows=32), r"rows a multiple of 32"),
    "quantize tile_rows": (lambda: quantize_mxfp8(torch.zeros(32), tile_rows=2), "tile_rows: 1 or 32, got 2"),
    "quantize_mxfp4": (lambda: quantize_mxfp4(torch.zeros(16)), "quantize_mxfp4: expected x"),
    "quantize_nvfp4": (lambda: quantize_nvfp4(torch.zeros(24)), "quantize_nvfp4: expected x"),
}  # fmt: skip


@pytest.mark.parametrize("error", VIEW_ERRORS)
def test_errors(error: str) -> None:
    call, message = VIEW_ERRORS[error]
    with pytest.raises(ValueError, match=message):
        call()


def test_all_tensors_of_a_view_may_be_meta() -> None:
    meta = MXFP4Experts(**experts("meta"))
    assert meta.w2_scale.device.type == "meta"
    for make in DEVICES.values():
        assert make(B8.to("meta"), B8.to("meta")).values.is_meta


def test_a_foreign_layout_is_not_checked_by_shape() -> None:
    packed = MXFP4Experts(torch.zeros(1, 2, 3), B8, B8, B8, layout="somebody_cuda")
    assert packed.flat()[-1] == "somebody_cuda"
