"""The Hopper MoE kernel: its device functions in the emulator, and the op itself where a GPU is present."""

import dataclasses

import pytest
import torch

from dsv41._op import Target, split_scratch, use
from dsv41._op import ops as registered
from dsv41.formats import E8M0, MXFP4, MXFP8, MXFP4Experts, quantize_mxfp4, quantize_mxfp8
from dsv41.ops import mxfp4_moe, pack_experts
from dsv41.ops._tilelang.pack import MOVED_BASE
from dsv41.ops.moe.api import mxfp4_moe_scratch, read_layout, scratch_parts
from dsv41.ops.moe.tilelang_cuda import Shape, _source, choose_shape
from dsv41.parity import distance
from tests.tolerance import DOT_BF16, DOT_EXACT_INNER
from tests.tools.cuda_emu import SHARED, EmulationError, available, emulate

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_gpp = pytest.mark.skipif(not available(), reason="needs g++")
EDIT: tuple[str, str] | None = None  # a mistake to plant into the sources


def make_experts(num_experts, hidden, inter, device="cpu"):
    w13 = quantize_mxfp4(torch.randn(num_experts, 2 * inter, hidden, device=device) * 0.1)
    w2 = quantize_mxfp4(torch.randn(num_experts, hidden, inter, device=device) * 0.1)
    return MXFP4Experts(w13.values, w13.scale, w2.values, w2.scale)


def clone(e):
    return MXFP4Experts(e.w13.clone(), e.w13_scale.clone(), e.w2.clone(), e.w2_scale.clone())


