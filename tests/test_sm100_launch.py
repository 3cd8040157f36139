"""The launch functions of SM100's kernels on a CPU, from the public function to the kernel's arguments.

The compiled kernel is replaced by its program in an emulation, whose result must be the reference's; and the
same arguments are shown to the compiled kernel's own checks. `tests/mutations_sm100.py` has the mistakes that
these tests are known to see.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from dsv41_reference.quant import to_mxfp8_tiles

from dsv41 import Target, ops, use
from dsv41.formats import E8M0, MXFP8, MXFP4Experts, quantize_mxfp4, quantize_mxfp8
from tests.tools import host_args, lowering, sm100_emu

pytest.importorskip("tilelang")

BF16 = torch.bfloat16
LINEAR, MOE = (f"dsv41.ops.{family}.tilelang_sm100_cuda" for family in ("linear", "moe"))


@contextlib.contextmanager
def on_sm100() -> Iterator[None]:
    """CPU tensors count as a B200's; what is not under test there is the reference's."""
    target = Target("cuda", 100, frozenset({"tilelang", "nvcc"}))
    others = ("swiglu_quantize", "quantize_mxfp8")
    with mock.patch.object(Target, "of", staticmethod(lambda x: target)), use("torch", *others):
        yield


def scattered(*shape: int) -> torch.Tensor:
    """Rows and blocks of very different sizes: no scale may be another's."""
    x = torch.randn(*shape).unflatten(-1, (-1, 32))
    return (x * torch.exp2(torch.randint(-5, 6, (*x.shape[:-1], 1)))).flatten(-2).to(BF16)


def linear_call(tokens: int) -> tuple[MXFP8, MXFP8]:
    values, codes = to_mxfp8_tiles(scattered(256, 384).float())
    return quantize_mxfp8(scattered(tokens, 384)), MXFP8(values, codes.view(E8M0), tile_rows=32)


def experts_call() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """More rows of expert 3 than a tile holds, less than half a tile of 0, none of 1, ids of nobody."""
    w13, w2 = quantize_mxfp4(scattered(4, 512, 128)), quantize_mxfp4(scattered(4, 128, 256))
    stack = MXFP4Experts(w13.values, w13.scale, w2.values, w2.scale)
    ids = torch.stack([torch.full((140,), 3), (torch.arange(140) % 5 > 0) * 2], 1).int()
    ids[7], ids[9, 0], ids[139] = -1, 4, torch.tensor([2, 0])
    args = quantize_mxfp8(scattered(140, 128)), ids, torch.rand(140, 2) + 0.1, stack
    return args, {"limit": 5.0, "shared": torch.randn(140, 128).to(BF16)}


def close(got: torch.Tensor, want: torch.Tensor, slack: float) -> None:
    """Within roundings of a row's size; NaN in the same places."""
    size = want.float().square().mean(-1, keepdim=True).sqrt()
    assert got.shape == want.shape and torch.equal(got.isnan(), want.isnan())
    far = (got.float() - want.float()).abs() > slack * torch.maximum(size, want.float().abs())
    assert not far.any(), f"{int(far.sum())} of {far.numel()}"


LATE = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])


@LATE
@pytest.mark.parametrize("tokens", [0, 8, 130])  # 8: as many rows of scales as the weights have
def test_block_linear(tokens: int, late: bool) -> None:
    x, w = linear_call(tokens)
    if tokens:
        x.values.view(torch.uint8)[3, 5] = 0x7F  # NaN stays in its row
    with on_sm100(), sm100_emu.emulated(LINEAR, late):
        got = ops.block_linear(x, w)
    close(got, ops.block_linear(x, w), 2.0**-7)


@LATE
@pytest.mark.parametrize("tokens", [0, 8, 130])
def test_grouped_linear(tokens: int, late: bool) -> None:
    """Three groups; a NaN stays in its row and group."""
    values, codes = to_mxfp8_tiles(scattered(384, 256).float())
    w, x = MXFP8(values, codes.view(E8M0), tile_rows=32), scattered(tokens, 3, 256)
    if tokens:
        x[3, 1, 5] = torch.nan
    with on_sm100(), sm100_emu.emulated(LINEAR, late):
        got = ops.grouped_linear(x, w)
    close(got.flatten(1), ops.grouped_linear(x, w).flatten(1), 2.0**-7)


@LATE
def test_experts(late: bool) -> None:
    args, keys = experts_call()
    with on_sm100(), sm100_emu.emulated(MOE, late):
        got = ops.mxfp4_moe(*args, **keys)
        none = ops.mxfp4_moe(torch.zeros(0, 128).to(BF16), args[1][:0], args[2][:0], args[3], limit=5.0)
    close(got, ops.mxfp4_moe(*args, **keys), 2.0**-6)
    assert none.shape == (0, 128)


@pytest.mark.skipif(lowering.nvcc() is None or torch.cuda.is_available(), reason="needs nvcc and no GPU")
@pytest.mark.parametrize("module", [LINEAR, MOE])
def test_the_compiled_kernel_takes_what_it_is_given(module: str) -> None:
    """TileLang's own checks of types, sizes and strides; and that they would say something."""
    loaded, launched = importlib.import_module(module), []

    def product(*args: Any) -> Any:
        return lambda *given: launched.append((args, given))

    with on_sm100(), mock.patch.object(loaded, "_product", product):
        if module == LINEAR:
            ops.block_linear(*linear_call(130))
        else:
            args, keys = experts_call()
            ops.mxfp4_moe(*args, **keys)
    args, given = launched[0]
    kernel = loaded._product(*args)
    assert host_args.refusal(kernel, *given) is None
    x, x_scale, w, w_scale, owner, out = given
    assert "x_scale dtype" in str(host_args.refusal(kernel, x, x_scale.view(torch.int32), *given[2:]))
    assert "w_scale shape" in str(host_args.refusal(kernel, x, x_scale, w, w_scale[1:], owner, out))


@pytest.mark.skipif(lowering.nvcc() is None or torch.cuda.is_available(), reason="needs nvcc and no GPU")
def test_the_compiled_kernel_of_groups_takes_what_it_is_given() -> None:
    loaded, launched = importlib.import_module(LINEAR), []

    def grouped(*args: Any) -> Any:
        return lambda *given: launched.append((args, given))

    values, codes = to_mxfp8_tiles(torch.randn(256, 256))
    with on_sm100(), mock.patch.object(loaded, "_grouped", grouped):
        ops.grouped_linear(scattered(130, 2, 256), MXFP8(values, codes.view(E8M0), tile_rows=32))
    args, given = launched[0]
    kernel = loaded._grouped(*args)
    assert host_args.refusal(kernel, *given) is None
    assert "x shape" in str(host_args.refusal(kernel, given[0][:, :256], *given[1:]))
