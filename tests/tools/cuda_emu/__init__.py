"""Runs the CUDA device functions of the library on a CPU: g++ compiles the same text against `emu.h`.

One block or cluster at a time; its threads are fibers that switch where CUDA threads may wait. Reported, with
the thread and the line of source: deadlocks (what every thread waits for), accesses outside shared memory or
outside a tensor, misaligned ones, reads of shared memory that was never written or that a copy is in flight
to, two accesses without a barrier between them, operands of wgmma that change before the wait or that no
fence made visible. Of SM100 (sm100.cuh): tensor memory that nobody wrote or gave back, sums that are read and
operands and scales that change before a product's barrier, and barriers without their fences.
Accumulators are NaN until the wait. It proves numerics, indexing and synchronisation of one block or cluster;
not speed, registers, atomics between blocks, nor that wgmma's own sums round as the tensor cores do.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
_FILES = (
    "runtime.h", "state.h", "wgmma.h", "tensor.h", "runtime.cpp", "emu.h", "emu_types.h", "emu_hopper.h",
    "emu_sm100.h",
)  # fmt: skip
# Distributions switch on checks that take a jump to another fiber's stack for a broken program.
_FIBERS = ["-U_FORTIFY_SOURCE", "-fcf-protection=none", "-fno-omit-frame-pointer"]
_KERNEL_FLAGS = [
    *_FIBERS, "-std=c++20", "-O1", "-g", "-w", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing",
    "-fsanitize=kernel-address", "--param", "asan-instrumentation-with-call-threshold=0",
    "--param", "asan-stack=0", "--param", "asan-globals=0",
]  # fmt: skip


class _Shared:
    def __repr__(self) -> str:
        return "SHARED"


SCHEDULES = ("eager", "late", "first", "last")
SHARED = _Shared()
"""In ``args``: the pointer to the block's shared memory."""


class EmulationError(AssertionError):
    """A kernel did what it must not do; the message says what, by which thread, on which line."""


def available() -> bool:
    """Whether this machine can build emulations (g++ on x86-64 or another Linux with ucontext)."""
    return shutil.which("g++") is not None


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:1])} failed:\n{done.stderr[-6000:]}")


def _cached(name: str, key: str, make: Any) -> Path:
    folder = Path(tempfile.gettempdir()) / f"dsv41_cuda_emu_{os.getuid()}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}_{name}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = make(Path(scratch))
            os.replace(made, path)
    return path


def _library(source: str, call: str, kinds: str) -> tuple[Path, str]:
    tool = "".join((HERE / f).read_text("utf-8") for f in _FILES) + " ".join(_FIBERS)

    def make_runtime(scratch: Path) -> Path:
        made = scratch / "runtime.o"
        flags = [*_FIBERS, "-std=c++20", "-O3", "-g", "-fPIC", "-w"]
        _run(["g++", *flags, "-c", str(HERE / "runtime.cpp"), "-o", str(made)])
        return made

    runtime = _cached("runtime.o", tool, make_runtime)
    spell = {
        "p": "emu::Pointer{{slots[{0}]}}",
        "s": "emu::Pointer{{shared}}",
        "i": "static_cast<int>(reinterpret_cast<intptr_t>(slots[{0}]))",
        "l": "static_cast<long long>(reinterpret_cast<intptr_t>(slots[{0}]))",
        "f": "emu::unpack<float>(reinterpret_cast<uint64_t>(slots[{0}]))",
    }
    passed = ", ".join(spell[kind].format(i) for i, kind in enumerate(kinds))
    entry = f'extern "C" void dsv41_entry(void* shared, void* const* slots) {{ {call}({passed}); }}\n'
    text = f"{source}\n{entry}"

    def make(scratch: Path) -> Path:
        (scratch / "kernel.cpp").write_text(text, "utf-8")
        made = scratch / "kernel.so"
        include = ["-include", str(HERE / "emu.h"), "-I", str(HERE / "include"), "-I", str(HERE)]
        flags = [*_KERNEL_FLAGS, "-DDSV41_EMULATE", *include, f"-ffile-prefix-map={scratch}=."]
        _run(["g++", *flags, "-c", str(scratch / "kernel.cpp"), "-o", str(scratch / "kernel.o")])
        _run(["g++", "-shared", "-o", str(made), str(scratch / "kernel.o"), str(runtime)])
        return made

    return _cached("kernel.so", tool + text + " ".join(_KERNEL_FLAGS), make), text


def _located(message: str, library: Path, text: str) -> str:
    """The message with the lines of source that its return addresses stand for."""
    lines = message.split("\n")
    addresses = [line[1:] for line in lines if line.startswith("@")]
    kept = [line for line in lines if not line.startswith("@")]
    if addresses and shutil.which("addr2line"):
        command = ["addr2line", "-i", "-e", str(library), *addresses]
        found = subprocess.run(command, capture_output=True, text=True).stdout.split("\n")
        source = text.split("\n")
        for place in found:
            file, _, number = place.partition(" ")[0].rpartition(":")
            if file.endswith("kernel.cpp") and number.isdigit() and 0 < int(number) < len(source) - 1:
                kept.append(f"  line {number}: {source[int(number) - 1].strip()}")
            if len(kept) > 6:
                break
    return "\n".join(kept)


