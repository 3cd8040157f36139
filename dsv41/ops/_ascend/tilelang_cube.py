"""Products on the cube cores of an Ascend 950: plain, MXFP8, and with weights that vector cores expand.

Lowered to Ascend C and looked at; neither emulated nor run.
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


def expanded(features, k, matrices, fp4):
    """out = x w[owner of the row tile]^T; the program (x, w, w_scale, owner, out).

    A vector core turns a tile of weights into bf16, which is exact, and hands it to its cube core: TileLang's
    path between them knows types of 16 and 32 bits. ``fp4``: E2M1 with a scale a row and 32 values, else E4M3
    with a scale a 32 x 32 tile. A tile of rows whose owner is -1 is left alone.
    """
    rows, many = T.dynamic("rows"), T.dynamic("many")
    x_stride, out_stride = T.dynamic("x_stride"), T.dynamic("out_stride")
    depth = 128
    columns, words = features // COLUMNS, depth // 32
    per_byte = 2 if fp4 else 1
    scale_rows = features if fp4 else features // 32

    @T.prim_func
    def product(
        x: T.StridedTensor((rows, k), (x_stride, 1), T.bfloat16),
        w: T.Tensor((matrices * features, k // per_byte), T.uint8),
        w_scale: T.Tensor((matrices * scale_rows, k // 32), T.uint8),
        owner: T.Tensor((many,), T.int32),
        out: T.StridedTensor((rows, features), (out_stride, 1), T.bfloat16),
    ):
        with T.MixedKernel(CORES, sids=1) as (core, _):
            a = T.alloc_l1((ROWS, depth), T.bfloat16)
            b = T.alloc_l1((COLUMNS, depth), T.bfloat16)
            total = T.alloc_l0c((ROWS, COLUMNS), T.float32)
            stored = T.alloc_shared((COLUMNS, depth // per_byte), T.uint8)
            wide = T.alloc_shared((COLUMNS, depth), T.bfloat16)
            for tile in T.serial(tiles(rows, columns, core)):
                row = (tile * CORES + core) // columns
                column = (tile * CORES + core) % columns
                matrix = owner[row * ROWS]
                if matrix >= 0:
                    for step in T.Pipelined(k // depth, num_stages=2):
                        first = matrix * features + column * COLUMNS
                        T.copy(w[first, step * (depth // per_byte)], stored)
                        with T.SimtVF(threads=THREADS):
                            for i, j in T.Parallel(COLUMNS, depth // 2):
                                at = column * COLUMNS + i
                                line = matrix * scale_rows + (at if fp4 else at // 32)
                                scale = power(T.cast(w_scale[line, step * words + j // 16], T.int32))
                                if fp4:
                                    byte = T.cast(stored[i, j], T.int32)
                                    wide[i, 2 * j] = T.cast(e2m1_value(byte) * scale, T.bfloat16)
                                    wide[i, 2 * j + 1] = T.cast(e2m1_value(byte >> 4) * scale, T.bfloat16)
                                else:
                                    low = e4m3_value(T.cast(stored[i, 2 * j], T.int32))
                                    high = e4m3_value(T.cast(stored[i, 2 * j + 1], T.int32))
                                    wide[i, 2 * j] = T.cast(low * scale, T.bfloat16)
                                    wide[i, 2 * j + 1] = T.cast(high * scale, T.bfloat16)
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
