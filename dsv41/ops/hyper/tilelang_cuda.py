"""mHC of four streams on Hopper (mhc.cuh): one pass over the streams, coefficients, the norm."""

from pathlib import Path

import tilelang.language as T

from ..._op import compiled
from .._tilelang import arch_of, build, device_source
from ..norm_rope.api import NORM_QUANTIZE
from .api import parts

HERE = Path(__file__).parent
ARCH = "sm_90a"
WARPS = 8  # a block of `streams`: 16 tokens each
TOKENS = 8  # a block of `coefficients`


def source():
    """The text of both kernels."""
    return device_source(HERE.parent / "quant" / "quantize.cuh", HERE / "mhc.cuh")


def streams_call(hidden, warps, stages, expand):
    """(device function, bytes of shared memory) of the pass over the streams."""
    stage = (10 if expand else 8) * warps * 32 * 16
    return f"mhc::streams<{hidden}, {warps}, {stages}, {str(expand).lower()}>", stages * stage + 18432


def stages(inner):
    """Chunks under way: as many as fit, or the only one, so that two blocks fit."""
    return min(4, inner)


@compiled
def _streams(hidden, depth, expand, arch):
    text, (call, size) = source(), streams_call(hidden, WARPS, depth, expand)

    @T.prim_func
    def mhc_streams(
        out: T.Tensor((16,), T.bfloat16),  # the start of the new streams
        y: T.int64,
        y_stride: T.int64,
        x: T.int64,
        x_stride: T.int64,
        post: T.int64,
        comb: T.int64,
        pre: T.int64,
        fn: T.int64,
        out_stride: T.int64,
        h: T.int64,
        partial: T.int64,
        count: T.int32,
        number: T.int32,
        inner: T.int32,
    ):
        with T.Kernel(T.ceildiv(count, 16 * WARPS), number, threads=32 * WARPS) as _:
            T.import_source(text)
            shared = T.alloc_shared((size,), T.uint8)
            T.call_extern(
                "handle", call, y, y_stride, x, x_stride, post, comb, pre, fn, out.access_ptr("w"),
                out_stride, h, partial, count, inner, shared.access_ptr("rw"),
            )  # fmt: skip

    return build(mhc_streams, arch)


@compiled
def _coefficients(hidden, groups, inner, arch):
    text, call = source(), f"mhc::coefficients<{hidden}, {groups}, {inner}>"

    @T.prim_func
    def mhc_coefficients(
        pre: T.Tensor((4,), T.float32),  # the start of the results
        partial: T.int64,
        base: T.int64,
        scale: T.int64,
        norm_eps: T.float32,
        eps: T.float32,
        iters: T.int32,
        post: T.int64,
        comb: T.int64,
        count: T.int32,
    ):
        with T.Kernel(T.ceildiv(count, TOKENS), threads=16 * TOKENS) as _:
            T.import_source(text)
            T.call_extern(
                "handle",
                call,
                partial,
                base,
                scale,
                norm_eps,
                eps,
                iters,
                pre.access_ptr("w"),
                post,
                comb,
                count,
            )

    return build(mhc_coefficients, arch)


def variants(cfg):
    """Both kernels for few and for many tokens."""
    for tokens in (64, 4096):
        number, inner, of_group = parts(tokens, cfg.hidden)
        for expand in (False, True):
            yield _streams, (cfg.hidden, stages(inner), expand, ARCH)
        yield _coefficients, (cfg.hidden, number // of_group, of_group, ARCH)


def mhc_mixes(x, fn, base, scale, norm_eps, eps, iters, pre, post, comb, scratch):
    """Launches of ``dsv41.ops.mhc_mixes``."""
    if x.shape[0]:
        _launch(x, x, pre, pre, pre, fn, x, x, scratch, False)
        _finish(x, base, scale, norm_eps, eps, iters, pre, post, comb, scratch)


def mhc_boundary(
    y, x, post, comb, pre, fn, base, scale, weight, norm_eps, eps, iters, floor,
    out, next_pre, next_post, next_comb, norm, values, codes, collapsed, scratch,
):  # fmt: skip
    """Launches of ``dsv41.ops.mhc_boundary``."""
    if x.shape[0]:
        _launch(y, x, post, comb, pre, fn, out, collapsed, scratch, True)
        _finish(x, base, scale, norm_eps, eps, iters, next_pre, next_post, next_comb, scratch)
        launch = NORM_QUANTIZE.load("tilelang_cuda")
        launch(collapsed, weight, norm_eps, floor, norm, values, codes)


def _launch(y, x, post, comb, pre, fn, out, h, scratch, expand):
    count, _, hidden = x.shape
    number, inner, _ = parts(count, hidden)
    _streams(hidden, stages(inner), expand, arch_of(x))(
        out.as_strided((16,), (1,)), y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), post.data_ptr(),
        comb.data_ptr(), pre.data_ptr(), fn.data_ptr(), out.stride(0), h.data_ptr(), scratch.data_ptr(),
        count, number, inner,
    )  # fmt: skip


def _finish(x, base, scale, norm_eps, eps, iters, pre, post, comb, scratch):
    count, _, hidden = x.shape
    number, _, of_group = parts(count, hidden)
    _coefficients(hidden, number // of_group, of_group, arch_of(x))(
        pre.as_strided((4,), (1,)), scratch.data_ptr(), base.data_ptr(), scale.data_ptr(), norm_eps, eps,
        iters, post.data_ptr(), comb.data_ptr(), count,
    )  # fmt: skip
