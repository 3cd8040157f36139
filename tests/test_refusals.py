"""Every argument of every public op, given wrong values: one sentence, and nothing is written."""

import inspect
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, Union, get_args, get_origin

import pytest
import torch

import dsv41
from dsv41 import V41FlashConfig, eplb, ops
from dsv41.cache import PagedKV, Record, page_slots
from dsv41.formats import MXFP4Experts, quantize_mxfp4, quantize_mxfp8, quantize_nvfp4
from dsv41.layers import V41Flash, V41State
from dsv41.layers.expert_parallel import ExpertParallel, even_map
from dsv41.memory import MemoryPlan
from dsv41.ops.exchange import Exchange, LocalTransport, record_bytes, usual_capacity
from dsv41.ops.verify import RaggedSplit, Verified
from dsv41.spec import DecodeGraphs, default_sizes, generate
from tests.ops.rows import same
from tests.test_api import CASES, VIEWS, WITH_OUT, call, copied, ints, rebuilt

# Values that no parameter of a type takes; for floats those below 0 too, except where any sign is good.
WRONG: dict[type, list[Any]] = {
    float: [math.nan, math.inf, -math.inf, -1.0, True, "1", [1.0], torch.ones(()), None],
    int: [1.5, 2.0, math.nan, -2, 2**80, True, "3", [1], torch.ones((), dtype=torch.int64), None],
    bool: [1, 0.0, "yes", torch.ones((), dtype=torch.bool), None],
    str: ["other", 3, b"chain", None],
}
SIGNED = {
    ("sparse_attn", "scale"),
    ("DecodeGraphs.admit", "temperature"),
    ("DecodeGraphs.admit", "seed"),
}
ALSO_TENSORS = {("physical_experts", "step"), ("DecodeGraphs.admit", "anchor")}


def kinds(annotation: Any) -> tuple[Any, ...]:
    """The kinds of a union, or the one that it is."""
    union = isinstance(annotation, types.UnionType) or get_origin(annotation) is Union
    return get_args(annotation) if union else (annotation,)


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
    line = sentence(lambda **given: call(name, **given), arguments, name, label, wrong)
    kept = all(same(a, b) for a, b in zip(held(arguments), held(before), strict=True))
    return line or (None if kept else f"{label}: written before it was refused")


def sentence(
    function: Callable[..., Any], arguments: dict[str, Any], name: str, label: str, wrong: Any
) -> str | None:
    """What is wrong with how a function refuses this value of this parameter, or None."""
    shown = f"{label}={type(wrong).__name__} {wrong!r}"[:90]
    try:
        function(**{**arguments, label: wrong})
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
    return None


