"""Sparse attention over cache records."""

import math
from collections.abc import Callable
from typing import Any

import torch

from ..._op import (
    Kernel,
    Op,
    check,
    check_flags,
    check_numbers,
    check_sizes,
    check_tensor,
    check_values,
    describe,
    output,
    tiling_tokens,
    workspace,
)
from ...cache import PagedKV
from ..norm_rope.api import check_rope_table

TILE = 64  # keys, and heads, that a block of the Hopper kernel takes at a time
# Splits that a cluster of blocks adds up on Hopper, without a second launch: those of the model's own lists.
CLUSTERS = {("mxfp8", "nvfp4"): (2, 3, 4, 5), ("mxfp8", "mxfp8"): (2, 3)}
BLOCKS = 132  # blocks that the automatic number of splits fills; a constant, so that it needs no device


def num_splits_for(num_tokens: int, num_heads: int, window: int, compressed: int) -> int:
    """Parts into which the keys of a query are split when the caller leaves it open.

    Args:
        window: slots a row of ``window_ids``.
        compressed: slots a row of ``compressed_ids``, 0 for none.

    Returns:
        The fewest parts that give the blocks of a small batch the same tiles each; 1 for larger batches.
    """
    tiles = max(1, -(-window // TILE) + -(-compressed // TILE))
    rows = max(1, tiling_tokens(num_tokens)) * -(-num_heads // TILE)
    most = min(tiles, max(1, BLOCKS // rows))
    return -(-tiles // -(-tiles // most))


def sparse_attn_scratch(
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    window: int,
    compressed: int,
    num_splits: int | None = None,
) -> int:
    """Bytes of scratch that ``sparse_attn`` needs on an accelerator for exactly these sizes.

    Not for at most so many tokens: few are split and many are not, so more may need less. For several sizes
    take the largest. A pure function of the sizes and of ``batch_invariant()``, where None splits nothing.

    Args:
        window: slots a row of ``window_ids``.
        compressed: slots a row of ``compressed_ids``, 0 for none.
        num_splits: as given to ``sparse_attn``.

    Returns:
        Bytes: f32 sums, a maximum and a total for every row, head and part; 0 where nothing is split.
    """
    name = "sparse_attn_scratch"
    check_sizes(name, num_tokens=num_tokens, window=window, compressed=compressed)
    check_sizes(name, 1, num_heads=num_heads, head_dim=head_dim)
    if num_splits is None:
        num_splits = num_splits_for(num_tokens, num_heads, window, compressed)
    check_sizes(name, 1, num_splits=num_splits)
    return num_tokens * num_heads * num_splits * (head_dim + 2) * 4 if num_splits > 1 else 0


def _aligned(*tensors: torch.Tensor) -> bool:
    """Whether rows of 16-byte pieces can be read and written: addresses, and strides but the last."""
    size = [x.element_size() for x in tensors]
    return all(
        x.data_ptr() % 16 == 0
        and all(n < 2 or s * b % 16 == 0 for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True))
        for x, b in zip(tensors, size, strict=True)
    )


def _misaligned(window: torch.Tensor, compressed: torch.Tensor | None) -> str | None:
    for label, pages in (("window", window), ("compressed", compressed)):
        if pages is not None and (pages.data_ptr() % 16 or (pages.shape[0] > 1 and pages.stride(0) % 16)):
            return f"{label}: pages at multiples of 16 bytes, got a stride of {pages.stride(0)}"
    return None


def _hopper(
    q: Any, window: Any, window_layout: Any, window_ids: Any, compressed: Any, compressed_layout: Any,
    compressed_ids: Any, sink: Any, cos: Any, sin: Any, scale: Any, num_splits: Any, out: Any, lse: Any,
    scratch: Any,
) -> str | None:  # fmt: skip
    if q.shape[2] != 512:
        return f"head_dim must be 512, got {q.shape[2]}"
    if q.shape[0] * -(-q.shape[1] // TILE) * num_splits >= 2**31 or q.shape[0] * q.shape[1] >= 2**31:
        return "fewer than 2^31 rows of heads"
    if not 0 < scale < float("inf"):
        return f"a positive scale, got {scale}"
    if cos is not None and cos.shape[1] != 32:
        return f"inverse RoPE of the last 64 columns, got {2 * cos.shape[1]}"
    if not _aligned(q, out):
        strides = f"{q.stride()}, {out.stride()}"
        return f"q and out must start and step in multiples of 16 bytes, got strides {strides}"
    for label, pages, layout in (
        ("window", window, window_layout),
        ("compressed", compressed, compressed_layout),
    ):
        if pages is not None and layout not in ("mxfp8", "nvfp4", "v4", "bf16"):
            return f"{label}: records mxfp8, nvfp4, v4 or bf16, got {layout}"
    return _misaligned(window, compressed)


def _sm100(*args: Any) -> str | None:
    layouts = [layout for layout in (args[2], args[5]) if layout]
    if any(layout not in ("mxfp8", "nvfp4") for layout in layouts):
        return f"records mxfp8 or nvfp4, got {'+'.join(layouts)}"
    return _hopper(*args)


def _portable(
    q: Any, window: Any, window_layout: Any, window_ids: Any, compressed: Any, compressed_layout: Any,
    compressed_ids: Any, sink: Any, cos: Any, sin: Any, scale: Any, num_splits: Any, out: Any, lse: Any,
    scratch: Any,
) -> str | None:  # fmt: skip
    if q.shape[2] > 1024:
        return f"head_dim at most 1024, got {q.shape[2]}"
    # It would take any stride; but a model of full width must not become slow by where its pages lie.
    return _misaligned(window, compressed) if q.shape[2] == 512 else None


def _flashmla(records: set[str]) -> Callable[..., str | None]:
    """What FlashMLA takes, for caches of ``records`` (window, or window+compressed)."""

    def supports(
        q: Any, window: Any, window_layout: str, window_ids: Any, compressed: Any, compressed_layout: str,
        compressed_ids: Any, *_: Any,
    ) -> str | None:  # fmt: skip
        kind = "+".join(filter(None, (window_layout, compressed_layout)))
        if kind not in records:
            return f"caches of {', '.join(sorted(records))}, got {kind}"
        if q.shape[1] not in (64, 128) or q.shape[2] != 512:
            return f"64 or 128 heads of width 512, got {q.shape[1]} of {q.shape[2]}"
        counts = [ids.shape[1] for ids in (window_ids, compressed_ids) if ids is not None]
        if any(n % 64 or not n for n in counts):
            return f"a multiple of 64 ids a query, got {counts}"
        return None

    return supports


def _ascend(
    q: Any, window: Any, window_layout: str, window_ids: Any, compressed: Any, compressed_layout: str,
    compressed_ids: Any, sink: Any, *rest: Any,
) -> str | None:  # fmt: skip
    kinds = [layout for layout in (window_layout, compressed_layout) if layout]
    if any(kind not in ("mxfp8", "nvfp4") for kind in kinds):
        return f"mxfp8 or nvfp4 records, got {'+'.join(kinds)}"
    if sink is None or rest[-2].numel():
        return "takes a sink and returns no lse"
    given = [ids for ids in (window_ids, compressed_ids) if ids is not None]
    if not window_ids.shape[1] or q.shape[1] % 16:
        return "ids of the window, and a multiple of 16 heads"
    return None if all(x.is_contiguous() for x in (q, rest[-3], *given)) else "contiguous q, ids and out"


_V4 = {"v4", "v4+v4"}
_ATTN = Op(
    "sparse_attn(Tensor q, Tensor window, str window_layout, Tensor window_ids, Tensor? compressed,"
    " str compressed_layout, Tensor? compressed_ids, Tensor? sink, Tensor? cos, Tensor? sin,"
    " float scale, int num_splits, Tensor(a!) out, Tensor(b!) lse, Tensor(c!) scratch) -> ()",
    reference="dsv41_reference.attn:sparse_attn",
    package=__package__,
    kernels=(
        Kernel("tilelang_cuda", "cuda", needs=("tilelang",), archs=(90,), supports=_hopper),
        Kernel("flashmla_cuda", "cuda", needs=("flash_mla",), archs=(90,), supports=_flashmla(_V4)),
        Kernel(
            "flashmla_cuda",
            "cuda",
            needs=("flash_mla",),
            archs=(100, 103),
            supports=_flashmla({*_V4, "mxfp8", "mxfp8+mxfp8", "mxfp8+nvfp4"}),
        ),
        Kernel("tilelang_sm100_cuda", "cuda", needs=("tilelang",), archs=(100, 103), supports=_sm100),
        Kernel("triton_cuda", "cuda", needs=("triton",), supports=_portable),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu"), supports=_ascend),
    ),
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
    inverse_rope: tuple[torch.Tensor, torch.Tensor] | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of each query over its window records and its selected compressed records, in one softmax.

        z[h, k] = scale * <q[h], kv[k]>,  M = max(z, sink[h]),  e = exp(z - M)
        out[h]  = sum_k bf16(e[k]) kv[k] / (sum_k e[k] + exp(sink[h] - M))

    A record is key and value of all heads. The sink is not multiplied by the scale and has no value. With
    ``inverse_rope`` the rounded output is what ``rope(out, cos, sin, inverse=True)`` makes of it.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16.
        window: PagedKV of window rows.
        window_ids: [num_tokens, n] int32 slots of ``window``, distinct in a row; -1 contributes nothing.
        compressed: PagedKV of compressed entries, or None.
        compressed_ids: [num_tokens, m] int32 slots of ``compressed``, distinct in a row; -1 contributes
            nothing.
        scale: multiplies the scores.
        sink: [num_heads] f32, or None for no sink.
        inverse_rope: (cos, sin) [num_tokens, rope_dim/2] f32 of the queries' positions: rotate the output
            back, for ``grouped_linear``. None leaves it as it is.
        return_lse: also return the log-sum-exp of the scores, without the sink.
        num_splits: parts into which the keys of a query are split on an accelerator, at least 1. None takes
            what fills the device, so that a row's last bits may depend on the batch; with a fixed number,
            or inside ``batch_invariant()``, they do not.
        out: [num_tokens, num_heads, head_dim] bf16 to write into.
        scratch: [n] uint8, at least ``sparse_attn_scratch(...)`` bytes; contents need no preparation.

    Returns:
        out [num_tokens, num_heads, head_dim] bf16 and lse [num_tokens, num_heads] f32 or None. A row whose
        ids are all -1 is 0 and -inf. A row that reads a non-finite record is NaN, and no other row is.

    Contract: no host sync on accelerators; graph-safe; allocates only what is None; the same bits on every
        run, on an accelerator whatever else is in the batch where ``num_splits`` is given or inside
        ``batch_invariant()``; bytes of records that no id names are not read into any result.
    Reference: dsv41_reference.attn.sparse_attn
    """
    name = "sparse_attn"
    check(isinstance(window, PagedKV), name, "window: PagedKV", window)
    check_tensor(name, "q", q, (None, None, window.record.dim), torch.bfloat16)
    check(q.device == window.pages.device, name, f"q on {window.pages.device}", f"{q.device}")
    tokens, heads, _ = q.shape
    check(heads >= 1, name, "q: at least one head", q)
    both = (compressed is None) == (compressed_ids is None)
    check(both, name, "compressed and compressed_ids together", "one of them")
    for label, cache, ids in (("window", window, window_ids), ("compressed", compressed, compressed_ids)):
        if cache is None:
            continue
        check(isinstance(cache, PagedKV), name, "compressed: PagedKV", cache)
        check(cache.record.dim == q.shape[2], name, f"{label}: records of width {q.shape[2]}", cache.record)
        check(cache.pages.device == q.device, name, f"{label} on {q.device}", f"{cache.pages.device}")
        check_tensor(name, f"{label}_ids", ids, (tokens, None), torch.int32, like=q)
        if check_values() and ids is not None:
            wrong = ((ids < -1) | (ids >= cache.num_slots)).nonzero()[:1].tolist()
            for row, column in wrong:
                got = f"{int(ids[row, column])} in row {row}"
                check(False, name, f"{label}_ids: -1 to {cache.num_slots - 1}", got)
            ordered = ids.sort(1).values
            twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).nonzero()[:1].tolist()
            for row, column in twice:
                got = f"{int(ordered[row, column])} twice in row {row}"
                check(False, name, f"{label}_ids: distinct in a row", got)
    if sink is not None:
        check_tensor(name, "sink", sink, (heads,), torch.float32, like=q)
    check_numbers(name, -math.inf, scale=scale)
    check_flags(name, return_lse=return_lse)
    cos = sin = None
    if inverse_rope is not None:
        given = tuple(inverse_rope) if isinstance(inverse_rope, tuple | list) else (inverse_rope,)
        pair = len(given) == 2 and all(isinstance(x, torch.Tensor) and x.dim() == 2 for x in given)
        if not pair:
            got = f"({', '.join(map(describe, given))})"
            check(False, name, "inverse_rope: (cos, sin), [num_tokens, rope_dim/2] float32 each", got)
        cos, sin = inverse_rope
        check_rope_table(name, cos, sin, tokens, q.shape[2], q)
    out = output(name, out, tuple(q.shape), torch.bfloat16, q)
    lse = output(name, None, (tokens, heads) if return_lse else (0, 0), torch.float32, q)
    extra, far = (None, "", None), 0
    if compressed is not None and compressed_ids is not None:
        extra, far = (compressed.pages, compressed.record.layout, compressed_ids), compressed_ids.shape[1]
    near = window_ids.shape[1]
    if num_splits is None:
        num_splits = num_splits_for(tokens, heads, near, far)
    check_sizes(name, 1, num_splits=num_splits)
    num_splits = min(num_splits, max(1, -(-near // TILE) + -(-far // TILE)))
    size = sparse_attn_scratch(tokens, heads, q.shape[2], near, far, num_splits)
    scratch = workspace(name, scratch, size, q)
    _ATTN(
        q, window.pages, window.record.layout, window_ids, *extra, sink, cos, sin, scale, num_splits, out,
        lse, scratch,
    )  # fmt: skip
    return out, lse if return_lse else None
