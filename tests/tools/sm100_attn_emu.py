"""Runs the sparse attention of SM100 from its kernel file, on a CPU: the launch function and the program.

As sm100_emu.py, whose blocks, warps, barriers and engines these are, and further:

- the 32 threads of a warp are a dimension of every number; both ways of a choice are computed;
- a fragment's row belongs to a thread, as a copy from tensor memory gives it;
- a block barrier is a fence of tcgen05 too, as it is compiled; a wait is none;
- tcgen05.mma of bf16 with sums in float64, operands by rows or by columns, in parts of tensors.

Reported besides: an element that two threads touch, one of them writing, without a barrier in between; a
product of what was written without a barrier or without a fence since; a branch that a warp does not go as
one. Global memory outside of a tensor may be read, as NaN or a number that is far off, and not be used.
"""

import contextlib
import importlib.util
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch

from tests.tools import sm100_emu
from tests.tools.sm100_emu import (
    NAN,
    Block,
    Declared,
    EmulationError,
    Language,
    Memory,
    Region,
    Size,
    Threads,
)

MODULE = "dsv41.ops.attn.tilelang_sm100_cuda"
FAR_OFF = -(2**40)


def here() -> Any:
    """The warp that runs: also its number, how many barriers it passed, and whether a fence is behind it."""
    return sm100_emu.here()


class Lane(Threads):
    """The number of a thread, in arithmetic and as an index: [32, 1]. Only it may be in a branch."""

    def __add__(self, other: Any) -> torch.Tensor:
        return self.numbers + other

    def __floordiv__(self, other: int) -> torch.Tensor:
        return self.numbers // other

    def __mul__(self, other: int) -> torch.Tensor:
        return self.numbers * other

    __radd__ = __add__


class Kind(str):
    """A type: a name, and its numbers."""

    def __call__(self, value: Any) -> Any:
        return value


class Global(Memory):
    """An argument of the kernel."""

    written = False

    def __getitem__(self, index: Any) -> torch.Tensor:
        index = index if isinstance(index, tuple) else (index,)
        at = spread(index)
        held = torch.ones(at[0].shape, dtype=torch.bool)
        for i, n in zip(at, self.data.shape, strict=True):
            held &= (i >= 0) & (i < n)
        clamped = tuple(i.clamp(0, max(n - 1, 0)) for i, n in zip(at, self.data.shape, strict=True))
        nothing = NAN if self.data.dtype.is_floating_point else FAR_OFF
        if not self.data.numel():
            return torch.full(at[0].shape, nothing)
        return torch.where(held, self.data[clamped], nothing)

    def __setitem__(self, index: Any, value: torch.Tensor) -> None:
        at = inside(index if isinstance(index, tuple) else (index,), self.data.shape)
        self.data[at] = torch.as_tensor(value, dtype=self.data.dtype).expand(at[0].shape)
        self.written = True


def spread(index: tuple[Any, ...]) -> list[torch.Tensor]:
    """An index of every element."""
    numbers = (i.numbers if isinstance(i, Lane) else torch.as_tensor(i) for i in index)
    return list(torch.broadcast_tensors(*numbers))


def inside(index: tuple[Any, ...], shape: torch.Size) -> tuple[torch.Tensor, ...]:
    """An index of every element, in range."""
    at = spread(index)
    for i, n in zip(at, shape, strict=True):
        if not bool(((i >= 0) & (i < n)).all()):
            raise EmulationError(f"{int(i.min())} to {int(i.max())} in {list(shape)}")
    return tuple(at)


class Touch:
    """The last thread at every element, how many barriers its block had passed, and how many its warp."""

    def __init__(self, shape: torch.Size):
        self.thread, self.block, self.warp = (torch.full(shape, -1) for _ in range(3))

    def unordered(self, at: Any) -> bool:
        """Whether another thread was at one of these, with no barrier between it and here."""
        warp = here()
        me, there = warp.threads[:, None], self.thread[at]
        together = there // 32 == warp.index
        since = torch.where(together, self.warp[at] >= warp.passed, self.block[at] >= warp.block.met[1])
        return bool((since & (there != me) & (there >= 0)).any())

    def mark(self, at: Any) -> None:
        warp = here()
        self.thread[at] = warp.threads[:, None].expand(self.thread[at].shape)
        self.block[at], self.warp[at] = warp.block.met[1], warp.passed


