"""The products of SM100, run from their programs on a CPU: what tests/tools/sm100_emu.py says it sees."""

import pytest
import torch
from dsv41_reference.quant import from_mxfp4, from_mxfp8, from_mxfp8_tiles, to_mxfp8_tiles

from dsv41.formats import quantize_mxfp4, quantize_mxfp8
from tests.tools.sm100_emu import EmulationError, launch, program

U8, FEATURES, K = torch.uint8, 256, 768  # six tiles of k: the four stages are used again


def words(codes: torch.Tensor) -> torch.Tensor:
    """Four scale bytes a word, as unsigned numbers."""
    return codes.view(U8).contiguous().view(torch.int32).long() & 0xFFFFFFFF


def rows_of(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """E4M3 values as numbers, words of scales, and what both mean. Scales differ in every block."""
    x = quantize_mxfp8((torch.randn(count, K) * torch.exp2(torch.randint(-6, 6, (count, K)))).bfloat16())
    return x.values.double(), words(x.scale), from_mxfp8(*x.flat()).double()


def linear(edit: tuple[str, str] | None = None, late: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """What the program of a linear gives, and what it should; the last tile of rows is not full."""
    x, x_words, want = rows_of(130)
    w, code = to_mxfp8_tiles(
        torch.randn(FEATURES, K) * torch.exp2(torch.arange(FEATURES)[:, None] // 32 * 1.0)
    )
    out, owner = torch.full((130, FEATURES), float("nan"), dtype=torch.float64), torch.zeros(0)
    launch(program(FEATURES, K, None, edit=edit), x, x_words, w.double(), words(code), owner, out, late=late)
    return out, want @ from_mxfp8_tiles(w, code).double().T


def experts(edit: tuple[str, str] | None = None, late: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for rows sorted by expert: two tiles of experts, one of nobody in between."""
    x, x_words, want = rows_of(384)
    w = quantize_mxfp4(torch.randn(3, FEATURES, K) * torch.exp2(torch.randint(-3, 3, (3, FEATURES, 1))))
    whole = from_mxfp4(w.values, w.scale.view(U8)).double()
    values = whole / torch.exp2(w.scale.view(U8).double() - 127).repeat_interleave(32, 2)
    owner = torch.tensor([2, -1, 1]).repeat_interleave(128)
    out = torch.full((384, FEATURES), float("nan"), dtype=torch.float64)
    codes = words(w.scale).flatten(0, 1)
    launch(program(FEATURES, K, 3, edit=edit), x, x_words, values.flatten(0, 1), codes, owner, out, late=late)
    expected = torch.cat([want[:128] @ whole[2].T, out[128:256], want[256:] @ whole[1].T])
    return out, expected


def grouped(edit: tuple[str, str] | None = None, late: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 rows of two groups side by side, weights of E4M3 tiles."""
    rank, k = 128, 512  # four tiles of k: the first of three stages is used again
    x = torch.randn(130, 2, k).bfloat16()
    powers = torch.exp2(torch.randint(-6, 6, (2 * rank // 32, 1)))
    w, code = to_mxfp8_tiles(torch.randn(2 * rank, k) * powers.repeat_interleave(32, 0))
    code[3, 5], code[6] = 255, 0  # NaN, also where infinite weights would have a sum; the least power
    x[:, 0, 160:192], x[:, 1] = x[:, 0, 160:192].abs() + 1, x[:, 1] * 2.0**100
    for part in (w[96:128, 160:192], w[192:224]):
        part.copy_(part.float().abs() / 2 + 64)
    out, unread = torch.full((130, 2 * rank), float("nan"), dtype=torch.float64), torch.zeros(0)
    rows, scales = x.flatten(1).double(), words(code)
    launch(program(rank, k, None, 2, edit), rows, scales, w.double(), scales, unread, out, late=late)
    whole = from_mxfp8_tiles(w, code).double().unflatten(0, (2, rank))
    return out, torch.einsum("tgk,grk->tgr", x.double(), whole).flatten(1)


def right(made: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.allclose(*made, rtol=1e-12, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("product", [linear, experts, grouped])
def test_products(product, late: bool) -> None:
    assert right(product(late=late))


# Planted in the program's text: barriers, parities, fences, indices, scales.
INDENT = "\n" + 32 * " "
FAULTS = {
    "one warp's arrivals": ("T.alloc_barrier([64] * STAGES)", "T.alloc_barrier([32] * STAGES)"),
    "one stage for all": ("step % STAGES", "0 % STAGES"),
    "parity of the wait for tiles": (
        "T.mbarrier_wait_parity(loaded[stage], step // STAGES & 1)",
        "T.mbarrier_wait_parity(loaded[stage], step // STAGES & 1 ^ 1)",
    ),
    "no wait for scales": ("T.mbarrier_wait_parity(ordered[stage], step // STAGES & 1)", "pass"),
    "no wait for tiles": ("T.mbarrier_wait_parity(loaded[stage], step // STAGES & 1)", "pass"),
    "tiles over tiles in use": ("T.mbarrier_wait_parity(consumed[stage], step // STAGES & 1 ^ 1)", "pass"),
    "no fence": ("T.fence_proxy_async()", "pass"),
    "no transposition": ("T.tcgen05_sf_warp_transpose(b_words[stage, :])", "pass"),
    "sums of the tile before": ("clear_accum=step == 0", "clear_accum=False"),
    "only the last step": ("clear_accum=step == 0", "clear_accum=True"),
    "scales of the other operand": (f"a_scale,{INDENT}b_scale", f"b_scale,{INDENT}a_scale"),
    "the next step's scales": ("x_scale[at, step]", "x_scale[at, (step + 1) % words]"),
    "a tile's scale": ("(at if fp4 else at // 32)", "(at if fp4 else at // 64)"),
    "no wait for the end": ("T.mbarrier_wait_parity(finished[0], 0)", "pass"),
    "no fence before the sums": ("T.tcgen05_after_thread_sync()", "pass"),
    "columns exchanged": ("out[row * ROWS, column * FEATURES]", "out[row * ROWS, 0]"),
}  # fmt: skip
FAULTS_OF_EXPERTS = {
    "the first expert": ("first = expert * features", "first = 0 * features"),
    "scales of the first expert": ("expert * scale_rows +", "0 * scale_rows +"),
    "whose tile": ("owner[row * ROWS]", "owner[row]"),
    "a tile of nobody": ("if expert >= 0:", "if expert >= -1:"),
}

FAULTS_OF_GROUPS = {
    "no wait for weights": ("T.mbarrier_wait_parity(ordered[stage], step // STAGES & 1)", "pass"),
    "no wait for rows": ("T.mbarrier_wait_parity(loaded[stage], step // STAGES & 1)", "pass"),
    "weights over others": ("T.mbarrier_wait_parity(consumed[stage], step // STAGES & 1 ^ 1)", "pass"),
    "one warp's arrivals": ("T.alloc_barrier([64] * STAGES)", "T.alloc_barrier([32] * STAGES)"),
    "no fence": ("T.fence_proxy_async()", "pass"),
    "sums of the tile before": ("clear_accum=step == 0", "clear_accum=False"),
    "rows of the first group": ("column * FEATURES // features * k", "0"),
    "half a group": ("column * FEATURES // features * k", "column * FEATURES // (2 * features) * k"),
    "the next scale": ("piece // 2 * 8", "(piece + 1) // 2 % 4 * 8"),
    "scales of another tile": ("w_scale[at // 32, step] >>", "w_scale[at // 64, step] >>"),
    "scales of another step": ("w_scale[at // 32, step] >>", "w_scale[at // 32, 0] >>"),
    "weights of another step": ("w[at, step * K + piece", "w[at, piece"),
    "weights of another row": ("at = column * FEATURES + own", "at = column * FEATURES + own // 2"),
    "half of a row": ("b[stage, own, piece * 16 + j]", "b[stage, own, piece // 2 * 16 + j]"),
    "infinite instead of NaN": ("T.uint32(0x7FC00000)", "T.uint32(0x7F800000)"),
    "zero for the least power": ("T.uint32(0x400000)", "T.uint32(0)"),
}  # fmt: skip


def seen(product, edit: tuple[str, str]) -> bool:
    """Whether a mistake shows in one of the two orders of the engines."""
    for late in (False, True):
        try:
            if not right(product(edit, late)):
                return True
        except EmulationError:
            return True
    return False


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_linear_are_seen(fault: str) -> None:
    assert seen(linear, FAULTS[fault])


@pytest.mark.parametrize("fault", FAULTS_OF_EXPERTS)
def test_faults_of_the_experts_are_seen(fault: str) -> None:
    assert seen(experts, FAULTS_OF_EXPERTS[fault])


@pytest.mark.parametrize("fault", FAULTS_OF_GROUPS)
def test_faults_of_the_groups_are_seen(fault: str) -> None:
    assert seen(grouped, FAULTS_OF_GROUPS[fault])
