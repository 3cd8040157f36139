"""Measured seconds of a step by its tokens, as stairs: the price list that a budget is chosen from."""

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .._op import check
from ._values import integer, numbers
from .confidence import read_versioned

_FORMAT, _VERSION = "dsv41.StepCost", 1
_LARGEST = 2**24  # an eager tail holds every token count, so a slip of the pen must not fill the memory
Curve = tuple[Sequence[int] | np.ndarray, Sequence[float] | np.ndarray]


def _curve(
    label: str, sizes: ArrayLike, seconds: ArrayLike, *, above: int = 0, zero: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """A checked table: int64 sizes, rising, and float64 seconds forced to be monotone.

    ``label`` is the curve's name ("draft", "tail"), empty for the table itself.
    """
    label, rates = f"{label} sizes".lstrip(), f"{label} seconds".lstrip()
    size = np.atleast_1d(numbers("StepCost", label, sizes))
    second = np.atleast_1d(numbers("StepCost", rates, seconds).astype(np.float64))
    check(size.ndim == 1, "StepCost", f"{label}: [n]", list(size.shape))
    check(size.size > 0, "StepCost", f"{label}: at least one size", "an empty table")
    check(
        size.shape == second.shape, "StepCost", f"{rates}: as many as sizes, {size.size}", list(second.shape)
    )
    whole = bool(np.all(np.isfinite(size)) and np.all(size == np.floor(size)))
    check(whole and size[0] > above, "StepCost", f"{label}: whole sizes above {above}", size.tolist())
    rises = bool(np.all(size[1:] > size[:-1]))
    check(rises, "StepCost", f"{label}: sizes in rising order", size.tolist())
    check(size[-1] <= _LARGEST, "StepCost", f"{label}: whole sizes of at most {_LARGEST}", size.tolist())
    good = bool(np.all(np.isfinite(second)) and np.all(second >= 0 if zero else second > 0))
    sign = "not negative" if zero else "positive"
    check(good, "StepCost", f"{rates}: finite and {sign}", second.tolist())
    curve = size.astype(np.int64), np.maximum.accumulate(second)
    for table in curve:
        table.flags.writeable = False
    return curve


def _pair(label: str, curve: Any) -> tuple[Any, Any]:
    """The two lists of a curve."""
    pair = isinstance(curve, Sequence) and not isinstance(curve, str) and len(curve) == 2
    check(pair, "StepCost", f"{label}: (sizes, seconds)", curve)
    return curve[0], curve[1]


class StepCost:
    """Seconds of a step by its target tokens.

        T(B) = seconds of the smallest captured size >= B                  (graphs are padded, so never
        interpolated)
             = the eager tail above the largest captured size: its first point up to there, then linear
             between points
        D(S) = seconds of drafting for S requests, ceil lookup, 0 without a table

    Noise in the measurements is made monotone by a running maximum. Tables are immutable; `fingerprint` tells
    whether two ranks hold the same one.

    Args:
        sizes: [n] rising token counts that were captured.
        seconds: [n] positive seconds of a whole step at each, without drafting if ``draft`` is given.
        draft: ([n] requests, [n] seconds) of the draft pass, or None.
        tail: ([n] sizes, [n] seconds) of eager steps above the captured sizes, or None: larger steps are then
            impossible.

    Errors: ValueError for an empty, unsorted, negative or NaN table. Warns when every size costs the same:
    such a table can
        never trim.
    """

    def __init__(
        self, sizes: ArrayLike, seconds: ArrayLike, *, draft: Curve | None = None, tail: Curve | None = None
    ):
        self.sizes, self.seconds = _curve("", sizes, seconds)
        self.draft = None if draft is None else _curve("draft", *_pair("draft", draft), zero=True)
        self.tail = None
        self.tops, self.top_seconds = self.sizes, self.seconds
        self.tiers, self.tier_seconds = self.sizes, self.seconds
        if tail is not None:
            at, took = _curve("tail", *_pair("tail", tail), above=int(self.sizes[-1]))
            took = np.maximum(took, self.seconds[-1])
            took.flags.writeable = False
            self.tail = at, took
            # Eager steps are not padded: past the first point every token count is a bucket of its own.
            every = np.arange(at[0], at[-1] + 1)
            self.tops = np.concatenate((self.sizes, every))
            self.top_seconds = np.concatenate((self.seconds, np.interp(every, at, took)))
            self.tiers = np.concatenate((self.sizes, at))
            self.tier_seconds = np.concatenate((self.seconds, took))
        for table in (self.sizes, self.seconds, self.tops, self.top_seconds, self.tiers, self.tier_seconds):
            table.flags.writeable = False
        self.max_tokens = int(self.tops[-1])
        self.fingerprint = hashlib.sha256(self.to_json().encode()).hexdigest()[:16]
        if self.top_seconds[0] == self.top_seconds[-1]:
            message = (
                "StepCost: every size costs the same, so no budget can ever trim a draft; measure the sizes"
            )
            warnings.warn(message, UserWarning, stacklevel=2)

    def __call__(self, tokens: ArrayLike) -> np.ndarray:
        """Seconds T of steps of ``tokens`` target tokens, of any shape; ValueError above `max_tokens`."""
        wanted = np.asarray(tokens, np.int64)
        fits = wanted.size == 0 or (wanted.min() >= 0 and wanted.max() <= self.max_tokens)
        check(fits, "StepCost", f"0 to {self.max_tokens} tokens", wanted.tolist())
        return self.top_seconds[np.searchsorted(self.tops, wanted)]

    def draft_seconds(self, requests: int) -> float:
        """Seconds D of drafting for ``requests``; ValueError above the draft table."""
        requests = integer("StepCost", "requests", requests, 0)
        if self.draft is None or requests == 0:
            return 0.0
        sizes, seconds = self.draft
        check(requests <= sizes[-1], "StepCost", f"at most {sizes[-1]} drafting requests", requests)
        return float(seconds[np.searchsorted(sizes, requests)])

    def to_json(self) -> str:
        """The table as JSON text, with its format and version; numbers survive exactly."""
        data: dict[str, Any] = {"format": _FORMAT, "version": _VERSION}
        data |= {"sizes": self.sizes.tolist(), "seconds": self.seconds.tolist()}
        for label, curve in (("draft", self.draft), ("tail", self.tail)):
            data[label] = None if curve is None else [curve[0].tolist(), curve[1].tolist()]
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> "StepCost":
        """Read what `to_json` wrote; refuses other formats and versions."""
        data = read_versioned("StepCost", text, _FORMAT, _VERSION, ("sizes", "seconds", "draft", "tail"))
        return cls(data["sizes"], data["seconds"], draft=data["draft"], tail=data["tail"])

    @classmethod
    def measure(
        cls,
        run: Callable[[int], int | None],
        sizes: Iterable[int],
        *,
        tail: Iterable[int] = (),
        draft: tuple[Callable[[int], int | None], Iterable[int]] | None = None,
        warmup: int = 2,
        repeats: int = 5,
        synchronize: Callable[[], None] | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> "StepCost":
        """Time a step at every size: median of ``repeats`` after ``warmup`` runs.

        Args:
            run: runs one step of that many target tokens, at the context lengths of production. It may return
                how many tokens it really ran; anything but the requested number is refused, as it would price
                another size.
            sizes: the captured sizes, rising.
            tail: sizes above them that run eagerly.
            draft: (callable, request counts) that times the draft pass, or None.
            warmup: runs before timing.
            repeats: timed runs.
            synchronize: waits for the device, e.g. ``torch.cuda.synchronize``; None for host callables.
            timer: clock in seconds.

        Returns:
            StepCost.
        """
        warmup = integer("StepCost", "warmup", warmup, 0)
        repeats = integer("StepCost", "repeats", repeats, 1)

        def timed(call: Callable[[int], int | None], size: int) -> float:
            took = []
            for i in range(warmup + repeats):
                begin = timer()
                ran = call(size)
                if synchronize is not None:
                    synchronize()
                if i >= warmup:
                    took.append(timer() - begin)
                check(ran is None or ran == size, "StepCost", f"a run of {size} tokens", ran)
            return float(np.median(took))

        def curve(call: Callable[[int], int | None], at: Iterable[int]) -> Curve:
            asked = [integer("StepCost", "a size", size) for size in at]
            return asked, [timed(call, size) for size in asked]

        steps, eager = curve(run, sizes), curve(run, tail)
        return cls(*steps, draft=None if draft is None else curve(*draft), tail=eager if eager[0] else None)