class Watched(Memory):
    """Shared or tensor memory: which thread wrote and read every element last, and when."""

    def __init__(self, data: torch.Tensor):
        super().__init__(data)
        self.wrote, self.read = Touch(data.shape), Touch(data.shape)

    def reads(self, at: Any) -> None:
        if self.wrote.unordered(at):
            raise EmulationError("a read of what another thread wrote, without a barrier")
        self.read.mark(at)

    def writes(self, at: Any) -> None:
        if self.wrote.unordered(at) or self.read.unordered(at):
            raise EmulationError("a write over what another thread wrote or reads, without a barrier")
        self.wrote.mark(at)

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        if any(isinstance(i, slice) for i in index):
            return Region(self, index)
        at = inside(index, self.data.shape)
        self.reads(torch.broadcast_tensors(*at, here().threads[:, None])[:-1])
        return self.data[at]

    def __setitem__(self, index: tuple[Any, ...], value: Any) -> None:
        index = index if isinstance(index, tuple) else (index,)
        at = inside(index, self.data.shape)
        self.writes(torch.broadcast_tensors(*at, here().threads[:, None])[:-1])
        self.data[at] = torch.as_tensor(value, dtype=self.data.dtype).expand(at[0].shape)
        self.hidden.add(here().index)
        here().unfenced.append((self, here().index))


