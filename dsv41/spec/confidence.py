"""From confidence logits to survivals: calibration, running products, and which of them a budget may read."""

import json
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from .._op import check
from ._values import integer, numbers

_FORMAT, _VERSION = "dsv41.Calibration", 1
_SMALLEST_NORMAL = np.float32(2.0**-126)
T = TypeVar("T", np.ndarray, torch.Tensor)


def survival(confidence: np.ndarray) -> tuple[np.ndarray, int]:
    """Probability that a draft and everything before it are accepted.

        a[i, j] = c[i, 0] * ... * c[i, j]   in fp32, left to right

    Args:
        confidence: [num_requests, block] conditional acceptance probabilities. NaN and infinities read as 0;
            the rest is clamped to [0, 1].

    Returns:
        (survival, num_invalid): [num_requests, block] float32, non-increasing along a row, the same bits as
        the device-side split uses; and how many entries were NaN or infinite.
    """
    with np.errstate(over="ignore"):  # beyond fp32 is infinite, and counted
        c = numbers("survival", "confidence", confidence).astype(np.float32)
    check(c.ndim == 2, "survival", "confidence: [num_requests, block]", list(c.shape))
    valid = np.isfinite(c)
    a = np.clip(np.where(valid, c, np.float32(0)), np.float32(0), np.float32(1))
    for j in range(a.shape[1]):
        if j:
            a[:, j] *= a[:, j - 1]
        a[a[:, j] < _SMALLEST_NORMAL, j] = 0
    return a, int(valid.size - np.count_nonzero(valid))


