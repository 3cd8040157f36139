"""Every public op keeps the same promises: documented, out=, no tokens, fake tensors, torch's own checks."""

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from dsv41 import ops
from dsv41._op import ops as registered
from dsv41.cache import PagedKV, Record
from dsv41.formats import E4M3, MXFP4, MXFP8, NVFP4, MXFP4Experts, quantize_mxfp4, quantize_mxfp8
from tests.ops.rows import same, tensors

BF16, I32 = torch.bfloat16, torch.int32
VIEWS = (MXFP8, MXFP4, NVFP4, MXFP4Experts, PagedKV)


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(BF16)


def ints(*shape: int, below: int = 4) -> torch.Tensor:
    return torch.randint(0, below, shape, dtype=I32)


def rope_pair(n: int) -> dict[str, torch.Tensor]:
    return {"cos": torch.rand(n, 4), "sin": torch.rand(n, 4)}


def tiles(rows: int, width: int) -> MXFP8:
    return quantize_mxfp8(torch.randn(rows, width), tile_rows=32)


def cache(layout: str, dim: int = 32) -> PagedKV:
    record = Record(layout, dim)
    pages = torch.zeros((2, 4, record.bytes), dtype=torch.uint8)
    return PagedKV(pages, record)


def experts() -> MXFP4Experts:
    a, b = quantize_mxfp4(torch.randn(4, 64, 32)), quantize_mxfp4(torch.randn(4, 32, 32))
    return MXFP4Experts(a.values, a.scale, b.values, b.scale)


def index(n: int) -> dict[str, Any]:
    return {
        "q": quantize_mxfp4(torch.randn(n, 2, 32)),
        "head_weights": torch.rand(n, 2),
        "request_ids": ints(n, below=1),
        "visible": ints(n, below=9),
        "keys": cache("mxfp4"),
        "page_table": torch.tensor([[1, 0]], dtype=I32),
        "top_k": 3,
        "num_candidates": 2,
        "block_size": 2,
    }


def engram(n: int) -> dict[str, Any]:
    return {
        "tokens": ints(n, below=9),
        "positions": torch.arange(n, dtype=I32),
        "cu_seqlens": torch.tensor([0, n], dtype=I32),
        "token_classes": torch.arange(9, dtype=I32),
        "multipliers": torch.tensor([[3, 5, 7]]),
        "primes": torch.tensor([[11, 13]]),
        "offsets": torch.tensor([[0, 11]]),
    }


def law(n: int) -> dict[str, Any]:
    row = torch.arange(n)
    return {"temperature": torch.ones(n), "seeds": row, "uids": row, "positions": row}


