"""Every argument of every public op, given wrong values: one sentence, and nothing is written."""

import inspect
import math
from typing import Any

import pytest
import torch

from dsv41 import ops
from tests.ops.rows import same
from tests.test_api import CASES, VIEWS, WITH_OUT, call, copied, rebuilt

# Values that no parameter of a type takes; for floats those below 0 too, except where any sign is good.
WRONG: dict[type, list[Any]] = {
    float: [math.nan, math.inf, -math.inf, -1.0, True, "1", [1.0], torch.ones(()), None],
    int: [1.5, 2.0, math.nan, -2, 2**80, True, "3", [1], torch.ones((), dtype=torch.int64), None],
    bool: [1, 0.0, "yes", torch.ones((), dtype=torch.bool), None],
    str: ["other", 3, b"chain", None],
}
SIGNED = {("sparse_attn", "scale")}
ALSO_TENSORS = {("physical_experts", "step")}


def kinds(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", (annotation,))


def held(arguments: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of all arguments."""
    found: list[torch.Tensor] = []
    for value in arguments.values():
        rebuilt(value, lambda x: found.append(x) or x)
    return found


def refusal(name: str, label: str, wrong: Any) -> str | None:
    """What is wrong with how an op refuses this value of this parameter, or None."""
    arguments = CASES[name](4)
    before = copied(arguments)
    shown = f"{label}={type(wrong).__name__} {wrong!r}"[:90]
    try:
        call(name, **{**arguments, label: wrong})
    except ValueError as error:
        text = str(error)
        named = label in text or isinstance(wrong, torch.Tensor)  # another may be found not to fit to it
        if not (text.startswith(f"{name}: expected ") and ", got " in text and named):
            return f"{shown}: {text}"
        if "\n" in text or len(text) > 300:
            return f"{shown}: no sentence: {text}"
    except Exception as error:
        return f"{shown}: {type(error).__name__} {error}"
    else:
        return f"{shown}: taken"
    kept = all(same(a, b) for a, b in zip(held(arguments), held(before), strict=True))
    return None if kept else f"{shown}: written before it was refused"


@pytest.mark.parametrize("name", CASES)
def test_scalars(name: str) -> None:
    found = []
    for label, parameter in inspect.signature(getattr(ops, name)).parameters.items():
        allowed = kinds(parameter.annotation)
        kind = next((k for k in (bool, int, float, str) if k in allowed), None)
        if kind is None:
            continue
        for wrong in WRONG[kind]:
            fine = wrong is None and type(None) in allowed
            fine |= kind is float and wrong == -1.0 and (name, label) in SIGNED
            fine |= isinstance(wrong, torch.Tensor) and (name, label) in ALSO_TENSORS
            if not fine:
                found.append(refusal(name, label, wrong))
    assert not [line for line in found if line]


@pytest.mark.parametrize("name", CASES)
def test_tensors_and_views(name: str) -> None:
    found = []
    given = CASES[name](4)
    for label, parameter in inspect.signature(getattr(ops, name)).parameters.items():
        allowed = kinds(parameter.annotation)
        views = [k for k in allowed if k in VIEWS]
        if not any("Tensor" in str(k) or k in views or issubclass(k, tuple) for k in allowed):
            continue
        wrongs: list[Any] = ["x", [torch.ones(4)], (None,) * 9, object(), {"a": 1}]
        wrongs += [] if (name, label) in ALSO_TENSORS else [3, 2.5]
        wrongs += [] if type(None) in allowed else [None]
        there = given.get(label)
        if isinstance(there, torch.Tensor):
            wrongs += [there[None], there.to(torch.complex64), there.tolist()]
            wrongs += [there.repeat_interleave(2, -1)[..., ::2]] if there.dim() > 1 else []
            wrongs += [there.to("meta")] if len(held(given)) > 1 else []
        elif views:
            wrongs += [] if torch.Tensor in allowed else [torch.ones(4, 32)]
            wrongs += [view for view in EXAMPLES if type(view) not in allowed]
        found += [refusal(name, label, wrong) for wrong in wrongs]
    assert not [line for line in found if line]


WRITTEN = {
    "apply_token_bitmask": "logits",
    "compress_pairs": "carry",
    "exchange_pack_fixed": "lost",
    "markov_bias": "logits",
    "rms_norm_quantize": "norm",
}


@pytest.mark.parametrize("name", sorted({*WRITTEN, *WITH_OUT}))
def test_written_memory_is_apart(name: str) -> None:
    """Rows that are one row in memory cannot hold a result each."""
    arguments = CASES[name](4)
    want = call(name, **copied(arguments))
    if name in WITH_OUT:
        given = want[0] if name in ("sparse_attn", "index_topk", "mhc_boundary") else want
        found = [refusal(name, "out", rebuilt(given, lambda x: x[:1].expand_as(x)))]
    else:
        found = []
    if name in WRITTEN:
        label = WRITTEN[name]
        x = arguments.get(label, torch.empty(4, 32, dtype=torch.bfloat16))
        whole = x.repeat(4, *[1] * (x.dim() - 1))[: max(4, len(x))]
        found.append(refusal(name, label, whole[:1].expand_as(x if len(x) > 1 else whole)))
    assert not [line for line in found if line]


def _examples() -> list[Any]:
    """One view of each kind."""
    arguments = [value for make in CASES.values() for value in make(4).values()]
    return [next(v for v in arguments if type(v) is k) for k in VIEWS if any(type(v) is k for v in arguments)]


EXAMPLES = _examples()
