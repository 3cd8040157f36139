"""The tile interpreter computes what TileLang programs say and reports planted faults."""

import inspect
import types
from typing import Any

import pytest
import torch

from dsv41.formats import E4M3, quantize_mxfp8

pytest.importorskip("tilelang")

from . import tilelang_samples
from .tile_interp import TileError, run

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def samples(tmp_path: Any, old: str = "", new: str = "") -> Any:
    """The sample programs after a change of their source."""
    if not old:
        return tilelang_samples
    text = inspect.getsource(tilelang_samples)
    assert old in text
    file = tmp_path / "changed.py"  # TileLang reads the source of its functions
    file.write_text(text.replace(old, new), "utf-8")
    module = types.ModuleType("changed")
    module.__file__ = str(file)
    exec(compile(file.read_text("utf-8"), str(file), "exec"), module.__dict__)
    return module


def rms_norm(programs: Any) -> bool:
    x, weight, out = torch.randn(6, 64).bfloat16(), torch.rand(64), torch.full((6, 64), torch.nan).bfloat16()
    run(programs.rms_norm(64), x, weight, out, 1e-6)
    want = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * weight
    return torch.allclose(out.float(), want, rtol=1e-2, atol=1e-3)


def decode_gemm(programs: Any) -> bool:
    m, n, k = 41, 64, 128
    a, w = torch.randn(m, k).bfloat16(), torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scale, c = torch.randint(120, 130, (n, k // 32), dtype=torch.uint8), torch.full((m, n), torch.nan)
    run(programs.decode_gemm(n, k), a, w, scale, c)
    values = torch.stack([E2M1[(w & 15).long()], E2M1[(w >> 4).long()]], -1).flatten(-2)
    want = a.float() @ (values * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)).T
    return torch.allclose(c, want, rtol=1e-4, atol=1e-3)


def quantize(programs: Any) -> bool:
    x = torch.randn(5, 96)[:, :64]
    x[0, 0] = 7.5  # just above 448 / 256 times a power of two
    out, code = torch.zeros(5, 64).to(E4M3), torch.zeros(5, 2, dtype=torch.uint8)
    run(programs.quantize(64), x, out, code)
    want = quantize_mxfp8(x)
    same = torch.equal(out.view(torch.uint8), want.values.view(torch.uint8))
    return same and torch.equal(code, want.scale.view(torch.uint8))


def running_max(programs: Any) -> bool:
    x, out = torch.randn(3, 8), torch.zeros(3, 8)
    run(programs.running_max(8), x, out)
    return torch.equal(out, x.cummax(-1).values)


@pytest.mark.parametrize("case", [rms_norm, decode_gemm, quantize, running_max])
def test_samples(case: Any) -> None:
    assert case(tilelang_samples)


FAULTS = [
    (decode_gemm, "T.Cast(T.uint32, j % 2)", "T.Cast(T.uint32, 1 - j % 2)", None),
    (decode_gemm, "(step * bk + j) // 32", "j // 32", None),
    (decode_gemm, "T.Pipelined(k // bk", "T.Pipelined(k // bk - 1", None),
    (decode_gemm, "T.clear(acc)", "T.evaluate(0)", "never written"),
    (decode_gemm, "<< 28", "<< 27", None),
    (decode_gemm, "a[by * bm, step * bk]", "a[bx * bm, step * bk]", None),
    (decode_gemm, "sw[i, j // 2]", "sw[i, j]", "outside sw"),
    (rms_norm, "square[i, j] = v[i, j] * v[i, j]", "square[i, 0] = v[i, j] * v[i, j]", "different values"),
    (rms_norm, "T.copy(x[block * rows, 0], v)", "T.evaluate(0)", "never written"),
    (rms_norm, "total[i] /", "total[i + 1] /", "outside total"),
    (quantize, "> 0x600000", "> 0x700000", None),
    (quantize, "exponent + 1", "exponent + 2", None),
    (running_max, "out[row, j] = best[0]", "out[row, 0] = best[0]", None),
]


@pytest.mark.parametrize(
    "case, old, new, message", FAULTS, ids=[f"{f[0].__name__}-{i}" for i, f in enumerate(FAULTS)]
)
def test_faults(case: Any, old: str, new: str, message: str | None, tmp_path: Any) -> None:
    changed = samples(tmp_path, old, new)
    if message is None:
        assert not case(changed)
    else:
        with pytest.raises(TileError, match=message):
            case(changed)
