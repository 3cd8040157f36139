"""mHC of four streams on Hopper (mhc.cuh): one pass over the streams, then coefficients and normed rows."""

from pathlib import Path

import tilelang.language as T

from ..._op import compiled
from .._tilelang import arch_of, build, device_source
from ..norm_rope.api import warps
from .api import ROWS, hopper_parts, levels

HERE = Path(__file__).parent
ARCH = "sm_90a"


def source():
    """The text of both kernels."""
    files = (HERE.parent / "quant" / "quantize.cuh", HERE.parent / "norm_rope" / "norm_rope.cuh")
    return device_source(*files, HERE / "mhc.cuh", wgmma={"bf16_rs": (72,)})


def streams_call(hidden, groups, chunks, expand):
    """(device function, threads, bytes of shared memory) of the pass over the streams."""
    stages, buffers = (2 if chunks > 2 else 1), min(2, chunks)
    size = buffers * (18432 + 16) + stages * groups * (40960 if expand else 32768)
    call = f"mhc::streams<{hidden}, {groups}, {chunks}, {levels(hidden)[2]}, {str(expand).lower()}>"
    return call, 128 * (1 + groups), size


def finish_call(hidden, chunks, norm):
    """(device function, threads, bytes of shared memory, tokens a block) of what follows it."""
    groups, sums, per = levels(hidden)
    tokens, w = (1 if chunks < per else 2 if chunks == per else 8), warps(hidden)
    parts = (groups, sums, per // chunks) if chunks <= per else (groups, 1, 1)
    call = f"mhc::finish<{hidden}, {w}, {', '.join(map(str, parts))}, {tokens}, {str(norm).lower()}>"
    return call, 32 * (4 if w == 1 else w), tokens * parts[0] * parts[1] * 128 + 128, tokens


def cross_call(hidden):
    """(device function, threads, bytes of shared memory, rows a block) of a boundary without mixes."""
    w = warps(hidden)
    turns = -(-hidden // (256 * w))
    spread = w > 1 and 32 * w * turns <= 1024  # of narrow rows a block has four, a warp each
    threads = 32 * (w * turns if spread else 4 if w == 1 else w)
    call = f"mhc::cross<{hidden}, {w}, {str(spread).lower()}>"
    return call, threads, 128 + 4 * threads, 4 if w == 1 else 1


@compiled
def _streams(hidden, groups, chunks, expand, arch):
    text, (call, threads, size) = source(), streams_call(hidden, groups, chunks, expand)

    @T.prim_func
    def mhc_streams(
        out: T.Tensor((16,), T.bfloat16),  # the start of the new streams
        y: T.int64,
        y_stride: T.int64,
        x: T.int64,
        post: T.int64,
        comb: T.int64,
        pre: T.int64,
        fn: T.int64,
        h: T.int64,
        partial: T.int64,
        count: T.int32,
        number: T.int32,
    ):
        with T.Kernel(T.ceildiv(count, ROWS * groups), number, threads=threads) as _:
            T.import_source(text)
            T.pdl_sync()
            if chunks <= 4:  # of many tokens, blocks that start early are in the way
                T.pdl_trigger()
            T.annotate_min_blocks_per_sm(2 if groups == 1 and chunks == 1 else 1)
            shared = T.alloc_shared((size,), T.uint8)
            T.call_extern(
                "handle", call, y, y_stride, x, post, comb, pre, fn, out.access_ptr("w"), h, partial, count,
                shared.access_ptr("rw"),
            )  # fmt: skip

    return build(mhc_streams, arch)


@compiled
def _finish(hidden, chunks, norm, arch):
    text, (call, threads, size, _) = source(), finish_call(hidden, chunks, norm)

    @T.prim_func
    def mhc_finish(
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
        rows: T.int64,
        weight: T.int64,
        floor: T.float32,
        values: T.int64,
        codes: T.int64,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=threads) as _:
            T.import_source(text)
            T.pdl_sync()
            if chunks <= 4:
                T.pdl_trigger()
            shared = T.alloc_shared((size,), T.uint8)
            T.call_extern(
                "handle", call, partial, base, scale, norm_eps, eps, iters, pre.access_ptr("w"), post, comb,
                count, rows, weight, floor, values, codes, shared.access_ptr("rw"),
            )  # fmt: skip

    return build(mhc_finish, arch)


@compiled
def _cross(hidden, arch):
    text, (call, threads, size, _) = source(), cross_call(hidden)

    @T.prim_func
    def mhc_cross(
        out: T.Tensor((16,), T.bfloat16),  # the start of the new streams
        y: T.int64,
        y_stride: T.int64,
        x: T.int64,
        post: T.int64,
        comb: T.int64,
        pre: T.int64,
        count: T.int32,
        weight: T.int64,
        eps: T.float32,
        floor: T.float32,
        norm: T.int64,
        values: T.int64,
        codes: T.int64,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=threads) as _:
            T.import_source(text)
            T.pdl_sync()
            T.pdl_trigger()
            shared = T.alloc_shared((size,), T.uint8)
            T.call_extern(
                "handle", call, y, y_stride, x, post, comb, pre, out.access_ptr("w"), count, weight, eps,
                floor, norm, values, codes, shared.access_ptr("rw"),
            )  # fmt: skip

    return build(mhc_cross, arch)


def variants(cfg):
    """All kernels, those of the streams for few, some and many tokens."""
    yield _cross, (cfg.hidden, ARCH)
    for tokens in (ROWS, 2 * ROWS, 4096):
        _, chunks = hopper_parts(tokens, cfg.hidden)
        for expand in (False, True):
            yield _streams, (cfg.hidden, _groups(tokens), chunks, expand, ARCH)
            yield _finish, (cfg.hidden, chunks, expand, ARCH)


def _groups(tokens):
    """Warp groups a block, of 64 rows each."""
    return 1 if tokens <= ROWS else 2


def mhc_mixes(x, fn, base, scale, norm_eps, eps, iters, pre, post, comb, scratch):
    """Launches of ``dsv41.ops.mhc_mixes``."""
    if x.shape[0]:
        _pass(x, x, pre, pre, pre, fn, x, x, scratch, False)
        _after(x, base, scale, norm_eps, eps, iters, pre, post, comb, scratch)


def mhc_boundary(
    y, x, post, comb, pre, fn, base, scale, weight, norm_eps, eps, iters, floor,
    out, next_pre, next_post, next_comb, norm, values, codes, scratch,
):  # fmt: skip
    """Launches of ``dsv41.ops.mhc_boundary``; the collapsed rows wait in ``norm``."""
    count, _, hidden = x.shape
    if not count:
        return
    if not len(next_pre):  # without the mixes
        _cross(hidden, arch_of(x))(
            out.as_strided((16,), (1,)), y.data_ptr(), y.stride(0), x.data_ptr(), post.data_ptr(),
            comb.data_ptr(), pre.data_ptr(), count, weight.data_ptr(), norm_eps, floor, norm.data_ptr(),
            values.data_ptr(), codes.data_ptr(), -(-count // cross_call(hidden)[-1]),
        )  # fmt: skip
    else:
        _pass(y, x, post, comb, pre, fn, out, norm, scratch, True)
        rows = (norm.data_ptr(), weight.data_ptr(), floor, values.data_ptr(), codes.data_ptr())
        _after(x, base, scale, norm_eps, eps, iters, next_pre, next_post, next_comb, scratch, rows)


def _pass(y, x, post, comb, pre, fn, out, h, scratch, expand):
    count, _, hidden = x.shape
    number, chunks = hopper_parts(count, hidden)
    _streams(hidden, _groups(count), chunks, expand, arch_of(x))(
        out.as_strided((16,), (1,)), y.data_ptr(), y.stride(0), x.data_ptr(), post.data_ptr(),
        comb.data_ptr(), pre.data_ptr(), fn.data_ptr(), h.data_ptr(), scratch.data_ptr(), count, number,
    )  # fmt: skip


def _after(x, base, scale, norm_eps, eps, iters, pre, post, comb, scratch, rows=None):
    count, _, hidden = x.shape
    _, chunks = hopper_parts(count, hidden)
    tokens = finish_call(hidden, chunks, False)[-1]
    blocks = -(-count // tokens)
    if rows:
        blocks += -(-count // cross_call(hidden)[-1])
    _finish(hidden, chunks, rows is not None, arch_of(x))(
        pre.as_strided((4,), (1,)), scratch.data_ptr(), base.data_ptr(), scale.data_ptr(), norm_eps, eps,
        iters, post.data_ptr(), comb.data_ptr(), count, *(rows or (0, 0, 0.0, 0, 0)), blocks,
    )  # fmt: skip
