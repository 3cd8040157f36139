"""Every refusal: it is a ReplayConfigError, and the sentence says who refuses, the minimum, the value given
and what to do, in the one form of the library."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from dsv41 import V41FlashConfig, replay
from dsv41.layers import V41State
from dsv41.replay import (
    ReplayConfig,
    ReplayConfigError,
    ReplayGeometry,
    ReplayHooks,
    ReplayMode,
    ReplayRuntime,
    RequestSpan,
    SpanBatch,
    flops,
    plan_decoder,
    plan_encoder_hit,
    run_prefill,
)
from dsv41.replay.chunked import plan_prompt, prefill
from dsv41.replay.device import to_device
from tests import models
from tests.replay.model_runs import setting, variant

FLASH = ReplayGeometry()
COMPACT = ReplayConfig(ReplayMode.COMPACT)
MASK = ReplayConfig(ReplayMode.MASK)
ANY: Any = "none of the words"
PLAN = plan_decoder(COMPACT, FLASH, [RequestSpan(200, 200, 200)])


def refuses(call, *parts: str) -> None:
    with pytest.raises(ReplayConfigError) as caught:
        call()
    text = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert re.match(r"\w+(, request \d+)?: expected [^;]+, got [^;]+(; |$)", text), f"another form: {text}"
    assert "\n" not in text and not re.search(r"\.\s", text), f"one sentence: {text}"
    for part in parts:
        assert part in text, f"{part!r} missing in: {text}"


def config(**kwargs):
    return lambda: ReplayConfig(**{"mode": "compact", **kwargs})


def runtime(cfg=COMPACT, geom=FLASH, **kwargs):
    return lambda: cfg.validate(geom, ReplayRuntime(**kwargs))


def span(*args, **kwargs):
    return lambda: RequestSpan(*args, **kwargs)


def hooks(boundary_rows: int, decoder_rows: int) -> ReplayHooks:
    boundary = (np.zeros(boundary_rows),)
    return ReplayHooks(lambda plan: boundary, lambda b, plan: None, lambda kept, plan: kept[0][:decoder_rows])


RATIOS = ReplayRuntime().compress_ratios
ALL_ROWS = ReplayConfig(ReplayMode.COMPACT, first_layer_kv="all_rows")

CASES = {
    "mode": (config(mode="on"), "off, compact, mask", "'on'", "choose"),
    "dead": (config(dead="nan"), "empty, windowed", "'nan'", "choose"),
    "policy": (config(policy="tail"), "prompt_window, per_chunk_tail", "'tail'", "choose"),
    "first layer": (config(first_layer_kv="none"), "segment, all_rows", "'none'", "choose"),
    "keep 133": (config(keep=133), "at least 134", "window 128", "5 drafts", "got 133", "140 is recommended"),
    "keep 0": (config(keep=0), "at least 1", "got 0"),
    "keep -5": (config(keep=-5, mode="off"), "at least 1", "got -5"),
    "keep True": (config(keep=True, mode="off"), "at least 1", "got True", "whole number"),
    "keep 140.0": (config(keep=140.0), "at least 1", "got 140.0", "whole number"),
    "7 drafts": (
        config(keep=135, geometry=ReplayGeometry(draft_tokens=7)),
        "at least 136", "7 drafts", "got 135",
    ),
    "7 drafts, validate": (
        lambda: ReplayConfig(ReplayMode.MASK, 134).validate(ReplayGeometry(draft_tokens=7)),
        "at least 136", "got 134", "144 is recommended",
    ),
    "7 drafts, plan": (
        lambda: plan_decoder(ReplayConfig(ReplayMode.MASK, 134), ReplayGeometry(draft_tokens=7), []),
        "136",
    ),
    "window": (lambda: ReplayGeometry(window=1), "window", "at least 2", "got 1"),
    "drafts": (lambda: ReplayGeometry(draft_tokens=-1), "draft_tokens", "at least 0", "got -1"),
    "no decoder": (lambda: ReplayGeometry(num_decoder_layers=0), "num_decoder_layers", "at least 1", "got 0"),
    "exact_keep word": (lambda: FLASH.exact_keep(ANY), "segment, all_rows", "none of the words"),
    "exact_keep rows": (lambda: FLASH.exact_keep("segment", 0), "cached_rows", "at least 1", "got 0"),
    "no sources": (runtime(kv_source_layers=()), "at least 1", "none", "mode off"),
    "source beyond the cut": (
        runtime(kv_source_layers=(2, 20, 30)),
        "layer 20", "got 30", "first_decoder_layer",
    ),
    "source below the cut": (runtime(kv_source_layers=(2, 8)), "layer 20", "got 8"),
    "other ratio": (
        runtime(compress_ratios=(*RATIOS[:30], 2, *RATIOS[31:])),
        "ratio 1", "ratio 2 at layer 30", "mode off",
    ),
    "a window-only layer": (runtime(compress_ratios=(*RATIOS[:39], 0)), "ratio 0 at layer 39"),
    "no layer after the cut": (
        runtime(compress_ratios=RATIOS[:20]),
        "40 layers", "got 20", "num_decoder_layers",
    ),
    "Engram": (runtime(engram_layers=(1, 20)), "below", "20", "got [20]", "mode off"),
    "windows": (runtime(encoder_window=64), "equal", "64 and 128", "mode off"),
    "full drafter": (runtime(draft_windows=(128, None)), "sliding", "draft layer 1", "turn"),
    "wide drafter": (runtime(draft_windows=(128, 256)), "at least", "256", "got 140", "raise keep"),
    "drafter rows": (runtime(draft_target_rows=141), "at least the 141", "got 140", "raise keep"),
    "pipeline": (runtime(pipeline_starts=(0, 10, 30)), "inside the decoder", "got [30]", "cut at layer 20"),
    "sequence parallel": (runtime(sequence_parallel=True), "re-agree", "rows_agreed=False", "mode off"),
    "micro-batches": (runtime(micro_batches=2), "2 micro-batches", "rows_agreed=False", "mode off"),
    "context parallel": (runtime(context_parallel=65), "at least 2 x", "130", "got 128", "at most 64"),
    "ring": (runtime(window_storage="ring", ring_capacity=132), "at least 133", "got 132", "enlarge"),
    "ring, off": (
        runtime(ReplayConfig(), window_storage="ring", ring_capacity=132),
        "at least 133", "got 132",
    ),
    "ring, unknown": (runtime(window_storage="ring"), "at least 133", "got None"),
    "ring, all rows": (
        runtime(ALL_ROWS, window_storage="ring", ring_capacity=266),
        "at least 267", "got 266", "page",
    ),
    "storage": (runtime(window_storage="heap"), "paged, ring", "'heap'"),
    "trim": (runtime(graph_trim_threshold=140), "at least 141", "got 140", "raise"),
    "captures": (
        runtime(capture_sizes=(128, 512), max_batched_tokens=256),
        "at most", "256", "got 512", "drop",
    ),
    "replay rows": (runtime(encoder_replay=True, encoder_replay_rows=127), "window 128", "got 127", "raise"),
    "odd block": (runtime(encoder_replay=True, block_size=33), "multiple of 2", "got 33"),
    "windows cached": (
        runtime(encoder_replay=True, windows_prefix_cached=True),
        "prefix-cacheable", "unregister",
    ),
    "no padding": (
        runtime(encoder_replay=True, can_pad_compressed=False),
        "leave out", "turn encoder replay off",
    ),
    "prompt logprobs": (
        lambda: COMPACT.admit(prompt_logprobs=True),
        "log-prob", "compact", "keep_all=True", "windowed", "off",
    ),
    "hidden states": (lambda: MASK.admit(prompt_hidden_states=True), "hidden", "mask/empty"),
    "routed experts": (lambda: COMPACT.admit(routed_experts=True), "routed experts", "compact"),
    "over a hit": (
        lambda: ReplayConfig().admit(prompt_logprobs=True, hit_end=64),
        "prefix of 64", "ignore the cache",
    ),
    "float": (span(3, 3.0), "end", "integer", "3.0"),
    "bool": (span(True, 3), "q_len", "integer", "True"),
    "negative": (span(-1, 3), "q_len", "at least 0", "got -1"),
    "too many rows": (span(4, 3), "end", "at least q_len 4", "got 3"),
    "too far": (span(1, 1 << 31), "at most 2147483647", "split"),
    "target": (span(3, 9, 8), "target_end", "at least end 9", "got 8"),
    "target -1": (span(3, 9, -1), "at least end 9", "got -1"),
    "target too far": (span(3, 9, 1 << 31), "at most 2147483647"),
    "decode with a target": (
        span(1, 9, 9, is_decode=True),
        "None for a decode span", "got 9", "leave it out",
    ),
    "window beyond the step": (span(3, 9, 9, swa_start=7), "0..6", "got 7"),
    "window below zero": (span(3, 9, 9, swa_start=-1), "0..6", "got -1"),
    "live beyond the step": (span(3, 9, decoder_live_start=7), "0..6", "got 7"),
    "live below the window": (span(3, 9, swa_start=4, decoder_live_start=3), "4..6", "got 3"),
    "column length": (lambda: SpanBatch.from_columns([1, 2], [3, 4], swa_start=[0]), "[2] integers", "[1]"),
    "column type": (lambda: SpanBatch.from_columns(np.array([1.0]), [3]), "q_len", "float64"),
    "column value": (
        lambda: SpanBatch.from_columns([1, 5], [3, 4]),
        "request 1", "end", "at least q_len 5", "got 4",
    ),
    "short state": (
        lambda: plan_decoder(COMPACT, FLASH, [RequestSpan(1, 1, 1), RequestSpan(40, 1000, 1000, 900)]),
        "request 1", "at least 133", "got 100", "plan_encoder_hit",
    ),
    "short by one row": (
        lambda: plan_decoder(COMPACT, FLASH, [RequestSpan(40, 1000, 1000, 868)]),
        "at least 133", "got 132",
    ),
    "short live state": (
        lambda: plan_decoder(COMPACT, FLASH, [RequestSpan(40, 1000, 1000, decoder_live_start=900)]),
        "request 0", "at least 133", "got 100", "plan_encoder_hit",
    ),
    "pad": (lambda: PLAN.pad(139), "padded_to", "at least 140", "got 139"),
    "ring writes": (lambda: PLAN.ring_writes(132), "capacity", "at least 133", "got 132"),
    "ring rows": (lambda: PLAN.ring_writes(133, ANY), "kept, first_layer, all", "none of the words"),
    "gather": (lambda: PLAN.gather(np.zeros(199)), "200 rows", "[199]", "all packed rows"),
    "gather a scalar": (lambda: PLAN.gather(np.float64(0)), "200 rows", "[]"),
    "scatter": (lambda: PLAN.scatter(np.zeros(139)), "140 rows", "139"),
    "scatter out": (lambda: PLAN.scatter(np.zeros(140), np.zeros(199)), "200 rows", "[199]"),
    "scatter word": (lambda: PLAN.scatter(np.zeros(140), fill=ANY), "nan, zero", "none of the words"),
    "scatter nothing": (lambda: PLAN.scatter(np.zeros(140), fill=None), "nan or zero", "old memory"),
    "scatter ints": (lambda: PLAN.scatter(np.zeros(140, np.int32)), "floating", "int32", "fill=zero"),
    "scatter int tensor": (
        lambda: PLAN.scatter(torch.zeros(140, dtype=torch.int32)),
        "floating", "fill=zero",
    ),
    "geometry of another kind": (config(geometry=ANY), "ReplayGeometry", "got str"),
    "geometry of another kind, validate": (lambda: COMPACT.validate(ANY), "ReplayGeometry", "got str"),
    "geometry of another kind, plan": (lambda: plan_decoder(COMPACT, ANY, []), "ReplayGeometry", "got str"),
    "geometry of another kind, hit": (lambda: plan_encoder_hit(ANY, 0, 9, 140), "ReplayGeometry", "got str"),
    "geometry of another kind, exact_keep": (lambda: replay.exact_keep(ANY), "ReplayGeometry", "got str"),
    "runtime of another kind": (lambda: COMPACT.validate(FLASH, ANY), "ReplayRuntime", "got str"),
    "config of another kind": (lambda: plan_decoder(ANY, FLASH, []), "ReplayConfig", "got str"),
    "spans of another kind": (lambda: plan_decoder(COMPACT, FLASH, [(3, 3)]), "RequestSpan", "pass"),  # type: ignore
    "one span": (lambda: plan_decoder(COMPACT, FLASH, RequestSpan(3, 3)), "RequestSpan", "pass"),  # type: ignore
    "no spans": (lambda: plan_decoder(COMPACT, FLASH, None), "RequestSpan", "pass"),  # type: ignore
    "flag": (span(3, 9, keep_all="no"), "keep_all", "boolean", "'no'"),
    "flag of two": (span(3, 9, is_decode=2), "is_decode", "boolean", "got 2"),
    "hit beyond int32": (span(3, 9, hit_end=1 << 32), "hit_end", "0..2147483647", "got 4294967296"),
    "odd hit, plan": (
        lambda: plan_decoder(COMPACT, FLASH, [RequestSpan(1, 1), RequestSpan(99, 999, 999, hit_end=801)]),
        "request 1", "multiple of 2", "got 801",
    ),
    "rows beyond int32": (
        lambda: plan_decoder(COMPACT, FLASH, [RequestSpan(1 << 30, 1 << 30, 1 << 30)] * 2),
        "at most 2147483647 rows", "got 2147483648", "split",
    ),
    "column without rows": (lambda: SpanBatch.from_columns(3, 3), "q_len", "[1] integers", "got []"),  # type: ignore
    "ragged column": (lambda: SpanBatch.from_columns([[1], [2, 3]], [3, 4]), "q_len", "integers"),  # type: ignore
    "column beyond int64": (
        lambda: SpanBatch.from_columns([1], [3], target_end=np.array([(1 << 64) - 1], np.uint64)),
        "request 0", "target_end",
    ),
    "no ratio": (runtime(compress_ratios=(0,) * 40), "layer 20", "ratio 0", "mode off"),
    "hit at admission": (lambda: COMPACT.admit(hit_end=-1), "hit_end", "at least 0", "got -1"),
    "gather a list": (lambda: PLAN.gather([0.0] * 200), "200 rows", "got list"),
    "gather rows": (lambda: PLAN.gather(np.zeros(200), rows=np.arange(1)), "rows", "[140]", "[1]"),
    "scatter rows": (lambda: PLAN.scatter(np.zeros(140), rows=np.arange(1)), "rows", "[140]", "[1]"),
    "scatter a list": (lambda: PLAN.scatter([0.0] * 140), "140 rows", "got list"),
    "scatter a scalar": (lambda: PLAN.scatter(np.float64(0)), "140 rows", "got []"),
    "scatter, one column into five": (
        lambda: PLAN.scatter(np.zeros((140, 1)), np.zeros((200, 5))),
        "[200, 1] float64", "got [200, 5] float64",
    ),
    "scatter, a vector into rows": (
        lambda: PLAN.scatter(torch.zeros(140), torch.zeros(200, 140)),
        "[200] torch.float32", "got [200, 140]",
    ),
    "scatter floats into ints": (
        lambda: PLAN.scatter(np.zeros(140), np.zeros(200, np.int64), fill="zero"),
        "[200] float64", "got [200] int64",
    ),
    "scatter a tensor into an array": (
        lambda: PLAN.scatter(torch.zeros(140), np.zeros(200)),
        "[200] torch.float32", "got [200] float64",
    ),
    "unsigned slots": (lambda: PLAN.select_slots(torch.zeros((1, 200), dtype=torch.uint8), [True]), "uint8"),
    "unsigned array of slots": (lambda: PLAN.select_slots(np.zeros((1, 200), np.uint32), [True]), "uint32"),
    "float slots": (lambda: PLAN.select_slots(np.zeros((1, 200)), [True]), "signed integers", "float64"),
    "slots of words": (lambda: PLAN.select_slots(np.zeros((2, 200), int), [ANY] * 2), "booleans"),
    "slots": (lambda: PLAN.select_slots(np.zeros((2, 200), int), [True]), "[1, 200]", "[2, 200]"),
    "hook rows": (
        lambda: run_prefill(PLAN, hooks(200, 3)),
        "140 rows", "got 3",
    ),
    "boundary rows": (
        lambda: run_prefill(PLAN, hooks(7, 140)),
        "200 rows", "[7]",
    ),
    "odd hit": (
        lambda: plan_encoder_hit(FLASH, 1001, 2000, 140),
        "multiple of 2", "got 1001", "shorten the hit to 1000",
    ),
    "hit beyond": (lambda: plan_encoder_hit(FLASH, 1000, 999, 140), "target_end", "at least 1000", "got 999"),
    "negative hit": (lambda: plan_encoder_hit(FLASH, -2, 9, 140), "hit_end", "at least 0", "got -2"),
    "hit keep": (lambda: plan_encoder_hit(FLASH, 1000, 2000, 133), "keep", "at least 134", "got 133"),
    "hit align": (lambda: plan_encoder_hit(FLASH, 1000, 2000, 140, 0), "align", "at least 1", "got 0"),
    "cost length": (lambda: flops(0, 140, V41FlashConfig()), "prompt_len", "at least 1", "got 0"),
    "cost keep": (lambda: flops(10, 0, V41FlashConfig()), "keep", "at least 1", "got 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refusal(name):
    call, *parts = CASES[name]
    refuses(call, *parts)


def test_what_is_allowed():
    assert ReplayConfig(ReplayMode.COMPACT, 134).keep == 134
    assert ReplayConfig(ReplayMode.OFF, 1).validate(FLASH) == [
        "keep=1 is ignored in mode off; set mode compact or mask to use it"
    ]
    assert ReplayConfig().validate(FLASH, ReplayRuntime()) == []
    ReplayConfig(ReplayMode.COMPACT, 136, geometry=ReplayGeometry(draft_tokens=7))
    ReplayConfig(ReplayMode.COMPACT, 129, geometry=ReplayGeometry(draft_tokens=0))
    endless = ReplayConfig(ReplayMode.COMPACT, 1 << 80)  # "never drop a row", whatever the prompt
    assert plan_decoder(endless, FLASH, [RequestSpan(300, 300, 300), RequestSpan(9, 9)]).is_identity
    exact = ReplayConfig(ReplayMode.COMPACT, 2546)
    assert exact.validate(FLASH, ReplayRuntime()) == [] and not exact.approximate(FLASH)
    RequestSpan(*np.array([3, 9, 9]))
    ring = ReplayRuntime(
        window_storage="ring", ring_capacity=133, graph_trim_threshold=141, context_parallel=64
    )
    assert COMPACT.validate(FLASH, ring)
    assert ALL_ROWS.validate(FLASH, ReplayRuntime(window_storage="ring", ring_capacity=267))
    agreed = ReplayRuntime(
        sequence_parallel=True, micro_batches=4, rows_agreed=True, pipeline_starts=(0, 10, 20)
    )
    assert COMPACT.validate(FLASH, agreed)
    assert plan_decoder(COMPACT, FLASH, [RequestSpan(40, 1000, 1000, 867)]).swa_floor.tolist() == [867]
    for cfg in (V41FlashConfig(), V41FlashConfig.mini(), V41FlashConfig.tiny(), V41FlashConfig.micro()):
        geom = ReplayGeometry.from_config(cfg)
        mode = ReplayConfig(ReplayMode.COMPACT, geom.recommended_keep, geometry=geom)
        mode.validate(geom, ReplayRuntime.from_config(cfg))


def test_the_approximation_is_said_once_with_its_numbers():
    notes = COMPACT.validate(FLASH, ReplayRuntime())
    assert len(notes) == 1 and COMPACT.approximate(FLASH)
    for part in ("approximate", "140", "2546", "segment", "1 of 20"):
        assert part in notes[0]
    assert "2 of 20" in ALL_ROWS.validate(FLASH)[0]
    long = COMPACT.validate(FLASH, ReplayRuntime(max_model_len=100))
    assert any("max_model_len 100" in note and "no row" in note for note in long)


def test_admission():
    windowed = ReplayConfig(ReplayMode.MASK, dead="windowed")
    for cfg, keep_all in ((ReplayConfig(), False), (windowed, False), (COMPACT, True)):
        cfg.admit(prompt_logprobs=True, prompt_hidden_states=True, routed_experts=True, keep_all=keep_all)
    COMPACT.admit(hit_end=64)


def test_prefill_refuses_before_the_state_changes():
    cfg = variant(2, 6)
    geom, config = ReplayGeometry.from_config(cfg), setting(cfg, "compact")
    model, text, state = models.model(cfg), models.text(cfg, 20), V41State.allocate(cfg, 1, 32, block=2)

    def call(tokens: Any = text, config: Any = config, **kwargs: Any):
        return lambda: prefill(model, tokens, state, config, **kwargs)

    for request in (-1, 1, True):
        refuses(call(request=request), "prefill: expected request")
        refuses(lambda r=request: next(plan_prompt(config, geom, 4, request=r)), "prefill: expected request")
    refuses(call(hit_end=4, chunk=0), "chunk", "at least 1", "got 0")
    refuses(
        call(hit_end=4, geometry=ReplayGeometry.from_config(cfg, draft_tokens=40)),
        "keep", "at least 47", "40 drafts",
    )  # fmt: skip
    refuses(call(hit_end=None), "hit_end", "at least 0", "None")
    refuses(call(config=None), "config", "ReplayConfig", "NoneType")
    with pytest.raises(ValueError, match=r"prefill: expected tokens: \[\*\] int32"):
        call(text.tolist())()
    assert state.lens.tolist() == [0] and state.written.tolist() == [0]


def test_a_plan_on_the_host_is_refused():
    cfg = variant(2, 6)
    state, text = V41State.allocate(cfg, 1, 32, block=2), models.text(cfg, 20)
    host: Any = plan_decoder(
        setting(cfg, "compact"), ReplayGeometry.from_config(cfg), [RequestSpan(20, 20, 20)]
    )
    with pytest.raises(ValueError, match="V41Flash: expected a replay plan on the device"):
        models.model(cfg)(text, models.positions(0, 20), state, replay=host)


@pytest.mark.parametrize("spans", [[(8, 8), (12, 12)], [(12, 12), (8, 9)]])
def test_a_plan_of_other_rows_is_refused_where_values_are_checked(spans, monkeypatch):
    cfg = variant(2, 6)
    state, text = V41State.allocate(cfg, 2, 32, block=2), models.text(cfg, 20)
    geom, requests = ReplayGeometry.from_config(cfg), [RequestSpan(*span) for span in spans]
    plan = to_device(plan_decoder(setting(cfg, "compact"), geom, requests), "cpu")
    place = torch.cat([models.positions(0, 12), models.positions(0, 8)])
    bounds = torch.tensor([0, 12, 20], dtype=torch.int32)
    monkeypatch.setenv("DSV41_CHECK", "1")
    with pytest.raises(ValueError, match=r"V41Flash: expected .*replay plan"):
        models.model(cfg)(text, place, state, cu_seqlens=bounds, replay=plan)
