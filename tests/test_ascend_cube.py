"""Ascend kernels with products on cube cores, run from the emitted Ascend C on a CPU, against the reference.

The emulation has L1 and L0C in the layouts that TileLang's sources state, and both cores of a pair; sums are
float32, in the order of the values.
"""

import contextlib
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from dsv41_reference.quant import from_mxfp8, from_mxfp8_tiles, to_mxfp8

from dsv41 import ops
from dsv41.formats import MXFP4Experts, quantize_mxfp4, quantize_mxfp8
from dsv41.parity import distance
from tests.ops.attn_cases import Case, inputs
from tests.ops.test_index_hopper import Scene
from tests.test_ascend_index import score as reference_scores
from tests.tools import ascend_emu
from tests.tools.ascend_emu import EmulationError, emulated

pytest.importorskip("tilelang")
if not ascend_emu.available():
    pytest.skip("needs g++", allow_module_level=True)

BF16, E4M3, U8 = torch.bfloat16, torch.float8_e4m3fn, torch.uint8
LINEAR, INDEX, MOE = (f"dsv41.ops.{family}.tilelang_npu" for family in ("linear", "index", "moe"))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within the rounding of the output and of sums in another order."""
    slack = 2.0**-8 if got.dtype == BF16 else 2.0**-20
    scale = want.float().abs().amax(-1, keepdim=True) * (2.0**-16 if got.dtype == BF16 else 2.0**-20)
    far = (got.float() - want.float()).abs() > want.float().abs() * slack + scale
    assert not far.any(), (int(far.sum()), got[far][:4], want[far][:4])


def tiles(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(122, 131, (rows // 32, k // 32), dtype=U8)
    return torch.randn(rows, k).to(E4M3), codes


@pytest.mark.emulates("linear")
def test_linear() -> None:
    x, w = torch.randn(130, 256).to(BF16), torch.randn(256, 256).to(BF16)
    out = torch.zeros(130, 256)
    with emulated(LINEAR) as npu:
        npu.linear(x, w, out, None)
    close(out, x.float() @ w.float().T)


@pytest.mark.emulates("block_linear")
def test_block_linear() -> None:
    """Two depths of a tile, more rows than one tile holds; NaN stays in its row."""
    x = torch.randn(130, 256)
    x[7, 3] = torch.nan
    values, scale = to_mxfp8(x)
    w, codes = tiles(256, 256)
    out = torch.zeros(130, 256, dtype=BF16)
    with emulated(LINEAR) as npu:
        npu.block_linear(values, scale, w, codes, "exact", out, None)
    want = from_mxfp8(values, scale) @ from_mxfp8_tiles(w, codes).T
    assert out[7].isnan().all() and want[7].isnan().all()
    rest = torch.arange(130) != 7
    close(out[rest], want[rest])


@pytest.mark.emulates("grouped_linear")
def test_grouped_linear() -> None:
    x, (w, codes) = torch.randn(7, 2, 128).to(BF16), tiles(256, 128)
    out = torch.zeros(7, 2, 128, dtype=BF16)
    with emulated(LINEAR) as npu:
        npu.grouped_linear(x, w, codes, out, None)
    wide = from_mxfp8_tiles(w, codes).view(2, 128, 128)
    close(out, torch.einsum("tgk,grk->tgr", x.float(), wide))


ROWS = [(0, 300), (0, 299), (1, 40), (0, 260), (0, 170), (0, 120), (1, 41), (1, 0)]


@pytest.mark.parametrize("layout", ["mxfp4", "fp8"])
def test_index_scores(layout: str) -> None:
    """Tiles of one request and of several, a part of the entries, a page that is not held, NaN"""
    scene = Scene(layout, [300, 41], ROWS)
    scene.table[0, 9] = -1
    scene.weights[1, 3] = torch.nan
    q, q_scale, weights, requests, _, *rest = scene.args()
    given, expect = [q, q_scale, weights, requests, scene.visible, *rest], cast(Any, reference_scores)
    with emulated(INDEX) as npu:
        for first, width in ((0, 384), (128, 128)):
            got, want = torch.full((len(ROWS), width), 7.0), torch.full((len(ROWS), width), 7.0)
            npu.score(*given, first, got)
            expect(*given, first, want)
            exact = (want == 7) | want.isinf()
            assert torch.equal(got[exact], want[exact]) and torch.equal(got.isnan(), want.isnan())
            there = ~exact & ~want.isnan()
            assert (got - want)[there].abs().max() <= 2.0**-18 * want[there].abs().max()


def moe(npu: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels make of a call, and the reference."""
    torch.manual_seed(3)
    w13, w2 = quantize_mxfp4(torch.randn(3, 256, 256)), quantize_mxfp4(torch.randn(3, 256, 128))
    experts = MXFP4Experts(w13.values, w13.scale, w2.values, w2.scale)
    x = quantize_mxfp8(torch.randn(5, 256))
    ids = torch.tensor([[0, 2], [2, 1], [-1, 2], [2, 0], [1, 2]], dtype=torch.int32)
    weights, out = torch.rand(5, 2) + 0.1, torch.zeros(5, 256, dtype=BF16)
    npu.mxfp4_moe(*x.flat(), ids, weights, *experts.flat()[:4], "plain", 10.0, None, out, None)
    return out, ops.mxfp4_moe(x, ids, weights, experts, limit=10.0)


