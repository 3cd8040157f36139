"""Runs Ascend C that TileLang emits on a CPU: g++ compiles the same text against a small set of headers.

Cores run one after the other, the threads of a SIMT function as fibers; a cube core and the vector core
beside it take turns. Reported: accesses outside of an on-chip memory or of a tensor, reads of on-chip memory
that nobody wrote, two threads (or two cores) or pipes that touch a byte without a barrier or notification
between them, barriers that not every thread reaches, waits that nothing notified.

It proves numerics and indexing, not that CANN means the same by its names. Assumed, from names and from
TileLang's templates (none of it checked against CANN or a device): ``asc_copy_*_align`` copies bursts with
strides in bytes; a warp is 32 threads; ``asc_reduce_*`` combines all lanes of a warp; conversions round to
nearest even; E4M3 saturates; ``expf``, ``logf`` and the like are accurate; tiles lie in L1 and L0C as
TileLang's layouts say, and a product's sums are float32 in the order of its values. TileLang's own templates
of products (``gemm.h``: the way from L1 through L0A and L0B) are replaced by loops. Not modelled: caches
between cores, timing, the second vector core of a pair.
"""

import contextlib
import ctypes
import importlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.tools.cuda_emu import EmulationError, _bytes, _cached, _run
from tests.tools.lowering import ascend_source

HERE = Path(__file__).parent
TYPES = HERE.parent / "cuda_emu"
_FIBERS = ["-U_FORTIFY_SOURCE", "-fcf-protection=none", "-std=c++20", "-w", "-fPIC", "-g"]
_CHECKED = [
    "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fsanitize=kernel-address",
    "--param", "asan-instrumentation-with-call-threshold=0",
    "--param", "asan-stack=0", "--param", "asan-globals=0",
]  # fmt: skip
_MEMORY = re.compile(r"(__(ubuf|cbuf|cc)__ (\w+) \*\w+ = )\(__\w+__ \w+ \*\)0;")  # each memory begins at 0
_PLACE = {"ubuf": "ub", "cbuf": "l1", "cc": "l0c"}
_HEAD = re.compile(r'extern "C" __global__ (__\w+__(?:\(1, 2\))?) void (\w+)\(([^)]*)\)')
_GUARD = 4096
LAUNCHED: set[str] = set()  # ops whose launch functions ran kernels in here; `pytest.mark.emulates` looks


def available() -> bool:
    """Whether this machine can build emulations."""
    return shutil.which("g++") is not None


def emitted(func: Any) -> str:
    """The Ascend C of a program; kept by the program's text, because TileLang's scheduler takes long."""
    import tilelang

    def make(scratch: Path) -> Path:
        (scratch / "source").write_text(ascend_source(func), "utf-8")
        return scratch / "source"

    key = f"{tilelang.__version__}\n{func.script()}"
    return _cached("ascend_source.cpp", key, make).read_text("utf-8")


