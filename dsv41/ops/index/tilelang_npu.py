"""Index queries, scores and the choice of the largest on Ascend.

Scores are products of cube cores, all else is done by vector cores: emulated, never run. `index_topk` goes
over chunks of entries whose scores fit its scratch, and merges the best of each into the best so far.
"""

import tilelang.ascend.language as T
import torch

from ..._op import compiled, split_scratch
from .._ascend import CORES, THREADS, build, e2m1, is_nan, larger, magnitude, ue8m0, undo
from .._ascend import tilelang_cube as cube

FLOOR = 6 * 2.0**-126
KEYS, SPAN = 128, 8  # keys of a product, products in a row with the same queries
QUERIES = 256  # scored at a time; more leave room for fewer entries in the scratch


@compiled
def _query(heads, dim, pairs):
    count, x_token, x_head, cos_stride, sin_stride, values_token, scale_token = (
        T.dynamic(n)
        for n in ("count", "x_token", "x_head", "cos_stride", "sin_stride", "values_token", "scale_token")
    )
    plain, blocks = dim - 2 * pairs, dim // 32

    @T.prim_func
    def query_rows(
        x: T.StridedTensor((count, heads, dim), (x_token, x_head, 1), T.bfloat16),
        cos: T.StridedTensor((count, pairs), (cos_stride, 1), T.float32),
        sin: T.StridedTensor((count, pairs), (sin_stride, 1), T.float32),
        values: T.StridedTensor((count, heads * dim // 2), (values_token, 1), T.uint8),
        scale: T.StridedTensor((count, heads * blocks), (scale_token, 1), T.uint8),
    ):
        with T.Kernel(CORES) as core:
            rows = T.alloc_shared((heads, dim), T.bfloat16)
            turned = T.alloc_shared((heads, dim), T.bfloat16)
            packed = T.alloc_shared((heads * dim // 2,), T.uint8)
            codes = T.alloc_shared((heads * blocks,), T.uint8)
            for step in T.Pipelined(T.ceildiv(count - core, CORES), num_stages=2):
                token = step * CORES + core
                T.copy(x[token, 0:heads, 0:dim], rows)
                with T.SimtVF(threads=THREADS):
                    for h, i in T.Parallel(heads, plain):
                        turned[h, i] = rows[h, i]
                    for h, p in T.Parallel(heads, pairs):
                        a = T.cast(rows[h, plain + 2 * p], T.float32)
                        b = T.cast(rows[h, plain + 2 * p + 1], T.float32)
                        c = cos[token, p]
                        s = sin[token, p]
                        turned[h, plain + 2 * p] = T.cast(a * c - b * s, T.bfloat16)
                        turned[h, plain + 2 * p + 1] = T.cast(b * c + a * s, T.bfloat16)
                    for g in T.Parallel(heads * blocks):
                        h = g // blocks
                        first = g % blocks * 32
                        amax = T.alloc_var(T.float32)
                        amax = T.float32(FLOOR)
                        for i in T.serial(32):
                            amax = larger(amax, magnitude(T.cast(turned[h, first + i], T.float32)))
                        code = ue8m0(amax, 2, 0x400000)
                        codes[g] = T.cast(code, T.uint8)
                        for i in T.serial(16):
                            low = e2m1(T.cast(turned[h, first + 2 * i], T.float32) * undo(code))
                            high = e2m1(T.cast(turned[h, first + 2 * i + 1], T.float32) * undo(code))
                            packed[g * 16 + i] = T.cast(low | high << 4, T.uint8)
                T.copy(packed, values[token, 0])
                T.copy(codes, scale[token, 0])

    return build(query_rows)


def order(x):
    """uint32 keys in the order of floats, equal for zeros of both signs; 0 for what is never chosen."""
    bits = T.reinterpret(x, T.uint32)
    negative = bits >= T.uint32(0x80000000)
    key = T.if_then_else(negative, ~bits, bits | T.uint32(0x80000000))
    key = T.if_then_else(x == T.float32(0), T.uint32(0x80000000), key)
    return T.if_then_else(is_nan(x) | (bits == T.uint32(0xFF800000)), T.uint32(0), key)


def choose(k, merge):
    """The k-th largest key, a bit a pass; then every thread writes what it keeps of its share, in order.

    ``merge``: `scores` are those of the entries from ``first`` on; `ids` and `kept` hold the best of the
    entries before and become the best of all. -inf in `kept`: none.
    """
    count, width, stride, ids_stride, kept_rows = (
        T.dynamic(n) for n in ("count", "width", "stride", "ids_stride", "kept_rows")
    )
    before = k if merge else 0  # values ahead of the scores

    @T.prim_func
    def topk_rows(
        scores: T.StridedTensor((count, width), (stride, 1), T.float32),
        lens: T.Tensor((count,), T.int32),
        first: T.int32,
        kept: T.Tensor((kept_rows, k), T.float32),
        ids: T.StridedTensor((count, k), (ids_stride, 1), T.int32),
    ):
        with T.Kernel(CORES) as core:
            above = T.alloc_shared((THREADS,), T.int32)
            equal = T.alloc_shared((THREADS,), T.int32)
            best = T.alloc_shared((k if merge else 1,), T.float32)
            chosen = T.alloc_shared((k if merge else 1,), T.int32)
            for step in T.serial(T.ceildiv(count - core, CORES)):
                row = step * CORES + core
                length = before + T.max(0, T.min(lens[row] - first, width))
                share = T.ceildiv(length, THREADS)
                if (not merge) | (length > before):
                    with T.SimtVF(threads=THREADS):
                        found = T.alloc_fragment((THREADS,), T.int32)
                        total = T.alloc_fragment((1,), T.int32)
                        edge = T.alloc_local((1,), T.uint32)  # the largest that k keys reach
                        edge[0] = T.uint32(0)
                        for bit in T.serial(32):
                            for t in T.Parallel(THREADS):
                                reached = T.alloc_var(T.int32)
                                reached = 0
                                trial = edge[0] | (T.uint32(1) << T.cast(31 - bit, T.uint32))
                                for i in T.serial(share):
                                    if t * share + i < length:
                                        value = T.alloc_var(T.float32)
                                        value = candidate(kept, scores, row, t * share + i, before)
                                        key = order(value)
                                        reached = reached + T.cast(key >= trial, T.int32)
                                found[t] = reached
                            T.reduce_sum(found, total, dim=0)
                            if total[0] >= k:
                                edge[0] = edge[0] | (T.uint32(1) << T.cast(31 - bit, T.uint32))
                        if edge[0] == T.uint32(0):  # fewer than k: all that may be chosen
                            edge[0] = T.uint32(1)
                        for t in T.Parallel(THREADS):
                            more = T.alloc_var(T.int32)
                            same = T.alloc_var(T.int32)
                            more = 0
                            same = 0
                            for i in T.serial(share):
                                if t * share + i < length:
                                    value = T.alloc_var(T.float32)
                                    value = candidate(kept, scores, row, t * share + i, before)
                                    key = order(value)
                                    more = more + T.cast(key > edge[0], T.int32)
                                    same = same + T.cast(key == edge[0], T.int32)
                            above[t] = more
                            equal[t] = same
                        for t in T.Parallel(THREADS):
                            room = T.alloc_var(T.int32)  # of keys at the edge, the lowest indices first
                            place = T.alloc_var(T.int32)
                            taken = T.alloc_var(T.int32)
                            room = k
                            for o in T.serial(THREADS):
                                room = room - above[o]
                            place = 0
                            taken = 0
                            for o in T.serial(t):
                                of_edge = T.alloc_var(T.int32)
                                of_edge = T.min(equal[o], T.max(room - taken, 0))
                                taken = taken + of_edge
                                place = place + above[o] + of_edge
                            for i in T.serial(share):
                                if t * share + i < length:
                                    value = T.alloc_var(T.float32)
                                    value = candidate(kept, scores, row, t * share + i, before)
                                    key = order(value)
                                    if (key > edge[0]) | ((key == edge[0]) & (taken < room)):
                                        taken = taken + T.cast(key == edge[0], T.int32)
                                        if merge:
                                            index = T.alloc_var(T.int32)
                                            index = first + (t * share + i - k)
                                            if t * share + i < k:
                                                index = ids[row, t * share + i]
                                            best[place] = value
                                            chosen[place] = index
                                        else:
                                            ids[row, place] = t * share + i
                                        place = place + 1
                            if t == THREADS - 1:
                                for i in T.serial(k):
                                    if i >= place:
                                        if merge:
                                            best[i] = -T.infinity(T.float32)
                                            chosen[i] = -1
                                        else:
                                            ids[row, i] = -1
                        if merge:
                            for i in T.Parallel(k):
                                ids[row, i] = chosen[i]
                                kept[row, i] = best[i]

    return topk_rows


def candidate(kept, scores, row, i, before):
    """Value ``i`` of a row: the ``before`` best so far, then the scores."""
    if not before:
        return scores[row, i]
    return T.if_then_else(i < before, kept[row, T.min(i, before - 1)], scores[row, T.max(i - before, 0)])


@compiled
def _topk(k):
    return build(choose(k, False))


@compiled
def _merge(k):
    return build(choose(k, True))


@compiled
def _maxima(size):
    """ranks = the largest score of each block of ``size`` entries, infinite for that of the newest entry."""
    count, width, blocks = T.dynamic("count"), T.dynamic("width"), T.dynamic("blocks")

    @T.prim_func
    def maxima(
        scores: T.Tensor((count, width), T.float32),
        lens: T.Tensor((count,), T.int32),
        first: T.int32,
        ranks: T.Tensor((count, blocks), T.float32),
    ):
        with T.Kernel(CORES) as core:
            for step in T.serial(T.ceildiv(count - core, CORES)):
                row = step * CORES + core
                length = T.max(0, T.min(lens[row] - first, width))
                with T.SimtVF(threads=THREADS):
                    for t in T.Parallel(THREADS):
                        for i in T.serial(T.ceildiv(length, size * THREADS)):
                            block = i * THREADS + t
                            top = T.alloc_var(T.float32)
                            top = -T.infinity(T.float32)
                            for e in T.serial(size):
                                if block * size + e < length:
                                    top = larger(top, scores[row, block * size + e])
                            if first + (block + 1) * size >= lens[row]:
                                top = T.infinity(T.float32)
                            if block * size < length:
                                ranks[row, block] = top

    return build(maxima)


@compiled
def _restrict(size, named):
    """Scores become -inf outside of a row's blocks: ``named`` ascending ids, -1 behind the last."""
    count, width = T.dynamic("count"), T.dynamic("width")

    @T.prim_func
    def restrict(
        blocks: T.Tensor((count, named), T.int32),
        lens: T.Tensor((count,), T.int32),
        first: T.int32,
        scores: T.Tensor((count, width), T.float32),
    ):
        with T.Kernel(CORES) as core:
            for step in T.serial(T.ceildiv(count - core, CORES)):
                row = step * CORES + core
                length = T.max(0, T.min(lens[row] - first, width))
                with T.SimtVF(threads=THREADS):
                    for t in T.Parallel(THREADS):
                        for i in T.serial(T.ceildiv(length, size * THREADS)):
                            block = i * THREADS + t
                            wanted = first // size + block
                            low = T.alloc_var(T.int32)
                            high = T.alloc_var(T.int32)
                            low = 0  # ids before `low` are smaller, those from `high` on are not
                            high = named
                            for _ in T.serial(named.bit_length()):
                                if low < high:
                                    middle = T.alloc_var(T.int32)
                                    middle = (low + high) // 2
                                    id_ = T.alloc_var(T.int32)
                                    id_ = blocks[row, middle]
                                    if (id_ >= 0) & (id_ < wanted):
                                        low = middle + 1
                                    else:
                                        high = middle
                            found = T.alloc_var(T.int32)
                            found = -1
                            if low < named:
                                found = blocks[row, low]
                            if found != wanted:  # nothing is done behind the last entry
                                for e in T.serial(size):
                                    if block * size + e < length:
                                        scores[row, block * size + e] = -T.infinity(T.float32)

    return build(restrict)


@compiled
def _longest(together):
    """The most entries that tokens of a request see, of those of a tile; 0 but for the first of them."""
    tokens = T.dynamic("tokens")

    @T.prim_func
    def longest(
        request_ids: T.Tensor((tokens,), T.int32),
        lens: T.Tensor((tokens,), T.int32),
        most: T.Tensor((tokens,), T.int32),
    ):
        with T.Kernel(CORES) as core:
            for part in T.serial(T.ceildiv(tokens - core * THREADS, CORES * THREADS)):
                with T.SimtVF(threads=THREADS):
                    for t in T.Parallel(THREADS):
                        token = (part * CORES + core) * THREADS + t
                        if token < tokens:
                            seen = T.alloc_var(T.int32)
                            seen = 0
                            begin = token // together * together
                            for o in T.serial(together):
                                own = T.min(begin + o, tokens - 1)
                                if request_ids[own] == request_ids[token]:
                                    if own < token:
                                        seen = -1  # the earlier token's pass serves this one
                                    elif seen >= 0:
                                        seen = T.max(seen, lens[own])
                            most[token] = T.max(seen, 0)

    return build(longest)


def held_byte(page, stored, otherwise):
    """A byte of a page, ``otherwise`` where there is no page."""
    return T.if_then_else(page >= 0, stored, T.uint8(otherwise))


@compiled
def _scores(heads, dim, layout, page):
    """scores[t, j] of the entries from ``first`` on that a query sees; -inf where no page is held.

    A tile of queries is that of some tokens in a row; those of one request share their keys (`_longest` names
    one of them). A vector core looks keys up, turns them into E4M3 beside their scales and adds up the heads;
    a key of the `fp8` layout has one float for scale, which is applied to the product.
    """
    fp4 = layout == "mxfp4"
    key_bytes, scale_bytes = (dim // 2, dim // 32) if fp4 else (dim, 4)
    tokens, rows, pages, page_stride, requests, held, table_stride, width = (
        T.dynamic(n)
        for n in ("tokens", "rows", "pages", "page_stride", "requests", "held", "table_stride", "width")
    )
    together = cube.ROWS // heads

    @T.prim_func
    def index_scores(
        q: T.Tensor((rows, dim // 2), T.uint8),
        q_scale: T.Tensor((rows, dim // 32), T.uint8),
        weights: T.Tensor((rows,), T.float32),
        request_ids: T.Tensor((tokens,), T.int32),
        lens: T.Tensor((tokens,), T.int32),
        longest: T.Tensor((tokens,), T.int32),
        keys: T.StridedTensor((pages, page * (key_bytes + scale_bytes)), (page_stride, 1), T.uint8),
        table: T.StridedTensor((requests, held), (table_stride, 1), T.int32),
        first: T.int32,
        scores: T.Tensor((tokens, width), T.float32),
    ):
        with T.MixedKernel(cube.CORES, sids=1) as (core, _):
            a = T.alloc_l1((cube.ROWS, dim), T.float8_e4m3fn)
            b = T.alloc_l1((KEYS, dim), T.float8_e4m3fn)
            a_scale = T.alloc_l1((cube.ROWS, dim // 32), T.uint8)
            b_scale = T.alloc_l1((KEYS, dim // 32), T.uint8)
            products = T.alloc_l0c((cube.ROWS, KEYS), T.float32)
            queries = cube.narrow_tile(cube.ROWS, dim)
            wide = cube.narrow_tile(KEYS, dim)
            codes = cube.scale_tile(KEYS, dim)
            weight = T.alloc_shared((cube.ROWS,), T.float32)
            limit = T.alloc_shared((together,), T.int32)  # entries of the chunk that a token sees
            where = T.alloc_shared((KEYS,), T.int32)  # the page of a key, -1 for none
            line = T.alloc_shared((KEYS,), T.int32)  # and its number there
            factor = T.alloc_shared((KEYS,), T.float32)
            dots = T.alloc_shared((cube.ROWS, KEYS), T.float32)
            spans = T.ceildiv(width, SPAN * KEYS)
            for token in T.serial(tokens):
                begin = token // together * together
                for step in T.serial(T.ceildiv(spans - (core + token) % cube.CORES, cube.CORES)):
                    offset = (step * cube.CORES + (core + token) % cube.CORES) * SPAN * KEYS
                    most = T.min(longest[token] - first, width)
                    if most > offset:
                        with T.SimtVF(threads=THREADS):
                            for i, j in T.Parallel(cube.ROWS, dim // 2):
                                byte = T.cast(q[begin * heads + i, j], T.int32)
                                queries[cube.at(i, 2 * j)] = cube.e2m1_as_e4m3(byte)
                                queries[cube.at(i, 2 * j + 1)] = cube.e2m1_as_e4m3(byte >> 4)
                            for i in T.Parallel(cube.ROWS):
                                weight[i] = weights[begin * heads + i]
                            for o in T.Parallel(together):
                                same = request_ids[begin + o] == request_ids[token]
                                seen = T.min(lens[begin + o] - first, width)
                                limit[o] = T.if_then_else((begin + o < tokens) & same, seen, 0)
                        cube.to_l1(queries, a, cube.ROWS, dim)
                        T.copy(q_scale[begin * heads, 0], a_scale)
                        for part in T.serial(T.min(SPAN, T.ceildiv(most - offset, KEYS))):
                            with T.SimtVF(threads=THREADS):
                                for i in T.Parallel(KEYS):
                                    entry = first + offset + part * KEYS + i
                                    p = T.alloc_var(T.int32)
                                    p = -1
                                    if entry // page < held:
                                        p = table[request_ids[token], entry // page]
                                    where[i] = T.if_then_else((p >= 0) & (p < pages), p, -1)
                                    line[i] = entry % page
                                for i, j in T.Parallel(KEYS, dim // 2):
                                    if fp4:
                                        stored = keys[where[i], line[i] * key_bytes + j]
                                        byte = T.cast(held_byte(where[i], stored, 0), T.int32)
                                        wide[cube.at(i, 2 * j)] = cube.e2m1_as_e4m3(byte)
                                        wide[cube.at(i, 2 * j + 1)] = cube.e2m1_as_e4m3(byte >> 4)
                                    else:
                                        low = keys[where[i], line[i] * key_bytes + 2 * j]
                                        high = keys[where[i], line[i] * key_bytes + 2 * j + 1]
                                        wide[cube.at(i, 2 * j)] = held_byte(where[i], low, 0)
                                        wide[cube.at(i, 2 * j + 1)] = held_byte(where[i], high, 0)
                                for g, i in T.Parallel(dim // 32, KEYS):
                                    if fp4:
                                        stored = keys[where[i], page * key_bytes + line[i] * scale_bytes + g]
                                        codes[cube.scale_at(i, g)] = held_byte(where[i], stored, 127)
                                    else:
                                        codes[cube.scale_at(i, g)] = T.uint8(127)
                                if not fp4:
                                    for i in T.Parallel(KEYS):
                                        bits = T.alloc_var(T.int32)
                                        bits = 0
                                        for n in T.serial(4):
                                            stored = keys[
                                                where[i], page * key_bytes + line[i] * scale_bytes + n
                                            ]
                                            byte = T.cast(held_byte(where[i], stored, 0), T.int32)
                                            bits = bits | byte << (8 * n)
                                        factor[i] = T.reinterpret(bits, T.float32)
                            cube.to_l1(wide, b, KEYS, dim)
                            cube.scales_to_l1(codes, b_scale, KEYS, dim)
                            T.gemm_blockscaled(
                                a, b, products, a_scale, b_scale, transpose_B=True, clear_accum=True
                            )
                            T.copy(products, dots)
                            with T.SimtVF(threads=THREADS):
                                for o, i in T.Parallel(together, KEYS):
                                    sum_ = T.alloc_var(T.float32)
                                    sum_ = T.float32(0)
                                    for h in T.serial(heads):
                                        dot = (
                                            dots[o * heads + h, i]
                                            if fp4
                                            else dots[o * heads + h, i] * factor[i]
                                        )
                                        # NaN is not below 0 and stays.
                                        kept = T.if_then_else(dot < T.float32(0), T.float32(0), dot)
                                        sum_ = sum_ + weight[o * heads + h] * kept
                                    if offset + part * KEYS + i < limit[o]:
                                        none = -T.infinity(T.float32)
                                        at = offset + part * KEYS + i
                                        scores[begin + o, at] = T.if_then_else(where[i] >= 0, sum_, none)

    return build(index_scores)


def variants(cfg):
    """Queries of the indexer, scores of both kinds of keys in pages of 64, and the choice."""
    yield _query, (cfg.index_heads, cfg.index_dim, cfg.rope_dim // 2)
    yield _topk, (cfg.index_top_k,)
    for layout in ("mxfp4", "fp8"):
        yield _scores, (cfg.index_heads, cfg.index_dim, layout, 64)
    for k in (cfg.index_top_k, cfg.candidate_blocks):
        yield _merge, (k,)
    yield _longest, (cube.ROWS // cfg.index_heads,)
    yield _maxima, (cfg.candidate_block_size,)
    yield _restrict, (cfg.candidate_block_size, cfg.candidate_blocks)


def index_query(x, cos, sin, values, scale):
    """Launch of ``dsv41.ops.index_query``."""
    if x.numel():
        _query(*x.shape[1:], cos.shape[1])(
            x, cos, sin, values.view(torch.uint8).flatten(1), scale.view(torch.uint8).flatten(1)
        )


def topk(scores, lens, ids, scratch):
    """Launch of ``dsv41.ops.topk``; needs no scratch."""
    if ids.numel():
        _topk(ids.shape[1])(scores, lens, 0, scores.new_empty((0, ids.shape[1])), ids)


def score(q, q_scale, head_weights, request_ids, lens, keys, layout, page_table, first, out):
    """Scores of the entries from ``first`` on; ``out`` [num_tokens, entries]."""
    heads, dim = q.shape[1], 2 * q.shape[2]
    most = torch.empty_like(lens)
    _longest(cube.ROWS // heads)(request_ids, lens, most)
    _scores(heads, dim, layout, keys.shape[1])(
        q.flatten(0, 1), q_scale.flatten(0, 1), head_weights.flatten(), request_ids, lens, most,
        keys.flatten(1), page_table, first, out,
    )  # fmt: skip


def index_topk(
    q, q_scale, head_weights, request_ids, visible, keys, layout, page_table, candidates, block_size, ids,
    new_candidates, scratch,
):  # fmt: skip
    """Launches of ``dsv41.ops.index_topk``: their number depends on sizes only; `_ascend` in api.py says what
    it takes.
    """
    ids.fill_(-1)
    new_candidates.fill_(-1)
    tokens, entries = len(q), page_table.shape[1] * keys.shape[1]
    if not tokens or not entries or not len(page_table):
        return
    known = (request_ids >= 0) & (request_ids < len(page_table))
    lens = torch.where(known, visible, 0).clamp(0, entries)
    k, published = ids.shape[1], new_candidates.shape[1]
    rows = min(tokens, QUERIES)
    # Numbers that a query has in the scratch; a score has 1/block_size of a rank beside it.
    room = scratch.numel() // rows // 4 - k - published - 256
    width = room * block_size // (block_size + 1) if published else room
    width = min(width // KEYS, -(-entries // KEYS)) * KEYS
    for begin in range(0, tokens, rows):
        some = slice(begin, min(begin + rows, tokens))
        count = some.stop - begin
        parts = [(count, width), (count, k), (count, published)]
        parts.append((count, width // block_size if published else 0))
        scores, kept, kept_blocks, ranks = split_scratch(scratch, [(torch.float32, part) for part in parts])
        kept.fill_(-torch.inf)
        kept_blocks.fill_(-torch.inf)
        few = lens[some]
        for first in range(0, entries, width):
            score(
                q[some], q_scale[some], head_weights[some], request_ids[some], few, keys, layout, page_table,
                first, scores,
            )  # fmt: skip
            if published:
                _maxima(block_size)(scores, few, first, ranks)
                blocks = (few + block_size - 1) // block_size
                _merge(published)(ranks, blocks, first // block_size, kept_blocks, new_candidates[some])
            if candidates is not None and candidates.shape[1]:
                _restrict(block_size, candidates.shape[1])(candidates[some], few, first, scores)
            _merge(k)(scores, few, first, kept, ids[some])
