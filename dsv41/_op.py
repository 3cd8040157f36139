"""All the machinery of the library: an op is one schema, one reference and an ordered tuple of kernels."""

import contextlib
import contextvars
import functools
import importlib
import importlib.util
import math
import numbers
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_LIBRARY = torch.library.Library("dsv41", "DEF")
_OPS: dict[str, "Op"] = {}
_forced: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("dsv41_use", default=None)
_no_compile: contextvars.ContextVar[bool] = contextvars.ContextVar("dsv41_no_compile", default=False)
_invariant = False  # a plain name: torch.compile follows it, and compiles again when it changes
MANY_TOKENS = 1 << 40


class Unsupported(RuntimeError):
    """No kernel takes a call; the message has one line a candidate, each with its reason."""


def describe(value: Any) -> str:
    """A value as an error sentence shows it: tensors by shape, dtype and device, text as it is, the rest by
    repr, or by type where that is long.
    """
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        device = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{list(value.shape)} {dtype}{device}"
    if isinstance(value, str):
        return value
    try:
        text = repr(value)
    except ValueError:  # Python spells no integer of thousands of digits
        text = ""
    if not text:
        return f"{type(value).__name__} object"
    short = len(text) < 120 and "\n" not in text and "tensor(" not in text
    return text if short else f"{type(value).__name__} object"


def check(condition: bool, name: str, expected: str, got: Any) -> None:
    """Refuse a caller's mistake with the one sentence form of the library.

    Errors: ValueError ``<name>: expected <expected>, got <got>``; tensors are described by shape and dtype.
    """
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {describe(got)}")


def check_values() -> bool:
    """Whether values (ids in range, scale bytes) are checked on the host: ``DSV41_CHECK=1``."""
    return os.environ.get("DSV41_CHECK", "0") not in ("", "0")


def check_tensor(
    name: str,
    label: str,
    x: Any,
    shape: tuple[int | None, ...],
    *dtypes: torch.dtype,
    like: torch.Tensor | None = None,
    contiguous: bool = False,
) -> None:
    """Check one tensor argument: shape (None is any size), dtype, the device of ``like``, and stride.

    The last dimension must always be contiguous; ``contiguous`` asks it of the whole tensor.
    """
    good = isinstance(x, torch.Tensor) and x.dtype in dtypes
    size = x.shape if good else ()  # a plain loop: this runs several times in every call of an op
    good = good and len(size) == len(shape)
    for n, s in zip(size, shape, strict=False):
        good = good and (s is None or s == n)
    if not good:
        kinds = "|".join(str(d).removeprefix("torch.") for d in dtypes)
        spelled = ", ".join("*" if s is None else str(s) for s in shape)
        check(False, name, f"{label}: [{spelled}] {kinds}", x)
    if like is not None and x.device != like.device:
        check(False, name, f"{label} on {like.device}", f"{x.device}")
    if contiguous:
        if not x.is_contiguous():
            check(False, name, f"{label}: contiguous", f"strides {tuple(x.stride())}")
    else:
        check_last(name, label, x)


def check_last(name: str, label: str, x: torch.Tensor) -> None:
    """Check that the elements of the last dimension lie side by side: kernels take rows apart, not those."""
    if x.dim() and x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel():
        check(False, name, f"{label}: last dimension contiguous", f"strides {tuple(x.stride())}")


def check_apart(name: str, label: str, x: torch.Tensor) -> None:
    """Check that no two elements of a tensor that is written share memory (expanded, or rows that overlap).

    What a dimension steps over must hold all of the smaller steps: layouts that interleave are refused too.
    """
    if x.is_contiguous() or not x.numel():
        return
    reach = 0
    for step, n in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1):
        if step <= reach:
            check(False, name, f"{label}: elements apart in memory", f"strides {tuple(x.stride())}")
        reach += (n - 1) * step


# What a caller may give as a number, beside what torch.compile makes of one; a bool is none.
_WHOLE: tuple[type, ...] = (int, torch.SymInt, numbers.Integral)
_REAL: tuple[type, ...] = (*_WHOLE, float, torch.SymFloat, numbers.Real)
_MOST = 2**63 - 1


