"""MXFP4 experts on Hopper: grouping, two products with weights decoded in registers, and the combine."""

from pathlib import Path

import tilelang.language as T
import torch

from ..._op import compiled
from .._tilelang import HERE, build, device_source
from .api import scratch_parts

SMS = 132  # blocks of the persistent products; any number is right
# Largest token tile: the widths compiled for it (more in one kernel make ptxas serialise the products, C7512),
# blocks of 64 features a warp group, and groups that share the blocks of k.
SHAPES = {
    32: ((8, 16, 24, 32), 1, 2),
    64: ((24, 32, 48, 64), 1, 2),
    136: ((72, 136), 2, 1),
}
THREADS = 256


def _source(max_rows: int = 32) -> str:
    widths = SHAPES[max_rows][0]
    macro = "#define DSV41_WIDTHS(X) " + " ".join(f"X({n})" for n in widths) + "\n"
    files = (HERE / "weights_gemm.cuh", Path(__file__).parent / "mxfp4_moe.cuh")
    return macro + device_source(*files, wgmma={"bf16_rs": widths})


def _shared_bytes(k: int, max_rows: int) -> int:
    """`Layout::BYTES` of weights_gemm.cuh."""
    _, m_blocks, k_groups = SHAPES[max_rows]
    stage = max_rows * 256 + 2 * m_blocks * (4096 + 256)
    rest = (max_rows * 512 * m_blocks if k_groups > 1 else 0) + 4096 + 20 * max_rows + 256
    return min(12, (232448 - rest) // stage) * stage + rest


@compiled
def _prepare(hidden, arch):
    source = _source()
    tokens, top_k, rows = T.dynamic("tokens"), T.dynamic("top_k"), T.dynamic("rows")
    bounds = T.dynamic("bounds")

    @T.prim_func
    def prepare(
        ids: T.Tensor((tokens, top_k), T.int32),
        x: T.Tensor((tokens, hidden), T.uint8),
        x_scale: T.Tensor((tokens, hidden // 32), T.uint8),
        begins: T.Tensor((bounds,), T.int32),
        order: T.Tensor((rows,), T.int32),
        expanded: T.Tensor((tokens, hidden), T.bfloat16),
    ):
        with T.Kernel(bounds - 1 + T.ceildiv(tokens * (hidden // 8), 4 * THREADS), threads=THREADS) as _:
            T.import_source(source)
            shared = T.alloc_shared((64,), T.uint8)
            T.call_extern(
                "handle",
                f"moe::prepare<{hidden}>",
                ids.access_ptr("r"),
                x.access_ptr("r"),
                x_scale.access_ptr("r"),
                tokens,
                top_k,
                bounds - 1,
                begins.access_ptr("w"),
                order.access_ptr("w"),
                expanded.access_ptr("w"),
                shared.access_ptr("rw"),
            )

    return build(prepare, arch)


@compiled
def _gate_up(hidden, inter, max_rows, arch):
    source, (_, m_blocks, k_groups) = _source(max_rows), SHAPES[max_rows]
    tokens, top_k, rows = T.dynamic("tokens"), T.dynamic("top_k"), T.dynamic("rows")
    experts, bounds = T.dynamic("experts"), T.dynamic("bounds")

    @T.prim_func
    def gate_up(
        w: T.Tensor((experts, 2 * inter, hidden // 2), T.uint8),
        w_scale: T.Tensor((experts, 2 * inter, hidden // 32), T.uint8),
        x: T.Tensor((tokens, hidden), T.bfloat16),
        begins: T.Tensor((bounds,), T.int32),
        order: T.Tensor((rows,), T.int32),
        weights: T.Tensor((tokens, top_k), T.float32),
        out: T.Tensor((rows, inter), T.bfloat16),
        limit: T.float32,
    ):
        with T.Kernel(SMS, threads=128 + 256 * k_groups) as _:
            T.import_source(source)
            shared = T.alloc_shared((_shared_bytes(hidden, max_rows),), T.uint8)
            T.call_extern(
                "handle",
                f"moe::gate_up<{hidden}, {inter}, {max_rows}, {m_blocks}, {k_groups}>",
                w.access_ptr("r"),
                w_scale.access_ptr("r"),
                x.access_ptr("r"),
                begins.access_ptr("r"),
                order.access_ptr("r"),
                weights.access_ptr("r"),
                experts,
                top_k,
                limit,
                out.access_ptr("w"),
                shared.access_ptr("rw"),
            )

    return build(gate_up, arch)


@compiled
def _down(hidden, inter, max_rows, arch):
    source, (_, m_blocks, k_groups) = _source(max_rows), SHAPES[max_rows]
    rows, experts, bounds = T.dynamic("rows"), T.dynamic("experts"), T.dynamic("bounds")

    @T.prim_func
    def down(
        w: T.Tensor((experts, hidden, inter // 2), T.uint8),
        w_scale: T.Tensor((experts, hidden, inter // 32), T.uint8),
        x: T.Tensor((rows, inter), T.bfloat16),
        begins: T.Tensor((bounds,), T.int32),
        order: T.Tensor((rows,), T.int32),
        out: T.Tensor((rows, hidden), T.bfloat16),
    ):
        with T.Kernel(SMS, threads=128 + 256 * k_groups) as _:
            T.import_source(source)
            shared = T.alloc_shared((_shared_bytes(inter, max_rows),), T.uint8)
            T.call_extern(
                "handle",
                f"moe::down<{hidden}, {inter}, {max_rows}, {m_blocks}, {k_groups}>",
                w.access_ptr("r"),
                w_scale.access_ptr("r"),
                x.access_ptr("r"),
                begins.access_ptr("r"),
                order.access_ptr("r"),
                experts,
                out.access_ptr("w"),
                shared.access_ptr("rw"),
            )

    return build(down, arch)


@compiled
def _combine(hidden, top_k, with_shared, arch):
    source = _source()
    tokens, rows = T.dynamic("tokens"), T.dynamic("rows")

    @T.prim_func
    def combine(
        ids: T.Tensor((tokens, top_k), T.int32),
        parts: T.Tensor((rows, hidden), T.bfloat16),
        extra: T.Tensor((tokens, hidden), T.bfloat16),
        out: T.Tensor((tokens, hidden), T.bfloat16),
        experts: T.int32,
    ):
        with T.Kernel(T.ceildiv(tokens * (hidden // 8), THREADS), threads=THREADS) as _:
            T.import_source(source)
            T.call_extern(
                "handle",
                f"moe::combine<{hidden}, {top_k}, {str(with_shared).lower()}>",
                ids.access_ptr("r"),
                parts.access_ptr("r"),
                extra.access_ptr("r"),
                tokens,
                experts,
                out.access_ptr("w"),
            )

    return build(combine, arch)


def max_rows(tokens: int, top_k: int, experts: int) -> int:
    """Tokens of a tile at most: many stages of weights in flight while experts have few rows, else wide
    tiles. Depends on sizes only.
    """
    rows = tokens * top_k
    return 32 if rows <= 16 * experts else 64 if rows <= 48 * experts else 136


def variants(cfg):
    """Every build that a model of this configuration needs."""
    yield _prepare, (cfg.hidden, "sm_90a")
    for rows in SHAPES:
        yield _gate_up, (cfg.hidden, cfg.inter, rows, "sm_90a")
        yield _down, (cfg.hidden, cfg.inter, rows, "sm_90a")
    for with_shared in (False, True):
        yield _combine, (cfg.hidden, cfg.top_k, with_shared, "sm_90a")


def mxfp4_moe(
    x, x_scale, expert_ids, expert_weights, w13, w13_scale, w2, w2_scale, layout, limit, shared, out, scratch
):
    """Launches for ``dsv41.ops.mxfp4_moe``."""
    tokens, top_k = expert_ids.shape
    experts, inter, hidden = w13.shape[0], w13.shape[1] // 2, out.shape[1]
    if tokens == 0:
        return
    begins, order, rows, inner, parts = scratch_parts(scratch, tokens, top_k, experts, hidden, inter)
    arch, wide = "sm_90a", max_rows(tokens, top_k, experts)
    _prepare(hidden, arch)(expert_ids, x.view(torch.uint8), x_scale, begins, order, rows)
    _gate_up(hidden, inter, wide, arch)(w13, w13_scale, rows, begins, order, expert_weights, inner, limit)
    _down(hidden, inter, wide, arch)(w2, w2_scale, inner, begins, order, parts)
    extra = out if shared is None else shared
    _combine(hidden, top_k, shared is not None, arch)(expert_ids, parts, extra, out, experts)
