"""RMSNorm and RoPE on Ascend: a row a core."""

import tilelang.ascend.language as T
import torch

from ..._op import compiled
from .._ascend import CORES, THREADS, build, e4m3, even_threads, larger, magnitude, ue8m0, undo


@compiled
def _rms_norm(width, keep, quantize):
    """A norm that is kept as bf16, quantised, or both."""
    count, x_stride, norm_stride, values_stride, scale_stride = (
        T.dynamic(n) for n in ("count", "x_stride", "norm_stride", "values_stride", "scale_stride")
    )

    @T.prim_func
    def rms_norm_rows(
        x: T.StridedTensor((count, width), (x_stride, 1), T.bfloat16),
        weight: T.Tensor((width,), T.bfloat16),
        eps: T.float32,
        floor: T.float32,
        norm: T.StridedTensor((count, width if keep else 1), (norm_stride, 1), T.bfloat16),
        values: T.StridedTensor((count, width if quantize else 1), (values_stride, 1), T.uint8),
        scale: T.StridedTensor((count, width // 32 if quantize else 1), (scale_stride, 1), T.uint8),
    ):
        with T.Kernel(CORES) as core:
            factors = T.alloc_shared((width,), T.bfloat16)
            row_in = T.alloc_shared((width,), T.bfloat16)
            normed = T.alloc_shared((width,), T.bfloat16)
            row_out = T.alloc_shared((width if quantize else 32,), T.uint8)
            codes = T.alloc_shared((width // 32 if quantize else 32,), T.uint8)
            T.copy(weight, factors)
            for step in T.Pipelined(T.ceildiv(count - core, CORES), num_stages=2):
                row = step * CORES + core
                T.copy(x[row, 0], row_in)
                with T.SimtVF(threads=even_threads(width)):
                    square = T.alloc_fragment((width,), T.float32)
                    total = T.alloc_fragment((1,), T.float32)
                    for i in T.Parallel(width):
                        square[i] = T.cast(row_in[i], T.float32) * T.cast(row_in[i], T.float32)
                    T.reduce_sum(square, total, dim=0)
                    for i in T.Parallel(width):
                        unit = T.cast(row_in[i], T.float32) * (
                            T.float32(1) / T.sqrt(total[0] / T.float32(width) + eps)
                        )
                        normed[i] = T.cast(T.cast(factors[i], T.float32) * unit, T.bfloat16)
                    if quantize:
                        for b in T.Parallel(width // 32):
                            amax = T.alloc_var(T.float32)
                            amax = floor
                            for i in T.serial(32):
                                amax = larger(amax, magnitude(T.cast(normed[b * 32 + i], T.float32)))
                            code = ue8m0(amax, 8, 0x600000)
                            codes[b] = T.cast(code, T.uint8)
                            for i in T.serial(32):
                                at = b * 32 + i
                                row_out[at] = e4m3(T.cast(normed[at], T.float32) * undo(code))
                if keep:
                    T.copy(normed, norm[row, 0])
                if quantize:
                    T.copy(row_out, values[row, 0])
                    T.copy(codes, scale[row, 0])

    return build(rms_norm_rows)


@compiled
def _rope(dim, pairs):
    tokens, heads = T.dynamic("tokens"), T.dynamic("heads")
    x_token, x_head, out_token, out_head, cos_stride, sin_stride = (
        T.dynamic(n) for n in ("x_token", "x_head", "out_token", "out_head", "cos_stride", "sin_stride")
    )

    @T.prim_func
    def rope_rows(
        x: T.StridedTensor((tokens, heads, dim), (x_token, x_head, 1), T.bfloat16),
        cos: T.StridedTensor((tokens, pairs), (cos_stride, 1), T.float32),
        sin: T.StridedTensor((tokens, pairs), (sin_stride, 1), T.float32),
        sign: T.float32,
        out: T.StridedTensor((tokens, heads, dim), (out_token, out_head, 1), T.bfloat16),
    ):
        with T.Kernel(CORES) as core:
            row = T.alloc_shared((dim,), T.bfloat16)
            turned = T.alloc_shared((dim,), T.bfloat16)
            c = T.alloc_shared((pairs,), T.float32)
            s = T.alloc_shared((pairs,), T.float32)
            for step in T.Pipelined(T.ceildiv(tokens * heads - core, CORES), num_stages=2):
                token = (step * CORES + core) // heads
                head = (step * CORES + core) % heads
                T.copy(x[token, head, 0], row)
                T.copy(cos[token, 0], c)
                T.copy(sin[token, 0], s)
                with T.SimtVF(threads=THREADS):
                    for i in T.Parallel(dim - 2 * pairs):
                        turned[i] = row[i]
                    for p in T.Parallel(pairs):
                        a = T.cast(row[dim - 2 * pairs + 2 * p], T.float32)
                        b = T.cast(row[dim - 2 * pairs + 2 * p + 1], T.float32)
                        angle = s[p] * sign
                        turned[dim - 2 * pairs + 2 * p] = T.cast(a * c[p] - b * angle, T.bfloat16)
                        turned[dim - 2 * pairs + 2 * p + 1] = T.cast(b * c[p] + a * angle, T.bfloat16)
                T.copy(turned, out[token, head, 0])

    return build(rope_rows)


def variants(cfg):
    """Norms of the hidden state, the latent query, heads and index keys; RoPE of heads and index queries."""
    for width in sorted({cfg.hidden, cfg.q_rank, cfg.head_dim, cfg.index_dim}):
        yield _rms_norm, (width, True, False)
        for keep in (True, False):
            yield _rms_norm, (width, keep, True)
    for dim in sorted({cfg.head_dim, cfg.index_dim}):
        yield _rope, (dim, cfg.rope_dim // 2)


def _launch(x, weight, eps, floor, norm, values, scale):
    if not x.numel():
        return
    spare = x.view(torch.uint8)[:, :1]  # in place of a result that is not asked for: not written
    _rms_norm(x.shape[1], norm is not None, values is not None)(
        x, weight, eps, floor, x[:, :1] if norm is None else norm,
        spare if values is None else values.view(torch.uint8),
        spare if scale is None else scale.view(torch.uint8),
    )  # fmt: skip


def rms_norm(x, weight, eps, out):
    """Launch of ``dsv41.ops.rms_norm``."""
    _launch(x, weight, eps, 0.0, out, None, None)


def rms_norm_quantize(x, weight, eps, floor, norm, values, scale):
    """Launch of ``dsv41.ops.rms_norm_quantize``."""
    _launch(x, weight, eps, floor, norm, values, scale)


def rope(x, cos, sin, inverse, out):
    """Launch of ``dsv41.ops.rope``."""
    if x.numel():
        _rope(x.shape[2], cos.shape[1])(x, cos, sin, -1.0 if inverse else 1.0, out)
