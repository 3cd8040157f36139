"""Speculative decoding on the device: split a draft budget, verify drafts, sample, mask by grammar."""

from typing import Any, NamedTuple

import torch

from ..._op import Kernel, Op, check, check_apart, check_sizes, check_tensor, check_values


def _small(confidence: torch.Tensor, *_: Any) -> str | None:
    rows, block = confidence.shape
    small = rows * block <= 16384 and block <= 64
    return None if small else f"built for up to 16384 drafts, not {rows} x {block}"


def _a_row_a_thread(
    confidence: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, base: torch.Tensor, bonus: torch.Tensor,
    start: Any, weights: Any, budget: torch.Tensor, num_requests: torch.Tensor, rotation: torch.Tensor,
    *_: Any,
) -> str | None:  # fmt: skip
    rows, block = confidence.shape
    if rows > 1024 or block > 8:
        return f"built for up to 1024 requests and 8 drafts, not {rows} x {block}"
    counts = (lo, hi, base, bonus, budget, num_requests, rotation)
    return None if all(x.dtype == torch.int32 for x in counts) else "counts of 64 bits"


def _unsorted(logits: torch.Tensor, temperature: Any, top_k: Any, top_p: Any, *_: Any) -> str | None:
    if logits.dtype == torch.float64:
        return "f64 logits"
    return None if top_k is None and top_p is None else "top-k and top-p sort"


def _one_pass(
    logits: torch.Tensor, cu: Any, drafts: Any, draft_logits: Any, t: Any, draft_t: Any, k: Any, p: Any,
    mask: Any, seeds: Any, uids: Any, positions: Any, rule: str, *_: Any,
) -> str | None:  # fmt: skip
    if rule == "block":
        return "mode block"
    if draft_logits is not None and draft_logits.dtype == torch.float64:
        return "f64 logits"
    return _unsorted(logits, t, k, p)


def _f32_logits(*args: Any) -> str | None:
    """Ascend has no f64."""
    f64 = any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in args)
    return "f64 logits" if f64 else None


def _not_f64(logits: torch.Tensor, bitmask: Any) -> str | None:
    return "f64 logits" if logits.dtype == torch.float64 else None


_SPLIT = Op(
    "split_budget_ragged(Tensor confidence, Tensor lo, Tensor hi, Tensor base, Tensor bonus,"
    " Tensor start, Tensor weights, Tensor budget, Tensor num_requests, Tensor rotation,"
    " Tensor(a!) lengths, Tensor(b!) cu_q, Tensor(c!) cu_logits,"
    " Tensor(d!) token_request_ids, Tensor(e!) positions,"
    " Tensor(f!) logits_ids, Tensor(g!) stats) -> ()",
    reference="dsv41_reference.budget:split_budget_ragged",
    package="dsv41.ops.draft",  # its kernel is beside the drafter's: it shares nothing with those here
    kernels=(
        Kernel("tilelang_cuda", "cuda", needs=("tilelang",), archs=(90,), supports=_a_row_a_thread),
        Kernel("triton_cuda", "cuda", needs=("triton",), supports=_small),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu"), supports=_small),
    ),
)
# The mode travels as `rule`: an argument called `mode` collides with torch's own dispatch under compile.
_VERIFY = Op(
    "verify_drafts(Tensor target_logits, Tensor cu_logits, Tensor draft_tokens, Tensor? draft_logits,"
    " Tensor temperature, Tensor draft_temperature, Tensor? top_k, Tensor? top_p, Tensor? bitmask,"
    " Tensor seeds, Tensor uids, Tensor positions, str rule,"
    " Tensor(a!) tokens, Tensor(b!) num_emitted, Tensor(c!) status) -> ()",
    reference="dsv41_reference.verify:verify_drafts",
    package=__package__,
    kernels=(
        Kernel("triton_cuda", "cuda", needs=("triton",), supports=_one_pass),
        Kernel("torch_cuda", "cuda"),
        Kernel("torch_npu", "npu", needs=("torch_npu",), supports=_f32_logits),
    ),
)
_SAMPLE = Op(
    "sample_tokens(Tensor logits, Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? bitmask,"
    " Tensor seeds, Tensor uids, Tensor positions, Tensor columns, str stream, Tensor(a!) tokens) -> ()",
    reference="dsv41_reference.verify:sample_tokens",
    package=__package__,
    kernels=(
        Kernel("triton_cuda", "cuda", needs=("triton",), supports=_unsorted),
        Kernel("torch_cuda", "cuda"),
        Kernel("torch_npu", "npu", needs=("torch_npu",), supports=_f32_logits),
    ),
)
_BITMASK = Op(
    "apply_token_bitmask(Tensor(a!) logits, Tensor bitmask) -> ()",
    reference="dsv41_reference.verify:apply_token_bitmask",
    package=__package__,
    kernels=(
        Kernel("triton_cuda", "cuda", needs=("triton",)),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu"), supports=_not_f64),
    ),
)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTS = (torch.int32, torch.int64)
MODES = ("chain", "block", "coupled")
STREAMS = ("draft", "emit")


