"""The token mask on Ascend."""

import tilelang.ascend.language as T

from ..._op import compiled
from .._ascend import CORES, THREADS, build

COLUMNS = 32 * THREADS  # of a step: a word of the mask a thread


@compiled
def _mask(dtype):
    rows, vocab, words, stride, mask_stride = (
        T.dynamic(n) for n in ("rows", "vocab", "words", "stride", "mask_stride")
    )

    @T.prim_func
    def mask_rows(
        logits: T.StridedTensor((rows, vocab), (stride, 1), dtype),
        bitmask: T.StridedTensor((rows, words), (mask_stride, 1), T.int32),
    ):
        with T.Kernel(CORES) as core:
            steps = T.ceildiv(vocab, COLUMNS)
            for step in T.serial(T.ceildiv(rows * steps - core, CORES)):
                row = (step * CORES + core) // steps
                part = (step * CORES + core) % steps
                with T.SimtVF(threads=THREADS):
                    for t in T.Parallel(THREADS):
                        word = part * THREADS + t
                        if word * 32 < vocab:
                            allowed = T.alloc_var(T.int32)
                            allowed = bitmask[row, word]
                            for i in T.serial(32):
                                if ((allowed >> i & 1) == 0) & (word * 32 + i < vocab):
                                    logits[row, word * 32 + i] = -T.infinity(dtype)

    return build(mask_rows)


def variants(cfg):
    """Logits of the target."""
    yield _mask, ("float32",)


def apply_token_bitmask(logits, bitmask):
    """Launch of ``dsv41.ops.apply_token_bitmask``."""
    if logits.numel():
        _mask(str(logits.dtype).removeprefix("torch."))(logits, bitmask)