def tensor_map(x: torch.Tensor, box_rows: int) -> torch.Tensor:
    """What stands for a contiguous matrix's tensor map, for ``hopper::tile_copy``: a copy with a header."""
    data = x.view(torch.uint8).reshape(x.shape[0], -1)
    head = torch.zeros(128, dtype=torch.int64)
    head[:3] = torch.tensor([*data.shape, box_rows])
    return torch.cat([head.view(torch.uint8), data.flatten()])


def emulate(
    source: str,
    call: str,
    args: list[Any],
    *,
    grid: int | tuple[int, ...],
    threads: int | tuple[int, ...],
    shared_bytes: int = 0,
    cluster: int = 1,
    schedules: tuple[str, ...] = ("late", "eager"),
    uninitialised: str = "report",
    seconds: int = 120,
) -> None:
    """Run ``call`` (a device function of ``source``, template arguments included) for every thread of a grid.

    Args:
        source: CUDA text, as ``device_source(...)`` makes it.
        call: the callee, such as ``"body<64>"``.
        args: its arguments: CPU tensors (pointer to the first element; changed in place), ints, floats,
            `SHARED`; None is a null pointer.
        grid, threads: as a CUDA launch; up to three sizes.
        shared_bytes: size of the dynamic shared memory, aligned to 1,024.
        cluster: blocks of a cluster, neighbours in the grid; they run together.
        schedules: "late": copies land when nothing else can run, threads and blocks in ascending order;
            "eager": copies land at the first wait, descending order; "first", "last": as eager, and the first
            (the last) of every four warps is ahead of the others as far as barriers let it. The results must
            be the same bits.
        uninitialised: "report" reads of shared memory never written, or "allow" them (bytes of 0xFF).
        seconds: time limit of one schedule.

    Raises:
        EmulationError: see the module.
    """
    kinds, tensors = "", []
    for a in args:
        if isinstance(a, torch.Tensor):
            kinds += "p"
            tensors.append(a)
        elif a is None:
            kinds += "p"
        elif a is SHARED:
            kinds += "s"
        elif isinstance(a, float):
            kinds += "f"
        else:
            kinds += "i" if -(2**31) <= int(a) < 2**31 else "l"
    path, text = _library(source, call, kinds)
    library = ctypes.CDLL(str(path))
    library.emu_run.restype = ctypes.c_char_p

    redzone = 4096
    spans = [_bytes(t) for t in tensors]
    total = redzone + sum(len(s) + redzone + 1024 for s in spans) + 4096
    results: list[list[torch.Tensor]] = []
    for schedule in schedules:
        arena = torch.full((total,), 0xFF, dtype=torch.uint8)
        base = arena.data_ptr()
        at, begin = -base % 1024 + redzone, []
        for t, span in zip(tensors, spans, strict=True):
            start = at + t.storage_offset() * t.element_size() % 1024
            begin.append(start)
            arena[start : start + len(span)] = span
            at = start + len(span) + redzone
            at += -(at + base) % 1024
        slots, names, pointers = [], [], iter(begin)
        for i, a in enumerate(args):
            if isinstance(a, torch.Tensor):
                slots.append(base + next(pointers))
                names.append(f"argument {i} {list(a.shape)} {str(a.dtype).removeprefix('torch.')}".encode())
            elif isinstance(a, float):
                slots.append(int(torch.tensor(a, dtype=torch.float32).view(torch.int32)) & 0xFFFFFFFF)
            else:
                slots.append(0 if a is None or a is SHARED else int(a) & 0xFFFFFFFFFFFFFFFF)
        n = len(tensors)
        error = library.emu_run(
            (ctypes.c_uint * 3)(*_three(grid)),
            (ctypes.c_uint * 3)(*_three(threads)),
            ctypes.c_size_t(shared_bytes),
            (ctypes.c_void_p * max(len(slots), 1))(*slots),
            ctypes.c_void_p(base),
            ctypes.c_size_t(total),
            n,
            (ctypes.c_char_p * max(n, 1))(*names),
            (ctypes.c_size_t * max(n, 1))(*begin),
            (ctypes.c_size_t * max(n, 1))(*[len(s) for s in spans]),
            SCHEDULES.index(schedule),
            int(uninitialised == "allow"),
            seconds,
            cluster,
        )
        if error is not None:
            raise EmulationError(_located(f"{call} ({schedule}): {error.decode()}", path, text))
        results.append([arena[b : b + len(s)].clone() for b, s in zip(begin, spans, strict=True)])
    for other in results[1:]:
        for i, (a, b) in enumerate(zip(results[0], other, strict=True)):
            if not torch.equal(a, b):
                where = int((a != b).nonzero()[0])
                raise EmulationError(f"{call}: tensor {i} depends on the schedule, from byte {where} on")
    for span, result in zip(spans, results[0], strict=True):
        span.copy_(result)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """The bytes of memory from the first to the last element of a tensor, shared with it."""
    if t.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    flat = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
    extent = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
    start = t.storage_offset() * t.element_size()
    return flat[start : start + extent * t.element_size()]


def _three(size: int | tuple[int, ...]) -> tuple[int, ...]:
    sizes = (size,) if isinstance(size, int) else size
    return (*sizes, 1, 1)[:3]
