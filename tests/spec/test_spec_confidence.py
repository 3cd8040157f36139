"""Calibration, survivals and the confidences that a budget may read."""

import json

import numpy as np
import pytest
import torch

from dsv41.spec import (
    Calibration,
    StaleConfidence,
    expected_calibration_error,
    first_survival,
    fit_calibration,
    survival,
)


def blocks(temperatures, n=40_000, seed=0):
    """Logits whose calibrated confidence is true at these temperatures, and how many drafts were accepted."""
    rng = np.random.default_rng(seed)
    true = rng.normal(1.0, 1.5, (n, len(temperatures)))
    kept = rng.random(true.shape) < 1 / (1 + np.exp(-true))
    return true * np.array(temperatures), np.cumprod(kept, axis=1).sum(1)


def test_fit_finds_the_temperatures_and_lowers_the_error_of_every_position():
    temperatures = (2.0, 0.5, 1.5)
    logits, accepted = blocks(temperatures)
    fitted = fit_calibration(logits, accepted)
    assert fitted.temperatures == pytest.approx(temperatures, rel=0.12)
    raw, cooked = survival(1 / (1 + np.exp(-logits)))[0], survival(fitted.apply(logits))[0]
    for k in range(3):
        before, after = (expected_calibration_error(a[:, k], accepted > k) for a in (raw, cooked))
        print(f"draft {k + 1}: calibration error {100 * before:.2f} -> {100 * after:.2f} %")
        assert after < 0.01 < before


def test_fit_leaves_calibrated_data_alone():
    logits, accepted = blocks((1.0, 1.0), n=20_000, seed=1)
    assert fit_calibration(logits, accepted).temperatures == pytest.approx((1, 1), rel=0.1)


def test_calibration_keeps_order_within_a_position_and_agrees_between_numpy_and_torch():
    calibration = Calibration((1.7, 0.6))
    logits = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    ours, theirs = calibration.apply(logits), calibration.apply(torch.from_numpy(logits))
    assert ours.dtype == np.float32 and theirs.dtype == torch.float32
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)
    for k in range(2):
        assert (np.argsort(ours[:, k]) == np.argsort(logits[:, k])).all()
    assert np.isnan(calibration.apply(np.array([[np.nan, 1.0]]))[0, 0])
    assert calibration.apply(np.array([[-1e4, 1e4]])).tolist() == [[0.0, 1.0]]


def test_calibration_json_and_refusals():
    calibration = Calibration((1 / 3, 2.0))
    assert Calibration.from_json(calibration.to_json()) == calibration
    with pytest.raises(
        ValueError, match=r"logits: \[num_requests, 2\], the calibration's block, got \[4, 5\]"
    ):
        calibration.apply(np.zeros((4, 5)))
    with pytest.raises(
        ValueError, match=r"Calibration: expected JSON of format 'dsv41.Calibration', version 1"
    ):
        Calibration.from_json(json.dumps({"format": "dsv41.StepCost", "version": 1}))
    for bad in ((), (1.0, 0.0), (float("nan"),), (-1.0,)):
        with pytest.raises(ValueError, match="temperatures: at least one, finite and positive"):
            Calibration(bad)


def test_fit_refuses_what_would_mislead_it():
    logits, accepted = blocks((1.0, 1.0), n=100)
    with pytest.raises(ValueError, match=r"blocks verified whole \(2 drafts\), got 1 trimmed blocks"):
        fit_calibration(logits, accepted, offered=np.array([2] * 99 + [1]))
    with pytest.raises(ValueError, match="accepted: \\[100\\] from 0 to 2"):
        fit_calibration(logits, accepted + 1)
    with pytest.raises(ValueError, match="finite logits, got 1 that are not"):
        fit_calibration(np.where(np.arange(200).reshape(100, 2) == 7, np.nan, logits), accepted)
    with pytest.raises(ValueError, match="not empty"):
        fit_calibration(np.zeros((0, 5)), np.zeros(0))


def test_calibration_error_by_hand():
    assert expected_calibration_error(np.array([0.1, 0.1, 0.9]), np.array([0, 1, 1])) == pytest.approx(0.3)
    assert expected_calibration_error(np.array([1.0]), np.array([1])) == 0
    assert expected_calibration_error(np.array([]), np.array([])) == 0


def test_survival_reads_bad_values_as_zero_and_counts_them():
    c = np.array([[0.5, 0.5, 2.0], [np.nan, 0.9, 0.9], [0.5, np.inf, 1.0], [-np.inf, -1.0, 0.5]])
    a, invalid = survival(c)
    assert a.tolist() == [[0.5, 0.25, 0.25], [0, 0, 0], [0.5, 0, 0], [0, 0, 0]]
    assert invalid == 3
    assert survival(np.zeros((0, 5)))[0].shape == (0, 5)
    with pytest.raises(
        ValueError, match=r"survival: expected confidence: \[num_requests, block\], got \[3\]"
    ):
        survival(np.ones(3))


def test_first_survival_uses_the_prior_after_the_first_draft():
    assert first_survival(np.array([0.5, 1.0]), np.array([0.5, 0.5])).tolist() == [
        [0.5, 0.25, 0.125],
        [1, 0.5, 0.25],
    ]


