"""MXFP4 experts on Hopper: grouping, two products with weights decoded in registers, and the combine."""

from pathlib import Path
from typing import NamedTuple

import tilelang.language as T
import torch

from ..._op import compiled, split_scratch
from .._tilelang import HERE, build, device_source
from .api import scratch_parts

SMS = 132  # blocks of the persistent products; any number is right
THREADS = 256


class Shape(NamedTuple):
    """How a product is tiled. Few widths: with more, ptxas serialises the products (C7512)."""

    widths: tuple[int, ...]  # token tiles compiled; the last is the largest
    m_blocks: int  # blocks of 64 features a warp group
    k_groups: int  # warp groups that share the blocks of k
    native: bool  # token rows in E4M3 with a scale each 32, else bf16


SHAPES = {
    32: Shape((8, 16, 24, 32), 1, 2, True),
    136: Shape((72, 136), 2, 1, False),
}


def _source(max_rows: int) -> str:
    shape = SHAPES[max_rows]
    macro = "#define DSV41_WIDTHS(X) " + " ".join(f"X({n})" for n in shape.widths) + "\n"
    files = (HERE / "weights_gemm.cuh", Path(__file__).parent / "mxfp4_moe.cuh")
    return macro + device_source(*files, wgmma={"bf16_rs": shape.widths, "e4m3_rs": shape.widths})


