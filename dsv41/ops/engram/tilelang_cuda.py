"""Engram's gate on Hopper (gate.cuh)."""

from pathlib import Path

import tilelang.language as T

from ..._op import compiled
from .._tilelang import arch_of, build, device_source

HERE = Path(__file__).parent
ARCH = "sm_90a"
BLOCKS = 132  # one a multiprocessor; any number is right


def source():
    """The text of the kernel."""
    return device_source(HERE.parent / "quant" / "quantize.cuh", HERE / "gate.cuh")


def shared_bytes(hidden, streams):
    """Two tokens, the sums of the warps of each, two barriers."""
    return 2 * ((2 * streams + 1) * hidden * 2 + hidden // 256 * 3 * streams * 4) + 32


@compiled
def _gate(hidden, streams, arch):
    text, call, size = source(), f"engram::gate<{hidden}, {streams}>", shared_bytes(hidden, streams)

    @T.prim_func
    def engram_gate_rows(
        out: T.Tensor((16,), T.bfloat16),  # the start of the result
        x: T.int64,
        x_token: T.int64,
        x_stream: T.int64,
        kv: T.int64,
        kv_token: T.int64,
        q_weight: T.int64,
        q_stride: T.int64,
        k_weight: T.int64,
        k_stride: T.int64,
        dead: T.int64,
        eps: T.float32,
        out_token: T.int64,
        out_stream: T.int64,
        count: T.int32,
    ):
        with T.Kernel(T.min(count, BLOCKS), threads=hidden // 8) as _:
            T.import_source(text)
            T.pdl_sync()
            T.pdl_trigger()
            shared = T.alloc_shared((size,), T.uint8)
            T.call_extern(
                "handle", call, x, x_token, x_stream, kv, kv_token, q_weight, q_stride, k_weight, k_stride,
                dead, eps, out.access_ptr("w"), out_token, out_stream, count, shared.access_ptr("rw"),
            )  # fmt: skip

    return build(engram_gate_rows, arch)


def variants(cfg):
    """The model's width."""
    yield _gate, (cfg.hidden, cfg.num_streams, ARCH)


def engram_gate(x, kv, q_weight, k_weight, dead, eps, out):
    """Launch of ``dsv41.ops.engram_gate``."""
    count, streams, hidden = x.shape
    if not count:
        return
    _gate(hidden, streams, arch_of(x))(
        out.as_strided((16,), (1,)), x.data_ptr(), x.stride(0), x.stride(1), kv.data_ptr(), kv.stride(0),
        q_weight.data_ptr(), q_weight.stride(0), k_weight.data_ptr(), k_weight.stride(0),
        0 if dead is None else dead.data_ptr(), eps, out.stride(0), out.stride(1), count,
    )  # fmt: skip