def check_sizes(name: str, least: int = 0, most: int = _MOST, **sizes: Any) -> None:
    """Check integers that a caller gives: from ``least`` to ``most``, of 64 bits when that is not given."""
    for label, size in sizes.items():
        whole = isinstance(size, _WHOLE) and not isinstance(size, bool)
        if not whole or not least <= size <= most:
            span = f"{least} or more" if most == _MOST else f"{least} to {most}"
            check(False, name, f"{label}: an integer of {span}", size)


_LARGEST = torch.finfo(torch.float32).max


def check_numbers(name: str, least: float = 0.0, above: bool = False, **given: Any) -> None:
    """Check real numbers that a caller gives: finite in float32, of at least ``least``, or ``above`` it."""
    for label, x in given.items():
        real = isinstance(x, _REAL) and not isinstance(x, bool) and -_LARGEST <= x <= _LARGEST
        if not real or x < least or (above and x == least):
            span = "" if least == -math.inf else f" above {least:g}" if above else f" of {least:g} or more"
            check(False, name, f"{label}: a finite number{span}", x)


def check_flags(name: str, **flags: Any) -> None:
    """Check that these arguments are True or False."""
    for label, flag in flags.items():
        if not isinstance(flag, bool):
            check(False, name, f"{label}: True or False", flag)


def given_outputs(name: str, out: Any, count: int) -> tuple[Any, ...]:
    """The ``count`` results that a caller gives to write into, None for each that is not given."""
    if out is None:
        return (None,) * count
    good = isinstance(out, tuple | list) and len(out) == count
    check(good, name, f"out: {count} results", out)
    return tuple(out)


def output(
    name: str,
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    like: torch.Tensor,
    label: str = "out",
) -> torch.Tensor:
    """The caller's ``out`` after a check, or a new tensor: the only place where an op's result is
    allocated.
    """
    if out is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    check_tensor(name, label, out, shape, dtype, like=like)
    check_apart(name, label, out)
    return out


def workspace(
    name: str,
    scratch: torch.Tensor | None,
    size: int,
    like: torch.Tensor,
    dtype: torch.dtype = torch.uint8,
) -> torch.Tensor:
    """The caller's ``scratch`` after a check, or a new one: empty on a CPU, where references need none.

    Args:
        size: elements of ``dtype`` that the call needs.
    """
    if scratch is None:
        return torch.empty(0 if like.device.type == "cpu" else size, dtype=dtype, device=like.device)
    check_tensor(name, "scratch", scratch, (None,), dtype, like=like)
    unit = "bytes" if dtype == torch.uint8 else "numbers"
    check(scratch.numel() >= size, name, f"scratch: at least {size} {unit}", scratch)
    check(scratch.data_ptr() % 16 == 0, name, "scratch: at a multiple of 16 bytes", scratch.data_ptr())
    return scratch


Parts = list[tuple[torch.dtype, tuple[int, ...]]]
_PART_ALIGN = 256  # bytes: where a part of a scratch begins


