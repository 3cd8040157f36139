"""Adapters to FlashMLA and DeepGEMM: what they refuse, and how they translate arguments, with fake libraries.

The fakes compute with the reference from what they are given, so that a wrong layout of a scale or a wrong
place of a row shows. Nothing here says that the real libraries ran.
"""

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dsv41_reference.attn import sparse_attn as ref_attn
from dsv41_reference.quant import coarsen_mxfp8, e8m0_decode, from_mxfp4, from_mxfp8

from dsv41 import Target, ops
from dsv41._op import ops as registered
from dsv41.cache import PagedKV, Record
from dsv41.formats import MXFP4Experts, quantize_mxfp4, quantize_mxfp8
from dsv41.ops.linear.api import block_linear_scratch
from tests.ops.rows import same

BF16, U8, I32 = torch.bfloat16, torch.uint8, torch.int32
PACKAGES = frozenset({"deep_gemm", "flash_mla", "tilelang", "triton", "nvcc"})
SM90, SM100 = Target("cuda", 90, PACKAGES), Target("cuda", 100, PACKAGES)


def codes_of(packed: torch.Tensor) -> torch.Tensor:
    """SM100's packed scales back to codes; rows are the fastest dimension, 16 bytes apart."""
    assert packed.dtype == I32 and packed.stride(-2) == 1 and packed.stride(-1) % 4 == 0
    return packed.new_empty(packed.shape).copy_(packed).view(U8)