def emulate_moe(x, ids, weights, experts, limit, shape, shared=None, other=None):
    """`mxfp4_moe` launch by launch in the emulator; ``other``: for experts that do not fold."""
    (tokens, top_k), hidden, inter, n = ids.shape, experts.hidden, experts.inter, experts.num_experts
    scratch = torch.full((mxfp4_moe_scratch(tokens, top_k, n, hidden, inter),), 255, dtype=torch.uint8)
    parts = split_scratch(scratch, scratch_parts(tokens, top_k, n, hidden, inter))
    _, bases, mixed = read_layout(experts.layout)
    assert mixed == (other is not None)
    if mixed:
        chosen = parts[6].view(torch.int32).view(-1)[: tokens * top_k].view(tokens, top_k)
        for folded, one in ((1, shape), (0, other)):
            args = [ids, experts.flat()[1], tokens * top_k, n, folded, chosen]
            call = f"moe::choose<{2 * inter * hidden // 32}>"
            emulate(planted(shape), call, args, grid=-(-tokens * top_k // 32), threads=32)
            emulate_rows(x, chosen, weights, experts, limit, one, parts, (MOVED_BASE, MOVED_BASE), bases)
    else:
        emulate_rows(x, ids, weights, experts, limit, shape, parts, bases, bases)
    out = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
    emulate(
        planted(shape),
        f"moe::combine<{hidden}, {top_k}, {str(shared is not None).lower()}>",
        [ids, parts[-1], shared if shared is not None else out, tokens, n, out],
        grid=4,
        threads=256,
    )
    return out


def planted(shape):
    """The sources of a shape, with the mistake of a test."""
    return _source(shape).replace(*EDIT) if EDIT else _source(shape)


def emulate_rows(x, ids, weights, experts, limit, shape, parts, stored, bases):
    """`launch` of tilelang_cuda.py."""
    (tokens, top_k), hidden, inter, n = ids.shape, experts.hidden, experts.inter, experts.num_experts
    source = planted(shape)
    begins, order, counts, ready, ready_scale, inner, inner_scale, assigned = parts
    values, scale = (t.view(torch.uint8) for t in quantize_mxfp8(x).flat())
    (base, base2), (unit, unit2) = stored, (2.0 ** (code - 127) for code in bases)
    args = [ids, values, scale, tokens, top_k, n, unit, begins, order, counts, ready, ready_scale, SHARED]
    kind = f"gemm::{shape.tokens}"
    emulate(source, f"moe::prepare<{hidden}, {kind}>", args, grid=n + 2, threads=256, shared_bytes=64)
    w13, w13_scale, w2, w2_scale, _ = experts.flat()
    made, made_scale = inner, inner_scale
    if shape.by_128:
        made = assigned.view(torch.uint8).view(-1)
        made_scale = made[tokens * top_k * inter :]
    # Columns of a tile past its rows are multiplied with whatever is there.
    launch = {
        "grid": 2,
        "threads": shape.threads,
        "shared_bytes": 227 * 1024,
        "uninitialised": "allow",
    }
    if shape.one_launch:
        emulate(
            source,
            f"moe::products<{hidden}, {inter}, {shape.widths[-1]}>",
            [w13, w13_scale, w2, w2_scale, ready, ready_scale, begins, order, weights, n, top_k, base, base2,
             unit2, float(limit), inner, inner_scale, assigned, counts, SHARED],
            **launch,
        )  # fmt: skip
        return
    operand = values if shape.tokens == "Native" else ready
    emulate(
        source,
        f"moe::gate_up<{hidden}, {inter}, {shape.template}>",
        [w13, w13_scale, operand, ready_scale, begins, order, weights, n, top_k, base, unit, float(limit),
         made, made_scale, SHARED],
        **launch,
    )  # fmt: skip
    if shape.by_128:
        rows = tokens * top_k
        emulate(
            source,
            f"moe::fold_inner<{inter}, {kind}>",
            [made, made_scale, rows, unit2, inner, inner_scale],
            grid=-(-rows * (inter // 16) // 256),
            threads=256,
        )
    emulate(
        source,
        f"moe::down<{hidden}, {inter}, {shape.template}>",
        [w2, w2_scale, inner, inner_scale, begins, order, n, base2, unit2, assigned, SHARED],
        **launch,
    )


SHAPES = {
    "native": Shape((8, 16), 2, "Native"),
    "bf16": Shape((8, 16), 1, "Bf16"),
    "f16": Shape((8, 24), 1, "Half"),
    "exact, few rows": Shape((8, 16), 1, "Split"),
    "exact": Shape((8, 48), 1, "Split"),  # more than 64 columns take two turns
    "fp8": Shape((16, 80), 1, "Coarse"),
    "fp8, fewer rows": Shape((16, 80), 1, "Narrow"),
}


def plain(experts, shape):
    """What the reference computes with: the weights of a layer before packing."""
    return dataclasses.replace(
        experts, layout="plain fp8" if shape.tokens in ("Coarse", "Narrow") else "plain"
    )


def case(name, experts=3, tokens=21, top_k=2, hidden=256, device="cpu"):
    """Rows, ids and weights of a named routing."""
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    ids = torch.randint(-1, experts, (tokens, top_k), dtype=torch.int32, device=device)
    if name == "one expert":
        ids.fill_(experts - 1)
    elif name == "none":
        ids.fill_(-1)
    elif name == "past the end":  # ids that DSV41_CHECK would refuse contribute nothing
        ids[::3] = experts + 4
    return x, ids, torch.rand(tokens, top_k, device=device)


def exact_sums(x, experts):
    """Rows and experts whose first products have the same bits in any order of their sums.

    Otherwise a sum that is rounded elsewhere moves now and then an inner activation by a code: 0.2 % of them
    on an H200. In a call of a few rows one such code is more than any bound that would find a mistake.
    """
    for code in (experts.w13_scale, experts.w2_scale):
        code.view(torch.uint8).fill_(122)
    return torch.randint_like(x, -2, 3), experts


def one_a_row(experts):
    """The same first product; the second hands on the inner activations, as its output's first columns."""
    w2 = torch.zeros_like(experts.w2, dtype=torch.float32).repeat(1, 1, 2)
    w2[:, range(w2.shape[2]), range(w2.shape[2])] = 1
    w2 = quantize_mxfp4(w2)
    return dataclasses.replace(experts, w2=w2.values, w2_scale=w2.scale)


def inner_noise(x, ids, weight, experts, limit):
    """What roundings in the sums of gate and up can move each inner activation by, in float64.

    Tensor cores keep 14 bits of the largest product of a few, so that a sum is off by up to 2^-13 of its
    terms' magnitudes, and gate and up are rounded to bf16 on both sides.
    """
    rows = quantize_mxfp8(x).dequantize(torch.float64)
    w = MXFP4(experts.w13, experts.w13_scale).dequantize(torch.float64)[ids.long()]
    gate, up = torch.einsum("th,tfh->tf", rows, w).chunk(2, 1)
    off = torch.einsum("th,tfh->tf", rows.abs(), w.abs()).chunk(2, 1)
    off_gate, off_up = (2.0**-13 * o + 2.0**-8 * v.abs() for o, v in zip(off, (gate, up), strict=True))
    silu = torch.nn.functional.silu(gate.clamp(max=limit)).abs()
    return weight * (1.1 * off_gate * up.clamp(-limit, limit).abs() + silu * off_up + off_gate * off_up)


@needs_gpp
@pytest.mark.parametrize("shape", SHAPES)
def test_emulated_exact_sums_have_the_bits_of_the_reference(shape):
    x, ids, weights = case("ragged")
    x, experts = exact_sums(x, make_experts(3, 256, 128))
    want = mxfp4_moe(x, ids, weights, plain(experts, SHAPES[shape]), limit=1.0)
    got = emulate_moe(x, ids, weights, pack_experts(clone(experts)), 1.0, SHAPES[shape])
    assert torch.equal(got, want) and want.any()


@needs_gpp
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["ragged", "one expert", "none", "past the end"])
def test_emulated_moe_is_the_reference(shape, name):
    torch.manual_seed(0)
    experts = make_experts(3, 256, 128)
    x, ids, weights = case(name)
    shared = torch.randn(21, 256).bfloat16() if name == "none" else None
    want = mxfp4_moe(x, ids, weights, plain(experts, SHAPES[shape]), limit=1.0, shared=shared)
    got = emulate_moe(x, ids, weights, pack_experts(clone(experts)), 1.0, SHAPES[shape], shared=shared)
    assert distance(got, want) < DOT_BF16


@needs_gpp
@pytest.mark.parametrize("shape", SHAPES)
def test_emulated_rows_do_not_touch_each_other(shape):
    """A row's bits do not depend on its batch mates, and NaN stays in its row."""
    torch.manual_seed(1)
    packed = pack_experts(make_experts(3, 256, 128))
    x, ids, weights = case("ragged")
    whole = emulate_moe(x, ids, weights, packed, 7.0, SHAPES[shape])
    few = emulate_moe(x[3:9], ids[3:9], weights[3:9], packed, 7.0, SHAPES[shape])
    assert torch.equal(few, whole[3:9])
    x[5] = torch.nan
    spoiled = emulate_moe(x, ids, weights, packed, 7.0, SHAPES[shape])
    others = torch.arange(21) != 5
    assert torch.equal(spoiled[others], whole[others])
    assert spoiled[5].isnan().any() or (ids[5] < 0).all()


MISTAKES = {  # shape, text of the sources, what it becomes
    "signs of the other row": ("native", "(w << 4 & 0x80808080u)", "(w & 0x80808080u)"),
    "signs of the other row, bf16": ("bf16", "((row ? w << 4 : w) & 0x80808080u)", "(w & 0x80808080u)"),
    "a value of the table": ("native", "0x4C484440u", "0x4C484840u"),
    "a value of the table, bf16": ("bf16", "0xC0804000u", "0xC0800000u"),
    "a value of the table, folded": ("fp8", "0x3E3C3800u", "0x3E3C3C00u"),
    "rows swapped": ("native", "__byte_perm(row ? high : low", "__byte_perm(row ? low : high"),
    "scale of the first block": ("bf16", "row ? high : low, step >> 1)", "row ? high : low, 0)"),
    "scale of the first block, folded": ("exact, few rows", "0x4440 | q", "0x4440"),
    "token scale of the first block": ("native", "component(early[2 * j + i], q - 1)", "early[2 * j + i].x"),
    "token scale of the first turn": ("fp8", "turn * (WIDE / 4), scale", "0, scale"),
    "lower parts left out": ("exact", " + part[8 * j + 4 + i]", ""),
    "smallest of four scales": ("fp8", "int top = max(max(", "int top = min(min("),
    "no clamp of up": ("bf16", "up = hopper::max_or_nan(hopper::min_or_nan(up, limit), -limit);", ""),
    "weight of the first row": ("bf16", "(notes + 8 * j + column);  // the", "(notes + column);  // the"),
    "maxima of two warps": ("bf16", "gemm::as_bf16(four.y))", "gemm::as_bf16(four.x))"),
    "maxima of half the lanes": ("bf16", "half; half /= 2", "half > 1; half /= 2"),
    "scale of the other token": ("fp8", "0xFFFF0000u) * by.z", "0xFFFF0000u) * by.x"),
    "order of k": ("bf16", "+ 4 * (feature & 2)", "+ 2 * (feature & 2)"),
    "order of k, f16": ("f16", "0x3424", "0x2434"),
    "scale of a row's sums": ("f16", "__ldg(row_scales + assignment / top_k)", "__ldg(row_scales)"),
    "scale of an inner row": ("f16", "acc[4 * j] *= first, ", ""),
    "features of the first block": ("fp8", "values(stage, group * L::HELD + held)", "values(stage, group)"),
    "row of the wrong token": ("bf16", "__ldg(order + position) / top_k", "__ldg(order + position) % top_k"),
    "scale of the own features only": ("exact", "all = __hmax2(all, amax);", "all = own;"),
    "halves of inner rows swapped": ("exact", "__byte_perm(pair, 0, 0x4420)", "__byte_perm(pair, 0, 0x4431)"),
    "inner rows not waited for": ("exact, few rows", "hopper::wait_for_count(done, wanted);", ""),
    "copies kept in hand": ("exact, few rows", "; pending; --pending, landed", "; 0; --pending, landed"),
    "released too early": (
        "native", "hopper::wgmma_wait<0>();\n      hopper::keep(part[(q - 1) & 1]);",
        "hopper::keep(part[(q - 1) & 1]);",
    ),
}  # fmt: skip


@needs_gpp
@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_seen(mistake, monkeypatch):
    torch.manual_seed(0)
    experts = make_experts(3, 256, 128)
    name, old, new = MISTAKES[mistake]
    # More rows an expert than one turn of a tile takes, where turns are looked at.
    x, ids, weights = case("one expert" if SHAPES[name].k_groups == 1 else "ragged")
    want = mxfp4_moe(x, ids, weights, plain(experts, SHAPES[name]), limit=1.0)
    assert old in _source(SHAPES[name])
    monkeypatch.setattr(f"{__name__}.EDIT", (old, new))
    try:
        got = emulate_moe(x, ids, weights, pack_experts(clone(experts)), 1.0, SHAPES[name])
    except EmulationError:
        return
    assert not distance(got, want) < DOT_BF16


@needs_gpp
@pytest.mark.parametrize("size, weight, limit", [(1e-3, 1.0, 10.0), (1.0, 2.5, 10.0), (30.0, 400.0, 60.0)])
def test_f16_rows_of_any_size(size, weight, limit):
    """Rows of different magnitudes, small inner activations, weights that would leave f16's range."""
    torch.manual_seed(0)
    experts = make_experts(3, 256, 128)
    x, ids, weights = case("ragged")
    x = (x * size * torch.logspace(-3, 0, 256)).bfloat16()
    want = mxfp4_moe(x, ids, weights * weight, plain(experts, SHAPES["f16"]), limit=limit)
    got = emulate_moe(x, ids, weights * weight, pack_experts(clone(experts)), limit, SHAPES["f16"])
    assert want.isfinite().all() and distance(got, want) < DOT_BF16


def test_the_tiling_follows_rows_and_clamp():
    assert choose_shape(256, 6, 48, "exact", 10.0) == choose_shape(256, 6, 48, "fp8", 10.0) == "middle"
    assert choose_shape(4096, 6, 384, "exact", 10.0) == "f16_few"
    assert choose_shape(4096, 6, 384, "fp8", 1e4) == "fp8_few"
    assert choose_shape(1024, 6, 48, "exact", 10.0) == "f16"
    assert choose_shape(1024, 6, 48, "exact", 1e4) == choose_shape(1024, 6, 48, "unfolded", 10.0) == "bf16"


def test_packing_keeps_every_value_and_scale():
    """Packing is a permutation of nibbles and of scale bytes."""
    torch.manual_seed(0)
    experts = make_experts(2, 256, 128)
    packed = pack_experts(clone(experts))
    for plain, moved in ((experts.w13, packed.w13), (experts.w2, packed.w2)):
        magnitudes = [torch.stack([t & 7, t >> 4 & 7]).flatten().sort().values for t in (plain, moved)]
        assert torch.equal(*magnitudes)
        assert (plain & 0x88).sum().item() != 0
        ones = [sum(int((t >> b & 1).sum()) for b in range(8)) for t in (plain, moved)]
        assert ones[0] == ones[1]
    for plain, moved in ((experts.w13_scale, packed.w13_scale), (experts.w2_scale, packed.w2_scale)):
        pair = [t.view(torch.uint8).flatten().sort().values for t in (plain, moved)]
        assert torch.equal(*pair)


def far(experts, live, which=(1,), by_row=False):
    """Scales over the whole window that folds; in some experts one outside, of zeros or of values."""
    torch.manual_seed(3)
    codes = experts.w13_scale.view(torch.uint8).random_(105, 132)
    if by_row:
        codes.copy_(codes[..., :1].clone())
    for e in which:
        # The first expert by its down product.
        code, values = (experts.w13_scale, experts.w13) if e else (experts.w2_scale, experts.w2)
        code.view(torch.uint8)[e, 7, 3] = 140 if e else 90
        packed = values[e, 7].view(-1, 16)
        packed[3] = packed[3].clamp(min=1) if live else 0x80
    return experts


def test_scales_that_do_not_fold_are_counted():
    """A block too far from the others takes its expert, not the layer, to the path of any scales."""
    packed = pack_experts(far(make_experts(3, 256, 128), live=True), numerics="fp8")
    assert (packed.layout.split()[:3], packed.unfolded, packed.routed) == (["hopper", "fp8", "118"], 1, 1)
    assert packed.layout.split()[4:] == ["mixed"]
    first = packed.w13_scale.view(torch.uint8)[:, 0, 0]
    assert (first >= 224).tolist() == [True, False, True]
    packed = pack_experts(far(make_experts(3, 256, 128), live=True, which=(0, 1, 2)))
    assert (packed.unfolded, packed.routed) == (3, 3)
    packed = pack_experts(far(make_experts(3, 256, 128), live=False), numerics="fp8")
    assert (packed.layout.split()[:3], packed.unfolded, packed.routed) == (["hopper", "fp8", "118"], 0, 0)
    assert "mixed" not in packed.layout


def test_ranks_share_what_does_not_fold():
    """The layout is that of all ranks, so that experts can move; `routed` counts the rank's own."""

    def add_up(counts):
        counts[20] += 5

    packed = pack_experts(make_experts(2, 256, 128), add_up=add_up)
    assert packed.layout.endswith(" mixed") and (packed.unfolded, packed.routed) == (10, 0)
    assert (packed.w2_scale.view(torch.uint8) >= 224).all()


MIXED = {  # shapes of the experts that fold, and of those that do not
    "exact, few rows": ("exact, few rows", "native"),
    "exact": ("exact", "bf16"),
    "f16": ("f16", "bf16"),
    "fp8": ("fp8", "bf16"),
}


@needs_gpp
@pytest.mark.parametrize("which", [(1,), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_experts_that_do_not_fold_take_another_path(name, which):
    """One expert of three, two, all; a block of zeros in the others keeps no code that matters."""
    folded, other = (SHAPES[shape] for shape in MIXED[name])
    experts = far(make_experts(3, 256, 128), live=True, which=which)
    zeros = next((e for e in (2, 1) if e not in which), None)
    if zeros is not None:
        experts = far_zeros(experts, zeros)
    x, ids, weights = case("past the end")
    want = mxfp4_moe(x, ids, weights, plain(experts, folded), limit=1.0)
    packed = pack_experts(clone(experts))
    assert packed.routed == len(which)
    got = emulate_moe(x, ids, weights, packed, 1.0, folded, other=other)
    assert distance(got, want) < DOT_BF16
    few = emulate_moe(x[3:9], ids[3:9], weights[3:9], packed, 1.0, folded, other=other)
    assert torch.equal(few, got[3:9])


def far_zeros(experts, e):
    """A block of zeros whose scale is far from the others."""
    experts.w13_scale.view(torch.uint8)[e, 5, 2] = 223
    experts.w13[e, 5].view(-1, 16)[2] = 0x80
    return experts


@needs_gpp
def test_experts_of_a_mixed_layer_move_as_they_are():
    """Which path an expert takes is in its own slot: after a move the ids alone tell where it is."""
    experts = far(make_experts(3, 256, 128), live=True)
    x, ids, weights = case("ragged")
    packed = pack_experts(experts)
    order = torch.tensor([1, 2, 0])  # slot i gets expert order[i]
    moved = dataclasses.replace(
        packed, **{n: getattr(packed, n).view(torch.uint8)[order] for n in ("w13", "w2")},
        **{n: getattr(packed, n).view(torch.uint8)[order].view(E8M0) for n in ("w13_scale", "w2_scale")},
    )  # fmt: skip
    places = torch.where(ids < 0, ids, order.argsort()[ids.clamp(min=0).long()].int())
    both = (SHAPES[shape] for shape in MIXED["exact, few rows"])
    shape, other = both
    want = emulate_moe(x, ids, weights, packed, 1.0, shape, other=other)
    assert torch.equal(emulate_moe(x, places, weights, moved, 1.0, shape, other=other), want)


@needs_gpp
@pytest.mark.parametrize("old, new", [
    (">= FIRST_MOVED) != (folded", ">= FIRST_MOVED) == (folded"),
    ("int64_t>(id) * CODES", "int64_t>(0) * CODES"),
    ("id = -1;\n  chosen", "id = 0;\n  chosen"),
])  # fmt: skip
def test_mistakes_of_the_choice_are_seen(old, new, monkeypatch):
    experts = far(make_experts(3, 256, 128), live=True)
    folded, other = (SHAPES[shape] for shape in MIXED["fp8"])
    x, ids, weights = case("ragged")
    want = mxfp4_moe(x, ids, weights, plain(experts, folded), limit=1.0)
    assert old in _source(folded)
    monkeypatch.setattr(f"{__name__}.EDIT", (old, new))
    got = emulate_moe(x, ids, weights, pack_experts(clone(experts)), 1.0, folded, other=other)
    assert not distance(got, want) < DOT_BF16


@needs_gpp
@pytest.mark.parametrize("shape", ["exact, few rows", "f16", "fp8"])
def test_a_block_of_zeros_has_no_scale(shape):
    """The widest window of scales folds without loss, and the scale of zeros does not matter."""
    experts = far(make_experts(3, 256, 128), live=False)
    x, ids, weights = case("ragged")
    want = mxfp4_moe(x, ids, weights, plain(experts, SHAPES[shape]), limit=1.0)
    got = emulate_moe(x, ids, weights, pack_experts(clone(experts)), 1.0, SHAPES[shape])
    assert distance(got, want) < DOT_BF16


def test_pack_experts_refuses_before_it_writes():
    experts = make_experts(2, 256, 128)
    before = experts.w13.clone()
    for code in (0, 224, 255):
        bad = clone(experts)
        bad.w2_scale.view(torch.uint8)[1, 3, 2] = code
        with pytest.raises(ValueError, match="pack_experts: expected w2_scale: codes 1 to 223"):
            pack_experts(bad)
        assert torch.equal(bad.w13, before)
    with pytest.raises(ValueError, match="hidden a multiple of 256"):
        pack_experts(make_experts(2, 128, 128))
    with pytest.raises(ValueError, match=r"inter of 128 and no larger, got \(256, 384\)"):
        pack_experts(make_experts(2, 256, 384))
    with pytest.raises(ValueError, match="numerics: exact or fp8, got bf16"):
        pack_experts(experts, numerics="bf16")
    with pytest.raises(ValueError, match="plain layout, got hopper"):
        pack_experts(pack_experts(experts))
    with pytest.raises(ValueError, match="experts: MXFP4Experts, got"):
        pack_experts(before)  # type: ignore[arg-type]


def test_plain_experts_are_refused_on_an_accelerator():
    op, target = registered()["mxfp4_moe"], Target("cuda", 90, frozenset({"tilelang", "nvcc"}))
    experts = make_experts(2, 256, 128)
    x, ids, weights = case("ragged", 2)

    def reason(experts, x=x):
        q = quantize_mxfp8(x)
        out, scratch = torch.empty_like(x), torch.empty(0, dtype=torch.uint8)
        args = (*q.flat(), ids, weights, *experts.flat(), 7.0, None, out, scratch)
        return op.explain(target, args)[0][1]

    assert "packed by pack_experts, got the plain layout" in str(reason(experts))
    packed = pack_experts(experts)
    assert reason(packed) is None
    for i, given in enumerate(packed.flat()[:4]):
        memory = torch.empty(given.numel() + 16, dtype=given.dtype)
        tensors = list(packed.flat()[:4])
        tensors[i] = memory[1 : 1 + given.numel()].view(given.shape)
        q, out = quantize_mxfp8(x), torch.empty_like(x)
        args = (*q.flat(), ids, weights, *tensors, packed.layout, 7.0, None, out, out)
        assert "begin at a multiple of 16 bytes" in str(op.explain(target, args)[0][1])


def test_scratch_is_a_function_of_sizes():
    assert mxfp4_moe_scratch(0, 6, 384, 5120, 2304) == 3584
    each = 2 * 5120 + 4 * 160 + 6 * (2 * 5120 + 2 * 2304 + 4 * 72 + 4)
    assert 0 <= mxfp4_moe_scratch(4096, 6, 48, 5120, 2304) - 4096 * each < 2048


def on_a_gpu(x, ids, weights, experts, numerics):
    """What the kernels and the reference make of a call; the same bits when it is repeated."""
    with use("torch"):
        reference = dataclasses.replace(experts, layout="plain fp8" if numerics == "fp8" else "plain")
        want = mxfp4_moe(x, ids, weights, reference, limit=1.0)
    packed = pack_experts(clone(experts), numerics=numerics)
    got = mxfp4_moe(x, ids, weights, packed, limit=1.0)
    assert torch.equal(got, mxfp4_moe(x, ids, weights, packed, limit=1.0))
    return got, want, packed


@needs_gpu
@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 300, 900])
@pytest.mark.parametrize("name", ["ragged", "one expert", "none"])
@pytest.mark.parametrize("numerics", ["exact", "fp8"])
@pytest.mark.parametrize("unfolded", [(), (1, 6), tuple(range(16))], ids=len)
def test_moe_on_a_gpu(tokens, name, numerics, unfolded):
    experts = make_experts(16, 256, 128, "cuda")
    x, ids, weights = case(name, 16, tokens, device="cuda")
    few = tokens < 64
    if few:
        x, experts = exact_sums(x, experts)
    if unfolded:
        experts = far(experts, live=True, which=unfolded, by_row=few)
    got, want, packed = on_a_gpu(x, ids, weights, experts, numerics)
    assert packed.unfolded == packed.routed == len(unfolded)
    bound = DOT_EXACT_INNER if few else DOT_BF16
    assert distance(got, want) < bound if want.any() else not got.any()


@needs_gpu
@pytest.mark.parametrize("tokens, experts", [(7, 384), (64, 384), (300, 48)])
@pytest.mark.parametrize("numerics", ["exact", "fp8"])
def test_replays_with_other_rows_on_a_gpu(tokens, experts, numerics):
    """A captured call takes new rows, ids and weights, all experts of the model too; NaN stays in its row."""
    packed = pack_experts(make_experts(experts, 256, 128, "cuda"), numerics=numerics)
    size = mxfp4_moe_scratch(tokens, 6, experts, 256, 128)
    scratch = torch.empty(size, dtype=torch.uint8, device="cuda")

    def drawn(seed):
        torch.manual_seed(seed)
        return *quantize_mxfp8(case("ragged", experts, tokens, 6, device="cuda")[0]).flat(), *case(
            "ragged", experts, tokens, 6, device="cuda"
        )[1:]

    held = drawn(0)
    out = torch.empty(tokens, 256, dtype=torch.bfloat16, device="cuda")

    def call(given, out, scratch=None):
        values, scale, ids, weights = given
        x = MXFP8(values, scale.view(E8M0))
        return mxfp4_moe(x, ids, weights, packed, limit=1.0, out=out, scratch=scratch)

    call(held, out, scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(held, out, scratch)
    for seed in (1, 2):
        other = drawn(seed)
        clean = call(other, None).clone()
        other[1][tokens // 2] = 255  # NaN
        for mine, new in zip(held, other, strict=True):
            mine.view(torch.uint8).copy_(new.view(torch.uint8))
        scratch.random_(0, 255)
        graph.replay()
        others = torch.arange(tokens, device="cuda") != tokens // 2
        assert torch.equal(out[others], clean[others]) and clean.any()
        assert out[tokens // 2].isnan().any() or (other[2][tokens // 2] < 0).all()


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
@pytest.mark.parametrize("numerics", ["exact", "fp8"])
def test_inner_activations_on_a_gpu(tokens, numerics):
    """Each is the reference's or, seldom, the code beside it; the noise of sums that cancel comes on top."""
    experts = one_a_row(make_experts(16, 256, 128, "cuda"))
    x, ids, weights = case("ragged", 16, tokens, device="cuda")
    ids = torch.cat([ids[:, :1].clamp(min=0), torch.full_like(ids[:, :1], -1)], 1)
    got, want, _ = on_a_gpu(x, ids, weights, experts, numerics)
    noise = inner_noise(x, ids[:, 0], weights[:, :1], experts, limit=1.0)
    assert got[:, :128].any() and not got[:, 128:].any()
    got, want = (t[:, :128].float().unflatten(1, (-1, 128 if numerics == "fp8" else 32)) for t in (got, want))
    largest = want.abs().amax(-1, keepdim=True)
    # E4M3 has 8 codes a power of two; the smallest are 2^-9 of the scale apart. A block's largest value is
    # 224 to 448 scales, and a code more can take it to the next scale.
    code = torch.maximum(torch.maximum(got.abs(), want.abs()) / 8, largest / 112 * 2.0**-9)
    assert ((got - want).abs() <= code + noise.view_as(got)).all()
    assert (got != want).float().mean() < 0.01