def wrong_scalars(name: str, function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """A wrong value of each kind for every parameter that is a number, a flag or a word."""
    for label, parameter in inspect.signature(function, eval_str=True).parameters.items():
        allowed = kinds(parameter.annotation)
        kind = next((k for k in (bool, int, float, str) if k in allowed), None)
        for wrong in WRONG.get(kind, []) if kind else []:
            fine = wrong is None and type(None) in allowed
            fine |= kind is float and wrong == -1.0 and (name, label) in SIGNED
            fine |= kind is int and wrong == -2 and (name, label) in SIGNED
            fine |= isinstance(wrong, torch.Tensor) and (name, label) in ALSO_TENSORS
            if not fine:
                yield label, wrong


@pytest.mark.parametrize("name", CASES)
def test_scalars(name: str) -> None:
    found = [refusal(name, label, wrong) for label, wrong in wrong_scalars(name, getattr(ops, name))]
    assert not [line for line in found if line]


@pytest.mark.parametrize("name", CASES)
def test_tensors_and_views(name: str) -> None:
    found = []
    given = CASES[name](4)
    for label, parameter in inspect.signature(getattr(ops, name)).parameters.items():
        allowed = kinds(parameter.annotation)
        views = [k for k in allowed if k in VIEWS]
        results = any("tuple" in str(k) or k in (RaggedSplit, Verified) for k in allowed)
        if not (views or results or torch.Tensor in allowed):
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


# Values that a kernel would take for addresses or bits: (op, argument, a wrong value of its first element).
VALUES = [
    *[(op, "uids", wrong) for op in ("sample_tokens", "verify_drafts") for wrong in (-1, 1 << 48)],
    *[(op, "positions", wrong) for op in ("sample_tokens", "verify_drafts") for wrong in (-1, 1 << 32)],
    *[(op, "top_p", math.nan) for op in ("sample_tokens", "verify_drafts")],
    *[("sample_tokens", "columns", wrong) for wrong in (-1, 256)],
    ("verify_drafts", "cu_logits", 1),
    *[(op, label, 8) for op, label in [("copy_records", "slots"), ("copy_records", "source_slots")]],
    *[("write_cache", "slots", wrong) for wrong in (-2, 8)],
    *[("sparse_attn", label, wrong) for label in ("window_ids", "compressed_ids") for wrong in (-2, 8)],
    *[("mxfp4_moe", "expert_ids", wrong) for wrong in (-2, 4)],
    ("physical_experts", "expert_ids", 4),
    ("index_topk", "request_ids", 1),
    ("index_topk", "page_table", 2),
    ("index_topk", "visible", 9),
    ("engram_hash", "tokens", 9),
    ("engram_hash", "tokens", -1),
    ("engram_hash", "cu_seqlens", 1),
    ("engram_hash", "positions", 3),
    ("engram_lookup", "rows", 4),
    ("exchange_plan", "slots", 4),
    ("exchange_pack", "source", 8),
    ("exchange_pack_fixed", "slots", 4),
    ("exchange_combine", "place", 4),
    ("split_budget_ragged", "lo", 6),
]
DISTINCT = {
    f"{cache}_ids": torch.arange(4 * n).view(4, n).int() % 8
    for cache, n in (("window", 3), ("compressed", 2))
}
OPTIONAL = {"top_p": torch.ones(4), "columns": torch.zeros(4, dtype=torch.int32), "lo": torch.zeros(4).int()}


@pytest.mark.parametrize(("name", "label", "wrong"), VALUES)
def test_values_when_asked(name: str, label: str, wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = CASES[name](4)
    if name == "sparse_attn":
        arguments |= DISTINCT
    given = arguments.get(label, OPTIONAL.get(label)).clone()
    given.view(-1)[0] = wrong
    monkeypatch.setenv("DSV41_CHECK", "1")
    call(name, **{**copied(arguments), **({label: OPTIONAL[label]} if label in OPTIONAL else {})})
    line = sentence(lambda **given: call(name, **given), arguments, name, label, given)
    assert line is None


def _examples() -> list[Any]:
    """One view of each kind."""
    arguments = [value for make in CASES.values() for value in make(4).values()]
    return [next(v for v in arguments if type(v) is k) for k in VIEWS if any(type(v) is k for v in arguments)]


EXAMPLES = _examples()


# What is around the ops.

CFG = V41FlashConfig.tiny()
PLAN = MemoryPlan(1 << 30, 0, {"all": 1}, "host", 0, 1, 1, 1, 1, 64, 1024, 1024, 8, 256)


def decoding() -> DecodeGraphs:
    """Two requests of which one is live."""
    graphs = DecodeGraphs(lambda *_, **__: torch.zeros(0), V41State.allocate(CFG, 2, 64))
    graphs.admit(1, 3, length=0, left=4)
    return graphs


X = torch.ones(32, 64)
# Name in the sentence: (what makes the function, other arguments).
AROUND: dict[str, tuple[Callable[[], Callable[..., Any]], dict[str, Any]]] = {
    "DecodeGraphs": (lambda: DecodeGraphs, {"model": print, "state": V41State.allocate(CFG, 2, 64)}),
    "DecodeGraphs.admit": (lambda: decoding().admit, {"request": 0, "anchor": 1, "length": 0, "left": 4}),
    "DecodeGraphs.grow": (lambda: decoding().grow, {"request": 1, "room": 8}),
    "DecodeGraphs.cancel": (lambda: decoding().cancel, {"request": 1}),
    "DecodeGraphs.step": (lambda: decoding().step, {}),
    "Exchange": (lambda: Exchange, {"transport": None, "slots_per_rank": 1}),
    "ExpertParallel": (
        lambda: ExpertParallel,
        {"transport": LocalTransport.group(1)[0], "physical_to_logical": [[0, 1]], "num_experts": 2},
    ),
    "MemoryPlan.requests": (lambda: PLAN.requests, {"context": 4}),
    "MemoryPlan.tokens": (lambda: PLAN.tokens, {"requests": 4}),
    "Record": (lambda: Record, {"layout": "mxfp8", "dim": 64}),
    "V41State.allocate": (lambda: V41State.allocate, {"cfg": CFG, "num_requests": 1, "max_tokens": 64}),
    "V41State.first": (lambda: V41State.allocate(CFG, 2, 64).first, {"requests": 1}),
    "V41State.reset": (lambda: V41State.allocate(CFG, 2, 64).reset, {"request": 1}),
    "V41State.adopt": (
        lambda: V41State.allocate(CFG, 2, 64).adopt,
        {"request": 1, "tokens": torch.ones(2, dtype=torch.int32)},
    ),
    "even_map": (lambda: even_map, {"num_layers": 2, "num_experts": 4, "ranks": 2}),
    "plan_memory": (lambda: dsv41.plan_memory, {"cfg": CFG, "device_bytes": 1 << 40}),
    "prepare": (lambda: dsv41.prepare, {"cfg": CFG, "device": "cpu"}),
    "quantize_mxfp4": (lambda: quantize_mxfp4, {"x": X}),
    "quantize_mxfp8": (lambda: quantize_mxfp8, {"x": X}),
    "quantize_nvfp4": (lambda: quantize_nvfp4, {"x": X}),
}
AROUND |= {
    "default_sizes": (lambda: default_sizes, {"requests": 4, "block": 2}),
    "page_slots": (
        lambda: page_slots,
        {"entry_ids": ints(2, 3), "request_ids": ints(2), "page_table": ints(4, 2), "page_size": 4},
    ),
    "record_bytes": (lambda: record_bytes, {"hidden": 64}),
    "usual_capacity": (lambda: usual_capacity, {"tokens": 4, "top_k": 2, "ranks": 2}),
}
# Words that are open: names of devices, and of the kernel that packed weights.
OPEN = {
    ("MXFP4Experts", "layout"),
    ("prepare", "device"),
    ("V41State.allocate", "device"),
    ("ExpertParallel", "device"),
}


@pytest.mark.parametrize("name", AROUND)
def test_scalars_around_the_ops(name: str) -> None:
    make, arguments = AROUND[name]
    found = [
        sentence(make(), arguments, name, label, wrong)
        for label, wrong in wrong_scalars(name, make())
        if (name, label) not in OPEN
    ]
    assert not [line for line in found if line]


with torch.device("meta"):
    MODEL = V41Flash(CFG)
TOKENS, CU = torch.zeros(4, dtype=torch.int32), torch.tensor([0, 2, 4], dtype=torch.int32)
STEP: dict[str, Any] = {
    "tokens": TOKENS.to("meta"),
    "positions": TOKENS.to("meta"),
    "state": V41State.allocate(CFG, 2, 64, device="meta"),
    "cu_seqlens": CU.to("meta"),
}
MAP, LOADS = [[0, 1]], [[1.0, 2.0]]
KV = PagedKV(torch.zeros(2, 4, Record("mxfp8", 64).bytes, dtype=torch.uint8), Record("mxfp8", 64))
# Name in the sentence: (function, arguments, those that take an object of one kind).
OBJECTS: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = {
    "DecodeGraphs": (DecodeGraphs, AROUND["DecodeGraphs"][1], ("model", "state", "confidence", "sizes")),
    "DecodeGraphs.admit": (decoding().admit, AROUND["DecodeGraphs.admit"][1], ("anchor",)),
    "Exchange.dispatch": (
        Exchange(LocalTransport.group(1)[0], 2, 4).dispatch,
        {"x": quantize_mxfp8(X), "slots": ints(32, 2), "weights": torch.ones(32, 2)},
        ("x", "slots"),
    ),
    "ExpertParallel": (
        ExpertParallel,
        AROUND["ExpertParallel"][1],
        ("transport", "physical_to_logical", "table"),
    ),
    "MXFP4Experts": (MXFP4Experts, vars(CASES["mxfp4_moe"](1)["experts"]), ("layout",)),
    "PagedKV": (PagedKV, {"pages": KV.pages, "record": KV.record}, ("pages", "record")),
    "PagedKV.read": (KV.read, {"slots": ints(3)}, ("slots",)),
    "V41Flash": (V41Flash, {"cfg": CFG}, ("cfg", "token_map", "ep_group")),
    "V41Flash ": (
        MODEL.forward,
        STEP,
        ("tokens", "positions", "state", "cu_seqlens", "max_len", "rows", "draft_inputs"),
    ),
    "V41Flash  ": (MODEL.attach_engram, {"layer": CFG.engram.layers[0], "store": None}, ("store",)),
    "V41State.allocate": (V41State.allocate, AROUND["V41State.allocate"][1], ("cfg",)),
    "V41State.rollback": (V41State.allocate(CFG, 2, 64).rollback, {"lens": ints(2)}, ("lens",)),
    "duplicates": (eplb.duplicates, {"physical_to_logical": MAP, "num_gpus": 1}, ("physical_to_logical",)),
    "equal_shares": (
        eplb.equal_shares,
        {"physical_to_logical": MAP, "num_experts": 2},
        ("physical_to_logical",),
    ),
    "generate": (
        generate,
        {"model": print, "state": V41State.allocate(CFG, 1, 64), "prompts": [[1]], "max_new_tokens": 1},
        ("state",),
    ),
    "logical_maps": (
        eplb.logical_maps,
        {"physical_to_logical": MAP, "num_experts": 2},
        ("physical_to_logical",),
    ),
    "rank_loads": (
        eplb.rank_loads,
        {"weight": LOADS, "physical_to_logical": MAP, "num_gpus": 1},
        ("weight", "physical_to_logical"),
    ),
    "page_slots": (page_slots, AROUND["page_slots"][1], ("entry_ids", "request_ids", "page_table")),
    "plan_memory": (dsv41.plan_memory, {"cfg": CFG, "device_bytes": 1}, ("cfg", "engram")),
    "prepare": (dsv41.prepare, {"cfg": CFG, "device": "cpu"}, ("cfg",)),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_around_the_ops(name: str) -> None:
    function, arguments, labels = OBJECTS[name]
    found = []
    for label in labels:
        wrongs: list[Any] = [2.5, "x", object(), {"a": 1}, torch.ones(3, 3), [None]]
        parameter = inspect.signature(function).parameters.get(label)
        optional = parameter is None or parameter.default is not parameter.empty
        wrongs += [] if optional else [None]
        taken = ("x",) if (name, label) in OPEN else ()
        found += [
            sentence(function, arguments, name.strip(), label, wrong)
            for wrong in wrongs
            if not (isinstance(wrong, str) and wrong in taken)
        ]
    assert not [line for line in found if line]


def test_a_bound_below_the_longest_request_is_refused() -> None:
    """The rings would be written as for fewer rows. Known at once where the lengths are on the host."""
    with torch.device("cpu"):
        state = V41State.allocate(CFG, 2, 64)
    model = V41Flash(CFG)
    with pytest.raises(ValueError, match="V41Flash: expected max_len: an integer of 2 or more, got 1"):
        model(TOKENS, TOKENS, state, cu_seqlens=CU, max_len=1)
