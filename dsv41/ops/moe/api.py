"""Mixture of experts with MXFP4 weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ..._op import (
    Kernel,
    Op,
    Parts,
    check,
    check_numbers,
    check_sizes,
    check_tensor,
    check_values,
    output,
    parts_bytes,
    workspace,
)
from ...formats import MXFP8, MXFP4Experts
from .._tilelang import pack
from ..quant.api import check_scales, mxfp8_operand


def _hopper(x: Any, x_scale: Any, ids: Any, weights: Any, w13: Any, *rest: Any) -> str | None:
    layout, inter, hidden = rest[3], w13.shape[1] // 2, x.shape[1]
    if not layout.startswith("hopper"):
        return f"takes experts packed by pack_experts, got the {layout} layout"
    if hidden % 256 or inter % 128 or inter > hidden:
        return f"hidden must be a multiple of 256, inter of 128 and no larger, got {hidden} and {inter}"
    given = [t for t in (x, x_scale, ids, weights, w13, *rest) if isinstance(t, torch.Tensor)]
    if not all(t.is_contiguous() for t in given):
        return "takes contiguous tensors"
    packed = [t for t in given if t is not x_scale and t.element_size() < 4]
    if any(t.data_ptr() % 16 for t in packed) or x_scale.data_ptr() % 4:
        return "takes tensors that begin at a multiple of 16 bytes, scales of x of 4"
    return None


def _plain(x: Any, x_scale: Any, ids: Any, weights: Any, w13: Any, *rest: Any) -> str | None:
    if rest[3] != "plain":
        return f"takes experts in the plain layout, got the {rest[3]} layout"
    given = [t for t in (ids, weights, w13, *rest) if isinstance(t, torch.Tensor)]
    return None if all(t.is_contiguous() for t in given) else "takes contiguous tensors"


def _sm100(x: Any, x_scale: Any, ids: Any, weights: Any, w13: Any, *rest: Any) -> str | None:
    hidden, inter = x.shape[1], w13.shape[1] // 2
    if hidden % 128 or inter % 128:
        return f"hidden and inter multiples of 128, got {hidden} and {inter}"
    return _plain(x, x_scale, ids, weights, w13, *rest)


_MOE = Op(
    "mxfp4_moe(Tensor x, Tensor x_scale, Tensor expert_ids, Tensor expert_weights, Tensor w13,"
    " Tensor w13_scale, Tensor w2, Tensor w2_scale, str layout, float limit, Tensor? shared,"
    " Tensor(a!) out, Tensor(b!) scratch) -> ()",
    reference="dsv41_reference.moe:mxfp4_moe",
    package=__package__,
    kernels=(
        Kernel("tilelang_cuda", "cuda", needs=("tilelang",), archs=(90,), supports=_hopper),
        Kernel("deepgemm_cuda", "cuda", needs=("deep_gemm",), archs=(100, 103), supports=_sm100),
        Kernel("tilelang_sm100_cuda", "cuda", needs=("tilelang",), archs=(100, 103), supports=_sm100),
        Kernel("triton_cuda", "cuda", needs=("triton",), supports=_plain),
        Kernel("tilelang_npu", "npu", needs=("tilelang", "torch_npu"), supports=_sm100),
    ),
)


def scratch_parts(tokens: int, top_k: int, experts: int, hidden: int, inter: int) -> Parts:
    """The scratch of a call: first position of each expert, assignment of each position, counters of tiles,
    the rows as the product wants them (two bytes a value at most) and their scales, the inner activations
    and their scales, and one output row an assignment.
    """
    rows = tokens * top_k
    return [
        (torch.int32, (experts + 1,)),
        (torch.int32, (rows,)),
        (torch.int32, (experts + 1,)),
        (torch.bfloat16, (tokens, hidden)),
        (torch.float32, (tokens, hidden // 32)),
        (torch.bfloat16, (rows, inter)),
        (torch.float32, (rows, inter // 32)),
        (torch.bfloat16, (rows, hidden)),
    ]


def mxfp4_moe_scratch(num_tokens: int, top_k: int, num_experts: int, hidden: int, inter: int) -> int:
    """Bytes of scratch that ``mxfp4_moe`` needs on an accelerator for at most ``num_tokens`` tokens.

    About ``num_tokens * (2 * hidden + top_k * (2 * inter + 2 * hidden))``; a pure function of the sizes.
    """
    check_sizes("mxfp4_moe_scratch", num_tokens=num_tokens)
    check_sizes("mxfp4_moe_scratch", 1, top_k=top_k, num_experts=num_experts, hidden=hidden, inter=inter)
    return parts_bytes(scratch_parts(num_tokens, top_k, num_experts, hidden, inter))


def read_layout(layout: str) -> tuple[str, tuple[int, int], bool]:
    """What a "hopper" layout says: numerics, the middle code of the scales of w13 and of w2, and whether some
    experts do not fold.
    """
    _, numerics, first, second, *mixed = layout.split()
    return numerics, (int(first), int(second)), bool(mixed)


def pack_experts(
    experts: MXFP4Experts, *, numerics: str = "exact", add_up: Callable[[torch.Tensor], None] | None = None
) -> MXFP4Experts:
    """Put the weights of a layer into the order in which the Hopper kernel reads them, in place.

    Args:
        experts: MXFP4Experts view in the plain layout, hidden a multiple of 256, inter of 128 and no larger,
            scale codes 1 to 223.
        numerics: "exact", or "fp8": activations have one scale a 128 values, the largest of the four.
        add_up: adds counts [256] int64 up over the ranks that share the layer, in place: experts can then
            move between them, because all of them choose the same layout. None is one rank.

    Returns:
        MXFP4Experts view with a "hopper" layout over the same memory; the given view is refused from now on.
        Its ``unfolded`` counts 1 x 32 blocks, of all ranks, whose scale is too far from the layer's others to
        become part of FP8 values (2^13 from the middle); ``routed`` the experts here that have such blocks.
        A call takes those through exact kernels that apply scales to sums, whatever the numerics, and the
        others through the fast ones; the layout then ends in "mixed".

    Errors: ValueError before anything is written. One expert at a time: less than 1 GB above the layer.
    Contract: every value and scale is kept; with "exact" the products are those of the plain layout. An
        expert is its slot of every tensor, also in a mixed layer.
    """
    name = "pack_experts"
    check(isinstance(experts, MXFP4Experts), name, "experts: MXFP4Experts", experts)
    check(numerics in ("exact", "fp8"), name, "numerics: exact or fp8", numerics)
    check(add_up is None or callable(add_up), name, "add_up: a function of counts, or None", add_up)
    check(not experts.w13.is_meta, name, "experts with values", experts.w13)
    check(experts.layout == "plain", name, "experts in the plain layout", experts.layout)
    sizes = experts.hidden, experts.inter
    good = sizes[0] % 256 == 0 and sizes[1] % 128 == 0 and sizes[1] <= sizes[0]
    check(good, name, "hidden a multiple of 256, inter of 128 and no larger", sizes)
    w13, w13_scale, w2, w2_scale, _ = experts.flat()
    for label, scale in (("w13_scale", w13_scale), ("w2_scale", w2_scale)):
        codes = [int(part.aminmax()[i]) for part in scale if part.numel() for i in (0, 1)]
        wanted = f"{label}: codes {pack.MIN_CODE} to {pack.MAX_CODE} (255 is NaN)"
        low, high = min(codes, default=pack.MIN_CODE), max(codes, default=pack.MAX_CODE)
        check(low >= pack.MIN_CODE and high <= pack.MAX_CODE, name, wanted, f"{low} to {high}")
    for tensor in (w13, w13_scale, w2, w2_scale):
        check(
            tensor.is_contiguous(), name, "contiguous weights and scales", f"strides {tuple(tensor.stride())}"
        )
    used = [pack.used_codes(values, scale) for values, scale in ((w13, w13_scale), (w2, w2_scale))]
    totals = [counts.sum(0) for counts in used]
    for counts in totals:
        if add_up is not None:
            add_up(counts)
    bases = [pack.fold_base(counts) for counts in totals]
    unfolded = sum(int(pack.outside(counts, base)) for counts, base in zip(totals, bases, strict=True))
    far = [pack.outside(counts, base) for counts, base in zip(used, bases, strict=True)]
    routed = (far[0] + far[1] > 0).tolist()
    for e in range(experts.num_experts):
        w13[e].copy_(pack.mxfp4_values(pack.gate_up_rows(w13[e])))
        w2[e].copy_(pack.mxfp4_values(w2[e]))
        codes = pack.mxfp4_scales(pack.gate_up_rows(w13_scale[e])), pack.mxfp4_scales(w2_scale[e])
        for scale, code, base in zip((w13_scale, w2_scale), codes, bases, strict=True):
            scale[e].copy_(pack.moved_codes(code, base) if unfolded and not routed[e] else code)
    object.__setattr__(experts, "layout", "moved")  # a call with the old view would be wrong without a word
    layout = f"hopper {numerics} {bases[0]} {bases[1]}" + (" mixed" if unfolded else "")
    return dataclasses.replace(experts, layout=layout, unfolded=unfolded, routed=sum(routed))


def mxfp4_moe(
    x: torch.Tensor | MXFP8,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    experts: MXFP4Experts,
    *,
    limit: float,
    shared: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Everything one rank does for its local experts.

        gate, up = bf16(x @ w1_e.T), bf16(x @ w3_e.T)
        y_e = bf16(MXFP8(bf16(weight * silu(min(gate, limit)) * clamp(up, ±limit))) @ w2_e.T)
        out = sum of y_e over the row's experts, in top-k order in f32, plus ``shared``, rounded once

    Args:
        x: [num_tokens, hidden] bf16, quantised here, or an MXFP8 view of values [num_tokens, hidden] e4m3.
        expert_ids: [num_tokens, top_k] int32, local expert numbers; -1 is skipped.
        expert_weights: [num_tokens, top_k] f32, multiplied before the second product.
        experts: MXFP4Experts view.
        limit: clamp of the SwiGLU; the gate from above only.
        shared: [num_tokens, hidden] bf16 added before the rounding (the shared expert's output), or None.
        out: [num_tokens, hidden] bf16 to write into; may be ``shared``.
        scratch: [n] uint8, at least ``mxfp4_moe_scratch(...)`` bytes; contents need no preparation.

    Returns:
        [num_tokens, hidden] bf16; ``out`` itself when it was given. A row whose ids are all -1 is ``shared``
        or 0.

    Contract: no host sync on accelerators; graph-safe; allocates only what is None (and the quantised x); the
        same bits on every run; on an accelerator a row's bits do not depend on what the other rows hold. A
        kernel may choose its tiles, and with them the last bits, by how many rows there are, except inside
        ``batch_invariant()``.
    Reference: dsv41_reference.moe.mxfp4_moe
    """
    name = "mxfp4_moe"
    check(isinstance(experts, MXFP4Experts), name, "experts: MXFP4Experts", experts)
    check(experts.layout != "moved", name, "the view that pack_experts returned", "the one that it took")
    check(experts.num_experts > 0, name, "experts: at least one", experts.w13)
    hidden = experts.hidden
    x = mxfp8_operand(name, x, hidden, experts.w13)
    tokens = x.values.shape[0]
    coarse = experts.layout == "plain fp8" and hidden % 128 + experts.inter % 128
    check(not coarse, name, "hidden and inter multiples of 128 in fp8", (hidden, experts.inter))
    check_tensor(name, "expert_ids", expert_ids, (tokens, None), torch.int32, like=experts.w13)
    shape = tuple(expert_ids.shape)
    check(shape[1] > 0, name, "expert_ids of at least one column", expert_ids)
    check_tensor(name, "expert_weights", expert_weights, shape, torch.float32, like=experts.w13)
    if check_values() and expert_ids.numel():
        low, high = int(expert_ids.min()), int(expert_ids.max())
        good = low >= -1 and high < experts.num_experts
        check(good, name, f"expert_ids: -1 to {experts.num_experts - 1}", f"{low} to {high}")
    if experts.layout.startswith("plain"):  # packing has looked at the others
        check_scales(name, {"w13_scale": experts.w13_scale, "w2_scale": experts.w2_scale})
    check_numbers(name, above=True, limit=limit)
    if shared is not None:
        check_tensor(name, "shared", shared, (tokens, hidden), torch.bfloat16, like=experts.w13)
    out = output(name, out, (tokens, hidden), torch.bfloat16, experts.w13)
    size = mxfp4_moe_scratch(tokens, expert_ids.shape[1], experts.num_experts, hidden, experts.inter)
    scratch = workspace(name, scratch, size, out)
    _MOE(*x.flat(), expert_ids, expert_weights, *experts.flat(), limit, shared, out, scratch)
    return out
