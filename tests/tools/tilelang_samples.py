"""Small TileLang programs for the test of the tile interpreter: functions that return a `T.prim_func`."""

import tilelang.language as T


def rms_norm(width, rows=4):
    count = T.dynamic("count")

    @T.prim_func
    def program(
        x: T.Tensor((count, width), T.bfloat16),
        weight: T.Tensor((width,), T.float32),
        out: T.Tensor((count, width), T.bfloat16),
        eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(count, rows), threads=128) as block:
            v = T.alloc_fragment((rows, width), T.float32)
            square = T.alloc_fragment((rows, width), T.float32)
            total = T.alloc_fragment((rows,), T.float32)
            T.copy(x[block * rows, 0], v)
            for i, j in T.Parallel(rows, width):
                square[i, j] = v[i, j] * v[i, j]
            T.reduce_sum(square, total, dim=1)
            for i, j in T.Parallel(rows, width):
                v[i, j] = v[i, j] * T.rsqrt(total[i] / width + eps) * weight[j]
            T.copy(v, out[block * rows, 0])

    return program


def decode_gemm(n, k, bm=32, bn=32, bk=64):
    """A[m, k] times the transpose of packed E2M1 W[n, k] with a power-of-two scale a 32 values."""
    m = T.dynamic("m")

    @T.prim_func
    def program(
        a: T.Tensor((m, k), T.bfloat16),
        w: T.Tensor((n, k // 2), T.uint8),
        scale: T.Tensor((n, k // 32), T.uint8),
        c: T.Tensor((m, n), T.float32),
    ):
        with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=128) as (bx, by):
            sa = T.alloc_shared((bm, bk), T.bfloat16)
            sw = T.alloc_shared((bn, bk // 2), T.uint8)
            decoded = T.alloc_shared((bn, bk), T.bfloat16)
            acc = T.alloc_fragment((bm, bn), T.float32)
            T.clear(acc)
            for step in T.Pipelined(k // bk, num_stages=2):
                T.copy(a[by * bm, step * bk], sa)
                T.copy(w[bx * bn, step * (bk // 2)], sw)
                for i, j in T.Parallel(bn, bk):
                    byte = T.Cast(T.uint32, sw[i, j // 2])
                    code = (byte >> (4 * T.Cast(T.uint32, j % 2))) & 15
                    bits = ((code & 8) << 28) | ((code & 7) << 22)
                    power = T.Cast(T.uint32, scale[bx * bn + i, (step * bk + j) // 32]) << 23
                    value = T.reinterpret(bits, T.float32) * T.float32(2.0**126)
                    decoded[i, j] = T.Cast(T.bfloat16, value * T.reinterpret(power, T.float32))
                T.gemm(sa, decoded, acc, transpose_B=True)
            T.copy(acc, c[by * bm, bx * bn])

    return program


def quantize(width, group=32):
    """E4M3 with a power-of-two scale a group, its code in a second tensor; serial and conditional code."""
    count = T.dynamic("count")

    @T.prim_func
    def program(
        x: T.Tensor((count, width), T.float32),
        out: T.Tensor((count, width), T.float8_e4m3fn),
        code: T.Tensor((count, width // group), T.uint8),
    ):
        with T.Kernel(count, threads=64) as row:
            v = T.alloc_shared((width,), T.float32)
            largest = T.alloc_fragment((width // group,), T.float32)
            blocks = T.alloc_fragment((width // group, group), T.float32)
            T.copy(x[row, 0], v)
            for g, j in T.Parallel(width // group, group):
                blocks[g, j] = v[g * group + j]
            T.reduce_absmax(blocks, largest, dim=1)
            for g in T.Parallel(width // group):
                bits = T.reinterpret(T.max(largest[g], T.float32(1e-4)), T.int32)
                exponent = (bits >> 23) - 8
                if (bits & 0x7FFFFF) > 0x600000:
                    code[row, g] = T.Cast(T.uint8, exponent + 1)
                else:
                    code[row, g] = T.Cast(T.uint8, exponent)
            for g, j in T.Parallel(width // group, group):
                power = T.reinterpret((254 - T.Cast(T.int32, code[row, g])) << 23, T.float32)
                out[row, g * group + j] = T.Cast(T.float8_e4m3fn, blocks[g, j] * power)

    return program


def running_max(width):
    """The running maximum of a row by a serial loop: local state, a while loop, an early result."""
    count = T.dynamic("count")

    @T.prim_func
    def program(x: T.Tensor((count, width), T.float32), out: T.Tensor((count, width), T.float32)):
        with T.Kernel(count, threads=32) as row:
            best = T.alloc_local((1,), T.float32)
            best[0] = -T.infinity(T.float32)
            for j in T.serial(width):
                best[0] = T.max(best[0], x[row, j])
                out[row, j] = best[0]

    return program
