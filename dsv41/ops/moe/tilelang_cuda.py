"""MXFP4 experts on Hopper: grouping, two products with weights decoded in registers, and the combine."""

from pathlib import Path
from typing import NamedTuple

import tilelang.language as T
import torch

from ..._op import compiled, split_scratch, tiling_tokens
from .._tilelang import HERE, build, device_source
from .._tilelang.pack import MOVED_BASE
from .api import read_layout, scratch_parts

SMS = 132  # blocks of the persistent products; any number is right
THREADS = 256


class Shape(NamedTuple):
    """How a product is tiled. Few widths: with more, ptxas serialises the products (C7512)."""

    widths: tuple[int, ...]  # token tiles compiled; the last is the largest
    k_groups: int  # groups that share the blocks of k; a tile has 256 / k_groups features
    tokens: str  # how token rows come: a type of weights_gemm.cuh

    @property
    def template(self) -> str:
        """Arguments of the device functions."""
        return f"{self.widths[-1]}, {self.k_groups}, gemm::{self.tokens}"

    @property
    def columns(self) -> tuple[int, ...]:
        """Widths of the wgmma instructions."""
        each = 2 if self.tokens == "Split" else 1
        if not self.by_128:
            return self.widths
        return tuple(sorted({n * each // (2 if n * each > 64 and n % 16 == 0 else 1) for n in self.widths}))

    @property
    def one_launch(self) -> bool:
        """Whether both products are one launch."""
        return self.tokens == "Split"

    @property
    def folded(self) -> bool:
        """Whether weights carry their scales into the product."""
        return self.tokens not in ("Native", "Bf16")

    @property
    def by_128(self) -> bool:
        """Whether token rows have a scale each 128 k."""
        return self.tokens in ("Split", "Coarse", "Narrow")

    @property
    def held(self) -> int:
        """Blocks of 64 features that a consumer group multiplies."""
        return 2 if self.tokens in ("Bf16", "Half", "Coarse") else 1

    @property
    def threads(self) -> int:
        """Of a block: a group that copies, and those that multiply."""
        return 128 + 512 // self.held


SHAPES = {
    "native": Shape((8, 16, 24, 32), 2, "Native"),
    "bf16": Shape((72, 128), 1, "Bf16"),
    "f16": Shape((72, 104, 136), 1, "Half"),
    "f16_few": Shape((64, 72, 88), 1, "Half"),
    "decode": Shape((8, 16, 24), 1, "Split"),
    "middle": Shape((24, 32, 40), 1, "Split"),
    "fp8": Shape((64, 80, 96, 112, 128, 144), 1, "Coarse"),
    "fp8_few": Shape((48, 64, 80), 1, "Narrow"),
}
F16_LIMIT = 64  # of the clamp: inner activations of at most its square times the weight go through f16
PARTS = ("moe", "stream")  # of the sources here
WGMMA = ("e4m3_rs", "bf16_rs", "f16_rs", "e5m2_rs", "e5m2e4m3_rs")  # a source names them all


def _source(shape: Shape) -> str:
    macro = "#define DSV41_WIDTHS(X) " + " ".join(f"X({n})" for n in shape.widths) + "\n"
    files = [HERE / f"{n}.cuh" for n in ("mxfp4_fragments", "weights_gemm")]
    files += [Path(__file__).parent / f"mxfp4_{n}.cuh" for n in PARTS]
    return macro + device_source(*files, wgmma=dict.fromkeys(WGMMA, shape.columns))


def _shared_bytes(k: int, shape: Shape) -> int:
    """`Layout::BYTES` of weights_gemm.cuh, or `Stream::BYTES` of mxfp4_stream.cuh."""
    rows, blocks = shape.widths[-1], 4 // shape.k_groups
    row = {"Native": 128 + 16, "Bf16": 256, "Half": 256, "Split": 256 + 4}.get(shape.tokens, 128 + 4)
    stage = -(-(rows * row + blocks * (4096 + 256)) // 1024) * 1024
    rest = (rows * 512 if shape.k_groups > 1 else 0) + 4096 + 16 * (blocks // shape.held) * rows + 256
    return min(12, (232448 - rest) // stage) * stage + rest + (640 if shape.one_launch else 0)


@compiled
def _choose(hidden, inter, arch):
    source = _source(SHAPES["native"])
    tokens, top_k, experts = (T.dynamic(n) for n in ("tokens", "top_k", "experts"))

    @T.prim_func
    def choose(
        ids: T.Tensor((tokens, top_k), T.int32),
        w13_scale: T.Tensor((experts, 2 * inter, hidden // 32), T.uint8),
        chosen: T.Tensor((tokens, top_k), T.int32),
        folded: T.int32,
    ):
        with T.Kernel(T.ceildiv(tokens * top_k, THREADS), threads=THREADS) as _:
            T.import_source(source)
            T.call_extern(
                "handle",
                f"moe::choose<{2 * inter * (hidden // 32)}>",
                ids.access_ptr("r"),
                w13_scale.access_ptr("r"),
                tokens * top_k,
                experts,
                folded,
                chosen.access_ptr("w"),
            )

    return build(choose, arch)


@compiled
def _prepare(hidden, kind, arch):
    """``kind``: how token rows come, of `Shape`."""
    source = _source(SHAPES["native"])
    tokens, top_k, rows, scales = (T.dynamic(n) for n in ("tokens", "top_k", "rows", "scales"))
    bounds, size = T.dynamic("bounds"), T.dynamic("size")

    @T.prim_func
    def prepare(
        ids: T.Tensor((tokens, top_k), T.int32),
        x: T.Tensor((tokens, hidden), T.uint8),
        x_scale: T.Tensor((tokens, hidden // 32), T.uint8),
        begins: T.Tensor((bounds,), T.int32),
        order: T.Tensor((rows,), T.int32),
        counts: T.Tensor((bounds,), T.int32),
        ready: T.Tensor((size,), T.uint8),
        ready_scale: T.Tensor((scales,), T.float32),
        unit: T.float32,
    ):
        with T.Kernel(bounds - 1 + T.ceildiv(tokens * (hidden // 32), THREADS), threads=THREADS) as _:
            T.import_source(source)
            T.pdl_sync()
            T.pdl_trigger()
            shared = T.alloc_shared((64,), T.uint8)
            T.call_extern(
                "handle",
                f"moe::prepare<{hidden}, gemm::{kind}>",
                ids.access_ptr("r"),
                x.access_ptr("r"),
                x_scale.access_ptr("r"),
                tokens,
                top_k,
                bounds - 1,
                unit,
                begins.access_ptr("w"),
                order.access_ptr("w"),
                counts.access_ptr("w"),
                ready.access_ptr("w"),
                ready_scale.access_ptr("w"),
                shared.access_ptr("rw"),
            )

    return build(prepare, arch)


@compiled
def _fold_inner(inter, kind, arch):
    source = _source(SHAPES["native"])
    size, scales = T.dynamic("size"), T.dynamic("scales")
    bytes_in, codes_in = T.dynamic("bytes_in"), T.dynamic("codes_in")

    @T.prim_func
    def fold_inner(
        values: T.Tensor((bytes_in,), T.uint8),
        codes: T.Tensor((codes_in,), T.uint8),
        ready: T.Tensor((size,), T.uint8),
        ready_scale: T.Tensor((scales,), T.float32),
        rows: T.int32,
        unit: T.float32,
    ):
        with T.Kernel(T.ceildiv(rows * (inter // 16), THREADS), threads=THREADS) as _:
            T.import_source(source)
            T.call_extern(
                "handle",
                f"moe::fold_inner<{inter}, gemm::{kind}>",
                values.access_ptr("r"),
                codes.access_ptr("r"),
                rows,
                unit,
                ready.access_ptr("w"),
                ready_scale.access_ptr("w"),
            )

    return build(fold_inner, arch)


@compiled
def _products(hidden, inter, name, arch):
    shape = SHAPES[name]
    source = _source(shape)
    tokens, top_k, rows, scales = (T.dynamic(n) for n in ("tokens", "top_k", "rows", "scales"))
    experts, bounds, size, inner_size = (T.dynamic(n) for n in ("experts", "bounds", "size", "inner_size"))
    inner_scales = T.dynamic("inner_scales")

    @T.prim_func
    def products(
        w13: T.Tensor((experts, 2 * inter, hidden // 2), T.uint8),
        w13_scale: T.Tensor((experts, 2 * inter, hidden // 32), T.uint8),
        w2: T.Tensor((experts, hidden, inter // 2), T.uint8),
        w2_scale: T.Tensor((experts, hidden, inter // 32), T.uint8),
        x: T.Tensor((size,), T.uint8),
        x_scale: T.Tensor((scales,), T.float32),
        begins: T.Tensor((bounds,), T.int32),
        order: T.Tensor((rows,), T.int32),
        weights: T.Tensor((tokens, top_k), T.float32),
        inner: T.Tensor((inner_size,), T.uint8),
        inner_scale: T.Tensor((inner_scales,), T.float32),
        out: T.Tensor((rows, hidden), T.bfloat16),
        counts: T.Tensor((bounds,), T.int32),
        base: T.int32,
        base2: T.int32,
        unit2: T.float32,
        limit: T.float32,
    ):
        with T.Kernel(SMS, threads=640) as _:
            T.import_source(source)
            T.pdl_sync()
            T.pdl_trigger()
            shared = T.alloc_shared((_shared_bytes(hidden, shape),), T.uint8)
            T.call_extern(
                "handle",
                f"moe::products<{hidden}, {inter}, {shape.widths[-1]}>",
                w13.access_ptr("r"),
                w13_scale.access_ptr("r"),
                w2.access_ptr("r"),
                w2_scale.access_ptr("r"),
                x.access_ptr("r"),
                x_scale.access_ptr("r"),
                begins.access_ptr("r"),
                order.access_ptr("r"),
                weights.access_ptr("r"),
                experts,
                top_k,
                base,
                base2,
                unit2,
                limit,
                inner.access_ptr("rw"),
                inner_scale.access_ptr("rw"),
                out.access_ptr("w"),
                counts.access_ptr("rw"),
                shared.access_ptr("rw"),
            )

    return build(products, arch)


@compiled
def _gate_up(hidden, inter, name, arch):
    shape = SHAPES[name]
    source = _source(shape)
    tokens, top_k, rows, scales = (T.dynamic(n) for n in ("tokens", "top_k", "rows", "scales"))
    experts, bounds, size, inner = (T.dynamic(n) for n in ("experts", "bounds", "size", "inner"))
    inner_scales = T.dynamic("inner_scales")

    @T.prim_func
    def gate_up(
        w: T.Tensor((experts, 2 * inter, hidden // 2), T.uint8),
        w_scale: T.Tensor((experts, 2 * inter, hidden // 32), T.uint8),
        x: T.Tensor((size,), T.uint8),
        x_scale: T.Tensor((scales,), T.float32),
        begins: T.Tensor((bounds,), T.int32),
        order: T.Tensor((rows,), T.int32),
        weights: T.Tensor((tokens, top_k), T.float32),
        out: T.Tensor((inner,), T.uint8),
        out_scale: T.Tensor((inner_scales,), T.uint8),
        base: T.int32,
        unit: T.float32,
        limit: T.float32,
    ):
        with T.Kernel(SMS, threads=shape.threads) as _:
            T.import_source(source)
            shared = T.alloc_shared((_shared_bytes(hidden, shape),), T.uint8)
            T.call_extern(
                "handle",
                f"moe::gate_up<{hidden}, {inter}, {shape.template}>",
                w.access_ptr("r"),
                w_scale.access_ptr("r"),
                x.access_ptr("r"),
                x_scale.access_ptr("r"),
                begins.access_ptr("r"),
                order.access_ptr("r"),
                weights.access_ptr("r"),
                experts,
                top_k,
                base,
                unit,
                limit,
                out.access_ptr("w"),
                out_scale.access_ptr("w"),
                shared.access_ptr("rw"),
            )

    return build(gate_up, arch)


@compiled
def _down(hidden, inter, name, arch):
    shape = SHAPES[name]
    source = _source(shape)
    rows, experts, bounds = (T.dynamic(n) for n in ("rows", "experts", "bounds"))
    size, scales = T.dynamic("size"), T.dynamic("scales")

    @T.prim_func
    def down(
        w: T.Tensor((experts, hidden, inter // 2), T.uint8),
        w_scale: T.Tensor((experts, hidden, inter // 32), T.uint8),
        x: T.Tensor((size,), T.uint8),
        x_scale: T.Tensor((scales,), T.float32),
        begins: T.Tensor((bounds,), T.int32),
        order: T.Tensor((rows,), T.int32),
        out: T.Tensor((rows, hidden), T.bfloat16),
        base: T.int32,
        unit: T.float32,
    ):
        with T.Kernel(SMS, threads=shape.threads) as _:
            T.import_source(source)
            shared = T.alloc_shared((_shared_bytes(inter, shape),), T.uint8)
            T.call_extern(
                "handle",
                f"moe::down<{hidden}, {inter}, {shape.template}>",
                w.access_ptr("r"),
                w_scale.access_ptr("r"),
                x.access_ptr("r"),
                x_scale.access_ptr("r"),
                begins.access_ptr("r"),
                order.access_ptr("r"),
                experts,
                base,
                unit,
                out.access_ptr("w"),
                shared.access_ptr("rw"),
            )

    return build(down, arch)


@compiled
def _combine(hidden, top_k, with_shared, arch):
    source = _source(SHAPES["native"])
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
            T.pdl_sync()
            T.pdl_trigger()
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


def choose_shape(tokens: int, top_k: int, experts: int, numerics: str, limit: float) -> str:
    """The tiling of a call, by its sizes only."""
    rows = tiling_tokens(tokens) * top_k
    if numerics == "unfolded":  # weights whose scales are applied to the sums
        return "native" if rows <= 16 * experts else "bf16"
    if rows <= 16 * experts:
        return "decode"
    if rows <= 48 * experts:
        return "middle"
    if numerics != "fp8" and limit > F16_LIMIT:
        return "bf16"
    return ("fp8" if numerics == "fp8" else "f16") + ("_few" if rows <= 80 * experts else "")


def variants(cfg):
    """Every build that a model of this configuration needs."""
    yield _choose, (cfg.hidden, cfg.inter, "sm_90a")
    for kind in dict.fromkeys(shape.tokens for shape in SHAPES.values()):
        yield _prepare, (cfg.hidden, kind, "sm_90a")
    for kind in ("Coarse", "Narrow"):
        yield _fold_inner, (cfg.inter, kind, "sm_90a")
    for name, shape in SHAPES.items():
        for builder in (_products,) if shape.one_launch else (_gate_up, _down):
            yield builder, (cfg.hidden, cfg.inter, name, "sm_90a")
    for with_shared in (False, True):
        for top_k in sorted({cfg.top_k, cfg.draft.top_k}):
            yield _combine, (cfg.hidden, top_k, with_shared, "sm_90a")
    yield _combine, (cfg.hidden, 1, False, "sm_90a")  # a row an expert: what an exchange brings


def mxfp4_moe(
    x, x_scale, expert_ids, expert_weights, w13, w13_scale, w2, w2_scale, layout, limit, shared, out, scratch
):
    """Launches for ``dsv41.ops.mxfp4_moe``."""
    tokens, top_k = expert_ids.shape
    if tokens == 0:
        return
    (experts, inter), hidden, arch = (w13.shape[0], w13.shape[1] // 2), out.shape[1], "sm_90a"
    numerics, bases, mixed = read_layout(layout)
    parts = split_scratch(scratch, scratch_parts(tokens, top_k, experts, hidden, inter))

    def launch_for(ids, numerics, stored):
        launch(
            x, x_scale, ids, expert_weights, w13, w13_scale, w2, w2_scale, stored, bases, limit, parts,
            choose_shape(tokens, top_k, experts, numerics, limit),
        )  # fmt: skip

    if mixed:  # experts that fold, then the others; the ids wait where `_prepare` does not write
        chosen = parts[6].view(torch.int32).view(-1)[: tokens * top_k].view(tokens, top_k)
        for folded, kind in ((1, numerics), (0, "unfolded")):
            _choose(hidden, inter, arch)(expert_ids, w13_scale, chosen, folded)
            launch_for(chosen, kind, (MOVED_BASE, MOVED_BASE))
    else:
        launch_for(expert_ids, numerics, bases)
    extra = out if shared is None else shared
    _combine(hidden, top_k, shared is not None, arch)(expert_ids, parts[-1], extra, out, experts)


def launch(
    x,
    x_scale,
    expert_ids,
    expert_weights,
    w13,
    w13_scale,
    w2,
    w2_scale,
    stored,
    bases,
    limit,
    parts,
    tile,
):
    """A row an assignment, with a tiling of ``SHAPES``. Scales of ``bases`` have the codes ``stored``."""
    (tokens, _), hidden, inter = expert_ids.shape, w13.shape[2] * 2, w13.shape[1] // 2
    begins, order, counts, ready, ready_scale, inner, inner_scale, assigned = parts
    shape, arch, values = SHAPES[tile], "sm_90a", x.view(torch.uint8).view(-1)
    ready, inner = ready.view(torch.uint8).view(-1), inner.view(torch.uint8).view(-1)
    ready_scale, inner_scale, rows = ready_scale.view(-1), inner_scale.view(-1), order.shape[0]
    # Weights count from the base on: a scale of an activation takes the rest of their size.
    (base, base2), (unit, unit2) = stored, (2.0 ** (code - 127) for code in bases)
    _prepare(hidden, shape.tokens, arch)(
        expert_ids, values.view(tokens, hidden), x_scale, begins, order, counts, ready, ready_scale, unit
    )
    if shape.one_launch:
        _products(hidden, inter, tile, arch)(
            w13, w13_scale, w2, w2_scale, ready, ready_scale, begins, order, expert_weights, inner,
            inner_scale, assigned, counts, base, base2, unit2, limit,
        )  # fmt: skip
        return
    operand = values if shape.tokens == "Native" else ready
    # E4M3 on its way to a folded product waits where the second product's results will be.
    made = assigned.view(torch.uint8).view(-1) if shape.by_128 else inner
    made_scale = made[rows * inter :] if shape.by_128 else inner_scale.view(torch.uint8)
    _gate_up(hidden, inter, tile, arch)(
        w13, w13_scale, operand, ready_scale, begins, order, expert_weights, made, made_scale, base, unit,
        limit,
    )  # fmt: skip
    if shape.by_128:
        _fold_inner(inter, shape.tokens, arch)(made, made_scale, inner, inner_scale, rows, unit2)
    _down(hidden, inter, tile, arch)(w2, w2_scale, inner, inner_scale, begins, order, assigned, base2, unit2)