class RaggedSplit(NamedTuple):
    """Layout of one step's target tokens; see `split_budget_ragged`."""

    lengths: torch.Tensor
    cu_q: torch.Tensor
    cu_logits: torch.Tensor
    token_request_ids: torch.Tensor
    positions: torch.Tensor
    logits_ids: torch.Tensor
    stats: torch.Tensor


class Verified(NamedTuple):
    """What verification leaves of a step's drafts; see `verify_drafts`."""

    tokens: torch.Tensor
    num_emitted: torch.Tensor
    status: torch.Tensor


def split_budget_ragged(
    confidence: torch.Tensor,
    budget: torch.Tensor,
    *,
    max_tokens: int | None = None,
    max_logits: int | None = None,
    hi: torch.Tensor | None = None,
    lo: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    bonus: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    num_requests: torch.Tensor | None = None,
    rotation: torch.Tensor | None = None,
    out: RaggedSplit | None = None,
) -> RaggedSplit:
    """Give a step's draft tokens to the likeliest drafts and write the step's ragged layout.

        a[i, j]    = c[i, 0] * ... * c[i, j]                       in fp32, left to right
        lengths[i] = lo[i] + how many of slots lo[i] <= j < hi[i] are among the (K - sum lo) first
        order      = weights[i] * a[i, j] falling, (i + rotation) mod R rising, j rising

    Args:
        confidence: [max_requests, block] f32 probability that draft j is accepted if those before it are; NaN
            and infinities read as 0 and are counted, the rest is clamped to [0, 1].
        budget: [1] int32, K, drafts of the whole step; clamped to [sum lo, sum hi].
        max_tokens: capacity of the token outputs, normally the graph's size; None is max_requests * (block +
            1), enough unless rows bring more than their anchor.
        max_logits: capacity of ``logits_ids``; None is max_requests * (block + 1).
        hi: [max_requests] int32, drafts available to a row, or fewer as its cap; None is block.
        lo: [max_requests] int32, drafts a row gets whatever the budget; ``lo = hi`` pins a row; more than
            ``hi`` is cut to it (refused under DSV41_CHECK=1); None is 0.
        base: [max_requests] int32, tokens of a row before its drafts: 1 is the anchor; None is 1.
        bonus: [max_requests] int32, 1 where the row emits a token now; a row with 0 (inside its prefill)
            takes no drafts and has no logits row; None is 1.
        start: [max_requests] int64, position of a row's first token; None is 0.
        weights: [max_requests] f32, positive; anything else reads as 0; None is 1.
        num_requests: [1] int32, R, rows in use; the rows after it are padding; None is max_requests.
        rotation: [1] int32, the step counter, so that ties do not always favour the same rows; None is 0.
        out: RaggedSplit to write into; its tensors set the capacities instead.

    Returns:
        RaggedSplit; ``out`` itself when it was given. Every lane of every tensor is written.
            lengths [max_requests] int32; cu_q [max_requests + 1] int32 over base + lengths; cu_logits
            [max_requests + 1] int32 over bonus + lengths; token_request_ids [max_tokens] int32, -1 past the
            end; positions [max_tokens] int64, 0 past the end; logits_ids [max_logits] int32, the tokens whose
            logits are needed, -1 past the end; stats [5] int64: tokens, logits rows, drafts, invalid
            confidences, sum of admitted a in units of 2**-24.
        Tokens past a capacity are dropped, and stats[0] > max_tokens (stats[1] > max_logits) says so.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run and device.
    Whether
        draft j of a row is verified never depends on that row's confidences after j.
    Reference: dsv41_reference.budget.split_budget_ragged
    """
    name = "split_budget_ragged"
    check_tensor(name, "confidence", confidence, (None, None), torch.float32)
    rows, block = confidence.shape
    check(rows > 0 and block > 0, name, "confidence: [max_requests, block], neither empty", confidence)

    def given(
        label: str, x: torch.Tensor | None, default: int, size: int, *dtypes: torch.dtype
    ) -> torch.Tensor:
        if x is None:
            return confidence.new_full((size,), default, dtype=dtypes[0])
        check_tensor(name, label, x, (size,), *dtypes, like=confidence)
        return x

    check_tensor(name, "budget", budget, (1,), *_INTS, like=confidence)
    lo, hi = given("lo", lo, 0, rows, *_INTS), given("hi", hi, block, rows, *_INTS)
    if check_values() and bool((lo > hi).any()):
        row = int((lo > hi).nonzero()[0])
        check(False, name, "lo of at most hi", f"lo {int(lo[row])} and hi {int(hi[row])} in row {row}")
    base, bonus = given("base", base, 1, rows, *_INTS), given("bonus", bonus, 1, rows, *_INTS)
    start = given("start", start, 0, rows, torch.int64, torch.int32)
    weights = given("weights", weights, 1, rows, torch.float32)
    num_requests = given("num_requests", num_requests, rows, 1, *_INTS)
    rotation = given("rotation", rotation, 0, 1, *_INTS)
    check(out is None or isinstance(out, RaggedSplit), name, "out: RaggedSplit", out)
    if out is not None:
        max_tokens, max_logits = out.positions.numel(), out.logits_ids.numel()
    max_tokens = rows * (block + 1) if max_tokens is None else max_tokens
    max_logits = rows * (block + 1) if max_logits is None else max_logits
    check_sizes(name, max_tokens=max_tokens, max_logits=max_logits)
    shapes: tuple[tuple[int, torch.dtype], ...] = (
        (rows, torch.int32),
        (rows + 1, torch.int32),
        (rows + 1, torch.int32),
        (max_tokens, torch.int32),
        (max_tokens, torch.int64),
        (max_logits, torch.int32),
        (5, torch.int64),
    )
    if out is None:
        out = RaggedSplit(*(confidence.new_empty((size,), dtype=dtype) for size, dtype in shapes))
    else:
        for label, x, (size, dtype) in zip(RaggedSplit._fields, out, shapes, strict=True):
            check_tensor(name, f"out.{label}", x, (size,), dtype, like=confidence)
    _SPLIT(confidence, lo, hi, base, bonus, start, weights, budget, num_requests, rotation, *out)
    return out


