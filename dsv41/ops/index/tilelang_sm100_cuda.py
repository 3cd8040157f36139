"""index_topk on SM100: the scan of Hopper with a product of its own, MXFP4 times MXFP4 in tensor memory.

The program runs on a CPU (tests/ops/test_index_sm100.py); nobody has run the kernel. One query at a time.
"""

from pathlib import Path

from ..._op import compiled
from .. import _tilelang
from .._tilelang import arch_of, build, device_source
from . import tilelang_scan

HERE = Path(__file__).parent
ARCH = "sm_100a"
TOGETHER = 1  # queries of a pass over the keys


def scan_source(together: int = TOGETHER) -> str:
    """The text of scans and merges."""
    assert together == TOGETHER
    files = ("select.cuh", "index_plan.cuh", "index_scaled.cuh", "index_topk.cuh")
    return device_source(_tilelang.HERE / "sm100.cuh", *(HERE / file for file in files))


@compiled
def _scan(publish, restrict, select, arch):
    program = tilelang_scan.scan_program(scan_source(), "scaled", TOGETHER, publish, restrict, select)
    return build(program, arch)


@compiled
def _merge(publish, restrict, arch):
    return build(tilelang_scan.merge_program(scan_source(), TOGETHER, publish, restrict), arch)


def variants(cfg):
    """A plain selection, one that publishes blocks, one that they restrict."""
    for publish, restrict in ((False, False), (True, False), (False, True)):
        yield _scan, (publish, restrict, True, ARCH)
        yield _merge, (publish, restrict, ARCH)


def launch(q, *args, select=True):
    """`tilelang_scan.launch` with the kernels of SM100."""
    arch, before, after = arch_of(q), args[:5], args[6:]  # the layout of the keys is known
    scan, merge = (lambda _, *flags, build=build: build(*flags, arch) for build in (_scan, _merge))
    tilelang_scan.launch(scan, merge, q, *before, *after, select=select, together=TOGETHER)


def index_topk(*args):
    """Launches for ``dsv41.ops.index_topk``."""
    tilelang_scan.index_topk(launch, *args)