class Library(types.ModuleType):
    """Records calls; computes what a test expects of it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, dict[str, Any]]] = []

    # FlashMLA
    def get_mla_metadata(self) -> tuple[str, None]:
        return "plan", None

    def flash_mla_with_kvcache(self, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(("flash_mla_with_kvcache", given))
        q, layouts = given["q"].squeeze(1), {528: "mxfp8", 288: "nvfp4", 584: "v4"}
        arguments: list[Any] = [q]
        for cache, ids in (("k_cache", "indices"), ("extra_k_cache", "extra_indices_in_kvcache")):
            pages = given[cache]
            known = None if pages is None else pages.squeeze(2)
            name = "" if known is None else layouts[known.shape[2]]  # by the bytes alone, as the library does
            arguments += [known, name, None if given[ids] is None else given[ids].squeeze(1)]
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        arguments += [given["attn_sink"], None, None, given["softmax_scale"], 1, out, lse, torch.empty(0)]
        ref_attn(*arguments)
        return out.unsqueeze(1), torch.where(lse == -torch.inf, torch.inf, lse).unsqueeze(2)

    # DeepGEMM
    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return 8

    def get_mn_major_tma_aligned_tensor(self, scale: torch.Tensor) -> torch.Tensor:
        return scale

    def fp8_gemm_nt(self, a: Any, b: Any, d: torch.Tensor) -> None:
        x = a[0].float() * a[1].repeat_interleave(128, 1)
        each = b[1].repeat_interleave(128, 0)[: len(b[0])].repeat_interleave(128, 1)
        d.copy_(x @ (b[0].float() * each).T)

    def fp8_fp4_gemm_nt(self, a: Any, b: Any, d: torch.Tensor, *, recipe_a: Any, recipe_b: Any) -> None:
        assert recipe_a == recipe_b == (1, 32)
        d.copy_(from_mxfp8(a[0], codes_of(a[1])) @ from_mxfp8(b[0], codes_of(b[1])).T)

    def m_grouped_fp8_fp4_gemm_nt_contiguous(
        self, a: Any, b: Any, d: torch.Tensor, owner: torch.Tensor, *, recipe_a: Any, recipe_b: Any
    ) -> None:
        assert recipe_a == recipe_b == (1, 32) and b[0].dtype == torch.int8 and owner.dtype == I32
        for tile in owner.view(-1, 8):  # a tile of rows has one expert
            assert len(set(tile[tile >= 0].tolist())) <= 1
        d.fill_(torch.nan)  # what lies between is nobody's
        for e in range(len(b[0])):
            rows = owner == e
            w = from_mxfp4(b[0][e].view(U8), codes_of(b[1])[e])
            d[rows] = (from_mxfp8(a[0][rows], codes_of(a[1])[rows]) @ w.T).to(d.dtype)

    def get_num_sms(self) -> int:
        return 148

    def get_paged_mqa_logits_metadata(self, lens: torch.Tensor, page: int, sms: int) -> str:
        return f"{page} {sms}"

    def fp8_fp4_paged_mqa_logits(
        self, q: Any, keys: torch.Tensor, weights: torch.Tensor, lens: torch.Tensor, table: torch.Tensor,
        plan: str, longest: int,
    ) -> torch.Tensor:  # fmt: skip
        from dsv41_reference.cache import read_rows
        from dsv41_reference.index import index_scores

        assert plan == "64 148" and keys.shape[2] == 1
        assert ((table >= 0) & (table < len(keys))).all()  # the library reads them
        codes = q[1].squeeze(1).contiguous().view(U8).view(*q[0].squeeze(1).shape[:2], -1)
        scores = torch.full((len(lens), longest), torch.inf)  # what lies past the end is nobody's
        for t in range(len(lens)):
            entries = torch.arange(int(lens[t]))
            slots = table[t, entries // 64].long() * 64 + entries % 64
            rows = read_rows(keys.squeeze(2), "mxfp4", 128, slots)
            one = slice(t, t + 1)
            scores[t, : len(entries)] = index_scores(
                q[0].squeeze(1).view(U8)[one], codes[one], weights[one], rows
            )
        return scores


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library("fake")
    for name in ("flash_mla", "deep_gemm"):
        monkeypatch.setitem(sys.modules, name, made)
    yield made
    for name in list(sys.modules):
        if name.startswith("dsv41.ops.") and name.endswith(("deepgemm_cuda", "flashmla_cuda")):
            del sys.modules[name]


PLANTED = ["", ""]  # text of the next adapter, and what stands in its place


def load(module: str) -> Any:
    """An adapter anew, with what is planted."""
    sys.modules.pop(f"dsv41.ops.{module}", None)
    loaded = importlib.import_module(f"dsv41.ops.{module}")
    old, new = PLANTED
    if old:
        text = Path(str(loaded.__file__)).read_text("utf-8")
        assert text.count(old) == 1, old
        exec(compile(text.replace(old, new), module, "exec"), vars(loaded))
    return loaded


def caught(op: str, *args: Any, **options: Any) -> tuple[Any, ...]:
    """The flat arguments with which a public function calls its op."""
    entry, seen = registered()[op], []
    kept = entry._call
    entry._call = lambda *flat: seen.append(flat)
    try:
        getattr(ops, op)(*args, **options)
    finally:
        entry._call = kept
    return seen[0]


def attention(layouts: tuple[str, str], heads: int = 64, count: int = 64, **options: Any) -> tuple[Any, ...]:
    caches = []
    for layout in layouts:
        x = torch.randn(128, 512).to(BF16)
        record = Record(layout, 512)
        cache = PagedKV(torch.zeros(2, 64, record.bytes, dtype=U8), record)
        angle = torch.zeros(128, 32)
        ops.write_cache(x, angle.cos(), angle.sin(), torch.arange(128, dtype=I32), cache)
        caches += [cache, torch.randint(-1, 128, (3, count), dtype=I32)]
    q = torch.randn(3, heads, 512).to(BF16)
    return caught("sparse_attn", q, *caches, scale=0.05, num_splits=1, **options)


@pytest.mark.parametrize("layouts", [("v4", "v4"), ("mxfp8", "nvfp4"), ("mxfp8", "mxfp8")])
def test_flashmla(layouts: tuple[str, str], library: Library) -> None:
    """Records pass through untouched, by address, and so do ids."""
    angle = torch.randn(3, 32)
    options = {"sink": torch.randn(64), "inverse_rope": (angle.cos(), angle.sin())}
    args = list(attention(layouts, return_lse=True, **options))
    args[3][1], args[6][1] = -1, -1  # a query without a key
    *_, out, lse, _ = args
    load("attn.flashmla_cuda").sparse_attn(*args)
    given = library.calls[0][1]
    assert given["k_cache"].data_ptr() == args[1].data_ptr() and given["block_table"] is None
    assert given["extra_k_cache"].data_ptr() == args[4].data_ptr() and given["is_fp8_kvcache"]
    got = out.clone(), lse.clone()
    registered()["sparse_attn"].load("torch")(*args)
    assert same(got[0], out) and torch.equal(got[1], lse)


def reasons(op: str, target: Target, args: tuple[Any, ...], kernel: str) -> list[str | None]:
    return [reason for name, reason in registered()[op].explain(target, args) if name == kernel]


def test_flashmla_refusals() -> None:
    def why(target: Target, *args: Any, **options: Any) -> list[str | None]:
        return reasons("sparse_attn", target, attention(*args, **options), "flashmla_cuda")

    assert why(SM100, ("mxfp8", "nvfp4")) == ["built for sm90", None]
    assert why(SM90, ("v4", "v4")) == [None, "built for sm100, sm103"]
    assert "caches of v4, v4+v4, got mxfp8+nvfp4" in str(why(SM90, ("mxfp8", "nvfp4")))
    assert "64 or 128 heads" in str(why(SM100, ("v4", "v4"), heads=32))
    assert "multiple of 64 ids" in str(why(SM100, ("v4", "v4"), count=40))
    without = Target("cuda", 100, frozenset({"triton"}))
    assert "package 'flash_mla' is not installed" in why(without, ("v4", "v4"))


def linear(tokens: int = 5, features: int = 256, k: int = 256, numerics: str = "exact") -> tuple[Any, ...]:
    from dsv41_reference.quant import to_mxfp8_tiles

    x = quantize_mxfp8(torch.randn(tokens, k).to(BF16))
    sizes = torch.arange(features * k >> 14).view(
        features // 128, 1, k // 128, 1
    )  # differ in every tile of "fp8"
    w, code = to_mxfp8_tiles(
        (torch.randn(features // 128, 128, k // 128, 128) * torch.exp2(sizes)).view(features, k)
    )
    if numerics == "fp8":
        code = code[::4, ::4].contiguous()
    out = torch.zeros(tokens, features, dtype=BF16)
    scratch = torch.empty(block_linear_scratch(tokens, features, k, numerics), dtype=U8)
    return x.values, x.scale.view(U8), w, code, numerics, out, scratch


def coarsen_rows(x: torch.Tensor, x_scale: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> None:
    """What the Triton kernel of this name does: one scale a 128 values, f32, groups before tokens."""
    rows, codes = coarsen_mxfp8(x.view(torch.float8_e4m3fn), x_scale)
    values.view(U8).copy_(rows.view(U8))
    scale[:, : len(x)] = e8m0_decode(codes).T


@pytest.mark.parametrize("numerics", ["exact", "fp8"])
def test_deepgemm_linear(numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = linear(numerics=numerics)
    adapter = load("linear.deepgemm_cuda")
    monkeypatch.setattr(adapter, "coarsen_rows", coarsen_rows)
    adapter.block_linear(*args)
    got = args[5].clone()
    registered()["block_linear"].load("torch")(*args)
    torch.testing.assert_close(got.float(), args[5].float(), rtol=2.0**-7, atol=1e-3)
    target = SM100 if numerics == "exact" else SM90
    assert None in reasons("block_linear", target, args, "deepgemm_cuda")
    assert None not in reasons("block_linear", SM100 if numerics == "fp8" else SM90, args, "deepgemm_cuda")


@pytest.mark.parametrize("with_shared", [False, True])
def test_deepgemm_experts(with_shared: bool) -> None:
    """Rows at the padded starts of their experts, ids of nobody, and padding of NaN that must not leak."""
    a, b = quantize_mxfp4(torch.randn(5, 256, 128)), quantize_mxfp4(torch.randn(5, 128, 128))
    stack = MXFP4Experts(a.values, a.scale, b.values, b.scale)
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(11)]).to(I32)
    ids[2, 1], ids[4], ids[5, 0] = -1, 2, 7
    shared = torch.randn(11, 128).to(BF16) if with_shared else None
    args = caught(
        "mxfp4_moe", torch.randn(11, 128).to(BF16), ids, torch.rand(11, 3), stack, limit=5.0, shared=shared
    )
    load("moe.deepgemm_cuda").mxfp4_moe(*args)
    got = args[-2].clone()
    registered()["mxfp4_moe"].load("torch")(*args)
    torch.testing.assert_close(got.float(), args[-2].float(), rtol=2.0**-6, atol=2e-2)
    assert reasons("mxfp4_moe", SM100, args, "deepgemm_cuda") == [None]
    assert reasons("mxfp4_moe", SM90, args, "deepgemm_cuda") == ["built for sm100, sm103"]


def scores(pages: int = 3, page: int = 64, **options: Any) -> tuple[Any, ...]:
    record = Record("mxfp4", 128)
    cache = PagedKV(torch.zeros(pages, page, record.bytes, dtype=U8), record)
    angle = torch.zeros(pages * page, 32)
    x = torch.randn(pages * page, 128).to(BF16)
    ops.write_cache(x, angle.cos(), angle.sin(), torch.arange(pages * page, dtype=I32), cache)
    q = quantize_mxfp4(torch.randn(4, 32, 128).to(BF16).flatten(0, 1))
    table = torch.tensor([[2, 0], [1, 1]], dtype=I32)
    visible = torch.tensor([100, 30, 999, 128], dtype=I32)
    return (
        q.values.view(4, 32, 64), q.scale.view(U8).view(4, 32, 4), torch.rand(4, 32),
        torch.tensor([0, 1, 0, 5], dtype=I32), visible, cache.pages, "mxfp4", table,
        options.get("candidates"), 8, torch.zeros(4, 16, dtype=I32), torch.zeros(4, 0, dtype=I32),
        torch.empty(0, dtype=U8),
    )  # fmt: skip


def test_deepgemm_index() -> None:
    args = scores()
    load("index.deepgemm_cuda").index_topk(*args)
    got = args[10].clone()
    registered()["index_topk"].load("torch")(*args)
    assert torch.equal(got, args[10])
    assert reasons("index_topk", SM100, args, "deepgemm_cuda") == [None]
    small = scores(page=32)
    assert "pages of 64" in str(reasons("index_topk", SM100, small, "deepgemm_cuda"))
    chosen = scores(candidates=torch.zeros(4, 4, dtype=I32))
    assert reasons("index_topk", SM100, chosen, "deepgemm_cuda") == ["no candidate blocks"]
    many, none = list(args), list(args)
    many[10], none[5] = torch.zeros(len(args[10]), 1024, dtype=I32), args[5][:0]
    for odd in (tuple(many), tuple(none)):
        assert "at least one page and top_k up to 512" in str(
            reasons("index_topk", SM100, odd, "deepgemm_cuda")
        )


def test_deepgemm_index_of_pages_that_are_not_held() -> None:
    """Scores below 0, which pages that nobody holds must not beat."""
    args = list(scores())
    args[2], args[7] = -args[2], torch.tensor([[2, -1], [99, 1]], dtype=I32)
    load("index.deepgemm_cuda").index_topk(*args)
    got = args[10].clone()
    registered()["index_topk"].load("torch")(*args)
    assert torch.equal(got, args[10]) and (got == -1).any()


def test_packed_scales() -> None:
    """Four codes along k a word, the first in the low byte; rows fastest, 16 bytes apart."""
    from dsv41.ops._deepgemm import packed_scale

    codes = torch.randint(0, 256, (2, 5, 8), dtype=U8)
    made = packed_scale(codes)
    assert made.shape == (2, 5, 2) and made.stride() == (16, 1, 8)
    assert int(made[1, 3, 1]) & 0xFF == int(codes[1, 3, 4]) and torch.equal(codes_of(made), codes)
    assert e8m0_decode(codes_of(made)).shape == codes.shape


# Planted into the adapters: scales and ids exchanged, rows and scales of others, another tile.
FAULTS_OF_ATTENTION = [
    ("indices=window_ids", "indices=compressed_ids"),
    ("k_cache=window", "k_cache=compressed"),
    ("else compressed.unsqueeze(2)", "else window.unsqueeze(2)"),
    ("attn_sink=sink", "attn_sink=None"),
    ("softmax_scale=scale", "softmax_scale=2 * scale"),
    ("inverse=True", "inverse=False"),
    ("if lse.numel():", "if not lse.numel():"),
]
FAULTS_OF_LINEARS = [
    ("(x, packed_scale(x_scale)), (w, packed_scale(each_row))", "(x, packed_scale(each_row)), (w, x_scale)"),
    (".repeat_interleave(32, 0)", ".repeat(32, 1)"),
]  # fmt: skip
FAULTS_OF_FP8 = [
    ("(values.view(E4M3), of_rows)", "(x, of_rows)"),
    ("(w, of_weights)", "(w, of_weights.t().contiguous())"),
    ("coarsen_rows(x.view(torch.uint8), x_scale,", "coarsen_rows(x.view(torch.uint8), x_scale.roll(1, 0),"),
]
FAULTS_OF_EXPERTS = [
    ("(rows, packed_scale(codes))", "(rows, packed_scale(codes.roll(1, 0)))"),
    ("packed_scale(scale)", "packed_scale(scale.flip(0))"),
    ("out, owner", "out, owner.flip(0)"),
    ("contiguous_layout(), args", "contiguous_layout() // 2, args"),
]
FAULTS_OF_SCORES = [
    ("visible.clamp(0, longest)", "visible"),
    ("torch.where(known, request_ids, 0)", "torch.where(known, 0, request_ids)"),
    ("words.view(*q.shape[:2])", "words.view(*q.shape[:2]).roll(1, 1)"),
    ("(lens[:, None], page,", "(lens[:, None], 32,"),
    ("api.topk(scores, lens,", "api.topk(scores, lens + 1,"),
]
FAULTS_OF_PAGES = [
    ("table = torch.where(held, table, 0)", ""),
    ("-torch.inf)", "-1e3)"),
    ("(table < keys.shape[0])", "(table <= 99)"),
]
FAULTS = [
    *[(*fault, "flashmla") for fault in FAULTS_OF_ATTENTION],
    *[(*fault, "linear") for fault in FAULTS_OF_LINEARS],
    *[(*fault, "fp8") for fault in FAULTS_OF_FP8],
    *[(*fault, "experts") for fault in FAULTS_OF_EXPERTS],
    *[(*fault, "scores") for fault in FAULTS_OF_SCORES],
    *[(*fault, "pages") for fault in FAULTS_OF_PAGES],
]


@pytest.mark.parametrize("old, new, where", FAULTS)
def test_faults_are_seen(
    old: str, new: str, where: str, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PLANTED", [old, new])
    checks: dict[str, Callable[[], None]] = {
        "flashmla": lambda: test_flashmla(("mxfp8", "nvfp4"), library),
        "linear": lambda: test_deepgemm_linear("exact", monkeypatch),
        "fp8": lambda: test_deepgemm_linear("fp8", monkeypatch),
        "experts": lambda: test_deepgemm_experts(True),
        "scores": test_deepgemm_index,
        "pages": test_deepgemm_index_of_pages_that_are_not_held,
    }
    with pytest.raises((AssertionError, RuntimeError, IndexError)) as seen:
        checks[where]()
    assert str(seen.value) != old, "not planted"
