"""Runs the product of SM100 from its TileLang program, on a CPU, a warp at a time.

The program's function is called once a warp with a stand-in for `tilelang.language`; warps take turns and
switch where they wait, their 32 threads go together. It is the program that runs, not what the compiler makes
of it (that is compiled and looked at in tests/test_lowering.py). Assumed, from TileLang's documentation and
unchecked against a device:

- a barrier's phase ends with its last arrival and its last copy; waiting for a parity waits for that phase;
- copies and tcgen05 operations run by themselves: as early as they can, or as late (``late``, which also lets
  the last warp that can go first). A result that depends on which, is wrong one way;
- the copy engine and tcgen05 see what a warp stored only behind its fence;
- scales: 128 words, transposed by a warp as 4 x 32, copied to tensor memory; byte j is of values 32 j and on.

Reported: reads of what nobody wrote or fenced, accesses outside of a tensor, warps that wait for ever.
"""

import contextlib
import importlib
import inspect
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from dsv41_reference.quant import from_mxfp4

from dsv41.ops._tilelang import tilelang_sm100

NAN = float("nan")


class EmulationError(AssertionError):
    """What a device would have done wrong without a word."""


class _Stopped(BaseException):
    """Ends the warps of a block after an error in one of them."""


class Warp(threading.Thread):
    """32 threads of the block."""

    def __init__(self, block: "Block", index: int, body: Callable[[], None]):
        super().__init__(daemon=True)
        self.block, self.body = block, body
        self.threads = torch.arange(32 * index, 32 * index + 32)
        self.turn, self.ready, self.done = threading.Semaphore(0), lambda: True, False
        self.allocated, self.unfenced, self.behind = 0, [], False  # behind: a fence since the last wait

    def run(self) -> None:
        self.turn.acquire()
        try:
            if not self.block.stopped:
                self.body()
        except _Stopped:
            pass
        except BaseException as error:  # told by the block
            self.block.error = self.block.error or error
        self.done = True
        self.block.turn.release()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let the others run until ``ready()``."""
        self.ready, self.behind = ready, False
        self.block.turn.release()
        self.turn.acquire()
        if self.block.stopped:
            raise _Stopped


class Block:
    """One block: its warps, what they share, and the engines beside them."""

    def __init__(self, place: tuple[int, int], threads: int, body: Callable[[], None], late: bool):
        self.place, self.late = place, late
        self.turn, self.stopped = threading.Semaphore(0), False
        self.error: BaseException | None = None
        self.shared: list[Any] = []
        self.engines: deque[Callable[[], None]] = deque()
        self.met = [0, 0]  # warps at the block's barrier, and how often all were
        self.warps = [Warp(self, i, body) for i in range(threads // 32)]

    def run(self) -> None:
        for warp in self.warps:
            warp.start()
        while live := [warp for warp in self.warps if not warp.done]:
            try:
                able = [warp for warp in live if warp.ready()]
                if not able and not self.stopped:
                    if not self.engines:
                        raise EmulationError("warps that wait for ever")
                    self.engines.popleft()()
            except EmulationError as error:
                self.error = self.error or error
            self.stopped = self.error is not None
            chosen = able[-1:] if self.late else able[:1]
            for warp in live if self.stopped else chosen:
                warp.turn.release()
                self.turn.acquire()
        if self.error is not None:
            raise self.error

    def later(self, work: Callable[[], None]) -> None:
        """Give work to the engines, which do it in order."""
        self.engines.append(work)
        while self.engines and not self.late:
            self.engines.popleft()()


class Barrier:
    """Phases of arrivals and of copies that are under way."""

    def __init__(self, count: int):
        self.count, self.arrived, self.copies, self.phase = count, 0, 0, 0

    def step(self, arrivals: int = 0, copies: int = 0) -> None:
        self.arrived, self.copies = self.arrived + arrivals, self.copies + copies
        if self.arrived > self.count:
            raise EmulationError(f"{self.arrived} arrivals at a barrier of {self.count}")
        if self.arrived == self.count and self.copies == 0:
            self.arrived, self.phase = 0, self.phase + 1

    def passed(self, parity: int) -> bool:
        return self.phase % 2 != parity


class Region:
    """Part of a tensor: first index and size of every dimension."""

    def __init__(self, of: "Memory", index: tuple[Any, ...]):
        self.of = of
        spans = [i if isinstance(i, slice) else slice(i, i + 1) for i in index]
        spans = [
            slice(s.start or 0, n if s.stop is None else s.stop)
            for s, n in zip(spans, of.data.shape, strict=True)
        ]
        self.start, self.shape = [s.start for s in spans], [s.stop - s.start for s in spans]

    def view(self) -> torch.Tensor:
        """The part itself, dimensions of one cut off."""
        for first, size, whole in zip(self.start, self.shape, self.of.data.shape, strict=True):
            if first < 0 or first + size > whole:
                raise EmulationError(f"{self.start} of {self.shape} in {list(self.of.data.shape)}")
        part = self.of.data[tuple(slice(f, f + n) for f, n in zip(self.start, self.shape, strict=True))]
        return part.reshape([n for n in self.shape if n > 1]) if part.numel() > 1 else part

    def padded(self) -> torch.Tensor:
        """Rows past the end are zeros, as the copy engine gives them."""
        (first, rest), (rows, width) = self.start, self.shape
        if first < 0 or rest < 0 or rest + width > self.of.data.shape[1]:
            raise EmulationError(f"{self.start} of {self.shape} in {list(self.of.data.shape)}")
        part = self.of.data[first : first + rows, rest : rest + width]
        return torch.nn.functional.pad(part, (0, 0, 0, rows - len(part)))


class Memory:
    """A tensor. Of integers, -1 is what nobody wrote."""

    def __init__(self, data: torch.Tensor):
        self.data, self.hidden = data, set()  # hidden: stages that were stored and not fenced yet

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        if any(isinstance(i, slice) for i in index):
            return Region(self, index)
        for i, n in zip(index, self.data.shape, strict=True):
            if not bool((torch.as_tensor(i) >= 0).all() and (torch.as_tensor(i) < n).all()):
                raise EmulationError(f"{index} in {list(self.data.shape)}")
        found = self.data[index]
        return found if found.dim() else found.item()

    def __setitem__(self, index: tuple[Any, ...], value: torch.Tensor) -> None:
        self.data[index] = value
        self.hidden.add(index[0])
        here().unfenced.append((self, index[0]))


class Result(Memory):
    """What the program writes: an index names where a tile begins."""

    def __getitem__(self, index: Any) -> Region:
        return Region(self, index)


def here() -> Warp:
    """The warp that runs."""
    warp = threading.current_thread()
    assert isinstance(warp, Warp)
    return warp


class Threads:
    """The threads of a warp as one number: an index, or the same side of a branch."""

    def __init__(self, numbers: torch.Tensor):
        self.numbers = numbers

    def __lt__(self, other: int) -> bool:
        less = self.numbers < other
        assert less.all() or not less.any(), "a warp goes one way"
        return bool(less.all())

    def __mod__(self, other: int) -> torch.Tensor:
        return self.numbers % other

    def __floordiv__(self, other: int) -> torch.Tensor:
        return self.numbers // other


class Size:
    """A dimension that is known at the launch."""

    value = 0

    def __sub__(self, other: int) -> int:
        return self.value - other


class Declared(tuple[Any, ...]):
    """The shape of an argument, and its type."""

    dtype = ""


class Kind(str):
    """A type: a name, and its numbers."""

    def __call__(self, value: Any) -> Any:
        return value


class Language:
    """The part of `tilelang.language` that the program uses."""

    serial = unroll = vectorized = staticmethod(range)

    def min(self, a: torch.Tensor, b: int) -> torch.Tensor:
        return a.clamp(max=b)

    def cast(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        return x.bfloat16().double() if dtype == "bfloat16" else x.double()

    def reinterpret(self, bits: torch.Tensor, dtype: str) -> torch.Tensor:
        return bits.int().view(torch.float32).double()

    def if_then_else(self, condition: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
        return torch.where(condition, a, b)

    def __getattr__(self, name: str) -> Any:
        if name in ("float32", "uint32", "int32", "bfloat16") or name.startswith("float"):
            return Kind(name)
        raise AttributeError(f"the emulation does not know T.{name}")

    def prim_func(self, function: Any) -> Any:
        return function

    def dynamic(self, name: str) -> Size:
        return Size()

    def Tensor(self, shape: tuple[Any, ...], dtype: str) -> Declared:
        made = Declared(shape)
        made.dtype = dtype
        return made

    def ceildiv(self, a: Any, b: int) -> int:
        return -(-(a.value if isinstance(a, Size) else a) // b)

    @contextlib.contextmanager
    def Kernel(self, *grid: int, threads: int) -> Iterator[tuple[int, int]]:
        yield here().block.place

    def _once(self, make: Callable[[], Any]) -> Any:
        """The same object for every warp of the block: its n-th."""
        w = here()
        w.allocated += 1
        if len(w.block.shared) < w.allocated:
            w.block.shared.append(make())
        return w.block.shared[w.allocated - 1]

    def alloc_shared(self, shape: tuple[int, ...], dtype: str) -> Memory:
        words = dtype == "uint32"
        kind = torch.int64 if words else torch.float64
        return self._once(lambda: Memory(torch.full(shape, -1 if words else NAN, dtype=kind)))

    alloc_fragment = alloc_tmem = alloc_shared

    def alloc_barrier(self, counts: list[int]) -> list[Barrier]:
        return self._once(lambda: [Barrier(n) for n in counts])

    def alloc_var(self, dtype: str) -> int:
        return 0

    def get_thread_binding(self) -> Threads:
        return Threads(here().threads)

    def mbarrier_wait_parity(self, barrier: Barrier, parity: int) -> None:
        here().wait(lambda: barrier.passed(parity))

    def mbarrier_arrive(self, barrier: Barrier) -> None:
        barrier.step(arrivals=32)

    def tma_copy(self, source: Region, target: Region, barrier: Barrier) -> None:
        def land() -> None:
            target.view().copy_(source.padded())
            barrier.step(copies=-1)

        barrier.step(copies=1)
        here().block.later(land)

    def sync_warp(self) -> None:
        """Threads of a warp go together here."""

    def sync_threads(self) -> None:
        met = here().block.met
        turn = met[1]
        met[0] += 1
        if met[0] == len(here().block.warps):
            met[:] = 0, turn + 1
        here().wait(lambda: met[1] > turn)

    def tcgen05_sf_warp_transpose(self, words: Region) -> None:
        part = words.view()
        part.copy_(part.view(4, 32).T.reshape(-1).clone())

    def fence_proxy_async(self) -> None:
        for tensor, stage in here().unfenced:
            tensor.hidden.discard(stage)
        here().unfenced.clear()

    def tcgen05_cp_warpx4(self, source: Region, target: Memory) -> None:
        def copy() -> None:
            part = source.view()
            if (part < 0).any() or source.start[0] in source.of.hidden:
                raise EmulationError("scales that are not there, or not behind a fence")
            target.data.copy_(part.view(32, 4).T.reshape(-1, 1).expand(-1, target.data.shape[1]))

        here().block.later(copy)

    def tcgen05_gemm_blockscaled(
        self, a: Region, b: Region, total: Memory, a_scale: Memory, b_scale: Memory, *, transpose_B: bool,
        mbar: Barrier, clear_accum: bool, k_start: int, sf_a_granularity_k: int, sf_b_granularity_k: int,
    ) -> None:  # fmt: skip
        assert transpose_B and k_start == 0 and sf_a_granularity_k == sf_b_granularity_k == 32

        def product() -> None:
            made = scaled(a.view(), a_scale) @ scaled(b.view(), b_scale).T
            total.data.copy_(made if clear_accum else total.data + made)
            mbar.step(arrivals=1)

        here().block.later(product)

    def tcgen05_gemm(
        self, a: Region, b: Region, total: Memory, *, transpose_B: bool, mbar: Barrier, clear_accum: bool
    ) -> None:  # fmt: skip
        assert transpose_B
        if b.start[0] in b.of.hidden:
            raise EmulationError("a product of what is not behind a fence")

        def product() -> None:
            made = a.view() @ b.view().T
            total.data.copy_(made if clear_accum else total.data + made)
            mbar.step(arrivals=1)

        here().block.later(product)

    def tcgen05_after_thread_sync(self) -> None:
        here().behind = True

    def tcgen05_mma_arrive(self, barrier: list[Barrier]) -> None:
        here().block.later(lambda: barrier[0].step(arrivals=1))

    def copy(self, source: Memory, target: Any) -> None:
        """A row a thread: from tensor memory to registers, and from there to the result."""
        rows = here().threads
        if not isinstance(target, Region):
            if not here().behind:
                raise EmulationError("sums are read, and no fence is behind the last wait")
            target.data[rows] = source.data[rows]
            return
        (first, column), out, width = target.start, target.of.data, source.data.shape[1]
        if column + width > out.shape[1]:
            raise EmulationError(f"columns up to {column + width} of {out.shape[1]}")
        rows = rows[rows + first < len(out)]
        out[rows + first, column : column + width] = source.data[rows]


def scaled(values: torch.Tensor, words: Memory) -> torch.Tensor:
    """Rows times the powers of two in the four bytes of their words."""
    codes = torch.stack([words.data[:, 0] >> 8 * j & 255 for j in range(4)], 1)
    return values * torch.exp2(codes.double() - 127).repeat_interleave(32, 1)


def program(
    features: int,
    k: int,
    experts: int | None,
    groups: int | None = None,
    edit: tuple[str, str] | None = None,
) -> Any:
    """The program of `tilelang_sm100.product`, with a mistake if one is given: (old text, new text)."""
    text = Path(tilelang_sm100.__file__).read_text("utf-8")
    if edit is not None:
        assert edit[0] in text, edit[0]
        text = text.replace(*edit)
    module = types.ModuleType("edited")
    text = text.replace("import tilelang.language as T\n", "")
    module.__dict__["T"] = Language()
    exec(compile(text, "tilelang_sm100", "exec"), module.__dict__)
    return module.product(features, k, experts, groups)


def launch(function: Any, *arguments: torch.Tensor, late: bool = False) -> None:
    """Run the program over its grid: x, x_scale, w, w_scale, owner, out; values as f64, scales as words in
    int64.
    """
    for shape, x in zip(list(function.__annotations__.values()), arguments, strict=True):
        for size, n in zip(shape, x.shape, strict=True):
            if isinstance(size, Size):
                size.value = n
            assert isinstance(size, Size) or size == n, (shape, list(x.shape))
    tensors = [*(Memory(x) for x in arguments[:-1]), Result(arguments[-1])]
    rows, features = arguments[-1].shape
    tile = tilelang_sm100.ROWS, tilelang_sm100.FEATURES
    for row in range(-(-rows // tile[0])):
        for column in range(features // tile[1]):
            Block((column, row), 128, lambda: function(*tensors), late).run()


class Emulated:
    """The program in place of what is compiled of it, for tensors as a launch function gives them."""

    def __init__(self, function: Any, late: bool):
        self.function, self.late = function, late

    def __call__(self, *tensors: torch.Tensor) -> None:
        for (name, declared), x in zip(self.function.__annotations__.items(), tensors, strict=True):
            packed = declared.dtype == "float4_e2m1fn"
            wanted = getattr(torch, "float4_e2m1fn_x2" if packed else declared.dtype)
            assert x.numel(), f"{name}: a launch of nothing"
            assert x.dtype == wanted and x.is_contiguous(), f"{name}: {x.dtype}, strides {x.stride()}"
        *given, out = map(numbers, tensors)
        launch(self.function, *given, out, late=self.late)
        tensors[-1].copy_(out)


def numbers(x: torch.Tensor) -> torch.Tensor:
    """A kernel's argument as `launch` takes it: values as f64, words and ids as int64."""
    if x.dtype == torch.float4_e2m1fn_x2:
        codes = x.view(torch.uint8)
        ones = torch.full((len(codes), codes.shape[1] // 16), 127, dtype=torch.uint8)
        return from_mxfp4(codes, ones).double()
    if x.dtype == torch.uint32:
        return x.view(torch.int32).long() & 0xFFFFFFFF
    return x.double() if x.dtype.is_floating_point else x.long()


@contextlib.contextmanager
def emulated(module: str, late: bool = False) -> Iterator[None]:
    """Inside the context the launch functions of a kernel file of SM100 run on CPU tensors."""
    loaded: Any = importlib.import_module(module)
    builders = [name for name in ("_product", "_grouped") if name in vars(loaded)]
    kept = {name: vars(loaded)[name] for name in (*builders, "build", "sm100")}

    def build(function: Any, arch: str) -> Emulated:
        assert arch == "sm_100a", arch
        return Emulated(function, late)

    vars(loaded).update({name: inspect.unwrap(vars(loaded)[name]) for name in builders}, build=build)
    loaded.sm100 = types.SimpleNamespace(product=program, ROWS=tilelang_sm100.ROWS)
    try:
        yield
    finally:
        vars(loaded).update(kept)
