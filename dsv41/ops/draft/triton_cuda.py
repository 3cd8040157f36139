"""The Markov bias with Triton, for every GPU with bf16 tensor cores: the head is read once."""

import triton
import triton.language as tl

ROWS, COLUMNS = 64, 128  # of logits a program; always the same, so that a row's sums do not see the others


@triton.jit(do_not_specialize=["count"])
def _bias(
    logits, stride, embeds, embeds_stride, weight, weight_stride, count, vocab,
    RANK: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, there = row < count, column < vocab
    at, to = row.to(tl.int64)[:, None], column.to(tl.int64)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, RANK, PART):
        k = first + tl.arange(0, PART)
        inside = (k < RANK)[None]
        e = tl.load(embeds + at * embeds_stride + k[None], live[:, None] & inside, other=0.0)
        w = tl.load(weight + to * weight_stride + k[None], there[:, None] & inside, other=0.0)
        total = tl.dot(e, tl.trans(w), total)
    mask = live[:, None] & there[None]
    place = logits + at * stride + column[None]
    old = tl.load(place, mask, other=0.0)
    tl.store(place, old + total, mask)


def _part(rank):
    return min(64, max(16, triton.next_power_of_2(rank)))


def markov_bias(logits, embeds, weight):
    """Launch of ``dsv41.ops.markov_bias``."""
    count, vocab = logits.shape
    rank = weight.shape[1]
    if not count * vocab * rank:
        return
    _bias[(triton.cdiv(count, ROWS), triton.cdiv(vocab, COLUMNS))](
        logits, logits.stride(0), embeds, embeds.stride(0), weight, weight.stride(0), count, vocab,
        RANK=rank, PART=_part(rank), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8, num_stages=3,
    )  # fmt: skip


def variants(cfg):
    """``(kernel, signature, constants)`` for compilation ahead of time."""
    names = {"logits": "*fp32", "stride": "i64", "embeds": "*bf16", "embeds_stride": "i64", "weight": "*bf16"}
    names |= {"weight_stride": "i64", "count": "i32", "vocab": "i32"}
    rank = cfg.draft.markov_rank
    sizes = {"RANK": rank, "PART": _part(rank), "ROWS": ROWS, "COLUMNS": COLUMNS}
    yield _bias, (names, sizes, {"num_warps": 8, "num_stages": 3})
