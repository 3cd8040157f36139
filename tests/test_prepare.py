"""What `prepare` compiles is what steps launch; where it was not called, capture and `no_compile` say so."""

import functools
import importlib
import sys
import types
from typing import Any

import pytest
import torch

import dsv41
from dsv41 import Target, V41FlashConfig, no_compile, warm
from dsv41._op import _watch_triton
from tests.tools import lowering

SM90 = Target("cuda", 90, frozenset({"tilelang", "triton", "nvcc"}))


@functools.cache
def flash_calls() -> list[warm.Call]:
    return warm.calls(V41FlashConfig.flash(), 48, 64, 4096, drafter=True)


def test_a_cpu_needs_nothing() -> None:
    done = dsv41.prepare(V41FlashConfig.tiny(), "cpu")
    assert (done.compiled, done.warmed) == (0, 0)


def test_every_op_of_a_step_is_met() -> None:
    names = {op.name for op, _ in flash_calls()}
    wanted = {
        "mhc_boundary", "mhc_mixes", "mhc_expand", "mhc_collapse", "engram_hash", "engram_lookup",
        "engram_gate", "topk_route", "mxfp4_moe", "block_linear", "grouped_linear", "linear", "rms_norm",
        "rope", "write_cache", "rms_norm_quantize", "quantize_mxfp8", "swiglu_quantize", "compress_pairs",
        "copy_records", "index_query", "index_topk", "sparse_attn", "markov_bias", "sample_tokens",
        "split_budget_ragged", "verify_drafts",
    }  # fmt: skip
    assert wanted <= names


def test_one_layer_of_each_kind_has_every_call() -> None:
    """Forty layers ask for no call that the few do not ask for."""
    cfg = V41FlashConfig.tiny()
    few = {(op.name, len(args)) for op, args in warm.calls(cfg, 8, 2, 40, drafter=True)}
    kept = warm.one_of_each
    warm.one_of_each = lambda model: list(model.blocks)
    try:
        all_of_them = {(op.name, len(args)) for op, args in warm.calls(cfg, 8, 2, 40, drafter=True)}
    finally:
        warm.one_of_each = kept
    assert few == all_of_them


@pytest.mark.skipif(lowering.nvcc() is None, reason="needs nvcc")
def test_launches_ask_for_nothing_that_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every TileLang launch of prefill and decode, with builders that only note what is asked of them."""
    pytest.importorskip("tilelang")
    cfg = V41FlashConfig.flash()
    ahead = {(b.__module__, b.__name__, args) for b, args in warm.variants(cfg, SM90)}
    asked: set[tuple[str, str, Any]] = set()
    for name in {b.__module__ for b, _ in warm.variants(cfg, SM90)}:
        module = importlib.import_module(name)
        for builder in {b.__name__ for b, _ in warm.variants(cfg, SM90) if b.__module__ == name}:

            def note(*args: Any, at: tuple[str, str] = (name, builder)) -> Any:
                asked.add((*at, args))
                return lambda *given: None

            monkeypatch.setattr(module, builder, note)
    monkeypatch.setattr(Target, "of", staticmethod(lambda x: SM90))
    count = 0
    for op, args in flash_calls():
        args = warm.packed(op, args, SM90)
        forms = [args]
        others = ("hopper fp8 119 120", "hopper exact 119 120 mixed", "hopper fp8 119 120 mixed")
        for layout in others if op.name == "mxfp4_moe" else ():
            forms.append(tuple(layout if isinstance(a, str) and a == warm.PACKED else a for a in args))
        kernel = op.select(SM90, args)
        for form in forms if kernel == "tilelang_cuda" else ():
            op.load(kernel)(*form)
            count += 1
    assert count > 40 and asked
    assert not asked - ahead, sorted(asked - ahead)


def test_no_compile_holds_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the hook that Triton calls before it compiles; a hook that is there already is kept."""
    seen: list[str] = []
    runtime = types.SimpleNamespace(jit_cache_hook=lambda **what: seen.append(what["repr"]))
    triton = types.SimpleNamespace(knobs=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "triton", triton)  # type: ignore[arg-type]
    with no_compile():
        once = runtime.jit_cache_hook
        _watch_triton()
        assert runtime.jit_cache_hook is once
        with pytest.raises(RuntimeError, match=r"_gate\(\) \(Triton\) is not compiled .* call dsv41.prepare"):
            runtime.jit_cache_hook(repr="_gate()")
    runtime.jit_cache_hook(repr="_gate()")
    assert seen == ["_gate()"]


def test_tensors_on_the_device_are_laid_out_as_noted() -> None:
    x = torch.empty(6, 8, dtype=torch.bfloat16, device="meta")[:, 2:6]
    real = warm._real(x, torch.device("cpu"))
    assert (real.shape, real.stride(), real.dtype) == (x.shape, x.stride(), x.dtype)
    assert real.data_ptr() % 4 == 0 and not real.any()
    big = warm._real(torch.empty(1 << 30, 256, dtype=torch.uint8, device="meta"), torch.device("cpu"), True)
    assert big.nbytes <= warm.MOST_BYTES and big.shape[1] == 256
    assert warm._real(torch.empty(0, 3, device="meta"), torch.device("cpu")).shape == (0, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_capture_before_prepare_is_refused() -> None:
    from dsv41.layers import V41State
    from dsv41.spec import DecodeGraphs
    from tests import models

    cfg = V41FlashConfig.tiny(hidden=512, inter=128)  # a width that no other test compiles for
    model = models.build(cfg).cuda().pack()
    graphs = DecodeGraphs(model, V41State.allocate(cfg, 2, 64, device="cuda"))
    with pytest.raises(RuntimeError, match=r"call dsv41.prepare\(cfg\) first"):
        graphs.capture()