# A tiny call of each op with ``n`` tokens (or rows, or requests).
CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "apply_token_bitmask": lambda n: {"logits": torch.randn(n, 40), "bitmask": ints(n, 2)},
    "block_linear": lambda n: {"x": bf16(n, 64), "w": tiles(32, 64)},
    "compress_pairs": lambda n: {
        "kv_gate": torch.randn(n, 8),
        "request_ids": ints(n, below=1),
        "positions": torch.arange(n, dtype=I32),
        "carry": torch.zeros(1, 4, 8),
    },
    "copy_records": lambda n: {
        "source": cache("mxfp8"),
        "source_slots": torch.arange(n, dtype=I32),
        "cache": cache("mxfp8"),
        "slots": torch.arange(n, dtype=I32),
    },
    "engram_gate": lambda n: {
        "x": bf16(n, 2, 8),
        "kv": bf16(n, 24),
        "q_weight": bf16(2, 8),
        "k_weight": bf16(2, 8),
    },
    "engram_hash": engram,
    "engram_lookup": lambda n: {
        "rows": ints(n, 2),
        "values": quantize_mxfp8(torch.randn(4, 32)).values,
        "scale": quantize_mxfp8(torch.randn(4, 32)).scale,
    },
    "exchange_combine": lambda n: {"rows": bf16(4, 32), "place": ints(n, 2), "shared": bf16(n, 32)},
    "exchange_pack": lambda n: {
        "x": bf16(n, 32),
        "weights": torch.rand(n, 2),
        "slots": ints(n, 2),
        "source": torch.arange(2 * n, dtype=I32),
        "slots_per_rank": 2,
    },
    "exchange_pack_fixed": lambda n: {
        "x": bf16(n, 32),
        "weights": torch.rand(n, 2),
        "slots": ints(n, 2),
        "num_ranks": 2,
        "slots_per_rank": 2,
        "capacity": 3,
        "lost": torch.zeros(2, dtype=torch.int64),
    },
    "exchange_plan": lambda n: {"slots": ints(n, 2), "num_ranks": 2, "slots_per_rank": 2},
    "exchange_unpack": lambda n: {"records": ints(n, 64, below=99).to(torch.uint8), "hidden": 32},
    "grouped_linear": lambda n: {"x": bf16(n, 2, 32), "w": tiles(64, 32)},
    "index_query": lambda n: {"x": bf16(n, 2, 32), **rope_pair(n)},
    "index_topk": index,
    "linear": lambda n: {"x": bf16(n, 8), "w": bf16(5, 8)},
    "markov_bias": lambda n: {"logits": torch.randn(n, 9), "embeds": bf16(n, 4), "weight": bf16(9, 4)},
    "mhc_boundary": lambda n: {
        "y": bf16(n, 32),
        "x": bf16(n, 2, 32),
        "mixes": (torch.rand(n, 2), torch.rand(n, 2), torch.rand(n, 2, 2)),
        "fn": torch.randn(8, 64),
        "base": torch.randn(8),
        "scale": torch.rand(3),
        "weight": bf16(32),
        "norm_eps": 1e-20,
        "eps": 1e-6,
        "iters": 3,
    },
    "mhc_collapse": lambda n: {"x": bf16(n, 2, 8), "pre": torch.rand(n, 2)},
    "mhc_expand": lambda n: {
        "y": bf16(n, 8),
        "x": bf16(n, 2, 8),
        "post": torch.rand(n, 2),
        "comb": torch.rand(n, 2, 2),
    },
    "mhc_mixes": lambda n: {
        "x": bf16(n, 2, 8),
        "fn": torch.randn(8, 16),
        "base": torch.randn(8),
        "scale": torch.rand(3),
        "norm_eps": 1e-20,
        "eps": 1e-6,
        "iters": 3,
    },
    "mxfp4_moe": lambda n: {
        "x": bf16(n, 32),
        "expert_ids": ints(n, 2),
        "expert_weights": torch.rand(n, 2),
        "experts": experts(),
        "limit": 10.0,
        "shared": bf16(n, 32),
    },
    "physical_experts": lambda n: {
        "expert_ids": ints(n, 2),
        "table": torch.zeros((4, 2), dtype=torch.int16),
        "source": 1,
    },
    "quantize_mxfp4": lambda n: {"x": bf16(n, 64)},
    "quantize_mxfp8": lambda n: {"x": bf16(n, 64)},
    "quantize_nvfp4": lambda n: {"x": bf16(n, 64)},
    "rms_norm": lambda n: {"x": bf16(n, 8), "weight": bf16(8), "eps": 1e-20},
    "rms_norm_quantize": lambda n: {"x": bf16(n, 32), "weight": bf16(32), "eps": 1e-20},
    "rope": lambda n: {"x": bf16(n, 2, 16), **rope_pair(n)},
    "sample_tokens": lambda n: {"logits": torch.randn(n, 40), **law(n)},
    "sparse_attn": lambda n: {
        "q": bf16(n, 2, 32),
        "window": cache("mxfp8"),
        "window_ids": ints(n, 3, below=8),
        "compressed": cache("nvfp4"),
        "compressed_ids": ints(n, 2, below=8),
        "scale": 0.2,
        "sink": torch.randn(2),
        "return_lse": True,
    },
    "split_budget_ragged": lambda n: {"confidence": torch.rand(n, 5), "budget": torch.tensor([3])},
    "swiglu_quantize": lambda n: {"gate_up": bf16(n, 64), "limit": 10.0, "weight": torch.rand(n)},
    "topk": lambda n: {"scores": torch.randn(n, 7), "lens": ints(n, below=8), "k": 3},
    "topk_route": lambda n: {"logits": torch.randn(n, 6), "bias": torch.randn(6), "top_k": 2, "scale": 1.5},
    "verify_drafts": lambda n: {
        "target_logits": torch.randn(3 * n, 40),
        "cu_logits": torch.arange(0, 3 * n + 1, 3, dtype=I32),
        "draft_tokens": ints(n, 2, below=40).long(),
        **law(n),
    },
    "write_cache": lambda n: {
        "x": bf16(n, 32),
        **rope_pair(n),
        "slots": torch.arange(n, dtype=I32),
        "cache": cache("mxfp8"),
        "norm_weight": bf16(32),
    },
}
IN_PLACE = {"apply_token_bitmask", "markov_bias"}  # their result is an argument
WITH_OUT = [name for name in CASES if "out" in inspect.signature(getattr(ops, name)).parameters]