class Emulated:
    """A TileLang program for Ascend as a callable of CPU tensors and numbers, in place of a compiled kernel.

    Args:
        func: the `T.prim_func`.
        cores: the grid.
        edit: changes the emitted Ascend C, to see that a test notices.
    """

    def __init__(self, func: Any, cores: int, edit: Callable[[str], str] = lambda source: source) -> None:
        self.func, self.cores = func, cores
        self.source = _MEMORY.sub(
            lambda m: f"{m[1]}reinterpret_cast<{m[3]}*>(emu::{_PLACE[m[2]]}());", edit(emitted(func))
        )
        found = _HEAD.search(self.source)
        assert found is not None, "one kernel in the source"
        self.name, self.units = found[2], 2 if "mix" in found[1] else 1
        if found[1] != "__vector__":
            self.cores = importlib.import_module("dsv41.ops._ascend.tilelang_cube").CORES
        # The kernel's parameters are in an order of the compiler's own: found by name.
        self.parameters = [tuple(p.rsplit(" ", 1)) for p in found[3].split(", ")]
        self.library = ctypes.CDLL(str(self._build()))
        self.library.emu_run.restype = ctypes.c_char_p

    def _build(self) -> Path:
        import tilelang

        passed = []
        for i, (kind, _) in enumerate(self.parameters):
            if kind.endswith("*"):
                passed.append(f"static_cast<{kind}>(slots[{i}])")
            elif kind == "float":
                passed.append(
                    f"emu::bits<float>(static_cast<uint32_t>(reinterpret_cast<uint64_t>(slots[{i}])))"
                )
            else:
                passed.append(f"static_cast<{kind}>(reinterpret_cast<intptr_t>(slots[{i}]))")
        call = f"{self.name}({', '.join(passed)});"
        text = f'{self.source}\nextern "C" void dsv41_kernel(void* const* slots) {{ {call} }}\n'
        text += f'extern "C" const int dsv41_units = {self.units};\n'
        key = "".join(
            p.read_text("utf-8") for p in sorted(HERE.rglob("*.[hc]*")) if p.suffix in (".h", ".cpp")
        )
        key += (TYPES / "emu_types.h").read_text("utf-8") + " ".join(_FIBERS + _CHECKED)
        templates = Path(tilelang.__file__).parent / "src"

        def make_runtime(scratch: Path) -> Path:
            made = scratch / "runtime.o"
            _run(["g++", *_FIBERS, "-O2", "-c", str(HERE / "runtime.cpp"), "-o", str(made)])
            return made

        runtime = _cached("ascend_runtime.o", key, make_runtime)

        def make(scratch: Path) -> Path:
            (scratch / "kernel.cpp").write_text(text, "utf-8")
            include = [f"-I{folder}" for folder in (HERE / "include", HERE, TYPES, templates)]
            objects = [str(scratch / "kernel.o"), str(runtime)]
            _run(["g++", *_FIBERS, *_CHECKED, *include, "-c", str(scratch / "kernel.cpp"), "-o", objects[0]])
            _run(["g++", "-shared", "-o", str(scratch / "kernel.so"), *objects])
            return scratch / "kernel.so"

        return _cached("ascend.so", key + text, make)

    runs = 0

    def __call__(self, *args: Any) -> None:
        """Run on ``args``, tensors in place; sizes and strides come from the tensors as on a device."""
        values: dict[str, Any] = {}
        assert len(args) == len(self.func.params)
        for param, value in zip(self.func.params, args, strict=True):
            buffer = self.func.buffer_map.get(param)
            values[buffer.data.name if buffer is not None else param.name] = value
            if buffer is None:
                continue
            assert isinstance(value, torch.Tensor) and value.dim() == len(buffer.shape), param.name
            strides = list(buffer.strides) or [None] * value.dim()
            stated, given = [*buffer.shape, *strides], [*value.shape, *value.stride()]
            for size, number in zip(stated, given, strict=True):
                if size is None:
                    continue
                if not hasattr(size, "name"):
                    assert int(size) == number or value.numel() == 0, f"{param.name}: {number}, not {size}"
                elif values.setdefault(size.name, number) != number:
                    assert value.numel() == 0, f"{param.name}: two values of {size.name}"
        slots, tensors = [], {}
        for kind, name in self.parameters:
            value = values[name]
            if isinstance(value, torch.Tensor):
                tensors[len(slots)] = (name, value)
                slots.append(0)
            elif kind == "float":
                slots.append(int(torch.tensor(float(value)).view(torch.int32)) & 0xFFFFFFFF)
            else:
                slots.append(int(value) & 0xFFFFFFFFFFFFFFFF)
        memory = _Memory([t for _, t in tensors.values()])
        for slot, begin in zip(tensors, memory.begins, strict=True):
            slots[slot] = memory.base + begin
        n = len(tensors)
        error = self.library.emu_run(
            self.cores,
            (ctypes.c_void_p * len(slots))(*slots),
            ctypes.c_void_p(memory.base),
            ctypes.c_size_t(len(memory.arena)),
            n,
            (ctypes.c_char_p * max(n, 1))(*[name.encode() for name, _ in tensors.values()]),
            (ctypes.c_size_t * max(n, 1))(*memory.begins),
            (ctypes.c_size_t * max(n, 1))(*memory.sizes),
        )
        if error is not None:
            raise EmulationError(f"{self.name}: {error.decode()}")
        memory.write_back()
        Emulated.runs += 1


class _Memory:
    """A copy of tensors with room between them that belongs to none; those that overlap stay together."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        spans = [_bytes(t) for t in tensors]
        self.sizes = [len(s) for s in spans]
        self.arena = torch.full(
            (sum(self.sizes) + (len(spans) + 1) * (_GUARD + 512),), 0xFF, dtype=torch.uint8
        )
        self.base, self.begins = self.arena.data_ptr(), [0] * len(spans)
        self.copies: list[tuple[torch.Tensor, int]] = []
        at, end, shift = _GUARD, 0, 0
        for i in sorted(range(len(spans)), key=lambda i: spans[i].data_ptr()):
            start = spans[i].data_ptr()
            if start >= end:
                at += _GUARD
                at += (start - self.base - at) % 512  # aligned as the caller's
                shift = start - at
            end = max(end, start + self.sizes[i])
            self.begins[i] = start - shift
            at = max(at, end - shift)
            self.copies.append((spans[i], self.begins[i]))
        for span, begin in self.copies:
            self.arena[begin : begin + len(span)] = span

    def write_back(self) -> None:
        """What the kernel wrote, to the tensors themselves."""
        for span, begin in self.copies:
            span.copy_(self.arena[begin : begin + len(span)])


@contextlib.contextmanager
def emulated(module: str, edit: Callable[[str], str] = lambda source: source) -> Iterator[Any]:
    """Inside the context the kernel file ``module`` launches on CPU tensors: what it builds is emulated.

    Args:
        edit: changes the emitted Ascend C.
    """
    from dsv41._op import ops
    from dsv41.ops import _ascend

    loaded: Any = importlib.import_module(module)
    kept, made = loaded.build, {}
    mine = {name for name, op in ops().items() if f"{op.package}.tilelang_npu" == module}
    launches = {name: launch for name, launch in vars(loaded).items() if name in mine}

    def noted(name: str, launch: Any) -> Any:
        def run(*args: Any) -> None:
            before = Emulated.runs
            launch(*args)
            if Emulated.runs > before:
                LAUNCHED.add(name)

        return run

    def build(func: Any) -> Emulated:
        return Emulated(func, _ascend.CORES, edit)

    builders = {name: b for name, b in vars(loaded).items() if hasattr(b, "__wrapped__")}

    def uncached(builder: Any) -> Any:
        def get(*args: Any) -> Any:
            key = (builder.__name__, args)
            if key not in made:
                made[key] = builder.__wrapped__(*args)
            return made[key]

        return get

    loaded.build = build
    for name, builder in builders.items():
        setattr(loaded, name, uncached(builder))
    for name, launch in launches.items():
        setattr(loaded, name, noted(name, launch))
    try:
        yield loaded
    finally:
        loaded.build = kept
        vars(loaded).update(builders | launches)