def test_stale_confidences_are_older_than_their_block_and_belong_to_the_tenant():
    stale = StaleConfidence(4, 2, prior=0.75)
    slots, first, second = np.array([2, 0]), np.array([1, 1]), np.array([1, 2])
    prior = [[0.75, 0.75]] * 2
    assert stale.read(0, slots, first).tolist() == prior
    stale.write(0, slots, first, np.array([[0.1, 0.2], [0.3, 0.4]]))
    assert stale.read(0, slots, first).tolist() == prior  # block 0 is being decided: not yet
    old = stale.read(1, slots, first)
    np.testing.assert_allclose(old, [[0.1, 0.2], [0.3, 0.4]], rtol=1e-6)
    stale.write(1, slots, first, np.full((2, 2), 0.9))
    assert np.array_equal(stale.read(1, slots, first), old)  # the current block is there and not shown
    assert stale.read(2, slots, first) == pytest.approx(np.full((2, 2), 0.9))
    recycled = stale.read(2, slots, second)  # slot 0 has a new tenant
    np.testing.assert_allclose(recycled, [[0.9, 0.9], [0.75, 0.75]], rtol=1e-6)
    assert stale.read(2, slots[:0], first[:0]).shape == (0, 2)
    with pytest.raises(
        ValueError, match=r"StaleConfidence: expected confidence: \[num_requests, 2\], got \[2, 5\]"
    ):
        stale.write(2, slots, first, np.zeros((2, 5)))
    with pytest.raises(ValueError, match="block_number >= 0"):
        stale.write(-1, slots, first, np.zeros((2, 2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": [-1, 0]}, "slots: .* from 0 to 3"),  # a padding row must not write the last slot
        ({"slots": [4, 0]}, "slots: .* from 0 to 3"),
        ({"slots": [1.0, 0.0]}, "slots"),
        ({"slots": [1]}, "generations: .1. integers"),
        ({"slots": [1, 1]}, "slots: all different"),
        ({"generations": [-1, 0]}, "generations"),
        ({"generations": [0]}, "generations"),
        ({"block_number": 0.5}, "block_number"),
        ({"confidence": [[0.5, 0.5]]}, "confidence"),
        ({"confidence": "high"}, "confidence"),
    ],
)
def test_stale_confidences_refuse_slots_that_are_not_theirs(change, message):
    stale = StaleConfidence(4, 2)
    call = {"block_number": 0, "slots": [1, 3], "generations": [0, 0], "confidence": np.full((2, 2), 0.5)}
    stale.write(**call)
    with pytest.raises(ValueError, match=f"StaleConfidence: expected {message}"):
        stale.write(**{**call, **change})
    if "confidence" not in change and "all different" not in message:
        call.pop("confidence")
        with pytest.raises(ValueError, match=f"StaleConfidence: expected {message}"):
            stale.read(**{**call, "block_number": 1, **change})
    assert stale.read(1, np.array([1, 3, 0]), np.zeros(3, int)).tolist() == [[0.5, 0.5], [0.5, 0.5], [1, 1]]


@pytest.mark.parametrize("prior", [float("nan"), -0.5, 1.5, np.ones(3), "x"])
def test_a_prior_is_a_probability_a_draft(prior):
    with pytest.raises(ValueError, match=r"StaleConfidence: expected prior: "):
        StaleConfidence(4, 2, prior=prior)
    for size in ((-1, 2), (2.5, 2), (2, 0)):
        with pytest.raises(ValueError, match=r"StaleConfidence: expected .*: an integer"):
            StaleConfidence(*size)  # pyright: ignore[reportArgumentType]


def test_calibrations_are_plain_numbers_and_refuse_the_rest():
    same = Calibration(np.array([1.0, 2.0]))  # pyright: ignore[reportArgumentType]
    assert same == Calibration((1.0, 2.0)) and hash(same) == hash(Calibration((1.0, 2.0)))
    assert same.apply([[0.0, 0.0]]).tolist() == [[0.5, 0.5]]  # pyright: ignore
    for wrong in (None, 1.0, "ab", ("a",), ((1.0,),)):
        with pytest.raises(ValueError, match="Calibration: expected temperatures"):
            Calibration(wrong)  # pyright: ignore[reportArgumentType]
        data = {**json.loads(same.to_json()), "temperatures": wrong}
        with pytest.raises(ValueError, match="Calibration: expected temperatures"):
            Calibration.from_json(json.dumps(data))
    data.pop("temperatures")
    with pytest.raises(ValueError, match="Calibration: expected JSON of format"):
        Calibration.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "change",
    [
        {"accepted": [0.5, 1]},
        {"offered": [2]},
        {"grid": []},
        {"grid": [0.0]},
        {"grid": [float("nan")]},
        {"grid": [[1.0]]},
        {"logits": "x"},
    ],
)
def test_fit_refuses_what_is_not_a_block(change):
    call = {"logits": np.zeros((2, 2)), "accepted": [1, 0], **change}
    with pytest.raises(ValueError, match=f"fit_calibration: expected {next(iter(change))}"):
        fit_calibration(**call)


@pytest.mark.parametrize(
    ("predicted", "observed", "bins"),
    [
        ([0.5, 0.5], [1], 20),
        ([], [1.0], 20),
        ([1.5], [1], 20),
        ([-0.5], [1], 20),
        ([float("nan")], [1], 20),
        ([[0.5]], [[1]], 20),
        ([0.5], [2], 20),
        ([0.5], [1], 0),
        ([0.5], [1], 2.5),
    ],
)
def test_calibration_error_refuses_what_is_not_a_probability(predicted, observed, bins):
    with pytest.raises(ValueError, match="expected_calibration_error: expected "):
        expected_calibration_error(predicted, observed, bins=bins)