def call(name: str, **arguments: Any) -> Any:
    return getattr(ops, name)(**arguments)


def rebuilt(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The argument with every tensor in it changed, inside views as well."""
    if isinstance(value, VIEWS):
        return type(value)(**{k: rebuilt(v, change) for k, v in vars(value).items()})
    return tree_map(lambda x: change(x) if isinstance(x, torch.Tensor) else x, value)


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: rebuilt(v, torch.clone) for k, v in arguments.items()}


def test_every_op_has_a_case_and_a_public_function() -> None:
    helpers = {name for name in ops.__all__ if name.endswith("_scratch") or name.startswith("pack_")}
    assert sorted(CASES) == sorted(set(ops.__all__) - helpers) == sorted(registered())


SCRATCHES = [name for name in ops.__all__ if name.endswith("_scratch")]


@pytest.mark.parametrize("name", SCRATCHES)
def test_sizes_of_a_scratch(name: str) -> None:
    """No rows need no or a fixed number of bytes; a size that cannot be is refused by its name."""
    function = getattr(ops, name)
    sizes = [p for p in inspect.signature(function).parameters.values() if "int" in str(p.annotation)]
    given = dict.fromkeys([p.name for p in sizes], 256)
    assert isinstance(function(**given), int) and function(**given) >= function(**{**given, sizes[0].name: 0})
    for p in sizes:
        for wrong in (-1, 2.5, "3", True):
            with pytest.raises(
                ValueError, match=rf"{name}: expected {p.name}: an integer of [01] or more, got"
            ):
                function(**{**given, p.name: wrong})
    widths = {"num_heads", "head_dim", "hidden", "inter", "top_k", "out_features", "in_features", "groups"}
    for label in widths & set(given):
        with pytest.raises(ValueError, match=rf"{label}: an integer of 1 or more, got 0"):
            function(**{**given, label: 0})


@pytest.mark.parametrize("name", CASES)
def test_runs_and_repeats(name: str) -> None:
    """The same bits again, inputs untouched except those that the op writes by contract."""
    arguments = CASES[name](5)
    before = copied(arguments)
    result = call(name, **arguments)
    again = call(name, **before)
    if result is None:
        result, again = arguments["cache"].pages, before["cache"].pages
    results = tensors(result)
    assert results and all(same(a, b) for a, b in zip(results, tensors(again), strict=True))
    assert not any(x.is_floating_point() and x.float().isnan().any() for x in results if x.element_size() > 1)


@pytest.mark.parametrize("name", WITH_OUT)
def test_out_is_what_comes_back(name: str) -> None:
    arguments = CASES[name](5)
    want = call(name, **copied(arguments))
    whole = want[:1] if name in ("sparse_attn", "index_topk", "mhc_boundary") else want
    given = rebuilt(whole, torch.empty_like)
    got = call(name, **arguments, out=given[0] if whole is not want else given)
    mine = tensors(given)
    assert all(a is b for a, b in zip(tensors(got), mine, strict=False))
    assert all(same(a, b) for a, b in zip(mine, tensors(want), strict=False))


@pytest.mark.parametrize("name", CASES)
def test_no_tokens(name: str) -> None:
    if name == "split_budget_ragged":
        with pytest.raises(ValueError, match="neither empty"):
            call(name, **CASES[name](0))
        return
    arguments = CASES[name](0)
    result = call(name, **arguments)
    if result is None:
        assert (arguments["cache"].pages == 0).all()
    elif name == "exchange_plan":  # its last result is a count a rank
        assert result[0].shape == (0, 2) and not result[1].numel() and result[2].tolist() == [0, 0]
    elif name == "exchange_pack_fixed":  # rows are a capacity a rank
        assert result[0].shape == (0, 2) and result[1].shape[0] == 6
    else:
        assert all(x.shape[0] == 0 for x in tensors(result))


@pytest.mark.parametrize("name", CASES)
def test_fake_tensors(name: str) -> None:
    """The public function reads no value: it runs where there are none, and promises the right shapes."""
    arguments = CASES[name](5)
    want = call(name, **copied(arguments))
    with FakeTensorMode() as mode:
        fake = {k: rebuilt(v, mode.from_tensor) for k, v in arguments.items()}
        got = call(name, **fake)
    if want is not None:
        for a, b in zip(tensors(got), tensors(want), strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("name", CASES)
def test_torch_checks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the schema says is written and nothing else; then torch.library.opcheck."""
    op, seen = registered()[name], []
    direct = op._call
    monkeypatch.setattr(op, "_call", lambda *args: seen.append(args) or direct(*args))
    call(name, **CASES[name](5))
    args = tuple(rebuilt(a, torch.clone) for a in seen[0])
    direct(*args)
    for schema, before, after in zip(direct._schema.arguments, seen[0], args, strict=True):
        if isinstance(before, torch.Tensor) and schema.alias_info is None:
            assert same(before, after), f"{schema.name} was written"
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(isinstance(a, torch.Tensor) and a.dtype == E4M3 for a in args):
        checks.append("test_schema")  # it compares by arithmetic, which 8-bit floats do not have
    torch.library.opcheck(direct, args, test_utils=checks)


@pytest.mark.parametrize("name", CASES)
def test_reference_has_the_flat_arguments(name: str) -> None:
    op = registered()[name]
    module, function = op.reference.split(":")
    reference = getattr(importlib.import_module(module), function)
    names = [a.name for a in op._call._schema.arguments]
    assert list(inspect.signature(reference).parameters) == names
    assert module.startswith("dsv41_reference.") and function == name
    assert not op._call._schema.returns  # it writes into what it is given


# Documentation.

SECTIONS = ("Args:", "Returns:", "Contract:", "Reference:")


def sections(text: str) -> dict[str, str]:
    """The text of each section by its title, the head under ""."""
    parts = re.split(rf"^({'|'.join(SECTIONS)})", text, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


@pytest.mark.parametrize("name", CASES)
def test_docstring(name: str) -> None:
    """A sentence, then Args, Returns, Contract, Reference; an entry a parameter, a shape a tensor."""
    function = getattr(ops, name)
    text = inspect.getdoc(function) or ""
    found, hints = sections(text), get_type_hints(function)
    returns = hints.pop("return") is not type(None)
    assert list(found) == ["", *(s for s in SECTIONS if returns or s != "Returns:")]
    first = text.split("\n", 1)[0]
    assert first.endswith(".") and first[0].isupper()
    entries = {
        key.strip(): entry
        for keys, entry in re.findall(r"^    ([\w, ]+): (.+?)(?=^    \w|\Z)", found["Args:"], re.M | re.S)
        for key in keys.split(",")
    }
    assert list(entries) == list(inspect.signature(function).parameters)
    for parameter, hint in hints.items():
        kinds = getattr(hint, "__args__", (hint,))
        shaped = re.search(r"\[[^\]]+\]", entries[parameter])
        if torch.Tensor in kinds:
            assert shaped, f"{parameter}: a shape in brackets"
        for view in (k for k in kinds if k in VIEWS):
            assert view.__name__ in entries[parameter], f"{parameter}: {view.__name__}"
    contract = " ".join(found["Contract:"].split())
    assert contract.endswith(".") and ("no host sync" in contract or "as `" in contract)
    assert found["Reference:"].strip() == registered()[name].reference.replace(":", ".")