def _check_sampling(
    name: str,
    like: torch.Tensor,
    rows: int,
    vocab: int,
    mask_rows: int,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    bitmask: torch.Tensor | None,
    **required: tuple[torch.Tensor, tuple[torch.dtype, ...]],
) -> None:
    for label, (x, dtypes) in required.items():
        check_tensor(name, label, x, (rows,), *dtypes, like=like)
    if top_k is not None:
        check_tensor(name, "top_k", top_k, (rows,), *_INTS, like=like)
    if top_p is not None:
        check_tensor(name, "top_p", top_p, (rows,), torch.float32, like=like)
    if bitmask is not None:
        _check_bitmask(name, bitmask, like, mask_rows, vocab)
    if check_values():
        spans = {"uids": 1 << 48, "positions": 1 << 32, "columns": 1 << 8}
        for label, span in spans.items():
            x = required[label][0] if label in required else None
            bad = [] if x is None else x[(x < 0) | (x >= span)][:1].tolist()
            check(not bad, name, f"{label}: 0 to {span - 1}", bad)
        bad = [] if top_p is None else top_p.isnan().nonzero()[:1, 0].tolist()
        check(not bad, name, "top_p: no NaN", f"one in row {bad}")


def _check_bitmask(name: str, bitmask: torch.Tensor, like: torch.Tensor, rows: int, vocab: int) -> None:
    words = (vocab + 31) // 32
    check_tensor(name, "bitmask", bitmask, (rows, None), torch.int32, like=like)
    check(bitmask.shape[1] >= words, name, f"bitmask: at least {words} words for {vocab} tokens", bitmask)


