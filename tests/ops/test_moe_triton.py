"""The portable kernels of the experts: in the corrected interpreter, and on a GPU where one is present."""

from typing import Any

import pytest
import torch

from dsv41 import V41FlashConfig
from dsv41._op import Target, explain, use
from dsv41.formats import MXFP4Experts, quantize_mxfp8
from dsv41.ops import mxfp4_moe, pack_experts
from dsv41.ops.moe.api import mxfp4_moe_scratch
from dsv41.parity import distance
from tests.ops.test_moe_kernel import make_experts
from tests.tools import triton_interp

interpreted = pytest.mark.skipif(not triton_interp.available(), reason="needs triton")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MODULE = "dsv41.ops.moe.triton_cuda"


def step(tokens: int, top_k: int, experts: int, hidden: int, device: str = "cpu") -> tuple[Any, ...]:
    """Rows, and experts of which the last has no token; some choices are none."""
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    ids = torch.rand(tokens, experts - 1, device=device).argsort(1)[:, :top_k].int()
    ids[torch.rand(ids.shape, device=device) < 0.2] = -1
    return x, ids, torch.rand(tokens, top_k, device=device) + 0.1


def interpret_moe(x, ids, weights, e: MXFP4Experts, limit: float, shared=None, edit=None) -> torch.Tensor:
    """The launches of `mxfp4_moe` in the interpreter, over scratch of NaN."""
    kernels, out = triton_interp.interpret(MODULE, edit), torch.empty_like(x)
    size = mxfp4_moe_scratch(ids.shape[0], ids.shape[1], e.num_experts, e.hidden, e.inter)
    scratch = torch.full((size,), 255, dtype=torch.uint8)
    kernels.mxfp4_moe(*quantize_mxfp8(x).flat(), ids, weights, *e.flat(), limit, shared, out, scratch)
    return out


CASES = {
    "tiny": (5, 2, 4, 128, 64, 10.0),
    "odd sizes": (3, 2, 4, 96, 32, 1.0),
    "two columns of tiles": (2, 2, 3, 64, 96, 10.0),
    "many tokens": (80, 1, 3, 32, 32, 10.0),
    "one token": (1, 2, 3, 32, 32, 10.0),
}


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_interpreted_is_the_reference(case: str) -> None:
    torch.manual_seed(0)
    tokens, top_k, count, hidden, inter, limit = CASES[case]
    e, (x, ids, weights) = make_experts(count, hidden, inter), step(tokens, top_k, count, hidden)
    for shared in (None, torch.randn(tokens, hidden).bfloat16()):
        got = interpret_moe(x, ids, weights, e, limit, shared)
        assert distance(got, mxfp4_moe(x, ids, weights, e, limit=limit, shared=shared)) < 1e-5


@interpreted
def test_all_tokens_to_one_expert_and_wrong_ids() -> None:
    """One hot expert; ids beyond the local ones contribute nothing; a NaN stays in its row."""
    torch.manual_seed(0)
    e = make_experts(3, 64, 32)
    x, ids, weights = torch.randn(70, 64).bfloat16(), torch.full((70, 2), 1).int(), torch.rand(70, 2)
    ids[:, 1] = 7
    want = mxfp4_moe(x, ids, weights, e, limit=10.0)
    assert distance(interpret_moe(x, ids, weights, e, 10.0), want) < 1e-5
    x[3, 5] = torch.nan
    got = interpret_moe(x, ids, weights, e, 10.0)
    others = torch.arange(70) != 3
    assert got[3].isnan().all() and distance(got[others], want[others]) < 1e-5


FAULTS = {
    "nibbles swapped": ("tl.join(byte & 15, byte >> 4)", "tl.join(byte >> 4, byte & 15)"),
    "half of one": ("tl.where(size < 2, 0.5 * size", "tl.where(size < 1, 0.5 * size"),
    "up before gate": ("w_row + INTER, live", "w_row, live"),
    "weight after the product": ("* tl.load(weights + assignment, used, other=0.0)[:, None]", ""),
    "not clamped below": ("tl.where(u < -limit, -limit, u)", "u"),
    "not requantised": ("e4m3.to(tl.float32) * power(code)[:, None]", "blocks"),
    "next position": ("tl.cumsum(here, 0) - here", "tl.cumsum(here, 0)"),
    "wrong ids count": ("& (id < experts)", ""),
}


@interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    torch.manual_seed(0)
    e, (x, ids, weights) = make_experts(3, 64, 32), step(9, 2, 3, 64)
    ids[2, 1] = 9
    want = mxfp4_moe(x, ids, weights, e, limit=0.5)
    assert not distance(interpret_moe(x, ids, weights, e, 0.5, edit=dict([FAULTS[fault]])), want) < 1e-5


def test_the_hopper_kernel_comes_first() -> None:
    """This one takes what that one refuses; which of the two runs is visible."""
    names = [
        name for name, _ in explain(mxfp4_moe, Target("cuda", 90, frozenset({"tilelang", "triton", "nvcc"})))
    ]
    assert names.index("tilelang_cuda") < names.index("triton_cuda")


@needs_gpu
@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 300, 2000])
@pytest.mark.parametrize("size", ["tiny", "packed"])
def test_gpu(tokens: int, size: str) -> None:
    """The reference's values, the same bits again and alone; beside the Hopper kernel for sizes it takes."""
    torch.manual_seed(tokens)
    hidden, inter = (128, 64) if size == "tiny" else (512, 256)
    e, (x, ids, weights) = make_experts(9, hidden, inter, "cuda"), step(tokens, 3, 9, hidden, "cuda")
    shared = torch.randn_like(x)
    got = mxfp4_moe(x, ids, weights, e, limit=10.0, shared=shared)
    assert torch.equal(got, mxfp4_moe(x, ids, weights, e, limit=10.0, shared=shared))
    if not tokens:
        return
    row = tokens // 2
    a, b, c, d = (t[row : row + 1] for t in (x, ids, weights, shared))
    assert torch.equal(mxfp4_moe(a, b, c, e, limit=10.0, shared=d)[0], got[row])
    with use("torch"):
        assert distance(got, mxfp4_moe(x, ids, weights, e, limit=10.0, shared=shared)) < 1e-5
    if size == "packed":
        packed = mxfp4_moe(x, ids, weights, pack_experts(e), limit=10.0, shared=shared)
        assert distance(got, packed) < 1e-5


@needs_gpu
def test_gpu_takes_the_small_models() -> None:
    for cfg in (V41FlashConfig.tiny(), V41FlashConfig.micro()):
        e = make_experts(5, cfg.hidden, cfg.inter, "cuda")
        x, ids, weights = step(6, 2, 5, cfg.hidden, "cuda")
        got = mxfp4_moe(x, ids, weights, e, limit=10.0)
        with use("torch"):
            assert distance(got, mxfp4_moe(x, ids, weights, e, limit=10.0)) < 1e-5
