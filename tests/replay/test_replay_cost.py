"""The cost model against the published table and against loops over positions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_toy import examples

from dsv41 import V41FlashConfig
from dsv41.replay import ReplayConfig, ReplayGeometry, ReplayMode, RequestSpan, flops, plan_decoder
from dsv41.replay.cost import _capped

KEEPS = (128, 134, 140, 2414, 2560)
# prompt length: TFLOP of a full prefill, per cent saved at each keep, per cent saved by mask/empty at 140
TABLE = {
    128: (4.0, (0, 0, 0, 0, 0), 0),
    256: (8.2, (24.5, 23.3, 22.2, 0, 0), 0.8),
    512: (16.7, (36.9, 36.3, 35.7, 0, 0), 2.0),
    1024: (34.0, (43.4, 43.1, 42.8, 0, 0), 3.5),
    2048: (69.1, (46.4, 46.2, 46.1, 0, 0), 4.4),
    4096: (139, (47.9, 47.8, 47.7, 20.1, 18.3), 4.9),
    8192: (281, (48.7, 48.7, 48.6, 34.8, 33.9), 5.3),
    32768: (1143, (49.6, 49.6, 49.5, 46.0, 45.8), 6.4),
    131072: (4719, (49.6, 49.6, 49.6, 48.7, 48.6), 7.7),
    1048576: (47639, (47.7, 47.7, 47.7, 47.5, 47.5), 14.4),
}


@pytest.mark.parametrize("length", TABLE)
def test_table(length):
    total, saved, masked = TABLE[length]
    config = V41FlashConfig()
    costs = [flops(length, keep, config) for keep in KEEPS]
    assert costs[0].total_off == pytest.approx(total * 1e12, rel=0.005, abs=0.051e12)
    assert [100 * cost.saved for cost in costs] == pytest.approx(saved, abs=0.5)
    assert 100 * costs[2].saved_mask_empty == pytest.approx(masked, abs=0.5)


def test_rules_of_thumb():
    """About 17.3 and 16.8 GFLOP a token; the saved share is 0.49 of the dropped share."""
    cost = flops(8192, 140, V41FlashConfig())
    assert cost.encoder / 8192 == pytest.approx(17.3e9, rel=0.01)
    assert cost.decoder_off / 8192 == pytest.approx(16.8e9, rel=0.01)
    assert cost.saved == pytest.approx(0.4926 * (1 - 140 / 8192), abs=0.005)


@examples(100)
@given(st.integers(0, 300), st.integers(1, 40) | st.just(np.inf), st.integers(1, 3))
def test_closed_sums(count, limit, ratio):
    assert _capped(count, limit, ratio) == sum(min(limit, n // ratio) for n in range(1, count + 1))


def brute(c: V41FlashConfig, rows, floor_of, attends) -> float:
    """Attention, index and projection work of decoder rows, one row and one layer at a time."""
    from dsv41.replay.cost import _decoder_row_macs

    total = 0.0
    for p in rows:
        total += _decoder_row_macs(c)
        for layer in range(c.first_decoder_layer, c.num_layers):
            if not attends(p):
                continue
            keys = min(c.window, p + 1 - floor_of(p)) + min(c.index_top_k, p + 1)
            total += 2 * c.num_heads * c.head_dim * keys
            if layer in c.index_sources:
                pool = c.candidate_blocks * c.candidate_block_size
                entries = p + 1 if layer == c.candidate_source else min(p + 1, pool)
                total += c.index_heads * c.index_dim * entries
    return 2 * total


@examples(40)
@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from(["compact", "empty", "windowed", "off"]))
def test_plan_and_prompt_costs_agree_with_loops(length, chunk, mode):
    c = V41FlashConfig.tiny()
    geom = ReplayGeometry.from_config(c, draft_tokens=2)
    name, dead = (mode, "empty") if mode in ("off", "compact") else ("mask", mode)
    cfg = ReplayConfig(ReplayMode(name), 25, dead=dead, geometry=geom)
    s = max(length - 25, 0) if mode != "off" else 0
    off = planned = 0.0
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        plan = plan_decoder(cfg, geom, [RequestSpan(end - start, end, length)])
        stats = plan.stats(c)
        assert stats["rows_kept"] + stats["rows_dropped"] == end - start
        off, planned = off + stats["decoder_flops_off"], planned + stats["decoder_flops"]
    cost = flops(length, 25, c)
    assert (
        off
        == pytest.approx(cost.decoder_off)
        == pytest.approx(brute(c, range(length), lambda p: 0, lambda p: True))
    )
    wanted = {
        "off": cost.decoder_off, "windowed": None, "compact": cost.decoder_compact, "empty":
        cost.decoder_mask_empty,
    }[mode]  # fmt: skip
    first = s if mode == "compact" else 0
    loops = brute(c, range(first, length), lambda p: s if p >= s else 0, lambda p: p >= s or mode != "empty")
    assert planned == pytest.approx(loops)
    assert wanted is None or planned == pytest.approx(wanted)
