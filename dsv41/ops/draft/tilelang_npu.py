"""The drafter on Ascend: splitting a budget (one core, whose threads share the requests), the Markov bias."""

import tilelang.ascend.language as T

from ..._op import compiled
from .._ascend import CORES, THREADS, build, not_finite
from .._ascend import tilelang_cube as cube


def flushed(x):
    """A number of 0 or more, subnormal ones as 0."""
    return T.if_then_else(x < T.float32(2.0**-126), T.float32(0), x)


@compiled
def _split(rows, block, kinds):
    """``kinds``: integer types of lo, hi, base, bonus, start, budget, num_requests and rotation."""
    stride, max_tokens, max_logits = (T.dynamic(n) for n in ("stride", "max_tokens", "max_logits"))
    slots = rows * block

    @T.prim_func
    def split(
        confidence: T.StridedTensor((rows, block), (stride, 1), T.float32),
        lo: T.Tensor((rows,), kinds[0]),
        hi: T.Tensor((rows,), kinds[1]),
        base: T.Tensor((rows,), kinds[2]),
        bonus: T.Tensor((rows,), kinds[3]),
        start: T.Tensor((rows,), kinds[4]),
        weights: T.Tensor((rows,), T.float32),
        budget: T.Tensor((1,), kinds[5]),
        num_requests: T.Tensor((1,), kinds[6]),
        rotation: T.Tensor((1,), kinds[7]),
        lengths: T.Tensor((rows,), T.int32),
        cu_q: T.Tensor((rows + 1,), T.int32),
        cu_logits: T.Tensor((rows + 1,), T.int32),
        token_request_ids: T.Tensor((max_tokens,), T.int32),
        positions: T.Tensor((max_tokens,), T.int64),
        logits_ids: T.Tensor((max_logits,), T.int32),
        stats: T.Tensor((5,), T.int64),
    ):
        with T.Kernel(CORES) as core:
            rank = T.alloc_shared((slots,), T.int64)  # of a slot among all; -1 is no candidate
            mass = T.alloc_shared((slots,), T.int64)  # survival in units of 2^-24
            floor = T.alloc_shared((rows,), T.int32)
            candidates = T.alloc_shared((rows,), T.int32)
            invalid = T.alloc_shared((rows,), T.int32)
            drafts = T.alloc_shared((rows,), T.int32)
            own = T.alloc_shared((rows,), T.int32)  # tokens of a request beside its drafts
            emits = T.alloc_shared((rows,), T.int32)
            if core == 0:
                with T.SimtVF(threads=THREADS):
                    for r in T.Parallel(rows):
                        requests = T.cast(num_requests[0], T.int32)
                        live = r < requests
                        emit = T.alloc_var(T.int32)
                        emit = T.cast(live & (bonus[r] != 0), T.int32)
                        emits[r] = emit
                        cap = T.alloc_var(T.int32)
                        cap = T.if_then_else(emit != 0, T.max(0, T.min(T.cast(hi[r], T.int32), block)), 0)
                        low = T.alloc_var(T.int32)
                        low = T.min(T.max(T.cast(lo[r], T.int32), 0), cap)
                        floor[r] = low
                        own[r] = T.if_then_else(live, T.max(T.max(T.cast(base[r], T.int32), 0), emit), 0)
                        weight = T.alloc_var(T.float32)
                        weight = weights[r]
                        if not_finite(weight) | (weight <= T.float32(0)):
                            weight = T.float32(0)
                        cycle = T.max(requests, 1)
                        turn = T.alloc_var(T.int32)
                        shift = T.truncmod(T.cast(rotation[0], T.int64), T.cast(cycle, T.int64))
                        turn = T.truncmod(r + T.cast(shift, T.int32) + cycle, cycle)
                        survival = T.alloc_var(T.float32)
                        survival = T.float32(1)
                        wrong = T.alloc_var(T.int32)
                        wrong = 0
                        found = T.alloc_var(T.int32)
                        found = 0
                        for j in T.serial(block):
                            c = T.alloc_var(T.float32)
                            c = confidence[r, j]
                            if not_finite(c):
                                c = T.float32(0)
                                wrong = wrong + T.cast(j < cap, T.int32)
                            c = T.if_then_else(c < T.float32(0), T.float32(0), c)
                            c = T.if_then_else(c > T.float32(1), T.float32(1), c)
                            survival = flushed(survival * c)
                            key = T.alloc_var(T.float32)
                            key = flushed(weight * survival)
                            place = T.cast(slots - 1 - (turn * block + j), T.int64)
                            bits = T.cast(T.reinterpret(key, T.int32), T.int64)
                            if (j >= low) & (j < cap):
                                rank[r * block + j] = bits * T.int64(slots) + place
                                found = found + 1
                            else:
                                rank[r * block + j] = T.int64(-1)
                            mass[r * block + j] = T.cast(survival * T.float32(2.0**24), T.int64)
                        candidates[r] = found
                        invalid[r] = wrong
                    for r in T.Parallel(rows):
                        wanted = T.alloc_var(T.int32)
                        total = T.alloc_var(T.int32)
                        wanted = T.cast(budget[0], T.int32)
                        total = 0
                        for o in T.serial(rows):
                            wanted = wanted - floor[o]
                            total = total + candidates[o]
                        wanted = T.min(T.max(wanted, 0), total)
                        taken = T.alloc_var(T.int32)
                        taken = floor[r]
                        for j in T.serial(block):
                            mine = T.alloc_var(T.int64)
                            mine = rank[r * block + j]
                            if mine >= T.int64(0):
                                above = T.alloc_var(T.int32)
                                above = 0
                                for o in T.serial(slots):
                                    above = above + T.cast(rank[o] > mine, T.int32)
                                taken = taken + T.cast(above < wanted, T.int32)
                        drafts[r] = taken
                        lengths[r] = taken
                    for r in T.Parallel(rows):
                        ends = T.alloc_var(T.int32)
                        ends_logits = T.alloc_var(T.int32)
                        ends = 0
                        ends_logits = 0
                        for o in T.serial(r + 1):
                            if own[o] != 0:
                                ends = ends + own[o] + drafts[o]
                            ends_logits = ends_logits + emits[o] + drafts[o]
                        cu_q[r + 1] = ends
                        cu_logits[r + 1] = ends_logits
                        if r == 0:
                            cu_q[0] = 0
                            cu_logits[0] = 0
                        if r == rows - 1:
                            sums = T.alloc_var(T.int64)
                            all_drafts = T.alloc_var(T.int64)
                            all_wrong = T.alloc_var(T.int64)
                            sums = T.int64(0)
                            all_drafts = T.int64(0)
                            all_wrong = T.int64(0)
                            for o in T.serial(rows):
                                all_drafts = all_drafts + T.cast(drafts[o], T.int64)
                                all_wrong = all_wrong + T.cast(invalid[o], T.int64)
                                for j in T.serial(block):
                                    if j < drafts[o]:
                                        sums = sums + mass[o * block + j]
                            stats[0] = T.cast(ends, T.int64)
                            stats[1] = T.cast(ends_logits, T.int64)
                            stats[2] = all_drafts
                            stats[3] = all_wrong
                            stats[4] = sums
                with T.SimtVF(threads=THREADS):
                    first = T.alloc_local((rows + 1,), T.int32)
                    for t in T.Parallel(THREADS):
                        first[0] = 0
                        for r in T.serial(rows):
                            first[r + 1] = first[r] + T.if_then_else(own[r] != 0, own[r] + drafts[r], 0)
                        for part in T.serial(T.ceildiv(max_tokens, THREADS)):
                            token = part * THREADS + t
                            if token < max_tokens:
                                owner = T.alloc_var(T.int32)
                                owner = 0
                                for r in T.serial(rows):
                                    owner = owner + T.cast(first[r + 1] <= token, T.int32)
                                if owner < rows:
                                    token_request_ids[token] = owner
                                    begin = T.cast(start[owner], T.int64)
                                    positions[token] = begin + T.cast(token - first[owner], T.int64)
                                else:
                                    token_request_ids[token] = -1
                                    positions[token] = T.int64(0)
                        for part in T.serial(T.ceildiv(max_logits, THREADS)):
                            item = part * THREADS + t
                            if item < max_logits:
                                ends2 = T.alloc_var(T.int32)
                                ends2 = 0
                                result = T.alloc_var(T.int32)
                                result = -1
                                for r in T.serial(rows):
                                    ends2 = ends2 + emits[r] + drafts[r]
                                    if (ends2 > item) & (result < 0):
                                        result = first[r + 1] - (ends2 - item)
                                logits_ids[item] = result

    return build(split)


