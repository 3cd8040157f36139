"""A kernel of each kind that SM103 (B300) takes from SM100, compiled for it. None was ever run.

The files are those of SM100, whose whole list `tests/test_lowering.py` compiles for sm_100a; a machine with
SM103 asks for sm_103a.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from dsv41 import Target, V41FlashConfig, warm
from dsv41.support import TARGETS
from tests.tools import lowering

pytest.importorskip("tilelang")
pytest.importorskip("triton")
if lowering.nvcc() is None or lowering.cuobjdump() is None:
    pytest.skip("needs nvcc and cuobjdump", allow_module_level=True)

OWN = [module for module in lowering.files("tilelang") if "sm100" in module]


def test_what_is_compiled_ahead_is_for_sm103() -> None:
    """A machine with SM103 takes SM100's kernels, all for sm_103a."""
    builds, others = (
        warm.variants(V41FlashConfig(), Target("cuda", arch, TARGETS["CUDA SM100"].packages))
        for arch in (103, 100)
    )
    assert [b.__name__ for b, _ in builds] == [b.__name__ for b, _ in others]
    assert {a for _, args in builds for a in args if str(a).startswith("sm_")} == {"sm_103a"}


@pytest.mark.parametrize("module", ["dsv41.ops.quant.tilelang_cuda", *OWN])
def test_tilelang(module: str) -> None:
    builder, args = lowering.all_variants(module, V41FlashConfig())[0]
    made = lowering.lower_tilelang(module, builder, args, "sm_103a")
    assert made.registers and (made.has("LDTM") == (module in OWN))


def test_triton() -> None:
    command = [sys.executable, "-m", "tests.tools.lowering", "dsv41.ops.draft.triton_cuda", "103"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-3000:]
    assert any(line.split()[-2] == "1" for line in done.stdout.splitlines()), "tcgen05"
