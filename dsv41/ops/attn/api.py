"""Sparse attention over cache records."""

import torch

from ..._op import Op, check, check_tensor, check_values, output
from ...cache import PagedKV

_ATTN = Op(
    "sparse_attn(Tensor q, Tensor window, str window_layout, Tensor window_ids, Tensor? compressed,"
    " str compressed_layout, Tensor? compressed_ids, Tensor? sink, float scale, Tensor(a!) out,"
    " Tensor(b!) lse) -> ()",
    reference="dsv41_reference.attn:sparse_attn",
    package=__package__,
)


def sparse_attn(
    q: torch.Tensor,
    window: PagedKV,
    window_ids: torch.Tensor,
    compressed: PagedKV | None = None,
    compressed_ids: torch.Tensor | None = None,
    *,
    scale: float,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of each query over its window records and its selected compressed records, in one softmax.

        z[h, k] = scale * <q[h], kv[k]>,  M = max(z, sink[h]),  e = exp(z - M)
        out[h]  = sum_k bf16(e[k]) kv[k] / (sum_k e[k] + exp(sink[h] - M))

    A record is key and value of all heads. The sink is not multiplied by the scale and has no value.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16.
        window: PagedKV of window rows.
        window_ids: [num_tokens, n] int32 slots of ``window``, distinct in a row; -1 contributes nothing.
        compressed: PagedKV of compressed entries, or None.
        compressed_ids: [num_tokens, m] int32 slots of ``compressed``, distinct in a row; -1 contributes
            nothing.
        scale: multiplies the scores.
        sink: [num_heads] f32, or None for no sink.
        return_lse: also return the log-sum-exp of the scores, without the sink.
        out: [num_tokens, num_heads, head_dim] bf16 to write into.

    Returns:
        out [num_tokens, num_heads, head_dim] bf16 and lse [num_tokens, num_heads] f32 or None. A row whose
        ids are all -1 is 0 and -inf. A row that reads a non-finite record is NaN, and no other row is.

    Contract: no host sync on accelerators; graph-safe; allocates only what is None; the same bits on every
        run; bytes of records that no id names are not read into any result.
    Reference: dsv41_reference.attn.sparse_attn
    """
    name = "sparse_attn"
    check(isinstance(window, PagedKV), name, "window: PagedKV", window)
    check_tensor(name, "q", q, (None, None, window.record.dim), torch.bfloat16)
    check(q.device == window.pages.device, name, f"q on {window.pages.device}", f"{q.device}")
    tokens, heads, _ = q.shape
    check(heads >= 1, name, "q: at least one head", q)
    check(
        (compressed is None) == (compressed_ids is None), name, "compressed and compressed_ids together", None
    )
    for label, cache, ids in (("window", window, window_ids), ("compressed", compressed, compressed_ids)):
        if cache is None or ids is None:
            continue
        check(cache.record.dim == q.shape[2], name, f"{label}: records of width {q.shape[2]}", cache.record)
        check(cache.pages.device == q.device, name, f"{label} on {q.device}", f"{cache.pages.device}")
        check_tensor(name, f"{label}_ids", ids, (tokens, None), torch.int32, like=q)
        if check_values() and ids.numel():
            low, high = int(ids.min()), int(ids.max())
            good = low >= -1 and high < cache.num_slots
            check(good, name, f"{label}_ids: -1 to {cache.num_slots - 1}", f"{low} to {high}")
    if sink is not None:
        check_tensor(name, "sink", sink, (heads,), torch.float32, like=q)
    out = output(name, out, tuple(q.shape), torch.bfloat16, q)
    lse = output(name, None, (tokens, heads) if return_lse else (0, 0), torch.float32, q)
    extra = (None, "", None)
    if compressed is not None:
        extra = (compressed.pages, compressed.record.layout, compressed_ids)
    _ATTN(q, window.pages, window.record.layout, window_ids, *extra, sink, scale, out, lse)
    return out, lse if return_lse else None