@compiled
def _bias(vocab, rank):
    return build(cube.plain(vocab, rank, "float32", accumulate=True))


def variants(cfg):
    """Batches of up to 256 requests, and the bias."""
    yield _bias, (cfg.vocab_size, cfg.draft.markov_rank)
    yield _split, (256, cfg.draft.block_size, (*("int32",) * 4, "int64", *("int32",) * 3))


def split_budget_ragged(
    confidence, lo, hi, base, bonus, start, weights, budget, num_requests, rotation, lengths, cu_q, cu_logits,
    token_request_ids, positions, logits_ids, stats,
):  # fmt: skip
    """Launch of ``dsv41.ops.split_budget_ragged``."""
    integers = (lo, hi, base, bonus, start, budget, num_requests, rotation)
    kinds = tuple(str(x.dtype).removeprefix("torch.") for x in integers)
    _split(*confidence.shape, kinds)(
        confidence, lo, hi, base, bonus, start, weights, budget, num_requests, rotation, lengths, cu_q,
        cu_logits, token_request_ids, positions, logits_ids, stats,
    )  # fmt: skip


def markov_bias(logits, embeds, weight):
    """Launch of ``dsv41.ops.markov_bias``: a product on cube cores whose store adds."""
    if logits.numel() and embeds.numel():
        _bias(*weight.shape)(embeds, weight, logits)
