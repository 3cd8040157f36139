"""Linears on Hopper: FP8 products and their scales between them; for many exact rows bf16 products.

A kernel with `pdl_sync` may be launched before the one in front of it has ended, and waits for that: there,
or within its device function where that comes first (hopper_launch.cuh).
"""

from pathlib import Path

import tilelang.language as T
import torch

from ..._op import compiled, split_scratch
from .._tilelang import HERE, build, device_source
from .api import AT_ONCE, group_splits, native, num_splits, scratch_parts

SMS = 132  # blocks of the persistent products; any number is right
THREADS = 256
# Kind of tile: consumer groups along tokens and features, 64-row blocks a group, features of a tile and of a
# product. All give the same bits.
TILES = {
    "decode": (1, 2, 1, 128, 64),
    "decode192": (1, 3, 1, 192, 64),
    "decode256": (1, 2, 1, 256, 64),
    "middle": (2, 1, 1, 128, 64),
    "large": (3, 1, 1, 128, 128),
}
CLUSTERED = "decode", "decode192", "middle"  # those whose blocks may share k
# Products in bf16: tokens of a tile, and blocks of weights in shared memory. All give the same bits.
WIDE_TILES = {"decode": (64, 8), "middle": (128, 4), "large": (192, 4), "prefill": (256, 3)}


def source() -> str:
    """The text of the FP8 product and of the small kernels."""
    files = HERE / "hopper_launch.cuh", HERE / "hopper_cluster.cuh", Path(__file__).parent / "block_gemm.cuh"
    return device_source(*files, wgmma={"e4m3_ss": (64, 128)})


def tile_rows(tile: str) -> int:
    """Tokens of a tile."""
    return 64 * TILES[tile][0] * TILES[tile][2]


