"""Products on the cube cores of an Ascend 950: plain, MXFP8, and with weights that vector cores expand.

Emulated, but for the product itself, and looked at in Ascend C; never run.
"""

import tilelang.ascend.language as T

from . import THREADS, e4m3_value

CORES = 32
ROWS, COLUMNS = 128, 128  # a tile of the result


def tiles(rows, columns, core):
    """How many tiles a core takes."""
    return T.ceildiv(T.ceildiv(rows, ROWS) * columns - core, CORES)


def plain(features, k, result, accumulate=False):
    """out = x w^T of bf16, or out += that (the store adds, once an element); the program (x, w, out)."""
    rows, out_stride = T.dynamic("rows"), T.dynamic("out_stride")
    depth = 128
    columns = -(-features // COLUMNS)

    @T.prim_func
    def product(
        x: T.Tensor((rows, k), T.bfloat16),
        w: T.Tensor((features, k), T.bfloat16),
        out: T.StridedTensor((rows, features), (out_stride, 1), result),
    ):
        with T.Kernel(CORES) as core:
            a = T.alloc_l1((ROWS, depth), T.bfloat16)
            b = T.alloc_l1((COLUMNS, depth), T.bfloat16)
            total = T.alloc_l0c((ROWS, COLUMNS), T.float32)
            for tile in T.serial(tiles(rows, columns, core)):
                row = (tile * CORES + core) // columns
                column = (tile * CORES + core) % columns
                for step in T.Pipelined(T.ceildiv(k, depth), num_stages=2):
                    T.copy(x[row * ROWS, step * depth], a)
                    T.copy(w[column * COLUMNS, step * depth], b)
                    T.gemm(a, b, total, transpose_B=True, clear_accum=step == 0)
                if accumulate:
                    T.set_atomic("add", result)
                T.copy(total, out[row * ROWS, column * COLUMNS])
                if accumulate:
                    T.set_atomic_none()

    return product


def mxfp8(features, k):
    """out = (x 2^x_scale) (w 2^w_scale)^T of E4M3; the program (x, x_scale, w, w_scale, out).

    ``w_scale`` is given expanded: the 32 rows of a tile share memory.
    """
    rows = T.dynamic("rows")
    depth = 256 if k % 256 == 0 else 128
    columns, words = features // COLUMNS, depth // 32

    @T.prim_func
    def product(
        x: T.Tensor((rows, k), T.float8_e4m3fn),
        x_scale: T.Tensor((rows, k // 32), T.uint8),
        w: T.Tensor((features, k), T.float8_e4m3fn),
        w_scale: T.StridedTensor((features // 32, 32, k // 32), (k // 32, 0, 1), T.uint8),
        out: T.Tensor((rows, features), T.bfloat16),
    ):
        with T.Kernel(CORES) as core:
            a = T.alloc_l1((ROWS, depth), T.float8_e4m3fn)
            b = T.alloc_l1((COLUMNS, depth), T.float8_e4m3fn)
            a_scale = T.alloc_l1((ROWS, words), T.uint8)
            b_scale = T.alloc_l1((COLUMNS, words), T.uint8)
            total = T.alloc_l0c((ROWS, COLUMNS), T.float32)
            for tile in T.serial(tiles(rows, columns, core)):
                row = (tile * CORES + core) // columns
                column = (tile * CORES + core) % columns
                for step in T.Pipelined(k // depth, num_stages=2):
                    T.copy(x[row * ROWS, step * depth], a)
                    T.copy(w[column * COLUMNS, step * depth], b)
                    T.copy(x_scale[row * ROWS, step * words], a_scale)
                    for g in T.serial(COLUMNS // 32):
                        T.copy(
                            w_scale[column * (COLUMNS // 32) + g, 0:32, step * words : (step + 1) * words],
                            b_scale[g * 32 : g * 32 + 32, :],
                        )
                    T.gemm_blockscaled(a, b, total, a_scale, b_scale, transpose_B=True, clear_accum=step == 0)
                T.copy(total, out[row * ROWS, column * COLUMNS])

    return product


def power(code):
    """2^(code - 127) of a UE8M0 byte; codes 1 to 254."""
    return T.reinterpret(code << 23, T.float32)


def narrow_tile(rows, depth):
    """Unified buffer for ``to_l1``: bytes of [rows, depth], addressed through ``at``."""
    return T.alloc_shared((depth // 32, rows + 1, 32), T.uint8)


def at(row, column):
    """Where a byte of a ``narrow_tile`` lies: 32 bytes of a row together, as in L1, and a row of padding."""
    return column // 32, row, column % 32


def to_l1(tile, b, rows, depth):
    """Copy a ``narrow_tile`` to L1.

    `T.copy` between the two orders values of 16 and 32 bits only ("Unsupported nd2nz dtype: float8_e4m3fn").
    The order is one of 32 bytes, whatever the type: SIMT threads write it, and the bytes travel as words of
    two.
    """
    return T.ascend_nd2nz_post_copy(b[0, 0], tile[0, 0, 0], rows, depth // 2, rows, "bfloat16_t")


def scale_tile(rows, depth):
    """Unified buffer for ``scales_to_l1``: UE8M0 bytes [rows, depth / 32], addressed through ``scale_at``."""
    return T.alloc_shared((rows // 16, depth // 64, 16, 2), T.uint8)


def scale_at(row, group):
    """Where a byte of a ``scale_tile`` lies: as TileLang's layout of scales in L1 has it."""
    return row // 16, group // 2, row % 16, group % 2


def scales_to_l1(tile, scale, rows, depth):
    """Copy a ``scale_tile`` to L1, in one piece."""
    blocks = rows * (depth // 32) // 32
    return T.ascend_nd2nz_post_copy(scale[0, 0], tile[0, 0, 0, 0], blocks, 16, blocks, "bfloat16_t")


def e2m1_as_e4m3(code):
    """The E4M3 byte of an E2M1 code, the low four bits of an int32; exact."""
    m = code & 7
    return T.cast((code & 8) << 4 | T.if_then_else(m < 2, m * 0x30, 0x30 + 4 * m), T.uint8)


def mxfp4(features, k, matrices):
    """out = (x 2^x_scale) (w[owner of the row tile] 2^w_scale)^T; the program (x, x_scale, w, w_scale, owner,
    out).

    ``x`` is E4M3, ``w`` E2M1. A vector core turns a tile of weights into E4M3, which is exact, and hands it
    to its cube core; scales go there as they are. ``owner`` -1: no row of the tile is anybody's.
    """
    rows, many = T.dynamic("rows"), T.dynamic("many")
    depth = 256 if k % 256 == 0 else 128
    columns, words = features // COLUMNS, depth // 32

    @T.prim_func
    def product(
        x: T.Tensor((rows, k), T.float8_e4m3fn),
        x_scale: T.Tensor((rows, k // 32), T.uint8),
        w: T.Tensor((matrices * features, k // 2), T.uint8),
        w_scale: T.Tensor((matrices * features, k // 32), T.uint8),
        owner: T.Tensor((many,), T.int32),
        out: T.Tensor((rows, features), T.bfloat16),
    ):
        with T.MixedKernel(CORES, sids=1) as (core, _):
            a = T.alloc_l1((ROWS, depth), T.float8_e4m3fn)
            b = T.alloc_l1((COLUMNS, depth), T.float8_e4m3fn)
            a_scale = T.alloc_l1((ROWS, words), T.uint8)
            b_scale = T.alloc_l1((COLUMNS, words), T.uint8)
            total = T.alloc_l0c((ROWS, COLUMNS), T.float32)
            stored = T.alloc_shared((COLUMNS, depth // 2), T.uint8)
            wide = narrow_tile(COLUMNS, depth)
            for tile in T.serial(tiles(rows, columns, core)):
                row = (tile * CORES + core) // columns
                column = (tile * CORES + core) % columns
                matrix = owner[row * ROWS]
                if matrix >= 0:
                    first = matrix * features + column * COLUMNS
                    for step in T.Pipelined(k // depth, num_stages=2):
                        T.copy(w[first, step * (depth // 2)], stored)
                        with T.SimtVF(threads=THREADS):
                            for i, j in T.Parallel(COLUMNS, depth // 2):
                                byte = T.cast(stored[i, j], T.int32)
                                wide[at(i, 2 * j)] = e2m1_as_e4m3(byte)
                                wide[at(i, 2 * j + 1)] = e2m1_as_e4m3(byte >> 4)
                        to_l1(wide, b, COLUMNS, depth)
                        T.copy(x[row * ROWS, step * depth], a)
                        T.copy(x_scale[row * ROWS, step * words], a_scale)
                        T.copy(w_scale[first, step * words], b_scale)
                        T.gemm_blockscaled(
                            a, b, total, a_scale, b_scale, transpose_B=True, clear_accum=step == 0
                        )
                    T.copy(total, out[row * ROWS, column * COLUMNS])

    return product


def tiled(features, k):
    """out = x w^T of bf16 and E4M3 weights with a scale a tile of 32 x 32; the program (x, w, w_scale, out).

    A vector core turns a tile of weights into bf16, which is exact and what a product with bf16 rows needs.
    """
    rows, x_stride, out_stride = T.dynamic("rows"), T.dynamic("x_stride"), T.dynamic("out_stride")
    depth = 128
    columns, words = features // COLUMNS, depth // 32

    @T.prim_func
    def product(
        x: T.StridedTensor((rows, k), (x_stride, 1), T.bfloat16),
        w: T.Tensor((features, k), T.uint8),
        w_scale: T.Tensor((features // 32, k // 32), T.uint8),
        out: T.StridedTensor((rows, features), (out_stride, 1), T.bfloat16),
    ):
        with T.MixedKernel(CORES, sids=1) as (core, _):
            a = T.alloc_l1((ROWS, depth), T.bfloat16)
            b = T.alloc_l1((COLUMNS, depth), T.bfloat16)
            total = T.alloc_l0c((ROWS, COLUMNS), T.float32)
            stored = T.alloc_shared((COLUMNS, depth), T.uint8)
            wide = T.alloc_shared((COLUMNS, depth), T.bfloat16)
            for tile in T.serial(tiles(rows, columns, core)):
                row = (tile * CORES + core) // columns
                column = (tile * CORES + core) % columns
                for step in T.Pipelined(k // depth, num_stages=2):
                    T.copy(w[column * COLUMNS, step * depth], stored)
                    with T.SimtVF(threads=THREADS):
                        for i, j in T.Parallel(COLUMNS, depth):
                            code = w_scale[(column * COLUMNS + i) // 32, step * words + j // 32]
                            value = e4m3_value(T.cast(stored[i, j], T.int32)) * power(T.cast(code, T.int32))
                            wide[i, j] = T.cast(value, T.bfloat16)
                    T.copy(wide, b)
                    T.copy(x[row * ROWS, step * depth], a)
                    T.gemm(a, b, total, transpose_B=True, clear_accum=step == 0)
                T.copy(total, out[row * ROWS, column * COLUMNS])

    return product


def e2m1_value(code):
    """The float of the low four bits of an int32."""
    # Its exponent and mantissa in a float's place, 2^126 too small: exact for the subnormal 0.5 too.
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return T.reinterpret(bits, T.float32) * T.float32(2.0**126)
