"""The corrected Triton interpreter computes as torch does; faults of a kernel show."""

import pytest
import torch

from dsv41 import ops

from .triton_interp import available, interpret

pytestmark = pytest.mark.skipif(not available(), reason="needs triton")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SAMPLES = "tests.tools.triton_samples"


def test_casts_round_to_nearest_even_and_saturate() -> None:
    ties = torch.arange(2048).float() / 64
    x = torch.cat([torch.linspace(-600, 600, 4096), ties, -ties, torch.randn(4096) * 1e5])
    bf, e4m3, e5m2 = (
        torch.empty(len(x)).bfloat16(),
        torch.empty(len(x)).to(E4M3),
        torch.empty(len(x)).to(E5M2),
    )
    interpret(SAMPLES).casts[(len(x) // 1024,)](x, bf, e4m3, e5m2, N=1024)
    assert torch.equal(bf, x.bfloat16())
    assert torch.equal(e4m3.float(), x.clamp(-448, 448).to(E4M3).float())
    assert torch.equal(e5m2.float(), x.clamp(-57344, 57344).to(E5M2).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3, torch.float32])
def test_dot(dtype: torch.dtype) -> None:
    a, b, c = torch.randn(16, 32).to(dtype), torch.randn(16, 32).to(dtype), torch.zeros(16, 16)
    interpret(SAMPLES).dot[(1,)](a, b, c, M=16, N=16, K=32)
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-6, atol=1e-5)


def test_a_nan_loses_in_max() -> None:
    x, out = torch.tensor([1.0, torch.nan, 3.0, -2.0]), torch.zeros(2)
    interpret(SAMPLES).row_max[(1,)](x, out, N=4)
    assert out.tolist() == [3.0, 4.0]


FAULTS = {
    "scale": ("scale_code(amax, shift, mantissa)", "scale_code(amax, shift, 0x7FFFFE)"),
    "nibbles": ("(low | high << 4)", "(high | low << 4)"),
    "grid": ("(22 << 23)", "(23 << 23)"),
    "sign": (">> 28 & 8", ">> 28 & 4"),
    "rows": ("row * x_stride", "row * (x_stride + 1)"),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_faults_of_a_kernel_show(fault: str | None) -> None:
    kernels = interpret("dsv41.ops.quant.triton_cuda", dict([FAULTS[fault]]) if fault else None)
    x = torch.randn(5, 96).bfloat16()[:, :64]
    values, scale = torch.zeros(5, 32, dtype=torch.uint8), torch.zeros(5, 2, dtype=torch.uint8)
    kernels.quantize_mxfp4(x, 1e-4, values, scale)
    want = ops.quantize_mxfp4(x, floor=1e-4)
    right = torch.equal(values, want.values) and torch.equal(scale, want.scale.view(torch.uint8))
    assert right == (fault is None)