def verify_drafts(
    target_logits: torch.Tensor,
    cu_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    uids: torch.Tensor,
    positions: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    draft_temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    bitmask: torch.Tensor | None = None,
    mode: str = "chain",
    out: Verified | None = None,
) -> Verified:
    """Decide how many drafts of each request stay, and draw the token that follows them.

        chain    draft x_k stays while u < p_k(x_k) / q_k(x_k); at the first that falls the token comes from
                 max(p_k - q_k, 0), after the last from p
        block    the longest prefix that passes block verification's own test; its residual, or p after the
                 last
        coupled  y_k = argmax(log p_k + g), g Gumbel noise keyed by (seed, uid, position); stays while x_k =
                 y_k

    p is the law after bitmask, temperature, top-k and top-p; greedy requests (one-hot p) and one-hot drafts
    take the same rules. ``chain`` and ``block`` emit exactly p's law provided that the drafts were drawn from
    q with noise of their own and that whether row k is verified never depends on x_k or anything after it.

    Args:
        target_logits: [num_logits, vocab] float; request r owns rows cu_logits[r] .. cu_logits[r + 1] - 1,
            one a draft and one more; row k is the law of position positions[r] + 1 + k.
        cu_logits: [num_requests + 1] int32; a request without rows emits nothing.
        draft_tokens: [num_requests, block] int32 or int64; an id outside the vocabulary ends its request's
            drafts.
        temperature: [num_requests] f32; <= 0 is greedy, the lowest id on ties; NaN and +inf leave no law.
        seeds: [num_requests] int64, the user's seed.
        uids: [num_requests] int64 in [0, 2**48), different for requests that are alive together.
        positions: [num_requests] int64, position of the anchor (the last emitted token).
        draft_logits: [num_requests, block, vocab] float, the very logits that were drawn from, before
            temperature; None when the drafts were not drawn (argmax, n-grams): q is then one-hot.
        draft_temperature: [num_requests] f32 the drafts were drawn at; <= 0 is one-hot; None is
            ``temperature``.
        top_k: [num_requests] int32, keeps logits >= the k-th largest; <= 0 keeps all; or None.
        top_p: [num_requests] f32, keeps logits with less than top_p of the mass strictly above; >= 1 keeps
            all; or None.
        bitmask: [num_logits, words] int32 of allowed tokens, as in `apply_token_bitmask`; or None.
        mode: ``chain``, ``block`` or ``coupled``.
        out: Verified to write into.

    Returns:
        Verified; ``out`` itself when it was given. tokens [num_requests, block + 1] int64: drafts that stay,
        the drawn token, then -1. num_emitted [num_requests] int32. status [num_requests] int32: 1 where the
        row to draw from has no law (a NaN, a +inf or nothing but -inf): its token is -1 and not counted,
        never an id outside the vocabulary.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run and for every
    batch a
        request is in.
    Reference: dsv41_reference.verify.verify_drafts
    """
    name = "verify_drafts"
    check_tensor(name, "target_logits", target_logits, (None, None), *_FLOATS)
    num_logits, vocab = target_logits.shape
    check_tensor(name, "draft_tokens", draft_tokens, (None, None), *_INTS, like=target_logits)
    rows, block = draft_tokens.shape
    check(block > 0 and vocab > 0, name, "a block and a vocabulary of at least 1", (block, vocab))
    check_tensor(name, "cu_logits", cu_logits, (rows + 1,), *_INTS, like=target_logits)
    if draft_logits is not None:
        check_tensor(name, "draft_logits", draft_logits, (rows, block, vocab), *_FLOATS, like=target_logits)
    if draft_temperature is None:
        draft_temperature = temperature
    floats, longs = (torch.float32,), (torch.int64,)
    _check_sampling(
        name,
        target_logits,
        rows,
        vocab,
        num_logits,
        top_k,
        top_p,
        bitmask,
        temperature=(temperature, floats),
        draft_temperature=(draft_temperature, floats),
        seeds=(seeds, longs),
        uids=(uids, longs),
        positions=(positions, longs),
    )
    check(mode in MODES, name, f"mode: one of {', '.join(MODES)}", mode)
    check(out is None or isinstance(out, Verified), name, "out: Verified", out)
    if check_values():
        sizes = cu_logits.diff()
        fits = bool(
            cu_logits[0] == 0
            and cu_logits[-1] <= num_logits
            and (sizes >= 0).all()
            and (sizes <= block + 1).all()
        )
        check(
            fits,
            name,
            f"cu_logits: from 0, 0 to {block + 1} rows a request, within {num_logits}",
            cu_logits.tolist(),
        )
        check(rows == uids.unique().numel(), name, "uids: all different", uids.tolist())
    if out is None:
        out = Verified(
            draft_tokens.new_empty((rows, block + 1), dtype=torch.int64),
            draft_tokens.new_empty((rows,), dtype=torch.int32),
            draft_tokens.new_empty((rows,), dtype=torch.int32),
        )
    else:
        check_tensor(name, "out.tokens", out.tokens, (rows, block + 1), torch.int64, like=target_logits)
        check_apart(name, "out.tokens", out.tokens)
        check_tensor(name, "out.num_emitted", out.num_emitted, (rows,), torch.int32, like=target_logits)
        check_tensor(name, "out.status", out.status, (rows,), torch.int32, like=target_logits)
    _VERIFY(
        target_logits,
        cu_logits,
        draft_tokens,
        draft_logits,
        temperature,
        draft_temperature,
        top_k,
        top_p,
        bitmask,
        seeds,
        uids,
        positions,
        mode,
        *out,
    )
    return out