def first_survival(first: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Survivals estimated from the one confidence of the current block that depends on no drafted token.

        a[i, 0] = first[i],   a[i, j] = first[i] * prior[0] * ... * prior[j - 1]

    Args:
        first: [num_requests] confidence of each request's first draft, current block.
        prior: [block - 1] typical conditional confidences of the drafts after it, from earlier blocks.

    Returns:
        [num_requests, block] float32.
    """
    first = numbers("first_survival", "first", first)
    prior = numbers("first_survival", "prior", prior)
    check(
        first.ndim == 1,
        "first_survival",
        "first: [num_requests], nothing past the first draft",
        list(first.shape),
    )
    check(prior.ndim == 1, "first_survival", "prior: [block - 1]", list(prior.shape))
    return survival(
        np.concatenate((first[:, None], np.broadcast_to(prior, (len(first), len(prior)))), axis=1)
    )[0]


class StaleConfidence:
    """Confidences of the last two blocks by slot, handing out only those older than the block being budgeted.

    A budget found by search may not read the confidences of the very drafts it decides on: that biases the
    text. Slots carry the generation of their tenant, so that a recycled slot never shows its predecessor's
    values.

    Args:
        num_slots: requests that can be alive together.
        block: drafts a block.
        prior: [block] or scalar conditional confidence of requests that have none yet, 0 to 1; 1 admits a
            newcomer's drafts first.

    Errors: ValueError for slots that are not there, named twice in one ``write`` or without a tenant, as a
    padding row's -1 is.
    """

    def __init__(self, num_slots: int, block: int, *, prior: float | np.ndarray = 1.0):
        name = "StaleConfidence"
        num_slots, block = integer(name, "num_slots", num_slots, 0), integer(name, "block", block, 1)
        known = numbers(name, "prior", prior).astype(np.float32)
        fits = known.shape in ((), (1,), (block,)) and bool(((known >= 0) & (known <= 1)).all())
        check(fits, name, f"prior: [{block}] or one, 0 to 1", prior)
        self.prior = np.broadcast_to(known, (block,)).copy()
        self._values = np.zeros((2, num_slots, block), np.float32)
        self._written = np.full((2, num_slots), -1, np.int64)
        self._tenant = np.full((2, num_slots), -1, np.int64)

    def _tenants(self, slots: np.ndarray, generations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Both as [num_requests] int64 after a check: a negative slot would silently be another's."""
        name, most = "StaleConfidence", self._values.shape[1] - 1
        slot, tenant = numbers(name, "slots", slots), numbers(name, "generations", generations)
        whole = slot.ndim == 1 and (slot.dtype.kind in "iu" or slot.size == 0)
        fits = whole and bool(((slot >= 0) & (slot <= most)).all())
        check(fits, name, f"slots: [num_requests] integers from 0 to {most}", slot.tolist())
        known = tenant.shape == slot.shape and (tenant.dtype.kind in "iu" or tenant.size == 0)
        known = known and bool((tenant >= 0).all())
        check(known, name, f"generations: [{slot.size}] integers from 0", tenant.tolist())
        return slot.astype(np.int64), tenant.astype(np.int64)

    def write(
        self, block_number: int, slots: np.ndarray, generations: np.ndarray, confidence: np.ndarray
    ) -> None:
        """Keep the confidences of the block drafted in step ``block_number``.

        Args:
            block_number: >= 0, the engine's step counter.
            slots: [num_requests] int, all different.
            generations: [num_requests] int >= 0, which tenant of the slot this is.
            confidence: [num_requests, block].
        """
        name, block = "StaleConfidence", self._values.shape[2]
        with np.errstate(over="ignore"):
            c = numbers(name, "confidence", confidence).astype(np.float32)
        check(
            c.ndim == 2 and c.shape[1] == block, name, f"confidence: [num_requests, {block}]", list(c.shape)
        )
        block_number = integer(name, "block_number", block_number)
        check(block_number >= 0, name, "block_number >= 0", block_number)
        slots, generations = self._tenants(slots, generations)
        check(len(c) == len(slots), name, f"confidence: [{len(slots)}, {block}]", list(c.shape))
        check(len(np.unique(slots)) == len(slots), name, "slots: all different", slots.tolist())
        half = block_number % 2
        self._values[half, slots] = c
        self._written[half, slots] = block_number
        self._tenant[half, slots] = generations

    def read(self, block_number: int, slots: np.ndarray, generations: np.ndarray) -> np.ndarray:
        """Newest confidences that the budget of block ``block_number`` may read.

        Args:
            block_number: the block about to be verified; only earlier ones are read.
            slots: [num_requests] int.
            generations: [num_requests] int.

        Returns:
            [num_requests, block] float32, the prior where nothing older is known.
        """
        block_number = integer("StaleConfidence", "block_number", block_number)
        slots, generations = self._tenants(slots, generations)
        age = np.where(self._tenant[:, slots] == generations, self._written[:, slots], -1)
        age = np.where(age < block_number, age, -1)
        newest = age.argmax(0)
        known = age.max(0, initial=-1) >= 0
        return np.where(known[:, None], self._values[newest, slots], self.prior)


@dataclass(frozen=True)
class Calibration:
    """Sequential temperature scaling: one temperature a draft position.

    c[i, k] = sigmoid(logits[i, k] / temperatures[k])
    """

    temperatures: tuple[float, ...]

    def __post_init__(self) -> None:
        given = numbers("Calibration", "temperatures", self.temperatures)
        good = given.ndim == 1 and given.size > 0 and bool((np.isfinite(given) & (given > 0)).all())
        check(good, "Calibration", "temperatures: at least one, finite and positive", self.temperatures)
        object.__setattr__(self, "temperatures", tuple(float(t) for t in given))  # equal and hashable

    def apply(self, logits: T) -> T:
        """Calibrated conditional confidences.

        Args:
            logits: [num_requests, block] confidence logits, NumPy or torch (any device).

        Returns:
            [num_requests, block] f32 of the same kind. A NaN stays NaN, which survivals read as 0 and count.

        Errors: ValueError when block is not the calibration's.
        """
        block = len(self.temperatures)
        if not isinstance(logits, torch.Tensor):
            logits = numbers("Calibration", "logits", logits)  # pyright: ignore[reportAssignmentType]
        same = logits.ndim == 2 and logits.shape[1] == block
        check(
            same,
            "Calibration",
            f"logits: [num_requests, {block}], the calibration's block",
            list(logits.shape),
        )
        if isinstance(logits, torch.Tensor):
            return torch.sigmoid(logits.float() / logits.new_tensor(self.temperatures, dtype=torch.float32))
        return _sigmoid(logits.astype(np.float64) / self.temperatures).astype(np.float32)

    def to_json(self) -> str:
        """The calibration as JSON text, with its format and version."""
        return json.dumps({"format": _FORMAT, "version": _VERSION, "temperatures": list(self.temperatures)})

    @classmethod
    def from_json(cls, text: str) -> "Calibration":
        """Read what `to_json` wrote; refuses other formats and versions."""
        data = read_versioned("Calibration", text, _FORMAT, _VERSION, ("temperatures",))
        return cls(data["temperatures"])


def read_versioned(name: str, text: str, kind: str, version: int, keys: tuple[str, ...]) -> dict[str, Any]:
    """A JSON object whose format and version are the expected ones and that has all keys, or a refusal."""
    expected = f"JSON of format {kind!r}, version {version}"
    try:
        data = json.loads(text)
    except (TypeError, ValueError):
        data = None
        check(False, name, expected, f"what is no JSON: {str(text)[:40]!r}")
    found = (data.get("format"), data.get("version")) if isinstance(data, dict) else data
    check(isinstance(data, dict) and found == (kind, version), name, expected, found)
    assert isinstance(data, dict)
    absent = [key for key in keys if key not in data]
    check(not absent, name, f"{expected}, with {', '.join(keys)}", f"one without {', '.join(absent)}")
    return data


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x))