class Fragment(Memory):
    """Registers: a row a thread."""

    def rows(self, index: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        at = inside(index, self.data.shape)
        if not bool((at[0] == here().threads[:, None]).all()):
            raise EmulationError("another thread's registers")
        return at

    def __getitem__(self, index: tuple[Any, ...]) -> torch.Tensor:
        return self.data[self.rows(index)]

    def __setitem__(self, index: tuple[Any, ...], value: torch.Tensor) -> None:
        self.data[self.rows(index)] = value


class Local:
    """An array of a thread."""

    def __init__(self, count: int):
        self.data = torch.full((32, count), NAN, dtype=torch.float64)

    def __getitem__(self, i: Any) -> torch.Tensor:
        return (self.data[:, i : i + 1] if isinstance(i, int) else self.data[:, i[0]]).clone()

    def __setitem__(self, i: Any, value: Any) -> None:
        value = torch.as_tensor(value)
        if self.data.dtype != value.dtype:
            self.data = self.data.to(value.dtype)  # of the type that was stored last
        at = torch.tensor([i]) if isinstance(i, int) else i[0]
        self.data[:, at] = value.expand(32, len(at))


class Attention(Language):
    """The part of `tilelang.language` that the attention uses."""

    float32, int32, int64, uint8, uint32, bfloat16, float8_e4m3fn = map(
        Kind, ("float32", "int32", "int64", "uint8", "uint32", "bfloat16", "float8_e4m3fn")
    )

    def macro(self, function: Any) -> Any:
        return function

    def dynamic(self, name: str, dtype: str = "int32") -> Size:
        return Size()

    def StridedTensor(self, shape: tuple[Any, ...], strides: tuple[Any, ...], dtype: str) -> Declared:
        return self.Tensor(shape, dtype)

    @contextlib.contextmanager
    def Kernel(self, *grid: int, threads: int) -> Iterator[tuple[int, ...]]:
        block: Any = here().block
        block.grid = grid
        if not block.place:
            raise LookupError  # all that was asked for: how many blocks there are
        yield block.place

    def alloc_shared(self, shape: tuple[int, ...], dtype: str) -> Memory:
        whole = dtype == "int32"
        kind = torch.int64 if whole else torch.float64
        return self._once(lambda: Watched(torch.full(shape, FAR_OFF if whole else NAN, dtype=kind)))

    alloc_tmem = alloc_shared

    def alloc_fragment(self, shape: tuple[int, ...], dtype: str) -> Memory:
        return self._once(lambda: Fragment(torch.full(shape, NAN, dtype=torch.float64)))

    def alloc_local(self, shape: tuple[int], dtype: str) -> Local:
        return Local(*shape)

    def sync_threads(self) -> None:
        """With both fences around it, as it is compiled."""
        super().sync_threads()
        self.sync_warp()
        self.tcgen05_after_thread_sync()

    def mbarrier_wait_parity(self, barrier: Any, parity: int) -> None:
        super().mbarrier_wait_parity(barrier, parity)
        here().behind = False

    def tcgen05_after_thread_sync(self) -> None:
        here().behind = True

    def sync_warp(self) -> None:
        warp = here()
        warp.passed += 1

    def get_thread_binding(self) -> Any:
        return Lane(here().threads[:, None])

    def unroll(self, first: int, last: int | None = None) -> Any:
        """Of 8 or 16 numbers none needs another: all at once."""
        if last is not None:
            return range(first, last)
        return self.vectorized(first) if first >= 8 else range(first)

    def vectorized(self, count: int) -> list[torch.Tensor]:
        """All at once."""
        return [torch.arange(count)[None]]

    def Parallel(self, rows: int, columns: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """All at once, each thread its row."""
        assert rows == 32 * len(here().block.warps)
        return [(here().threads[:, None], torch.arange(columns)[None])]

    # ---- numbers ----

    def cast(self, x: Any, dtype: str) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if dtype == "bfloat16":
            return x.bfloat16().double()
        return x.double() if dtype.startswith("float") else x.long()

    def reinterpret(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        if dtype == "float32":
            x = x & 0xFFFFFFFF
            return torch.where(x >= 2**31, x - 2**32, x).int().view(torch.float32).double()
        return x.float().view(torch.int32).long()

    def if_then_else(self, condition: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
        return torch.where(condition, a, b)

    def min(self, a: Any, b: Any) -> Any:
        return torch.minimum(*map(torch.as_tensor, (a, b)))

    def max(self, a: Any, b: Any) -> Any:
        a, b = map(torch.as_tensor, (a, b))
        return torch.fmax(a, b) if a.dtype.is_floating_point else torch.maximum(a, b)

    def exp(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    def log(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()

    def infinity(self, dtype: str) -> float:
        return float("inf")

    # ---- tensor memory ----

    def behind_a_fence(self) -> None:
        if not here().behind:
            raise EmulationError("tensor memory with no fence of tcgen05 since the last wait")

    def clear(self, numbers: Memory) -> None:
        numbers.data[here().threads] = 0

    def copy(self, source: Any, target: Any) -> None:
        """Between rows of tensor memory and the registers of their threads."""
        self.behind_a_fence()
        here().touched = here().block.met[1]
        loads = isinstance(source, Region)
        memory: Any = source if loads else target
        registers: Any = target if loads else source
        rows, part = here().threads, memory.view()  # in range
        at = (rows[:, None], torch.arange(memory.start[1], memory.start[1] + part.shape[1])[None])
        if loads:
            memory.of.reads(at)
            registers.data[rows] = memory.of.data[at]
        else:
            memory.of.writes(at)
            memory.of.data[at] = registers.data[rows]

    def tcgen05_gemm(
        self, a: Any, b: Any, total: Any, *, transpose_A: bool = False, transpose_B: bool = False,
        mbar: Any, clear_accum: bool,
    ) -> None:  # fmt: skip
        self.behind_a_fence()
        a, b = (x if isinstance(x, Region) else x[:, :] for x in (a, b))
        for x in (a, b):
            if x.of.hidden:
                raise EmulationError("a product of what is not behind a fence")
        for x in (a, b, total):
            if bool((x.of.wrote.block >= here().block.met[1]).any()):
                raise EmulationError("a product of what was written without a barrier since")

        def product() -> None:
            left, right = a.view().T if transpose_A else a.view(), b.view().T if transpose_B else b.view()
            made = left @ right
            total.view().copy_(made if clear_accum else total.view() + made)
            if mbar is not None:
                mbar[0].step(arrivals=1)

        here().block.later(product)


class Emulated:
    """The program in place of what is compiled of it, for tensors as the launch function gives them."""

    def __init__(self, function: Any, late: bool):
        self.function, self.late = function, late

    def __call__(self, *given: Any) -> None:
        arguments, results = [], []
        for (name, kind), x in zip(self.function.__annotations__.items(), given, strict=True):
            if isinstance(kind, Kind):
                assert isinstance(x, float if kind == "float32" else int), f"{name}: {x!r}"
                arguments.append(x)
                continue
            assert isinstance(x, torch.Tensor) and x.numel(), f"{name}: {x!r}"
            assert x.dtype == getattr(torch, kind.dtype) and x.dim() == len(kind), f"{name}: {x.dtype}"
            assert x.stride(-1) == 1, f"{name}: strides {x.stride()}"
            assert all(isinstance(n, Size) or n == m for n, m in zip(kind, x.shape, strict=True)), name
            memory = Global(x.double() if x.dtype.is_floating_point else x.long())
            arguments.append(memory)
            results.append((x, memory))
        grid = self.block((), arguments)
        for place in torch.cartesian_prod(*map(torch.arange, grid)).tolist():
            self.block(tuple(place), arguments)
        for x, memory in results:
            if memory.written:
                x.copy_(memory.data)

    def block(self, place: tuple[int, ...], arguments: list[Any]) -> tuple[int, ...]:
        """Run one block, or with no place tell how many there are."""

        def body() -> None:
            self.function(*arguments)
            if here().touched == here().block.met[1]:
                raise EmulationError("tensor memory is given back, with no barrier since its last use")

        block: Any = Block(place, 128, body, self.late)  # type: ignore[arg-type]
        for number, warp in enumerate(block.warps):
            warp.index, warp.passed, warp.behind, warp.touched = number, 0, True, -1
        with contextlib.suppress(LookupError) if not place else contextlib.nullcontext():
            block.run()
        return block.grid


def kernel_file(edit: tuple[str, str] | None = None, late: bool = False) -> Any:
    """The kernel file as a module whose launch function runs on CPU tensors; ``edit``: a mistake in it."""
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None and spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        text = file.read()
    if edit is not None:
        if edit[0] not in text:
            raise KeyError(edit[0])
        text = text.replace(*edit)
    module: Any = types.ModuleType(MODULE)
    module.__package__ = MODULE.rpartition(".")[0]
    text = text.replace("import tilelang.language as T\n", "")
    module.T = Attention()
    exec(compile(text, spec.origin, "exec"), module.__dict__)
    module.build = lambda function, arch, **off: Emulated(function, late)
    module.arch_of = lambda x: "sm_100a"
    module._attend, module._combine = inspect.unwrap(module._attend), inspect.unwrap(module._combine)
    return module
