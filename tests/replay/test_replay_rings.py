"""Window rings of window + drafts slots over prefill chunks and speculative accept / reject sequences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_toy import examples

from dsv41.replay import ReplayConfig, ReplayGeometry, ReplayMode, RequestSpan, plan_decoder
from dsv41.replay.config import FirstLayerKV


class Ring:
    """One layer's ring of one request; a row is (position, version), a version a proposal of that
    position."""

    def __init__(self, capacity: int) -> None:
        self.position, self.version = np.full(capacity, -1), np.full(capacity, -1)

    def read(self, wanted: np.ndarray, version_of: np.ndarray) -> bool:
        slot = wanted % len(self.position)
        return bool(
            (self.position[slot] == wanted).all() and (self.version[slot] == version_of[wanted]).all()
        )

    def step(self, plan, versions: np.ndarray, write_first: bool) -> bool:
        """Read the windows and write the plan's rows, in either order. False: a needed row was not there.

        Read first: only rows older than the step come from the ring. Write first (a kernel that attends in
        the ring): all of them do, which only steps of at most drafts + 1 rows allow.
        """
        table = plan.window_positions()
        row, slot = plan.ring_writes(len(self.position))
        assert len(np.unique(slot)) == len(slot)
        wanted = np.unique(
            table[table >= 0] if write_first else table[(table >= 0) & (table < plan.cached_lens[0])]
        )
        good = write_first or self.read(wanted, versions)
        self.position[slot] = plan.positions[row]
        self.version[slot] = versions[plan.positions[row]]
        return good and (not write_first or self.read(wanted, versions))


def session(
    geom: ReplayGeometry,
    capacity: int,
    keep: int,
    length: int,
    cuts,
    rollback: int,
    accepts,
    write_first: bool,
) -> bool:
    """Prefill in chunks, roll back into the prompt, then verify steps of drafts + 1 rows; True: no row was
    lost.

    An entry of `accepts` is the number of accepted drafts; -1 verifies the same position again.
    """
    ring = Ring(capacity)
    cfg = ReplayConfig(ReplayMode.COMPACT, keep, geometry=geom)
    versions = np.zeros(length + (len(accepts) + 2) * geom.backtrack, np.int64)
    good, start = True, 0
    for end in sorted({*cuts, length}):
        plan = plan_decoder(cfg, geom, [RequestSpan(end - start, end, length)])
        good &= ring.step(plan, versions, False)
        start = end
    start = length - min(rollback, length - 1)
    for accepted in accepts:
        end = start + geom.backtrack
        versions[start:end] += 1  # new proposals, whatever the slots held
        plan = plan_decoder(cfg, geom, [RequestSpan(geom.backtrack, end, is_decode=True)])
        good &= ring.step(plan, versions, write_first)
        start += 1 + accepted  # the token of the first query always stays, then the accepted drafts
    return good


@st.composite
def sessions(draw, geom: ReplayGeometry | None = None):
    if geom is None:
        geom = ReplayGeometry(draw(st.integers(2, 8)), 2, 3, draw(st.integers(0, 5)))
    keep = geom.min_keep + draw(st.integers(0, 2 * geom.window))
    length = draw(st.integers(1, 3 * keep))
    cuts = draw(st.sets(st.integers(1, length), max_size=6))
    accepts = draw(st.lists(st.integers(-1, geom.draft_tokens), max_size=30))
    return geom, keep, length, cuts, draw(st.integers(0, geom.backtrack)), accepts, draw(st.booleans())


@examples(80)
@given(sessions())
def test_window_plus_drafts_slots_lose_nothing(problem):
    geom, keep, length, cuts, rollback, accepts, write_first = problem
    assert session(geom, geom.cached_rows, keep, length, cuts, rollback, accepts, write_first)


@examples(30)
@given(sessions(ReplayGeometry()))
def test_133_slots_of_the_real_model_lose_nothing(problem):
    geom, keep, length, cuts, rollback, accepts, write_first = problem
    assert geom.cached_rows == 133
    assert session(geom, 133, keep, length, cuts, rollback, accepts, write_first)


@pytest.mark.parametrize(
    ("rollback", "accepts", "write_first"),
    [(6, [0], False), (0, [-1, -1], False), (0, [0], True)],
    ids=["rolled back into the prompt", "verified twice", "written before it is read"],
)
def test_132_slots_lose_a_row(monkeypatch, rollback, accepts, write_first):
    """The bound is tight in each of the three situations it is made for."""
    geom = ReplayGeometry()
    rest = (140, 500, (), rollback, accepts, write_first)
    assert session(geom, 133, *rest)
    monkeypatch.setattr(ReplayGeometry, "cached_rows", property(lambda self: 132))
    assert not session(geom, 132, *rest)


@pytest.mark.parametrize("chunk", [7, 133, 134, 140, 400, 500])
def test_a_chunk_longer_than_the_ring_writes_its_last_rows(chunk):
    geom = ReplayGeometry()
    plan = plan_decoder(
        ReplayConfig(), geom, [RequestSpan(3, 3, 3), RequestSpan(chunk, chunk + 9, chunk + 9)]
    )
    row, slot = plan.ring_writes(133)
    mine = row >= 3
    assert plan.positions[row[mine]].tolist() == list(range(max(9, chunk + 9 - 133), chunk + 9))
    np.testing.assert_array_equal(slot, plan.positions[row] % 133)
    for which in ("first_layer", "all"):  # mode off: every row is kept, so the three lists are one
        other = plan.ring_writes(133, which)
        np.testing.assert_array_equal(other, (row, slot))


def test_the_first_layer_and_the_encoder_write_rows_the_decoder_drops():
    geom = ReplayGeometry(4, 2, 2, 1)
    batch = [RequestSpan(2, 2, 2), RequestSpan(20, 30, 90)]
    wanted: dict[FirstLayerKV, list[int]] = {"segment": [0, 1], "all_rows": [0, 1, 17, 18, 19, 20, 21]}
    for variant, want in wanted.items():
        cfg = ReplayConfig(ReplayMode.COMPACT, 8, first_layer_kv=variant, geometry=geom)
        plan = plan_decoder(cfg, geom, batch)
        assert plan.ring_writes(5)[0].tolist() == [0, 1]
        row, slot = plan.ring_writes(5, "first_layer")
        assert row.tolist() == want and slot.tolist() == [0, 1, 0, 1, 2, 3, 4][: len(want)]
        assert plan.ring_writes(5, "all")[0].tolist() == [0, 1, 17, 18, 19, 20, 21]