def _shared_bytes(k: int, max_rows: int) -> int:
    """`Layout::BYTES` of weights_gemm.cuh."""
    _, m_blocks, k_groups, native = SHAPES[max_rows]
    stage = max_rows * (144 if native else 256) + 2 * m_blocks * (4096 + 256)
    rest = (max_rows * 512 * m_blocks if k_groups > 1 else 0) + 4096 + 28 * max_rows + 256
    return min(12, (232448 - rest) // stage) * stage + rest


@compiled
def _prepare(hidden, native, arch):
    source = _source(136)
    tokens, top_k, rows = T.dynamic("tokens"), T.dynamic("top_k"), T.dynamic("rows")
    bounds = T.dynamic("bounds")
    out = T.Tensor((tokens, hidden // 32), T.float32) if native else T.Tensor((tokens, hidden), T.bfloat16)

    @T.prim_func
    def prepare(
        ids: T.Tensor((tokens, top_k), T.int32),
        x: T.Tensor((tokens, hidden), T.uint8),
        x_scale: T.Tensor((tokens, hidden // 32), T.uint8),
        begins: T.Tensor((bounds,), T.int32),
        order: T.Tensor((rows,), T.int32),
        expanded: out,
    ):
        with T.Kernel(bounds - 1 + T.ceildiv(tokens * (hidden // 32), THREADS), threads=THREADS) as _:
            T.import_source(source)
            shared = T.alloc_shared((64,), T.uint8)
            T.call_extern(
                "handle",
                f"moe::prepare<{hidden}, {str(native).lower()}>",
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
    source, (_, m_blocks, k_groups, native) = _source(max_rows), SHAPES[max_rows]
    tokens, top_k, rows, scales = (T.dynamic(n) for n in ("tokens", "top_k", "rows", "scales"))
    experts, bounds, inner = T.dynamic("experts"), T.dynamic("bounds"), T.dynamic("inner")
    value = T.uint8 if native else T.bfloat16

    @T.prim_func
    def gate_up(
        w: T.Tensor((experts, 2 * inter, hidden // 2), T.uint8),
        w_scale: T.Tensor((experts, 2 * inter, hidden // 32), T.uint8),
        x: T.Tensor((tokens, hidden), value),
        x_scale: T.Tensor((scales,), T.float32),
        begins: T.Tensor((bounds,), T.int32),
        order: T.Tensor((rows,), T.int32),
        weights: T.Tensor((tokens, top_k), T.float32),
        out: T.Tensor((inner,), value),
        out_scale: T.Tensor((rows, inter // 32), T.float32),
        limit: T.float32,
    ):
        with T.Kernel(SMS, threads=128 + 256 * k_groups) as _:
            T.import_source(source)
            shared = T.alloc_shared((_shared_bytes(hidden, max_rows),), T.uint8)
            T.call_extern(
                "handle",
                f"moe::gate_up<{hidden}, {inter}, {max_rows}, {m_blocks}, {k_groups}, {_tokens(native)}>",
                w.access_ptr("r"),
                w_scale.access_ptr("r"),
                x.access_ptr("r"),
                x_scale.access_ptr("r"),
                begins.access_ptr("r"),
                order.access_ptr("r"),
                weights.access_ptr("r"),
                experts,
                top_k,
                limit,
                out.access_ptr("w"),
                out_scale.access_ptr("w"),
                shared.access_ptr("rw"),
            )

    return build(gate_up, arch)


@compiled
def _down(hidden, inter, max_rows, arch):
    source, (_, m_blocks, k_groups, native) = _source(max_rows), SHAPES[max_rows]
    rows, experts, bounds, inner = (T.dynamic(n) for n in ("rows", "experts", "bounds", "inner"))

    @T.prim_func
    def down(
        w: T.Tensor((experts, hidden, inter // 2), T.uint8),
        w_scale: T.Tensor((experts, hidden, inter // 32), T.uint8),
        x: T.Tensor((inner,), T.uint8 if native else T.bfloat16),
        x_scale: T.Tensor((rows, inter // 32), T.float32),
        begins: T.Tensor((bounds,), T.int32),
        order: T.Tensor((rows,), T.int32),
        out: T.Tensor((rows, hidden), T.bfloat16),
    ):
        with T.Kernel(SMS, threads=128 + 256 * k_groups) as _:
            T.import_source(source)
            shared = T.alloc_shared((_shared_bytes(inter, max_rows),), T.uint8)
            T.call_extern(
                "handle",
                f"moe::down<{hidden}, {inter}, {max_rows}, {m_blocks}, {k_groups}, {_tokens(native)}>",
                w.access_ptr("r"),
                w_scale.access_ptr("r"),
                x.access_ptr("r"),
                x_scale.access_ptr("r"),
                begins.access_ptr("r"),
                order.access_ptr("r"),
                experts,
                out.access_ptr("w"),
                shared.access_ptr("rw"),
            )

    return build(down, arch)


def _tokens(native: bool) -> str:
    return "gemm::Native" if native else "gemm::Bf16"


@compiled
def _combine(hidden, top_k, with_shared, arch):
    source = _source(136)
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
    """The token tile of a call, by its sizes only: native FP8 products, whose time is the bytes of the
    weights, while experts have few rows; then bf16 products and wide tiles.
    """
    return 32 if tokens * top_k <= 16 * experts else 136


def variants(cfg):
    """Every build that a model of this configuration needs."""
    for native in (False, True):
        yield _prepare, (cfg.hidden, native, "sm_90a")
    for rows in SHAPES:
        yield _gate_up, (cfg.hidden, cfg.inter, rows, "sm_90a")
        yield _down, (cfg.hidden, cfg.inter, rows, "sm_90a")
    for with_shared in (False, True):
        for top_k in sorted({cfg.top_k, cfg.draft.top_k}):
            yield _combine, (cfg.hidden, top_k, with_shared, "sm_90a")


def mxfp4_moe(
    x, x_scale, expert_ids, expert_weights, w13, w13_scale, w2, w2_scale, layout, limit, shared, out, scratch
):
    """Launches for ``dsv41.ops.mxfp4_moe``."""
    tokens, top_k = expert_ids.shape
    if tokens == 0:
        return
    experts, inter, hidden = w13.shape[0], w13.shape[1] // 2, out.shape[1]
    launch(
        x, x_scale, expert_ids, expert_weights, w13, w13_scale, w2, w2_scale, limit, shared, out,
        split_scratch(scratch, scratch_parts(tokens, top_k, experts, hidden, inter)),
        max_rows(tokens, top_k, experts),
    )  # fmt: skip


def launch(
    x, x_scale, expert_ids, expert_weights, w13, w13_scale, w2, w2_scale, limit, shared, out, parts, tile
):
    """The four launches with a token tile of ``SHAPES``."""
    (tokens, top_k), hidden, inter = expert_ids.shape, out.shape[1], w13.shape[1] // 2
    begins, order, rows, inner, inner_scale, assigned = parts
    native, arch, values = SHAPES[tile].native, "sm_90a", x.view(torch.uint8)
    inner = inner.view(-1)
    if native:
        rows = rows.view(-1).view(torch.float32)[: tokens * (hidden // 32)].view(tokens, -1)
        inner = inner.view(torch.uint8)
    _prepare(hidden, native, arch)(expert_ids, values, x_scale, begins, order, rows)
    operand, scale = (values, rows.view(-1)) if native else (rows, inner_scale.view(-1))
    _gate_up(hidden, inter, tile, arch)(
        w13, w13_scale, operand, scale, begins, order, expert_weights, inner, inner_scale, limit
    )
    _down(hidden, inter, tile, arch)(w2, w2_scale, inner, inner_scale, begins, order, assigned)
    extra = out if shared is None else shared
    _combine(hidden, top_k, shared is not None, arch)(expert_ids, assigned, extra, out, w13.shape[0])
