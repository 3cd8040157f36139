"""The planner's numbers: the golden batch, a scalar planner beside it, and the views of a plan."""

import ast
import pathlib
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replay_toy import examples

import dsv41.replay
from dsv41.replay import ReplayConfig, ReplayGeometry, ReplayMode, RequestSpan, SpanBatch, plan_decoder
from dsv41.replay.config import FirstLayerKV
from dsv41.replay.device import to_device

FLASH = ReplayGeometry()
COMPACT = ReplayConfig(ReplayMode.COMPACT)
GOLDEN = [
    RequestSpan(6, 1006, is_decode=True),
    RequestSpan(3000, 3000, 3000),
    RequestSpan(90, 90, 90),
    RequestSpan(200, 200, 200),
    RequestSpan(2048, 4096, 9000),
    RequestSpan(1000, 9000, 9000),
    RequestSpan(30, 2078, 2078),
]


def runs(rows) -> list[tuple[int, int]]:
    """Inclusive runs of consecutive numbers."""
    breaks = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1), len(rows)]
    return [(int(rows[a]), int(rows[b - 1])) for a, b in pairwise(breaks)]


@pytest.mark.parametrize(
    ("policy", "n_kept", "cu", "floor", "cached", "rows", "logits"),
    [
        (
            "prompt_window",
            [6, 140, 90, 140, 0, 140, 30],
            [0, 6, 146, 236, 376, 376, 516, 546],
            [0, 2860, 0, 60, 8860, 8860, 1938],
            [1000, 2860, 0, 60, 4096, 8860, 2048],
            [(0, 5), (2866, 3095), (3156, 3295), (6204, 6373)],
            [5, 145, 235, 375, -1, 515, 545],
        ),
        (
            "per_chunk_tail",
            [6, 140, 90, 140, 140, 140, 30],
            [0, 6, 146, 236, 376, 516, 656, 686],
            [0, 2860, 0, 60, 3956, 8860, 0],
            [1000, 2860, 0, 60, 3956, 8860, 2048],
            [(0, 5), (2866, 3095), (3156, 3295), (5204, 5343), (6204, 6373)],
            [5, 145, 235, 375, -1, 655, 685],
        ),
    ],
)
def test_golden(policy, n_kept, cu, floor, cached, rows, logits):
    plan = plan_decoder(ReplayConfig(ReplayMode.COMPACT, 140, policy), FLASH, GOLDEN)
    assert plan.n_kept.tolist() == n_kept
    assert plan.cu_seqlens_q.tolist() == cu
    assert plan.swa_floor.tolist() == plan.first_layer_floor.tolist() == floor
    assert plan.seq_lens.tolist() == [1006, 3000, 90, 200, 4096, 9000, 2078]
    assert plan.cached_lens.tolist() == cached
    assert runs(plan.rows) == rows
    assert plan.logits_row.tolist() == logits
    assert plan.max_q_len == 140 and plan.padded_to == plan.num_rows == cu[-1] and not plan.is_identity
    start = np.array([1000, 0, 0, 0, 2048, 8000, 2048])
    packed = np.concatenate([np.arange(a, s.end) for a, s in zip(start, GOLDEN, strict=True)])
    np.testing.assert_array_equal(plan.positions, packed[plan.rows])
    np.testing.assert_array_equal(plan.first_layer_rows, plan.rows)
    np.testing.assert_array_equal(plan.query_start_loc - plan.dropped_before, plan.cu_seqlens_q)
    assert plan.rows.dtype == np.int64 and plan.first_layer_rows.dtype == np.int64
    for name in ("cu_seqlens_q", "positions", "query_start_loc", "seq_lens", "cached_lens", "swa_floor",
                 "first_layer_floor", "encoder_floor", "logits_row"):  # fmt: skip
        assert getattr(plan, name).dtype == np.int32, name


