"""The op machinery, with made-up kernels and targets: selection, overrides, refusals, building."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dsv41
from dsv41 import _op, ops
from dsv41._op import (
    Kernel,
    Op,
    Target,
    Unsupported,
    check,
    check_tensor,
    compiled,
    describe,
    no_compile,
    output,
)
from tests.ops.rows import assert_refused

HERE = "dsv41_made_up"
H200, B200, OLD, NPU = Target("cuda", 90), Target("cuda", 100), Target("cuda", 70), Target("npu")


def small_only(x: torch.Tensor, out: torch.Tensor) -> str | None:
    return None if x.shape[0] <= 4 else f"at most 4 rows, got {x.shape[0]}"


@pytest.fixture(scope="module")
def op() -> Iterator[Op]:
    """An op with three kernels and a reference, which say by a number who ran."""

    def writer(number: float) -> Any:
        return lambda x, out: out.copy_(x + number)

    for number, name in enumerate(("reference", "first_cuda", "second_cuda", "third_npu"), 1):
        module = types.ModuleType(f"{HERE}.{name}")
        module.__dict__["made_up"] = writer(float(number))
        sys.modules[module.__name__] = module
    sys.modules[HERE] = types.ModuleType(HERE)
    made = Op(
        "made_up(Tensor x, Tensor(a!) out) -> ()",
        reference=f"{HERE}.reference:made_up",
        package=HERE,
        kernels=(
            Kernel("first_cuda", "cuda", needs=("surely_not_installed",), archs=(90, 100)),
            Kernel("second_cuda", "cuda", needs=("torch",), archs=(70, 90, 100), supports=small_only),
            Kernel("third_npu", "npu"),
        ),
    )
    yield made
    del _op._OPS["made_up"]


def args(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, 3), torch.empty(rows, 3)


def ran(op: Op) -> float:
    x, out = args()
    op(x, out)
    return out.unique().item()


# Selection.


def test_table_of_choices(op: Op) -> None:
    """Target and call against the kernel that takes it; the first that fits wins."""
    everything = frozenset({"surely_not_installed", "torch"})
    table: list[tuple[Target, int, str]] = [
        (Target("cpu"), 2, "torch"),
        (Target("cpu"), 99, "torch"),
        (H200, 2, "second_cuda"),
        (Target("cuda", 90, everything), 2, "first_cuda"),
        (Target("cuda", 90, everything), 99, "first_cuda"),
        (Target("cuda", 70, everything), 2, "second_cuda"),
        (OLD, 4, "second_cuda"),
        (NPU, 99, "third_npu"),
    ]
    for target, rows, kernel in table:
        assert op.select(target, args(rows)) == kernel, (target, rows)


def test_explain_gives_every_reason(op: Op) -> None:
    assert op.explain(OLD, args(9)) == [
        ("first_cuda", "built for sm90, sm100"),
        ("second_cuda", "at most 4 rows, got 9"),
        ("third_npu", "built for npu"),
        ("torch", "only on request: dsv41.use('torch')"),
    ]
    assert op.explain(B200)[:2] == [
        ("first_cuda", "package 'surely_not_installed' is not installed"),
        ("second_cuda", None),  # without arguments only the target is asked
    ]
    assert op.explain(Target("cpu"))[-1] == ("torch", None)


def test_an_accelerator_never_falls_to_the_reference(op: Op) -> None:
    with pytest.raises(Unsupported) as caught:
        op.select(B200, args(99))
    assert str(caught.value).splitlines() == [
        "made_up: no kernel takes this call on cuda sm100",
        "  first_cuda       package 'surely_not_installed' is not installed",
        "  second_cuda      at most 4 rows, got 99",
        "  third_npu        built for npu",
        "  torch            available; choose it with dsv41.use('torch')",
    ]
    assert isinstance(caught.value, RuntimeError)
    for name, real in _op.ops().items():
        for target in (H200, B200, NPU, Target("xpu")):
            packages = Target(target.device, target.arch, frozenset())
            if real is not op and all(reason for kernel, reason in real.explain(packages)):
                with pytest.raises(Unsupported, match=rf"^{name}: no kernel takes this call on"):
                    real.select(packages)


def test_use(op: Op) -> None:
    """A context asks for one kernel, of one op or of all; inner contexts win, and the end restores."""
    assert ran(op) == 1.0
    with dsv41.use("second_cuda", "made_up"):
        assert op.select(H200, args()) == "second_cuda"
        with pytest.raises(Unsupported, match=r"made_up: .* on cpu \(asked for second_cuda\)"):
            ran(op)
        ops.quantize_mxfp8(torch.zeros(1, 32))  # another op does not notice
        with dsv41.use("torch"):
            assert op.select(H200, args()) == "second_cuda"  # the rule of the op is before the one of all
        with dsv41.use("torch", "made_up"):
            assert op.select(H200, args(99)) == "torch" and ran(op) == 1.0
    assert op.select(H200, args()) == "second_cuda" and ran(op) == 1.0
    with dsv41.use("torch"):
        assert op.select(B200, args(99)) == "torch"
    with dsv41.use("third_npu"), pytest.raises(Unsupported, match=r"asked for third_npu\)\n"):
        op.select(H200, args())


@pytest.mark.parametrize(
    ("value", "kernel"),
    [
        ("torch", "torch"),
        ("second_cuda", "second_cuda"),
        ("made_up=torch", "torch"),
        ("rms_norm=torch", "second_cuda"),
        ("torch,made_up=second_cuda", "second_cuda"),
        ("", "second_cuda"),
    ],
)
def test_environment(op: Op, value: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_IMPL", value)
    assert op.select(H200, args()) == kernel
    with dsv41.use("torch", "made_up"):  # the code's word counts more than the environment's
        assert op.select(H200, args()) == "torch"


def test_environment_of_a_kernel_that_does_not_fit(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_IMPL", "first_cuda")
    with pytest.raises(Unsupported, match="asked for first_cuda"):
        op.select(H200, args())


# Loading and running.


def test_load_gives_the_launch_function(op: Op) -> None:
    for number, kernel in enumerate(("torch", "first_cuda", "second_cuda", "third_npu"), 1):
        x, out = args()
        op.load(kernel)(x, out)
        assert out.unique().item() == number
        assert op.load(kernel) is op.load(kernel)
    assert_refused(
        lambda: op.load("fourth"), r"made_up: expected kernel: one of \['first_cuda', .*, got fourth"
    )


def test_registered_with_torch(op: Op) -> None:
    x, out = args()
    torch.ops.dsv41.made_up(x, out)
    assert (out == 1).all()
    assert dsv41._op.ops()["made_up"] is op
    torch.library.opcheck(torch.ops.dsv41.made_up.default, args())


def test_explain_by_function_and_by_name() -> None:
    assert dsv41.explain(ops.rms_norm) == dsv41.explain("rms_norm") == [*dsv41.explain("rms_norm")]
    assert dsv41.explain("rms_norm")[-1] == ("torch", None)
    assert dsv41.explain(ops.rms_norm, H200)[-1][1] is not None
    assert_refused(
        lambda: dsv41.explain("no_such_op"), "explain: expected an op of dsv41.ops: .*, got no_such_op"
    )


def test_target() -> None:
    assert Target.of(torch.zeros(1)) == Target("cpu")
    assert [str(t) for t in (Target("cpu"), H200, NPU)] == ["cpu", "cuda sm90", "npu"]
    bare = Target("cuda", 90, frozenset({"nvcc"}))
    assert (
        bare.has("nvcc")
        and not bare.has("torch")
        and H200.has("torch")
        and not H200.has("surely_not_installed")
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None,), "Target: expected device: a torch device type as text, got None"),
        ((torch.device("cpu"),), "Target: expected device: a torch device type as text, got device.*"),
        (("cuda", "90"), "Target: expected arch: an integer such as 90 for SM90, or None, got '90'"),
        (("cuda", 9.0), "Target: expected arch: an integer such as 90 for SM90, or None, got 9.0"),
        (("cuda", 90, "triton"), "Target: expected packages: a set of names, or None, got triton"),
    ],
)
def test_target_refusals(given: Any, message: str) -> None:
    assert_refused(lambda: Target(*given), message)


# Building.


def test_compiled_builds_once_and_refuses_when_told() -> None:
    built: list[tuple[int, ...]] = []

    @compiled
    def kernel(width: int, heads: int) -> str:
        """A kernel of two constants."""
        built.append((width, heads))
        return f"kernel {width} x {heads}"

    assert kernel(4, 2) == kernel(4, 2) == "kernel 4 x 2" and built == [(4, 2)]
    with no_compile():
        assert kernel(4, 2) == "kernel 4 x 2"
        with pytest.raises(RuntimeError) as caught:
            kernel(8, 2)
    wanted = "kernel(8, 2) is not compiled and compiling is off (no_compile); call dsv41.prepare(cfg) first"
    assert str(caught.value) == wanted
    assert kernel(8, 2) == "kernel 8 x 2" and built == [(4, 2), (8, 2)]
    assert kernel.__name__ == "kernel" and kernel.__doc__ == "A kernel of two constants."


def test_compiled_refuses_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = compiled(lambda width: width)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="is not compiled and a graph is being captured"):
        kernel(3)


# Sentences.


def test_describe() -> None:
    assert describe(torch.zeros(2, 3)) == "[2, 3] float32"
    assert describe(torch.zeros(2, dtype=torch.int8, device="meta")) == "[2] int8 on meta"
    assert (describe("text"), describe(None), describe((1, 2))) == ("text", "None", "(1, 2)")


def test_check() -> None:
    check(True, "op", "anything", None)
    with pytest.raises(ValueError, match=r"^op: expected a thing, got 7$"):
        check(False, "op", "a thing", 7)


X = torch.zeros(2, 4)
TENSORS: dict[str, tuple[Any, str]] = {
    "no tensor": (
        lambda: check_tensor("op", "x", 3, (None,), torch.float32),
        r"op: expected x: \[\*\] float32, got 3",
    ),
    "dims": (
        lambda: check_tensor("op", "x", X, (None,), torch.float32),
        r"x: \[\*\] float32, got \[2, 4\] float32",
    ),
    "size": (lambda: check_tensor("op", "x", X, (2, 5), torch.float32), r"x: \[2, 5\] float32, got \[2, 4\]"),
    "dtype": (
        lambda: check_tensor("op", "x", X, (2, 4), torch.int8, torch.int32),
        r"x: \[2, 4\] int8\|int32, got",
    ),
    "device": (
        lambda: check_tensor("op", "x", X, (2, 4), torch.float32, like=X.to("meta")),
        "op: expected x on meta, got cpu",
    ),
    "contiguous": (
        lambda: check_tensor("op", "x", X[:, :2], (2, 2), torch.float32, contiguous=True),
        r"x: contiguous, got strides \(4, 1\)",
    ),
    "last": (
        lambda: check_tensor("op", "x", X.T, (4, 2), torch.float32),
        r"last dimension contiguous, got strides",
    ),
    "out apart": (
        lambda: output("op", X[:1].expand(2, 4), (2, 4), torch.float32, X),
        r"op: expected out: elements apart in memory, got strides \(0, 1\)",
    ),
    "out rows overlap": (
        lambda: output("op", torch.zeros(9).as_strided((2, 4), (3, 1)), (2, 4), torch.float32, X),
        r"op: expected out: elements apart in memory, got strides \(3, 1\)",
    ),
    "out": (
        lambda: output("op", X, (2, 5), torch.float32, X),
        r"op: expected out: \[2, 5\] float32, got \[2, 4\]",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensor_refusals(case: str) -> None:
    assert_refused(*TENSORS[case])


def test_strides_that_do_not_matter() -> None:
    """A size-one dimension may carry any stride, and so may a tensor without elements."""
    check_tensor("op", "x", X[:, ::4], (2, 1), torch.float32)
    check_tensor("op", "x", X[:0].expand(0, 4).T, (4, 0), torch.float32)
    check_tensor("op", "x", torch.zeros(0, 8)[:, ::2], (0, 4), torch.float32)


def test_output() -> None:
    new = output("op", None, (2, 3), torch.int32, X)
    assert new.shape == (2, 3) and new.dtype == torch.int32 and new.device == X.device
    assert output("op", X, (2, 4), torch.float32, X) is X
    for one in (X[:1, :1].expand(1, 1), X[0].expand(1, 4), X[0].expand(0, 4)):  # nothing lies on another
        assert output("op", one, tuple(one.shape), torch.float32, X) is one


@pytest.mark.parametrize(("value", "on"), [("", False), ("0", False), ("1", True), ("yes", True)])
def test_value_checks_are_asked_for(value: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV41_CHECK", value)
    assert _op.check_values() is on


def test_public_names() -> None:
    for name in dsv41.__all__:
        assert getattr(dsv41, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = dsv41.nothing
