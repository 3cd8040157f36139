"""The product of SM100: tcgen05 with tensor memory, for linears and for rows sorted by expert.

out = (x * 2^x_scale) (w * 2^w_scale)^T, E4M3 times E4M3 or E2M1, a scale 32 values. One warp copies tiles,
one multiplies, two bring the scales into the order of tensor memory. With rows of bf16 those two expand the
weights instead. Compiled and looked at, never run.
"""

import tilelang.language as T

ROWS, FEATURES, K = 128, 128, 128  # a tile; K is what one word of four scales covers


def power_of(code):
    """2^(code - 127) as float32, NaN for 255."""
    bits = T.if_then_else(code == 0, T.uint32(0x400000), code << 23)
    return T.reinterpret(T.if_then_else(code == 255, T.uint32(0x7FC00000), bits), T.float32)


def product(features, k, experts, groups=None):
    """The program (x, x_scale, w, w_scale, owner, out).

    Args:
        experts: None for E4M3 weights [features, k] with a scale a 32 x 32 tile; else how many matrices of
            E2M1 there are, with a scale a row and 32 values. ``owner`` [rows] then says whose each row is:
            the same for a whole tile, -1 for none.
        groups: None, or how many products of E4M3 weights lie side by side: x [rows, groups * k] bf16,
            w [groups * features, k], out [rows, groups * features]. ``x_scale`` is then not read.
    """
    rows, many, unread = T.dynamic("rows"), T.dynamic("many"), T.dynamic("unread")
    words = k // K
    fp4, wide = experts is not None, groups is not None
    matrices = groups or experts or 1
    side = groups or 1
    STAGES = 3 if wide else 4
    scale_rows = features if fp4 else features // 32
    stored = T.float4_e2m1fn if fp4 else T.float8_e4m3fn
    of_rows = T.bfloat16 if wide else T.float8_e4m3fn
    in_shared = T.bfloat16 if wide else T.float4_e2m1_unpacked if fp4 else T.float8_e4m3fn

    @T.prim_func
    def scaled_product(
        x: T.Tensor((rows, side * k), of_rows),
        x_scale: T.Tensor((unread if wide else rows, words), T.uint32),
        w: T.Tensor((matrices * features, k), stored),
        w_scale: T.Tensor((matrices * scale_rows, words), T.uint32),
        owner: T.Tensor((many,), T.int32),
        out: T.Tensor((rows, side * features), T.bfloat16),
    ):
        with T.Kernel(side * features // FEATURES, T.ceildiv(rows, ROWS), threads=128) as (column, row):
            a = T.alloc_shared((STAGES, ROWS, K), of_rows)
            b = T.alloc_shared((STAGES, FEATURES, K), in_shared)
            total = T.alloc_tmem([ROWS, FEATURES], T.float32)
            if not wide:
                a_words = T.alloc_shared((STAGES, ROWS), T.uint32)
                b_words = T.alloc_shared((STAGES, FEATURES), T.uint32)
                a_scale = T.alloc_tmem([ROWS, 4], T.uint32)
                b_scale = T.alloc_tmem([FEATURES, 4], T.uint32)
            result = T.alloc_fragment((ROWS, FEATURES), T.float32)
            loaded = T.alloc_barrier([32] * STAGES)
            ordered = T.alloc_barrier([64] * STAGES)
            consumed = T.alloc_barrier([1] * STAGES)
            finished = T.alloc_barrier([1])
            thread = T.get_thread_binding()
            expert = T.alloc_var(T.int32)
            expert = 0
            if fp4:
                expert = owner[row * ROWS]
            if expert >= 0:
                if thread < 32:
                    for step in T.serial(words):
                        stage = step % STAGES
                        T.mbarrier_wait_parity(consumed[stage], step // STAGES & 1 ^ 1)
                        at = (column * FEATURES // features * k if wide else 0) + step * K
                        T.tma_copy(
                            x[row * ROWS : row * ROWS + ROWS, at : at + K],
                            a[stage, :, :],
                            barrier=loaded[stage],
                        )
                        if not wide:
                            first = expert * features + column * FEATURES
                            T.tma_copy(
                                w[first : first + FEATURES, step * K : step * K + K],
                                b[stage, :, :],
                                barrier=loaded[stage],
                            )
                        T.mbarrier_arrive(loaded[stage])
                elif thread < 64:
                    for step in T.serial(words):
                        stage = step % STAGES
                        T.mbarrier_wait_parity(loaded[stage], step // STAGES & 1)
                        T.mbarrier_wait_parity(ordered[stage], step // STAGES & 1)
                        if wide:
                            T.tcgen05_gemm(
                                a[stage, :, :],
                                b[stage, :, :],
                                total,
                                transpose_B=True,
                                mbar=consumed[stage],
                                clear_accum=step == 0,
                            )
                        else:
                            T.tcgen05_cp_warpx4(a_words[stage, :], a_scale)
                            T.tcgen05_cp_warpx4(b_words[stage, :], b_scale)
                            T.tcgen05_gemm_blockscaled(
                                a[stage, :, :],
                                b[stage, :, :],
                                total,
                                a_scale,
                                b_scale,
                                transpose_B=True,
                                mbar=consumed[stage],
                                clear_accum=step == 0,
                                k_start=0,
                                sf_a_granularity_k=32,
                                sf_b_granularity_k=32,
                            )
                    T.tcgen05_mma_arrive(finished)
                else:
                    for step in T.serial(words):
                        stage = step % STAGES
                        T.mbarrier_wait_parity(consumed[stage], step // STAGES & 1 ^ 1)
                        lane = thread % 32
                        if wide:  # eight threads a row
                            piece = thread % 8
                            for i in T.unroll(FEATURES // 8):
                                own = i * 8 + thread // 8 - 8
                                at = column * FEATURES + own
                                power = power_of(w_scale[at // 32, step] >> piece // 2 * 8 & 255)
                                for j in T.vectorized(16):
                                    value = T.cast(w[at, step * K + piece * 16 + j], T.float32)
                                    b[stage, own, piece * 16 + j] = T.cast(value * power, T.bfloat16)
                        elif thread < 96:
                            for i in T.unroll(ROWS // 32):
                                at = T.min(row * ROWS + i * 32 + lane, rows - 1)
                                a_words[stage, i * 32 + lane] = x_scale[at, step]
                            T.sync_warp()
                            T.tcgen05_sf_warp_transpose(a_words[stage, :])
                        else:
                            for i in T.unroll(FEATURES // 32):
                                at = column * FEATURES + i * 32 + lane
                                b_words[stage, i * 32 + lane] = w_scale[
                                    expert * scale_rows + (at if fp4 else at // 32), step
                                ]
                            T.sync_warp()
                            T.tcgen05_sf_warp_transpose(b_words[stage, :])
                        T.fence_proxy_async()
                        T.mbarrier_arrive(ordered[stage])
                T.mbarrier_wait_parity(finished[0], 0)
                T.sync_threads()
                T.tcgen05_after_thread_sync()
                T.copy(total, result)
                T.copy(result, out[row * ROWS, column * FEATURES])

    return scaled_product