def _part_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return -(-dtype.itemsize * math.prod(shape) // _PART_ALIGN) * _PART_ALIGN


def parts_bytes(parts: Parts) -> int:
    """Bytes of a scratch that holds tensors of these types and shapes."""
    return sum(_part_bytes(dtype, shape) for dtype, shape in parts)


def split_scratch(scratch: torch.Tensor, parts: Parts) -> list[torch.Tensor]:
    """The tensors of ``parts`` as views of a uint8 scratch of at least ``parts_bytes(parts)``."""
    views, at = [], 0
    for dtype, shape in parts:
        views.append(scratch[at : at + dtype.itemsize * math.prod(shape)].view(dtype).view(shape))
        at += _part_bytes(dtype, shape)
    return views


@dataclass(frozen=True)
class Target:
    """What a kernel is chosen for: a torch device type and, for CUDA, the architecture (90 is SM90).

    ``packages`` overrides which packages count as installed, to ask about machines other than this one.
    """

    device: str
    arch: int | None = None
    packages: frozenset[str] | None = None

    def __post_init__(self) -> None:
        check(isinstance(self.device, str), "Target", "device: a torch device type as text", self.device)
        given = self.arch
        whole = given is None or (isinstance(given, int) and not isinstance(given, bool) and 0 < given < 1000)
        shown = repr(given) if isinstance(given, str) else given
        check(whole, "Target", "arch: an integer such as 90 for SM90, or None", shown)
        known = self.packages is None or isinstance(self.packages, Set)
        check(known, "Target", "packages: a set of names, or None", self.packages)

    @staticmethod
    def of(x: torch.Tensor) -> "Target":
        """The target that runs ops on ``x``. CUDA is asked once a device."""
        return _target(x.device.type, x.device.index)

    def has(self, package: str) -> bool:
        """Whether a package (or the ``nvcc`` program) is there, without importing it."""
        return package in self.packages if self.packages is not None else _installed(package)

    def __str__(self) -> str:
        return f"{self.device} sm{self.arch}" if self.device == "cuda" else self.device


@functools.cache
def _target(device: str, index: int | None) -> Target:
    if device == "cuda" and torch.version.hip:
        return Target("rocm")  # torch calls it cuda, with capabilities such as 9.0 that mean something else
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability(index)
        return Target("cuda", 10 * major + minor)
    return Target("npu" if device == "privateuseone" else device)


@functools.cache
def _installed(package: str) -> bool:
    if package == "nvcc":
        return compiler_found() or _asking_tilelang()
    return importlib.util.find_spec(package) is not None


def compiler_found() -> bool:
    """Whether nvcc is on PATH, in the usual folder or there as a wheel."""
    if shutil.which("nvcc") or Path("/usr/local/cuda/bin/nvcc").exists():
        return True
    try:
        return importlib.util.find_spec("nvidia.cu13") is not None
    except ModuleNotFoundError:  # no package of the name nvidia at all
        return False


def _asking_tilelang() -> bool:
    """Whether TileLang, which its own variables can send elsewhere, finds nvcc, or has kernels in its cache:
    a machine that only runs those needs no compiler.
    """
    if importlib.util.find_spec("tilelang") is None:
        return False
    env = importlib.import_module("tilelang.env").env
    home, kernels = env.CUDA_HOME, Path(env.TILELANG_CACHE_DIR).rglob("*.so")
    return bool(home and Path(home, "bin", "nvcc").exists()) or next(kernels, None) is not None


# What CI compiles for. Portable kernels too: elsewhere they would fail inside a compiler, or run untested.
CUDA_ARCHS = (90, 100, 103)


@dataclass(frozen=True)
class Kernel:
    """One candidate of an op: the file ``<name>.py`` beside the op's ``api.py``, imported when first chosen.

    ``supports(*op_args)`` returns None for yes or the reason why not; it reads host metadata only.
    """

    name: str
    device: str
    needs: tuple[str, ...] = ()
    archs: tuple[int, ...] = CUDA_ARCHS  # that a "cuda" kernel is built for
    supports: Callable[..., str | None] | None = None

    def __post_init__(self) -> None:
        if self.device == "cuda" and "tilelang" in self.needs:  # which compiles with it; Triton has its own
            object.__setattr__(self, "needs", (*self.needs, "nvcc"))

    def refusal(self, target: Target, args: tuple[Any, ...] | None) -> str | None:
        """Why this kernel does not take the call, or None when it does."""
        if target.device != self.device:
            return f"built for {self.device}"
        if self.device == "cuda" and target.arch not in self.archs:
            return "built for " + ", ".join(f"sm{a}" for a in self.archs)
        for package in self.needs:
            if not target.has(package):
                return f"{'program' if package == 'nvcc' else 'package'} '{package}' is not installed"
        return self.supports(*args) if self.supports is not None and args is not None else None


class Op:
    """An op that writes into given tensors: schema, reference, kernels in order of preference.

    Registered with ``torch.library`` under ``dsv41::<name>``; the fake implementation is empty because the
    public function allocates. On CPU tensors the reference runs: that is the product there. On an
    accelerator the first kernel that fits runs, and never the reference by itself.
    """

    def __init__(self, schema: str, *, reference: str, package: str | None, kernels: tuple[Kernel, ...] = ()):
        self.name = schema.split("(", 1)[0]
        self.reference, self.package, self.kernels = reference, package or "", kernels
        self._launchers: dict[str, Callable[..., None]] = {}
        _LIBRARY.define(schema)
        _LIBRARY.impl(self.name, self._dispatch, "CompositeExplicitAutograd")
        torch.library.register_fake(f"dsv41::{self.name}", lambda *args: None, lib=_LIBRARY)
        self._call = getattr(torch.ops.dsv41, self.name).default
        _OPS[self.name] = self

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def _dispatch(self, *args: Any) -> None:
        first = next(a for a in args if isinstance(a, torch.Tensor))
        self.load(self.select(Target.of(first), args))(*args)

    def select(self, target: Target, args: tuple[Any, ...] | None = None) -> str:
        """The kernel that takes this call; raises `Unsupported` with every candidate's reason."""
        forced = _forced_kernel(self.name)
        if forced == "torch" or (forced is None and target.device == "cpu"):
            return "torch"
        for kernel in self.kernels:
            if forced in (None, kernel.name) and kernel.refusal(target, args) is None:
                return kernel.name
        reasons = self.explain(target, args)
        lines = [f"  {kernel:<16} {reason or 'available'}" for kernel, reason in reasons if kernel != "torch"]
        lines.append(f"  {'torch':<16} available; choose it with dsv41.use('torch')")
        wanted = f" (asked for {forced})" if forced else ""
        raise Unsupported(f"{self.name}: no kernel takes this call on {target}{wanted}\n" + "\n".join(lines))

    def explain(self, target: Target, args: tuple[Any, ...] | None = None) -> list[tuple[str, str | None]]:
        """``[(kernel, None | reason)]`` in order of preference, the reference last."""
        rows = [(k.name, k.refusal(target, args)) for k in self.kernels]
        on_cpu = target.device == "cpu"
        return [*rows, ("torch", None if on_cpu else "only on request: dsv41.use('torch')")]

    def load(self, kernel: str) -> Callable[..., None]:
        """The launch function of a kernel (or of the reference, ``torch``) with the op's flat arguments."""
        if kernel not in self._launchers:
            if kernel == "torch":
                module, name = self.reference.split(":")
            else:
                known = [k.name for k in self.kernels]
                check(kernel in known, self.name, f"kernel: one of {[*known, 'torch']}", kernel)
                module, name = f"{self.package}.{kernel}", self.name
            self._launchers[kernel] = getattr(importlib.import_module(module), name)
            _watch_triton()
        return self._launchers[kernel]


def _forced_kernel(op: str) -> str | None:
    chosen = _forced.get()
    if chosen is not None and (op in chosen or "*" in chosen):
        return chosen.get(op, chosen.get("*"))
    env = os.environ.get("DSV41_IMPL")
    if not env:
        return None
    rules = {}
    for part in env.split(","):
        name, _, kernel = (text.strip() for text in part.rpartition("="))
        known = bool(kernel) and (not name or name in _OPS)
        check(known, "DSV41_IMPL", "a kernel, or op=kernel parts with commas between", env)
        rules[name or "*"] = kernel
    return rules.get(op, rules.get("*"))


@contextlib.contextmanager
def use(kernel: str, *chosen: str | Callable[..., Any]) -> Iterator[None]:
    """Inside the context the named ops (all, when none is named) run on ``kernel`` or raise `Unsupported`.

    Args:
        kernel: a kernel's name, or "torch" for the reference.
        chosen: ops, by public function or by name.
    """
    names = [_op_name("use", op) for op in chosen]
    asked = [ops()[name] for name in names] or ops().values()
    known = {"torch", *(k.name for op in asked for k in op.kernels)}
    check(kernel in known, "use", f"kernel: one of {sorted(known)}", repr(kernel))
    token = _forced.set({**(_forced.get() or {}), **dict.fromkeys(names or ("*",), kernel)})
    try:
        yield
    finally:
        _forced.reset(token)


def ops() -> dict[str, Op]:
    """Every registered op by name."""
    importlib.import_module("dsv41.ops")
    return dict(_OPS)


def explain(op: str | Callable[..., Any], target: Target | None = None) -> list[tuple[str, str | None]]:
    """Which kernels of an op fit a target, in order, each with None (fits) or the reason why not.

    Args:
        op: the op's public function or its name.
        target: any `Target`, also of a machine that is not here; None is the CPU.
    """
    target = target or Target("cpu")
    check(isinstance(target, Target), "explain", "target: a Target", target)
    return ops()[_op_name("explain", op)].explain(target)


def _op_name(caller: str, op: Any) -> str:
    name = op if isinstance(op, str) else getattr(op, "__name__", None)
    table = ops()
    check(name in table, caller, f"an op of dsv41.ops: {', '.join(sorted(table))}", op)
    return str(name)


@contextlib.contextmanager
def no_compile() -> Iterator[None]:
    """Inside the context a kernel that is not compiled yet is an error: proves that a step cannot stall."""
    _watch_triton()
    token = _no_compile.set(True)
    try:
        yield
    finally:
        _no_compile.reset(token)


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """Inside the context a row's bits depend neither on other rows of a call nor on how many there are.

    That is promised for kernels on an accelerator, except ``torch_cuda`` of `block_linear` and
    `grouped_linear` (sizes without a kernel), which multiplies with a library. On a CPU the references run,
    and float32 sums of the matrix library depend on the number of rows, in this context too; there
    ``dsv41_reference.accumulate(torch.float64, row_at_a_time=True)`` makes rows independent.

    Most ops hold it anyway. `block_linear`, `grouped_linear`, `mxfp4_moe` and `sparse_attn` choose the
    order of their sums by the number of tokens: here they take, for every call, the one of many tokens,
    which is slower for few; and `linear` takes a kernel with one order instead of a library's. The classes
    outside are listed in docs/linear.md and docs/experts.md. Call `prepare` inside too. Scratch functions
    follow the context: ask for sizes inside it. A graph keeps what it was captured with. All threads of the
    process are in it.
    """
    global _invariant
    before, _invariant = _invariant, True
    try:
        yield
    finally:
        _invariant = before


def in_batch_invariant() -> bool:
    """Whether the process is inside `batch_invariant`."""
    return _invariant


def tiling_tokens(tokens: int) -> int:
    """The number of tokens by which an op chooses the order of its sums."""
    return MANY_TOKENS if _invariant else tokens


def refuse_compiling(kernel: str) -> None:
    """Raise where a kernel must be there already: under `no_compile` and while a graph is captured."""
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if _no_compile.get() or capturing:
        where = "a graph is being captured" if capturing else "compiling is off (no_compile)"
        raise RuntimeError(f"{kernel} is not compiled and {where}; call dsv41.prepare(cfg) first")


def _watch_triton() -> None:
    """Let Triton, once it is imported, ask before it compiles: through the hook that it offers for that."""
    runtime = getattr(getattr(sys.modules.get("triton"), "knobs", None), "runtime", None)
    before = getattr(runtime, "jit_cache_hook", None)
    if runtime is None or getattr(before, "asks_dsv41", False):
        return

    def hook(**what: Any) -> Any:
        refuse_compiling(f"{what['repr']} (Triton)")
        return before(**what) if before is not None else None

    hook.asks_dsv41 = True  # pyright: ignore[reportFunctionMemberAccess]
    runtime.jit_cache_hook = hook


def compiled(builder: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a kernel builder by its (hashable) arguments; refuse to build under `no_compile` or in
    capture.
    """
    cache: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(builder)
    def build(*args: Any) -> Any:
        if args not in cache:
            refuse_compiling(f"{builder.__name__}({', '.join(map(repr, args))})")
            cache[args] = builder(*args)
        return cache[args]

    return build