def sample_tokens(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    uids: torch.Tensor,
    positions: torch.Tensor,
    columns: torch.Tensor | None = None,
    stream: str = "emit",
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    bitmask: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token a row from its processed law.

        out[i] = argmax(log p_i + g),  g Gumbel noise keyed by (seed, uid, position, column) of one stream

    A drafter uses ``draft`` with the anchor's position and the draft's number in the block; for
    `verify_drafts` in ``coupled`` mode it uses ``emit`` with the position of the token and column 0, which is
    also what plain decoding uses.

    Args:
        logits: [num_rows, vocab] float.
        temperature: [num_rows] f32; <= 0 is greedy, the lowest id on ties; NaN and +inf leave no law.
        seeds: [num_rows] int64, the user's seed.
        uids: [num_rows] int64 in [0, 2**48), the request.
        positions: [num_rows] int64 in [0, 2**32).
        columns: [num_rows] int32 in [0, 256); None is 0.
        stream: ``draft`` or ``emit``.
        top_k: [num_rows] int32, or None; as in `verify_drafts`.
        top_p: [num_rows] f32, or None; as in `verify_drafts`.
        bitmask: [num_rows, words] int32 of allowed tokens, or None.
        out: [num_rows] int64 to write into.

    Returns:
        [num_rows] int64; ``out`` itself when it was given. A row without a law (a NaN, a +inf, or nothing but
        -inf) gives -1.

    Contract: no host sync; graph-safe; allocates only what is None; the same bits on every run and for every
    batch a
        row is in.
    Reference: dsv41_reference.verify.sample_tokens
    """
    name = "sample_tokens"
    check_tensor(name, "logits", logits, (None, None), *_FLOATS)
    rows, vocab = logits.shape
    check(vocab > 0, name, "logits: [num_rows, vocab] with a vocabulary", logits)
    if columns is None:
        columns = logits.new_zeros((rows,), dtype=torch.int32)
    longs = (torch.int64,)
    _check_sampling(
        name,
        logits,
        rows,
        vocab,
        rows,
        top_k,
        top_p,
        bitmask,
        temperature=(temperature, (torch.float32,)),
        seeds=(seeds, longs),
        uids=(uids, longs),
        positions=(positions, longs),
        columns=(columns, _INTS),
    )
    check(stream in STREAMS, name, f"stream: one of {', '.join(STREAMS)}", stream)
    if out is None:
        out = logits.new_empty((rows,), dtype=torch.int64)
    else:
        check_tensor(name, "out", out, (rows,), torch.int64, like=logits)
    _SAMPLE(logits, temperature, top_k, top_p, bitmask, seeds, uids, positions, columns, stream, out)
    return out


def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """Forbid tokens by a packed bitmask, in place.

        logits[r, i] = -inf  where bit i mod 32 of bitmask[r, i div 32] is 0

    Args:
        logits: [num_rows, vocab] f32, bf16, f16 or f64; changed in place.
        bitmask: [num_rows, words] int32, or [1, words] for all rows; XGrammar's layout; words >= vocab / 32,
            bits past the vocabulary are ignored.

    Returns:
        [num_rows, vocab]; ``logits`` itself. A row whose bits are all 0 is all -inf: sampling refuses it by
        name.

    Contract: no host sync; graph-safe; allocates nothing that outlives the call; the same bits on every run.
    Reference: dsv41_reference.verify.apply_token_bitmask
    """
    name = "apply_token_bitmask"
    check_tensor(name, "logits", logits, (None, None), *_FLOATS)
    rows, vocab = logits.shape
    own = rows < 2 or vocab == 0 or logits.stride(0) >= vocab
    check(own, name, "logits: rows of their own", f"strides {tuple(logits.stride())}")
    check_tensor(name, "bitmask", bitmask, (None, None), torch.int32, like=logits)
    _check_bitmask(name, bitmask, logits, 1 if bitmask.shape[0] == 1 else rows, vocab)
    _BITMASK(logits, bitmask)
    return logits
