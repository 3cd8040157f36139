"""The budget's split on Hopper (split.cuh): every block decides it, a row a thread, and writes its part."""

from pathlib import Path

import tilelang.language as T
import torch

from ..._op import compiled
from .._tilelang import arch_of, build, device_source

HERE = Path(__file__).parent
ARCH = "sm_90a"
PLACES = 1  # of the layout a thread, about


def source():
    """The text of the kernel."""
    return device_source(HERE.parent / "quant" / "quantize.cuh", HERE / "split.cuh")


def split_call(block, threads, wide):
    """(device function, bytes of shared memory); ``wide``: positions of 64 bits."""
    return f"split::ragged<{block}, {threads}, int{64 if wide else 32}_t>", 8 * threads + threads // 4


@compiled
def _split(block, threads, wide, arch):
    text, (call, size) = source(), split_call(block, threads, wide)

    @T.prim_func
    def split_rows(
        lengths: T.Tensor((1,), T.int32),  # the start of the results
        confidence: T.int64,
        stride: T.int64,
        lo: T.int64,
        hi: T.int64,
        base: T.int64,
        bonus: T.int64,
        start: T.int64,
        weights: T.int64,
        budget: T.int64,
        num_requests: T.int64,
        rotation: T.int64,
        cu_q: T.int64,
        cu_logits: T.int64,
        token_request_ids: T.int64,
        positions: T.int64,
        logits_ids: T.int64,
        stats: T.int64,
        count: T.int32,
        max_tokens: T.int32,
        max_logits: T.int32,
        blocks: T.int32,
    ):
        with T.Kernel(blocks, threads=threads) as _:
            T.import_source(text)
            shared = T.alloc_shared((size,), T.uint8)
            T.call_extern(
                "handle", call, confidence, stride, lo, hi, base, bonus, start, weights, budget, num_requests,
                rotation, lengths.access_ptr("w"), cu_q, cu_logits, token_request_ids, positions, logits_ids,
                stats, count, max_tokens, max_logits, shared.access_ptr("rw"),
            )  # fmt: skip

    return build(split_rows, arch)


def variants(cfg):
    """Any number of requests up to 1,024, with and without a drafter (one column)."""
    for block in sorted({1, cfg.draft.block_size}):
        for threads in (128, 256, 512, 1024):
            yield _split, (block, threads, True, ARCH)


def split_budget_ragged(
    confidence, lo, hi, base, bonus, start, weights, budget, num_requests, rotation, lengths, cu_q, cu_logits,
    token_request_ids, positions, logits_ids, stats,
):  # fmt: skip
    """Launch of ``dsv41.ops.split_budget_ragged``."""
    rows, block = confidence.shape
    threads = next(n for n in (128, 256, 512, 1024) if rows <= n)
    places = max(positions.shape[0], logits_ids.shape[0])
    given = (lo, hi, base, bonus, start, weights, budget, num_requests, rotation)
    made = (cu_q, cu_logits, token_request_ids, positions, logits_ids, stats)
    _split(block, threads, start.dtype == torch.int64, arch_of(confidence))(
        lengths.as_strided((1,), (1,)), confidence.data_ptr(), confidence.stride(0),
        *(x.data_ptr() for x in given), *(x.data_ptr() for x in made),
        rows, positions.shape[0], logits_ids.shape[0], max(1, -(-places // (PLACES * threads))),
    )  # fmt: skip