def shared_bytes(tile: str, per: int) -> int:
    """`Shape::BYTES` of block_gemm.cuh."""
    rows, columns = tile_rows(tile), TILES[tile][3]
    stage = (rows + columns) * 128 + (1024 if per == 32 else 0)
    return min(12, (232448 - 256) // stage) * stage + 256


def _map(tensor, rows, width, box):
    """The tensor map of [rows, width bytes]: boxes of ``box`` rows x 128 bytes, swizzled by 128 bytes."""
    shape, strides, boxes, steps = (width, rows), (1, width), (128, box), (1, 1)
    u8, plain, swizzle, promote, zeros = 0, 0, 3, 2, 0
    layout = (*shape, *strides, *boxes, *steps, plain, swizzle, promote, zeros)
    return T.create_tma_descriptor(u8, 2, tensor.data, *layout)


@compiled
def _product(tile, per, cluster, arch):
    """``per``: k of one weight scale, 32 or 128. ``cluster``: blocks that share k, several or 1."""
    text, template = source(), ", ".join(map(str, (*TILES[tile], per // 32, cluster)))
    threads = 128 + 128 * TILES[tile][0] * TILES[tile][1]
    tokens, features, k = T.dynamic("tokens"), T.dynamic("features"), T.dynamic("k")
    groups, tiles = T.dynamic("groups"), T.dynamic("tiles")

    @T.prim_func
    def product(
        x: T.Tensor((tokens, k), T.uint8),
        x_scale: T.Tensor((tokens, groups), T.uint8),
        w: T.Tensor((features, k), T.uint8),
        w_scale: T.Tensor((tiles, groups), T.uint8),
        out: T.Tensor((tokens, features), T.bfloat16),
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=threads, cluster_dims=cluster if cluster > 1 else None) as _:
            T.import_source(text)
            shared = T.alloc_shared((shared_bytes(tile, per),), T.uint8)
            T.call_extern(
                "handle",
                f"blocks::linear<{template}>",
                _map(x, tokens, k, tile_rows(tile)),
                x_scale.access_ptr("r"),
                _map(w, features, k, TILES[tile][3]),
                w_scale.access_ptr("r"),
                tokens,
                features,
                k,
                out.access_ptr("w"),
                shared.access_ptr("rw"),
            )
            T.pdl_sync()  # asks for an early launch

    return build(product, arch)


@compiled
def _grouped(tile, expanded, arch):
    """``expanded``: the tokens come from `_expand`, whose order of k is cheaper to decode weights for."""
    width, stages = WIDE_TILES[tile]
    here = Path(__file__).parent
    files = (HERE / f"hopper_{name}.cuh" for name in ("launch", "cluster", "store"))
    files = *files, here / "block_gemm.cuh", here / "grouped_gemm.cuh"
    text = device_source(*files, wgmma={"e4m3_ss": (64, 128), "bf16_rs": (width,)})
    rest = 232448 - 512 - stages * 128 * 128  # as `Shared` of grouped_gemm.cuh
    size_shared = 232448 - rest + min(12, rest // (width * 128)) * width * 128
    tokens, k, out_bytes = T.dynamic("tokens"), T.dynamic("k"), T.dynamic("out_bytes")
    rows, row_tiles, k_tiles, size = (T.dynamic(name) for name in ("rows", "row_tiles", "k_tiles", "size"))
    width_bytes = T.dynamic("width_bytes")

    @T.prim_func
    def grouped(
        x: T.Tensor((tokens, width_bytes), T.uint8),
        w: T.Tensor((rows, k), T.uint8),
        w_scale: T.Tensor((row_tiles, k_tiles), T.uint8),
        out: T.Tensor((tokens, out_bytes), T.uint8),
        parts: T.Tensor((size,), T.float32),
        groups: T.int32,
        splits: T.int32,
    ):
        with T.Kernel(SMS, threads=384) as _:
            T.import_source(text)
            T.pdl_sync()
            T.pdl_trigger()
            shared = T.alloc_shared((size_shared,), T.uint8)
            T.call_extern(
                "handle",
                f"grouped::linear<{width}, {stages}, {str(expanded).lower()}>",
                _map(x, tokens, width_bytes, width),
                _map(w, rows, k, 128),
                w_scale.access_ptr("r"),
                tokens,
                groups,
                rows // groups,
                k,
                splits,
                _map(out, tokens, out_bytes, width),
                parts.access_ptr("w"),
                shared.access_ptr("rw"),
            )

    return build(grouped, arch)


@compiled
def _reduce(arch):
    text = source()
    tokens, features, size = T.dynamic("tokens"), T.dynamic("features"), T.dynamic("size")

    @T.prim_func
    def reduce(
        parts: T.Tensor((size,), T.float32), out: T.Tensor((tokens, features), T.bfloat16), splits: T.int32
    ):
        with T.Kernel(T.ceildiv(tokens * features, 4 * THREADS), threads=THREADS) as _:
            T.import_source(text)
            T.pdl_sync()
            T.call_extern(
                "handle",
                "blocks::reduce",
                parts.access_ptr("r"),
                splits,
                T.cast(tokens, "int64") * features,
                out.access_ptr("w"),
            )

    return build(reduce, arch)


@compiled
def _coarsen(arch):
    text = source()
    tokens, k, groups, coarse = T.dynamic("tokens"), T.dynamic("k"), T.dynamic("groups"), T.dynamic("coarse")

    @T.prim_func
    def coarsen(
        x: T.Tensor((tokens, k), T.uint8),
        x_scale: T.Tensor((tokens, groups), T.uint8),
        values: T.Tensor((tokens, k), T.uint8),
        scale: T.Tensor((tokens, coarse), T.uint8),
    ):
        with T.Kernel(T.ceildiv(tokens * (k // 32), THREADS), threads=THREADS) as _:
            T.import_source(text)
            T.call_extern(
                "handle",
                "blocks::coarsen",
                x.access_ptr("r"),
                x_scale.access_ptr("r"),
                T.cast(tokens, "int64") * k,
                values.access_ptr("w"),
                scale.access_ptr("w"),
            )

    return build(coarsen, arch)


@compiled
def _expand(arch):
    text = source()
    tokens, k, groups = T.dynamic("tokens"), T.dynamic("k"), T.dynamic("groups")

    @T.prim_func
    def expand(
        x: T.Tensor((tokens, k), T.uint8),
        x_scale: T.Tensor((tokens, groups), T.uint8),
        wide: T.Tensor((tokens, k), T.bfloat16),
    ):
        with T.Kernel(T.ceildiv(tokens * (k // 16), THREADS), threads=THREADS) as _:
            T.import_source(text)
            T.call_extern(
                "handle",
                "blocks::expand",
                x.access_ptr("r"),
                x_scale.access_ptr("r"),
                T.cast(tokens, "int64") * k,
                wide.access_ptr("w"),
            )

    return build(expand, arch)


def variants(cfg):
    """Every build that a model of this configuration needs."""
    for tile in TILES:
        for cluster in AT_ONCE if tile in CLUSTERED else (1,):
            for per in (128,) if tile == "large" else (32, 128):
                yield _product, (tile, per, cluster, "sm_90a")
    for tile in WIDE_TILES:
        for expanded in (False, True):
            yield _grouped, (tile, expanded, "sm_90a")
    yield _reduce, ("sm_90a",)
    yield _coarsen, ("sm_90a",)
    yield _expand, ("sm_90a",)


# Measured: tokens and features of a tile; cycles of a block of 128 k, and of a tile's beginning and end.
EXACT = {
    "decode": (64, 128, 700, 2500),
    "decode192": (64, 192, 950, 2800),
    "decode256": (64, 256, 1450, 3200),
    "middle": (128, 128, 1330, 3200),
}
FP8 = {
    "decode": (64, 128, 600, 2500),
    "decode192": (64, 192, 900, 2800),
    "decode256": (64, 256, 1200, 3200),
    "middle": (128, 128, 800, 3200),
    "large": (192, 128, 1060, 4700),
}
WIDE = {
    "decode": (64, 128, 1310, 2500),
    "middle": (128, 128, 1510, 3200),
    "large": (192, 128, 1760, 4700),
    "prefill": (256, 128, 2060, 5300),
}
EXPANDED = {
    "decode": (64, 128, 1060, 2500),
    "middle": (128, 128, 1310, 3200),
    "large": (192, 128, 1660, 4700),
    "prefill": (256, 128, 2060, 5300),
}


def choose_tile(
    tiles: dict[str, tuple[int, int, int, int]], tokens: int, features: int, k: int, splits: int, at_once: int
) -> str:
    """The tile of a call that takes the least time; none changes a bit. ``at_once``: tiles at a time."""

    def cycles(tile: str) -> int:
        rows, columns, block, ends = tiles[tile]
        total = -(-tokens // rows) * -(-features // columns)
        return -(-total // at_once) * (-(-k // 128 // splits) * block + ends)

    return min(tiles, key=cycles)


def block_linear(x, x_scale, w, w_scale, numerics, out, scratch):
    """Launches for ``dsv41.ops.block_linear``."""
    (tokens, k), features, arch = x.shape, w.shape[0], "sm_90a"
    if tokens == 0:
        return
    wide, values, scale, parts = split_scratch(scratch, scratch_parts(tokens, features, k, numerics))
    x, w = x.view(torch.uint8), w.view(torch.uint8)
    if numerics == "exact" and not native(tokens, features):
        _expand(arch)(x, x_scale, wide)
        product = _grouped(choose_tile(EXPANDED, tokens, features, k, 1, SMS), True, arch)
        product(wide.view(torch.uint8), w, w_scale, out.view(torch.uint8), parts, 1, 1)
        return
    if numerics == "fp8":
        _coarsen(arch)(x, x_scale, values, scale)
        x, x_scale = values, scale
    splits = num_splits(tokens, features, k)
    tiles = {t: v for t, v in (FP8 if numerics == "fp8" else EXACT).items() if splits == 1 or t in CLUSTERED}
    tile = choose_tile(tiles, tokens, features, k, splits, AT_ONCE[splits])
    total = -(-tokens // tile_rows(tile)) * -(-features // TILES[tile][3]) * splits
    product = _product(tile, 128 if numerics == "fp8" else 32, splits, arch)
    product(x, x_scale, w, w_scale, out, total if splits > 1 else min(total, SMS))


def grouped_linear(x, w, w_scale, out, scratch):
    """Launches for ``dsv41.ops.grouped_linear``."""
    (tokens, groups, k), rows, arch = x.shape, w.shape[0], "sm_90a"
    if tokens == 0:
        return
    splits = group_splits(tokens, rows, k)
    *_, parts = split_scratch(scratch, scratch_parts(tokens, rows, k, "bf16"))
    product = _grouped(choose_tile(WIDE, tokens, rows, k, splits, SMS // splits), False, arch)
    rows_in, rows_out = (t.view(torch.uint8).view(tokens, -1) for t in (x, out))
    product(rows_in, w.view(torch.uint8), w_scale, rows_out, parts, groups, splits)
    if splits > 1:
        _reduce(arch)(parts, out.view(tokens, rows), splits)