def expected_calibration_error(predicted: np.ndarray, observed: np.ndarray, *, bins: int = 20) -> float:
    """Count-weighted |mean prediction - mean outcome| over equal-width bins of the prediction.

    Args:
        predicted: [n] probabilities.
        observed: [n] outcomes, 0 or 1.
        bins: number of bins over [0, 1].

    Returns:
        The error in [0, 1]; 0 for no data.

    Errors: ValueError for lists of different lengths, a value outside [0, 1] or no bins.
    """
    name = "expected_calibration_error"
    bins = integer(name, "bins", bins, 1)
    predicted = numbers(name, "predicted", predicted).astype(np.float64)
    observed = numbers(name, "observed", observed).astype(np.float64)
    same = predicted.ndim == 1 and observed.shape == predicted.shape
    check(same, name, "predicted and observed: [n] both", (list(predicted.shape), list(observed.shape)))
    for label, values in (("predicted", predicted), ("observed", observed)):
        inside = bool(((values >= 0) & (values <= 1)).all())
        check(inside, name, f"{label}: 0 to 1", "others, or a NaN")
    which = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    gap = np.bincount(which, weights=predicted - observed, minlength=bins)
    return float(np.abs(gap).sum() / max(len(predicted), 1))


def fit_calibration(
    logits: np.ndarray,
    accepted: np.ndarray,
    *,
    offered: np.ndarray | None = None,
    grid: np.ndarray | None = None,
) -> Calibration:
    """Fit one temperature a position, first to last, each against the survival up to it.

        T_k = argmin over the grid of ECE(prod_{i<k} sigmoid(z_i / T_i) * sigmoid(z_k / T), 1[accepted >= k])

    Args:
        logits: [num_blocks, block] confidence logits.
        accepted: [num_blocks] drafts accepted of each block.
        offered: [num_blocks] drafts that were verified, or None for all. Trimmed blocks hide outcomes and are
            refused.
        grid: [n] temperatures to try; None is 121 from 1/8 to 8, evenly spaced in the logarithm.

    Returns:
        Calibration for this block length.

    Errors: ValueError for no data, a non-finite logit, an accepted count that is not whole or outside [0,
    block], trimmed blocks, or a grid that is empty or not positive.

    Source: DSpark, arXiv 2607.05147, sequential temperature scaling; 20 equal-width bins.
    """
    name = "fit_calibration"
    z, accepted = numbers(name, "logits", logits).astype(np.float64), numbers(name, "accepted", accepted)
    check(z.ndim == 2 and z.size > 0, name, "logits: [num_blocks, block], not empty", list(z.shape))
    blocks, block = z.shape
    check(
        bool(np.isfinite(z).all()), name, "finite logits", f"{np.count_nonzero(~np.isfinite(z))} that are not"
    )
    fits = accepted.shape == (blocks,) and bool(np.isin(accepted, np.arange(block + 1)).all())
    check(fits, name, f"accepted: [{blocks}] from 0 to {block}", f"shape {list(accepted.shape)}")
    if offered is not None:
        sent = numbers(name, "offered", offered)
        check(sent.shape == (blocks,), name, f"offered: [{blocks}]", list(sent.shape))
        trimmed = int(np.count_nonzero(sent != block))
        check(trimmed == 0, name, f"blocks verified whole ({block} drafts)", f"{trimmed} trimmed blocks")
    tried = np.geomspace(1 / 8, 8, 121) if grid is None else numbers(name, "grid", grid).astype(np.float64)
    usable = tried.ndim == 1 and tried.size > 0 and bool((np.isfinite(tried) & (tried > 0)).all())
    check(usable, name, "grid: at least one temperature, finite and positive", grid)
    prefix, chosen = np.ones(blocks), []
    for k in range(block):
        outcome = accepted > k
        # Of equally good temperatures the one nearest to 1 changes least.
        errors = [
            (expected_calibration_error(prefix * _sigmoid(z[:, k] / t), outcome), abs(np.log(t)), t)
            for t in tried
        ]
        chosen.append(float(min(errors)[2]))
        prefix = prefix * _sigmoid(z[:, k] / chosen[-1])
    return Calibration(tuple(chosen))