def test_defaults():
    assert ReplayConfig().mode is dsv41.replay.ReplayMode.OFF and ReplayConfig().keep == 140
    assert (FLASH.min_keep, FLASH.recommended_keep, FLASH.cached_rows, FLASH.backtrack) == (134, 140, 133, 6)
    wanted: dict[FirstLayerKV, list[int]] = {"segment": [2541, 2546, 2547], "all_rows": [2414, 2419, 2420]}
    for variant, keeps in wanted.items():
        assert [dsv41.replay.exact_keep(FLASH, variant, rows) for rows in (128, 133, 134)] == keeps
    assert ReplayGeometry.from_config(dsv41.V41FlashConfig()) == FLASH
    # 2560 is the round figure: it covers 147 cached rows in the segment variant and not one more.
    assert FLASH.exact_keep("segment", 147) == 2560
    assert [FLASH.exact_layers(keep - 1) for keep in (128, 140, 254, 255)] == [1, 1, 1, 2]


@pytest.mark.parametrize(("policy", "total"), [("prompt_window", 140), ("per_chunk_tail", 256 * 140)])
def test_a_million_tokens_in_chunks(policy, total):
    length, chunk = 1 << 20, 4096
    cfg = ReplayConfig(ReplayMode.COMPACT, 140, policy)
    plans = [
        plan_decoder(cfg, FLASH, [RequestSpan(chunk, e, length)]) for e in range(chunk, length + 1, chunk)
    ]
    assert sum(p.num_rows for p in plans) == total
    assert [int(p.logits_row[0]) for p in plans] == [-1] * 255 + [139]


# -- a planner for one request, in Python, straight from the definition --


def plain(cfg: ReplayConfig, geom: ReplayGeometry, span: RequestSpan) -> dict:
    a, e, f = span.end - span.q_len, span.end, span.swa_start
    mode = cfg.mode.value
    how = None
    if span.is_decode:
        first, s = a, 0
    elif mode == "off":
        first, s = a, f
    else:
        if cfg.policy == "prompt_window" and span.target_end is not None:
            s = max(f, span.target_end - cfg.keep, 0)
            first = min(max(a, s), e)
            whole = a >= s
        else:
            first = max(a, e - cfg.keep)
            s = first if first > a else f
            whole = first == a
        if whole and span.decoder_live_start is not None:
            s = span.decoder_live_start
        if span.keep_all or mode == "mask":
            first, how = a, "windowed" if span.keep_all else cfg.dead
    rows = []
    for p in range(first, e):
        low = max(p - geom.window + 1, 0)
        floors = [s, f if cfg.first_layer_kv == "all_rows" and mode != "off" and not span.is_decode else s]
        if p < s:
            floors = [p + 1, p + 1] if how == "empty" else [f, f]
        keys = [tuple(range(max(low, floor), p + 1)) for floor in floors]
        rows.append((p, keys[0], keys[1], not (p < s and how == "empty")))
    done = span.target_end is None or e >= span.target_end
    return {"rows": rows, "first": first, "floor": s, "logits": done and len(rows) > 0}