@pytest.mark.emulates("mxfp4_moe")
def test_experts() -> None:
    """Three experts, tiles of padding, an assignment without an expert, both depths of a product."""
    with emulated(MOE) as npu:
        got, want = moe(npu)
    assert (got.float() - want.float()).norm() < 2e-3 * want.float().norm()


# Planted into the emitted Ascend C: 0.5 becomes 0.54, rows of L1 without their padding, a lost wait of the
# cube core for its vector core.
FAULTS = {
    "value": ("* 48)", "* 49)"),
    "order": ("4128", "4096"),
    "wait": ("asc_sync_intra_wait(PIPE_MTE1, 1);", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_experts_are_seen(fault: str) -> None:
    planted = []

    def edit(source: str) -> str:
        planted.append(FAULTS[fault][0] in source)
        return source.replace(*FAULTS[fault])

    try:
        with emulated(MOE, edit) as npu:
            got, want = moe(npu)
        assert not (got.float() - want.float()).norm() < 2e-3 * want.float().norm()
    except EmulationError:
        pass
    assert any(planted)


@pytest.mark.emulates("markov_bias")
def test_markov_bias() -> None:
    """The store adds to the logits."""
    logits, embeds, weight = torch.randn(5, 256), torch.randn(5, 128).to(BF16), torch.randn(256, 128).to(BF16)
    want = logits + embeds.float() @ weight.float().T
    with emulated("dsv41.ops.draft.tilelang_npu") as npu:
        npu.markov_bias(logits, embeds, weight)
    close(logits, want)


def attend(npu: Any, case: Case, **change: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel makes of a case, and the reference."""
    (q, window, near, *rest), keys = inputs(case, "cpu")
    keys.update(change)
    if change:
        near = torch.full_like(near, -1)
    cos, sin = keys["inverse_rope"] or (None, None)
    far: tuple[Any, ...] = (None, "", None)
    if case.far:
        far = rest[0].pages, rest[0].record.layout, rest[1].contiguous()
    out, none = torch.zeros_like(q), torch.empty(0)
    npu.sparse_attn(
        q, window.pages, window.record.layout, near.contiguous(), *far, keys["sink"], cos, sin,
        keys["scale"], 1, out, none, none,
    )  # fmt: skip
    want, _ = ops.sparse_attn(q, window, near, *(rest if case.far else ()), **keys)
    return out, want


ATTN = "dsv41.ops.attn.tilelang_npu"
SMALL = Case("", tokens=3, heads=16, near=32, far=32, page=(16, 16), missing=0.3, width=128)


@pytest.mark.emulates("sparse_attn")
def test_sparse_attn() -> None:
    """Records of both kinds, ids of -1, NaN in records that no id names; infinite sinks, a bare window."""
    with emulated(ATTN) as npu:
        for sink in ({}, {"sink": torch.full((16,), torch.inf)}, {"sink": torch.full((16,), -torch.inf)}):
            out, want = attend(npu, SMALL, **sink)
            assert out.isfinite().all() and (distance(out, want) < 1e-5 if want.any() else not out.any())


def ragged(npu: Any, near: int, far: int, pages: tuple[int, int]) -> bool:
    """Whether ids that fill no tile give the reference's result."""
    case = replace(SMALL, tokens=2, near=near, far=far, layouts=("mxfp8", "mxfp8"), page=pages, rope=64)
    out, want = attend(npu, case)
    return bool(out.isfinite().all()) and distance(out, want) < 1e-5


@pytest.mark.parametrize("near, far", [(5, 0), (128, 5)])
def test_sparse_attn_of_any_number_of_ids(near: int, far: int) -> None:
    """No compressed entries, or the drafter's own rows; one kernel for pages of all sizes; rotated back."""
    with emulated(ATTN) as npu:
        assert ragged(npu, near, far, (133, 30)) and ragged(npu, near, far, (7, 16))


# Planted into the emitted Ascend C: ids behind the last, the window's page for the drafter's rows, an id of
# the next row; and into the launch.
FAULTS_OF_ATTENTION = {
    "tail": ("slot = -1;", ";"),
    "page": ("size = far_page;", ";"),
    "row": ("block_idx)) * (int64_t)5)", "block_idx)) * (int64_t)4)"),
}


@pytest.mark.parametrize("fault", [*FAULTS_OF_ATTENTION, "rotation", "angles"])
def test_faults_of_attention_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = FAULTS_OF_ATTENTION.get(fault, ("", ""))

    def edit(source: str) -> str:
        assert old in source
        return source.replace(old, new)

    with emulated(ATTN, edit) as npu:
        if fault == "rotation":
            monkeypatch.setattr(npu, "rope", lambda x, cos, sin, inverse, out: ops.rope(x, cos, sin, out=out))
        if fault == "angles":
            monkeypatch.setattr(npu, "rope", lambda x, c, s, inverse, out: ops.rope(x, s, c, out=out))
        with contextlib.suppress(EmulationError):
            assert not ragged(npu, 128, 5, (133, 30))
