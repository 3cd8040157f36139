"""Plain bf16 linears of few tokens on Hopper (few.cuh): a product a share of k, then their sum."""

from pathlib import Path

import tilelang.language as T

from ..._op import compiled, split_scratch
from .._tilelang import arch_of, build, device_source
from .api import linear_parts

ARCH = "sm_90a"
THREADS = 256
FEATURES, SHARE, TILES = 16, 512, 8  # of a block, as in few.cuh; tiles of 8 tokens
BYTES = 8 * TILES * 32 * 16


def source():
    """The text of both kernels."""
    return device_source(Path(__file__).parent / "few.cuh")


@compiled
def _product(arch):
    text = source()

    @T.prim_func
    def few_product(
        sums: T.Tensor((4,), T.float32),  # the start of the sums
        x: T.int64,
        x_stride: T.int64,
        w: T.int64,
        w_stride: T.int64,
        tokens: T.int32,
        features: T.int32,
        k: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(features, FEATURES), T.ceildiv(k, SHARE), T.ceildiv(tokens, 8 * TILES), threads=THREADS
        ) as _:
            T.import_source(text)
            T.annotate_min_blocks_per_sm(2)
            T.pdl_sync()
            T.pdl_trigger()
            shared = T.alloc_shared((BYTES,), T.uint8)
            T.call_extern(
                "handle", f"few::product<{TILES}>", x, x_stride, w, w_stride, tokens, features, k,
                sums.access_ptr("w"), shared.access_ptr("rw"),
            )  # fmt: skip

    return build(few_product, arch)


@compiled
def _add(dtype, arch):
    text, call = source(), f"few::add<{str(dtype == 'bfloat16').lower()}>"

    @T.prim_func
    def few_add(
        out: T.Tensor((2,), dtype),  # the start of the result
        sums: T.int64,
        shares: T.int32,
        tokens: T.int32,
        features: T.int32,
        out_stride: T.int64,
    ):
        with T.Kernel(T.ceildiv(tokens * (features // 2), THREADS), threads=THREADS) as _:
            T.import_source(text)
            T.pdl_sync()
            T.pdl_trigger()
            T.call_extern("handle", call, sums, shares, tokens, features, out.access_ptr("w"), out_stride)

    return build(few_add, arch)


def variants(cfg):
    """Both kernels; sizes are arguments."""
    yield _product, (ARCH,)
    for dtype in ("float32", "bfloat16"):
        yield _add, (dtype, ARCH)


def linear(x, w, out, scratch):
    """Launches of ``dsv41.ops.linear``."""
    (tokens, k), features = x.shape, w.shape[0]
    (sums,) = split_scratch(scratch, linear_parts(tokens, features, k))
    _product(arch_of(x))(
        sums.view(-1)[:4], x.data_ptr(), x.stride(0), w.data_ptr(), w.stride(0), tokens, features, k
    )
    _add(str(out.dtype).removeprefix("torch."), arch_of(x))(
        out.as_strided((2,), (1,)), sums.data_ptr(), -(-k // SHARE), tokens, features, out.stride(0)
    )
