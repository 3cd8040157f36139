"""Verification of drafted tokens, the processed token laws it tests, and the random numbers it spends.

Laws are natural-log probabilities in fp32 (fp64 for fp64 logits). Random numbers are a pure function of
(seed, uid, position, column, stream, token id): no generator, no state, the same on every device up to
``log``.
"""

import torch
from torch import Tensor

DRAFT, ACCEPT, EMIT = 0, 1, 2
"""Random streams: drafts of a block, acceptance tests of a block, tokens the target emits."""

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


# Random numbers


def _multiply(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product; int64 wraps, which keeps all 64 bits of it."""
    product = a * constant
    return (product >> 32) & _MASK32, product & _MASK32


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32 with ten rounds (Salmon et al., SC 2011).

    Args:
        counter: four int64 tensors [...] of 32-bit words.
        key: two int64 tensors [...] of 32-bit words.

    Returns:
        Four int64 tensors [...] of uniform 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK32, (k1 + _KEY_STEPS[1]) & _MASK32
    return c0, c1, c2, c3


def random_words(
    seeds: Tensor, uids: Tensor, positions: Tensor, columns: Tensor, stream: int, num: int
) -> Tensor:
    """Uniform 32-bit words of one stream.

        key     = (seed mod 2**32, seed div 2**32)
        counter = (i div 4, position, uid mod 2**32, stream | column * 2**8 | (uid div 2**32) * 2**16)
        word i  = Philox4x32-10(counter, key)[i mod 4]

    Args:
        seeds: [...] int64.
        uids: [...] int64 in [0, 2**48), the request.
        positions: [...] int64 in [0, 2**32).
        columns: [...] int64 in [0, 2**8).
        stream: `DRAFT`, `ACCEPT` or `EMIT`.
        num: words an entry.

    Returns:
        [..., num] int64 in [0, 2**32).
    """
    seeds, uids, positions, columns = torch.broadcast_tensors(
        *(t.to(torch.int64) for t in (seeds, uids, positions, columns))
    )
    seeds, uids, positions, columns = (t[..., None] for t in (seeds, uids, positions, columns))
    group = torch.arange((num + 3) // 4, device=seeds.device).expand(*seeds.shape[:-1], -1)
    tag = stream | ((columns & 0xFF) << 8) | (((uids >> 32) & 0xFFFF) << 16)
    counter = (group, positions & _MASK32, uids & _MASK32, tag)
    words = philox(counter, (seeds & _MASK32, (seeds >> 32) & _MASK32))
    return torch.stack(words, -1).flatten(-2)[..., :num]


def uniform(words: Tensor) -> Tensor:
    """f32 in (0, 1) of 32-bit words: word * 2**-32 + 2**-33, rounded twice, at most 1 - 2**-24."""
    return (words.to(torch.float32) * 2.0**-32 + 2.0**-33).clamp(max=1.0 - 2.0**-24)


def exponential(words: Tensor) -> Tensor:
    """f32 unit exponentials of 32-bit words: finite, positive, fine-grained near 0 where the winners are."""
    return -torch.log1p(-uniform(words))


# Token laws


def allowed_tokens(bitmask: Tensor, vocab: int) -> Tensor:
    """[..., vocab] bool from [..., words] int32: token i is bit i mod 32 of word i div 32."""
    token = torch.arange(vocab, device=bitmask.device)
    return ((bitmask[..., token // 32] >> (token % 32).to(torch.int32)) & 1).to(torch.bool)


def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Set to -inf, in place, the logits of the tokens whose bit is 0.

    Args:
        logits: [num_rows, vocab] of any float type.
        bitmask: [num_rows or 1, words] int32, words >= vocab / 32; bits past the vocabulary are ignored.
    """
    logits.masked_fill_(~allowed_tokens(bitmask, logits.shape[-1]), float("-inf"))


def token_law(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    bitmask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities that sampling parameters turn logits into.

    Order: bitmask, temperature, top-k, top-p. Both filters are cuts at a value, so equal logits live or die
    together: top-k keeps what is >= the k-th largest, top-p what has less than ``top_p`` of the mass strictly
    above it.

    Args:
        logits: [..., vocab] float.
        temperature: [...] f32; <= 0 is greedy: all mass on the largest logit, the lowest id on ties. NaN and
            +inf leave no law.
        top_k: [...] int32, <= 0 keeps all; or None.
        top_p: [...] f32, >= 1 keeps all; the largest logit always stays; or None.
        bitmask: [..., words] int32 of allowed tokens, or None.

    Returns:
        (log_p, ok): [..., vocab] f32 or f64, and [...] bool. A row without a law (a NaN, a +inf, nothing but
        -inf, or no temperature) is not ok and all -inf.
    """
    vocab = logits.shape[-1]
    z = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    if bitmask is not None:
        z = z.masked_fill(~allowed_tokens(bitmask, vocab), float("-inf"))
    top = z.amax(-1, keepdim=True)  # NaN when any logit is
    # -inf / inf is NaN and so is all that is divided by NaN: argmax would then take token 0 without a word.
    ok = torch.isfinite(top) & (temperature < float("inf"))[..., None]
    z = z - torch.where(ok, top, 0.0)
    greedy = (temperature <= 0)[..., None]
    first_top = torch.arange(vocab, device=z.device) == z.argmax(-1, keepdim=True)
    z = (z / torch.where(greedy, 1.0, temperature[..., None]).to(z.dtype)).masked_fill(
        greedy & ~first_top, float("-inf")
    )
    if top_k is not None or top_p is not None:
        ordered = z.sort(-1, descending=True).values
        if top_k is not None:
            kept = torch.where(top_k <= 0, vocab, top_k).to(torch.int64).clamp(max=vocab)[..., None]
            cut = ordered.gather(-1, kept - 1)
            z = z.masked_fill(z < cut, float("-inf"))
            ordered = ordered.masked_fill(ordered < cut, float("-inf"))
        if top_p is not None:
            mass = ordered.softmax(-1)
            above = mass.cumsum(-1) - mass
            kept = (above < top_p[..., None]).sum(-1, keepdim=True).clamp(min=1)
            cut = ordered.gather(-1, kept - 1)
            z = z.masked_fill((z < cut) & (top_p < 1)[..., None], float("-inf"))
    return z.log_softmax(-1).masked_fill(~ok, float("-inf")), ok[..., 0]


def draw(log_p: Tensor, noise: Tensor) -> Tensor:
    """Sample by a race of exponentials: argmax of log p - log E, the lowest id on ties."""
    return (log_p - noise.log().to(log_p.dtype)).argmax(-1)


# Verification rules. The exact-enumeration tests go through these same functions.


def accept_log_probability(log_p: Tensor, log_q: Tensor) -> Tensor:
    """log min(1, p(x) / q(x)) of a drafted token x, from its log-probabilities under target and draft."""
    return (log_p - log_q).clamp(max=0.0)


def residual_law(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Log of max(p - q, 0), not normalised, and the log of its sum (-inf when nothing is left).

    ``p`` may be scaled by a constant, which block verification uses.
    """
    above = log_q < log_p
    gap = torch.where(above, log_q - log_p, -1.0)
    # log1p(-exp(.)) keeps its digits when q << p, log(-expm1(.)) when q is close to p.
    difference = torch.where(gap > -0.6931472, torch.log(-torch.expm1(gap)), torch.log1p(-torch.exp(gap)))
    log_r = torch.where(above, log_p + difference, float("-inf"))
    return log_r, torch.logsumexp(log_r, -1)


def block_accept_probability(log_rho: Tensor, log_mass: Tensor) -> Tensor:
    """Block verification's acceptance of a prefix that is not the last: S / (S + 1 - rho).

    Args:
        log_rho: [...] log of the prefix's running ratio, <= 0.
        log_mass: [...] log S, S = sum over tokens of max(rho * p - q, 0) at the next position.
    """
    mass, lost = log_mass.exp(), -torch.expm1(log_rho)
    # 0/0 means p = q after a prefix of ratio 1: the next prefix is then accepted too, so either value serves.
    return torch.where(mass + lost > 0, mass / (mass + lost), 1.0)


def verify_drafts(
    target_logits: Tensor,
    cu_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    temperature: Tensor,
    draft_temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    bitmask: Tensor | None,
    seeds: Tensor,
    uids: Tensor,
    positions: Tensor,
    rule: str,
    tokens: Tensor,
    num_emitted: Tensor,
    status: Tensor,
) -> None:
    """Decide how many drafts of each request stay, and draw the token that follows them.

    Row k of request r (k = 0 .. length) is the target's law for position ``positions[r] + 1 + k``; drafts 0
    .. length - 1 are tested against rows 0 .. length - 1, length = cu_logits[r + 1] - cu_logits[r] - 1.

        chain    draft k stays while log p(x) > log u + log q(x); at the first that falls draw from max(p - q,
                 0), after
                 the last from p. Greedy requests and one-hot drafts are the same rule with one-hot p or q.
        block    the longest prefix whose own test passes stays (Sun et al., block verification).
        coupled  y = argmax(log p + g), g Gumbel noise keyed by (request, position); draft k stays while it
                 equals y.

    Args:
        target_logits: [num_logits, vocab] float.
        cu_logits: [num_requests + 1] int32; a request without rows emits nothing.
        draft_tokens: [num_requests, block] int32 or int64; an id outside [0, vocab) ends the drafts of its
            request.
        draft_logits: [num_requests, block, vocab] float, what the drafts were drawn from before temperature;
            None for drafts that were not drawn (one-hot).
        temperature: [num_requests] f32 of the target; <= 0 is greedy.
        draft_temperature: [num_requests] f32 the drafts were drawn at; <= 0 is one-hot.
        top_k: [num_requests] int32, or None.
        top_p: [num_requests] f32, or None.
        bitmask: [num_logits, words] int32, or None.
        seeds: [num_requests] int64.
        uids: [num_requests] int64 in [0, 2**48).
        positions: [num_requests] int64, position of the anchor.
        rule: chain, block or coupled.
        tokens: [num_requests, block + 1] int64; drafts that stay, the drawn token, then -1.
        num_emitted: [num_requests] int32; drafts that stay + 1.
        status: [num_requests] int32; 1 where a law was needed and its row had none: the drawn token is then
            -1 and not counted. Otherwise 0.
    """
    num_rows, vocab = target_logits.shape
    num_requests, block = draft_tokens.shape
    if num_rows == 0 or num_requests == 0:
        tokens.fill_(-1)
        num_emitted.zero_()
        status.zero_()
        return
    column = torch.arange(block + 1, device=target_logits.device)
    first = cu_logits[:-1].to(torch.int64)
    rows = (cu_logits[1:].to(torch.int64) - first).clamp(0, block + 1)
    row_ids = (first[:, None] + column).clamp(0, num_rows - 1)

    def spread(parameter: Tensor | None) -> Tensor | None:
        return None if parameter is None else parameter[:, None].expand(-1, block + 1)

    log_p, ok = token_law(
        target_logits[row_ids],
        temperature[:, None].expand(-1, block + 1),
        spread(top_k),
        spread(top_p),
        None if bitmask is None else bitmask[row_ids],
    )
    drafts = draft_tokens.to(torch.int64)
    x = drafts.clamp(0, vocab - 1)
    log_q, drawn = _draft_law(x, draft_logits, draft_temperature, vocab, log_p.dtype)
    log_p_x, log_q_x = (law.gather(-1, x[..., None])[..., 0] for law in (log_p[:, :block], log_q))
    # A draft whose law is unusable is dropped unseen: what is emitted there comes from the target alone.
    usable = (column[:block] < rows[:, None] - 1) & (drafts == x) & ok[:, :block]
    if rule != "coupled":
        usable = usable & drawn & (log_q_x > float("-inf"))
    usable = usable.cumprod(1).to(torch.bool)

    if rule == "coupled":
        noise = exponential(
            random_words(
                seeds[:, None], uids[:, None], positions[:, None] + 1 + column, column * 0, EMIT, vocab
            )
        )
        y = draw(log_p, noise)
        kept = (usable & (drafts == y[:, :block])).cumprod(1).sum(1)
        last = y.gather(1, kept[:, None])
    else:
        u = uniform(
            random_words(seeds[:, None], uids[:, None], positions[:, None], column[:block], ACCEPT, 1)
        )[..., 0]
        if rule == "chain":
            ratio = accept_log_probability(log_p_x, log_q_x)
            kept = (usable & (u.log() < ratio)).cumprod(1).sum(1)
            log_rho = torch.zeros_like(log_p[:, 0, 0])
        else:
            kept, log_rho = _block_prefix(log_p, log_q, log_p_x, log_q_x, usable, u)
        law, draft_law = (
            t[torch.arange(num_requests, device=x.device), kept.clamp(max=t.shape[1] - 1)]
            for t in (log_p, log_q)
        )
        log_r, log_mass = residual_law(log_rho[:, None] + law, draft_law)
        # The draft at `kept` was tested and fell; with rounding its residual can be empty though p is not.
        fell = (kept < usable.sum(1)) & (log_mass > float("-inf"))
        noise = exponential(random_words(seeds, uids, positions + 1 + kept, kept * 0, EMIT, vocab))
        last = draw(torch.where(fell[:, None], log_r, law), noise)[:, None]

    has_rows = rows > 0
    sound = has_rows & ok.gather(1, kept[:, None])[:, 0]
    padded = torch.cat((drafts, drafts[:, :1]), dim=1)
    text = torch.where(column < kept[:, None], padded, -1)
    tokens.copy_(torch.where((column == kept[:, None]) & sound[:, None], last, text))
    num_emitted.copy_(kept + sound)
    status.copy_(has_rows & ~sound)


def _draft_law(
    x: Tensor, draft_logits: Tensor | None, draft_temperature: Tensor, vocab: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Log-laws [num_requests, block, vocab] the drafts ``x`` were drawn from, and where there is one."""
    one_hot = torch.where(torch.arange(vocab, device=x.device) == x[..., None], 0.0, float("-inf")).to(dtype)
    if draft_logits is None:
        return one_hot, torch.ones_like(x, dtype=torch.bool)
    temperature = draft_temperature[:, None].expand(x.shape)
    log_q, ok = token_law(draft_logits, temperature)
    fixed = temperature <= 0
    return torch.where(fixed[..., None], one_hot, log_q.to(dtype)), ok | fixed


def _block_prefix(
    log_p: Tensor, log_q: Tensor, log_p_x: Tensor, log_q_x: Tensor, usable: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """Block verification: how many drafts stay, and the log of the running ratio of that prefix."""
    length = usable.sum(1)
    log_rho = torch.zeros_like(log_p[:, 0, 0])
    kept, kept_rho = torch.zeros_like(length), log_rho
    for k in range(1, usable.shape[1] + 1):
        log_rho = (
            log_rho + torch.where(usable[:, k - 1], log_p_x[:, k - 1] - log_q_x[:, k - 1], float("-inf"))
        ).clamp(max=0.0)
        chance = log_rho.exp()
        if k < usable.shape[1]:
            log_mass = residual_law(log_rho[:, None] + log_p[:, k], log_q[:, k])[1]
            chance = torch.where(length == k, chance, block_accept_probability(log_rho, log_mass))
        passed = usable[:, k - 1] & (u[:, k - 1] < chance)
        kept, kept_rho = torch.where(passed, k, kept), torch.where(passed, log_rho, kept_rho)
    return kept, kept_rho


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    bitmask: Tensor | None,
    seeds: Tensor,
    uids: Tensor,
    positions: Tensor,
    columns: Tensor,
    stream: str,
    tokens: Tensor,
) -> None:
    """Draw one token a row from the processed law, with the noise of one stream.

    Args:
        logits: [num_rows, vocab] float.
        temperature: [num_rows] f32; <= 0 is greedy.
        top_k: [num_rows] int32, or None.
        top_p: [num_rows] f32, or None.
        bitmask: [num_rows, words] int32, or None.
        seeds: [num_rows] int64.
        uids: [num_rows] int64 in [0, 2**48).
        positions: [num_rows] int64.
        columns: [num_rows] int32.
        stream: draft or emit.
        tokens: [num_rows] int64; -1 for a row without a law.
    """
    log_p, ok = token_law(logits, temperature, top_k, top_p, bitmask)
    words = random_words(
        seeds, uids, positions, columns, {"draft": DRAFT, "emit": EMIT}[stream], logits.shape[-1]
    )
    tokens.copy_(torch.where(ok, draw(log_p, exponential(words)), -1))