@st.composite
def spans(draw, geom: ReplayGeometry, keep: int):
    kind = draw(st.sampled_from(["decode", "known", "unknown"]))
    q_len = draw(st.integers(0, 3 * keep))
    start = draw(st.integers(0, 4 * keep))
    f = draw(st.sampled_from([0, 0, start // 2 // 2 * 2]))
    if kind == "decode":
        return RequestSpan(q_len, start + q_len, None, f, draw(st.none() | st.integers(f, start)), True)
    live = draw(st.none() | st.integers(f, start)) if kind == "unknown" or draw(st.booleans()) else None
    # Enough rows must remain at the end of the prompt, whatever the floor is.
    slack = geom.cached_rows + max(f, live or 0)
    end = start + q_len
    target = max(end, slack) + draw(st.sampled_from([0, 0, 1, keep, 5 * keep])) if kind == "known" else None
    return RequestSpan(q_len, end, target, f, live, keep_all=draw(st.booleans()))


@st.composite
def batches(draw):
    geom = ReplayGeometry(draw(st.integers(2, 9)), 2, 3, draw(st.integers(0, 4)))
    keep = geom.min_keep + draw(st.integers(0, 10))
    cfg = ReplayConfig(
        draw(st.sampled_from(["off", "compact", "mask"])), keep,
        draw(st.sampled_from(["prompt_window", "per_chunk_tail"])),
        draw(st.sampled_from(["segment", "all_rows"])), draw(st.sampled_from(["empty", "windowed"])), geom,
    )  # fmt: skip
    return cfg, geom, draw(st.lists(spans(geom, keep), max_size=5))


@examples(250)
@given(batches(), st.integers(0, 3))
def test_every_field_against_the_plain_planner(problem, pad):
    cfg, geom, batch = problem
    plan = plan_decoder(cfg, geom, batch).pad(sum(len(plain(cfg, geom, s)["rows"]) for s in batch) + pad)
    want = [plain(cfg, geom, span) for span in batch]
    m = sum(len(w["rows"]) for w in want)
    offsets = np.cumsum([0] + [s.q_len for s in batch])
    packed = [(r, p) for r, s in enumerate(batch) for p in range(s.end - s.q_len, s.end)]
    assert [packed[i] for i in plan.rows] == [(r, row[0]) for r, w in enumerate(want) for row in w["rows"]]
    assert plan.cu_seqlens_q.tolist() == np.cumsum([0] + [len(w["rows"]) for w in want]).tolist()
    assert plan.query_start_loc.tolist() == offsets.tolist()
    assert plan.seq_lens.tolist() == [s.end for s in batch]
    assert plan.cached_lens.tolist() == [w["first"] for w in want]
    assert (plan.seq_lens - plan.n_kept == plan.cached_lens).all()
    assert plan.swa_floor.tolist() == [w["floor"] for w in want]
    ends = plan.cu_seqlens_q[1:].tolist()
    assert plan.logits_row.tolist() == [e - 1 if w["logits"] else -1 for w, e in zip(want, ends, strict=True)]
    flat = [row for w in want for row in w["rows"]]
    for first_layer in (False, True):
        table = plan.window_positions(first_layer)
        assert table.shape == (m + pad, geom.window)
        assert [tuple(x for x in row if x >= 0) for row in table.tolist()] == [
            row[2 if first_layer else 1] for row in flat
        ] + [()] * pad
        low, length = plan.window_spans(first_layer)
        assert (np.sort(table, axis=1)[:, ::-1][:, 0][length > 0] == (low + length - 1)[length > 0]).all()
    assert plan.attends.tolist() == [row[3] for row in flat] + [False] * pad
    assert plan.is_padding.tolist() == [False] * m + [True] * pad
    assert plan.row_to_request().tolist() == [r for r, w in enumerate(want) for _ in w["rows"]] + [-1] * pad
    assert not any(dead for span, dead in zip(batch, plan.dead, strict=True) if span.is_decode)
    # What an engine may rely on.
    assert (np.diff(plan.rows) > 0).all()
    live = (plan.n_kept > 0) & (plan.dead == 0)
    assert (plan.swa_floor <= plan.cached_lens)[live].all()
    for span, w, floor in zip(batch, want, plan.swa_floor.tolist(), strict=True):
        assert not span.is_decode or len(w["rows"]) == span.q_len
        assert span.target_end is None or floor == 0 or floor <= span.target_end - geom.cached_rows
    lows = [0 if s.is_decode else s.swa_start for s, w in zip(batch, want, strict=True) for _ in w["rows"]]
    true_windows = all(
        row[1] == row[2] == tuple(range(max(row[0] - geom.window + 1, low), row[0] + 1))
        for row, low in zip(flat, lows, strict=True)
    )
    if plan.is_identity:
        assert m == len(packed) and true_windows and all(row[3] for row in flat)
    elif m == len(packed) and all(len(w["rows"]) for w in want) and not plan.dead.any():
        assert not true_windows
    # The shortest contiguous workspace that holds every window of a request.
    for r, w in enumerate(want):
        reach = [k for row in w["rows"] for k in row[1]]
        if reach and plan.dead[r] != 1:
            assert plan.window_gather_lens[r] == batch[r].end - min(reach)


@examples(60)
@given(batches())
def test_columns_and_spans_plan_alike(problem):
    cfg, geom, batch = problem
    columns = {
        name: np.array([-1 if v is None else v for v in (getattr(s, name) for s in batch)], np.int64)
        for name in ("q_len", "end", "target_end", "swa_start", "decoder_live_start", "is_decode", "keep_all")
    }
    other = SpanBatch.from_columns(columns.pop("q_len"), columns.pop("end"), **columns)
    a, b = plan_decoder(cfg, geom, batch), plan_decoder(cfg, geom, other)
    assert len(other) == len(batch)
    for name in a.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


@examples(60)
@given(batches())
def test_a_batch_is_its_requests_one_after_another(problem):
    cfg, geom, batch = problem
    plan = plan_decoder(cfg, geom, batch)
    for r, span in enumerate(batch):
        one = plan_decoder(cfg, geom, [span])
        mine = slice(plan.cu_seqlens_q[r], plan.cu_seqlens_q[r + 1])
        np.testing.assert_array_equal(plan.rows[mine] - plan.query_start_loc[r], one.rows)
        np.testing.assert_array_equal(plan.positions[mine], one.positions)
        for name in ("seq_lens", "cached_lens", "swa_floor", "first_layer_floor", "encoder_floor", "dead"):
            assert getattr(plan, name)[r] == getattr(one, name)[0]
        for first_layer in (False, True):
            np.testing.assert_array_equal(plan.floor_rows(first_layer)[mine], one.floor_rows(first_layer))
        shift = plan.cu_seqlens_q[r]
        assert plan.logits_row[r] == (one.logits_row[0] + shift if one.logits_row[0] >= 0 else -1)


@pytest.mark.parametrize("offset", [2, 322])
@pytest.mark.parametrize("variant", ["segment", "all_rows"])
def test_window_lists_at_offsets_off_the_window_grid(offset, variant):
    """Row numbers mistaken for positions agree at multiples of 128; these lengths and starts are none."""
    length = 2 * 128 + offset + 140
    cfg = replace(COMPACT, first_layer_kv=variant)
    batch = [RequestSpan(77, 77, 77), RequestSpan(length - 50, length, length)]
    plan = plan_decoder(cfg, FLASH, batch)
    s = length - 140
    for first_layer in (True, False):
        low = 0 if variant == "all_rows" and first_layer else s
        table = plan.window_positions(first_layer)[77:]
        for row, position in zip(table.tolist(), range(s, length), strict=True):
            want = list(range(max(low, position - 127), position + 1))
            assert row == want + [-1] * (128 - len(want))


# -- views of a plan --


def test_gather_scatter_and_slots_take_arrays_and_tensors():
    plan = plan_decoder(COMPACT, FLASH, GOLDEN[:4]).pad(400)
    n = plan.num_input_rows
    x = np.random.default_rng(0).normal(size=(n, 2, 3))
    (kept,) = plan.gather(x)
    assert kept.shape == (400, 2, 3) and not kept[376:].any()
    np.testing.assert_array_equal(kept[:376], x[plan.rows])
    t = torch.from_numpy(x)
    device = to_device(plan, "cpu")
    for result in (plan.gather(t)[0], device.gather(t)[0]):
        assert isinstance(result, torch.Tensor) and torch.equal(result, torch.from_numpy(kept))
    for values, scatter in ((kept, plan.scatter), (torch.from_numpy(kept), device.scatter)):
        back = np.asarray(scatter(values))
        dropped = np.setdiff1d(np.arange(n), plan.rows)
        assert np.isnan(back[dropped]).all() and not np.isnan(back[plan.rows]).any()
        np.testing.assert_array_equal(back[plan.rows], x[plan.rows])
        assert not np.asarray(scatter(values, fill="zero"))[dropped].any()
    out = np.ones((n, 2, 3))
    assert plan.scatter(kept, out, fill=None) is out and (out[dropped] == 1).all()
    slots = np.arange(3 * n).reshape(3, n)
    for mapping in (slots, torch.from_numpy(slots)):
        picked = np.asarray(plan.select_slots(mapping, [True, False, True]))
        assert picked.shape == (3, 400) and (picked[1] == -1).all() and (picked[:, 376:] == -1).all()
        np.testing.assert_array_equal(picked[[0, 2], :376], slots[[0, 2]][:, plan.rows])


def test_device_plan_is_the_plan():
    plan = plan_decoder(ReplayConfig(ReplayMode.MASK), FLASH, GOLDEN).pad(6500)
    device = to_device(plan, "cpu")
    for name in (
        "rows",
        "first_layer_rows",
        "cu_seqlens_q",
        "seq_lens",
        "cached_lens",
        "logits_row",
        "attends",
    ):
        np.testing.assert_array_equal(np.asarray(getattr(device, name)), getattr(plan, name))
    np.testing.assert_array_equal(np.asarray(device.floor), plan.floor_rows())
    np.testing.assert_array_equal(np.asarray(device.first_layer_floor), plan.floor_rows(True))
    np.testing.assert_array_equal(np.asarray(device.row_to_request), plan.row_to_request())
    assert device.positions.dtype == torch.int64 and not device.positions[plan.num_rows :].any()
    np.testing.assert_array_equal(np.asarray(device.positions)[: plan.num_rows], plan.positions)


def test_identity_gathers_nothing_and_empty_batches_plan():
    plan = plan_decoder(ReplayConfig(), FLASH, GOLDEN)
    x = np.zeros(plan.num_input_rows)
    assert plan.is_identity and plan.gather(x)[0] is x
    empty = plan_decoder(COMPACT, FLASH, [])
    assert empty.num_rows == empty.num_input_rows == empty.max_q_len == 0 and empty.cu_seqlens_q.tolist() == [
        0
    ]
    assert empty.pad(128).is_padding.all() and empty.pad(128).gather(np.zeros((0, 2)))[0].shape == (128, 2)
    none_kept = plan_decoder(COMPACT, FLASH, [GOLDEN[4]])
    assert (
        none_kept.num_rows == 0
        and none_kept.logits_row.tolist() == [-1]
        and none_kept.window_gather_lens[0] == 0
    )


def test_identity_ends_where_a_floor_first_cuts_a_window():
    """Segment start 860: the window of row 987 just reaches it, the window of row 986 is cut."""
    for q_len, identity in ((13, True), (14, False)):
        assert plan_decoder(COMPACT, FLASH, [RequestSpan(q_len, 1000, 1000)]).is_identity == identity


def test_the_decoder_is_skipped_only_when_it_has_no_row_at_all():
    calls = []
    hooks = dsv41.replay.ReplayHooks(
        encode_all=lambda plan: (np.zeros((plan.num_input_rows, 1)),),
        write_global_kv=lambda boundary, plan: calls.append("write"),
        decode_rows=lambda kept, plan: calls.append("decode") or kept[0],
    )
    plan = plan_decoder(COMPACT, FLASH, [GOLDEN[4]])
    assert dsv41.replay.run_prefill(plan, hooks) is None and calls == ["write"]
    # A rank that keeps nothing still takes part when the others pad to a common count.
    out = dsv41.replay.run_prefill(plan.pad(128), hooks)
    assert out is not None and out.shape == (0, 1) and calls == ["write", "write", "decode"]


def test_the_planner_imports_no_torch_and_nothing_imports_the_layers():
    folder = pathlib.Path(dsv41.replay.__file__).parent
    for path in folder.glob("*.py"):
        imports = set()
        body = [n for n in ast.walk(ast.parse(path.read_text()))]
        for node in body:
            if isinstance(node, ast.Import):
                imports |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imports |= {"." * node.level + (node.module or "")}
        assert ("torch" in imports) == (path.name in ("device.py", "chunked.py")), path
        assert not any("layers" in name for name in imports), path
