"""Runs TileLang programs on a CPU at the level of tiles, from the IR before any lowering to a GPU.

`T.Parallel` nests are vectorised over PyTorch tensors; copies, products, reductions and fills are PyTorch
operations; the grid and serial loops are Python's. Reported as `TileError`: accesses outside a buffer on the
chip, reads of elements that were never written there, parallel iterations that write different values to one
element, and anything that is not tile-level (thread indices, shuffles, extern calls: those have the CUDA
emulator). Accesses outside global memory read zero and write nothing, as the lowered code's guards do.

It proves numerics and indexing. It does not see layouts, barriers, warp specialisation, the copy engine, race
freedom between statements, registers, or the last bit of exp and rsqrt.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

FLOATS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
INTEGERS = {"bool": torch.bool, "int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16}
INTEGERS |= {"int32": torch.int32, "int64": torch.int64}
VIEWS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


class TileError(AssertionError):
    """A program did what it must not do."""


def prim_func(module: Any, builder: str, *args: Any) -> Any:
    """The program that a `@compiled` builder of a kernel module would compile."""
    kept = module.build
    module.build = lambda func, arch, **configs: func
    try:
        return getattr(module, builder).__wrapped__(*args)
    finally:
        module.build = kept


def run(program: Any, *args: Any) -> None:
    """Run a program (`T.prim_func`) on CPU tensors and numbers; results are written into the tensors."""
    _Interpreter(program).run(args)


def _storage(dtype: str) -> torch.dtype:
    """How a buffer is kept: wide unsigned numbers as int64."""
    return FLOATS.get(dtype) or INTEGERS.get(dtype) or torch.int64


def _bits(dtype: str) -> int:
    return int("".join(c for c in dtype.split("_")[0] if c.isdigit()) or 1)


def _wrap(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """An int64 value as ``dtype`` would hold it."""
    if dtype == "bool":
        return x != 0
    bits = _bits(dtype)
    if bits == 64:
        return x
    x = x & ((1 << bits) - 1)
    return x if dtype.startswith("u") else torch.where(x >= 1 << (bits - 1), x - (1 << bits), x)


def _cast(x: torch.Tensor, dtype: str) -> torch.Tensor:
    if dtype not in FLOATS:
        x = x.float() if x.dtype in LARGEST else x
        return _wrap((x.trunc() if x.is_floating_point() else x).to(torch.int64), dtype)
    target = FLOATS[dtype]
    if x.dtype in LARGEST:
        x = x.float()
    if target in LARGEST:
        x = x.float()
        x = torch.where(x.isnan(), x, x.clamp(-LARGEST[target], LARGEST[target]))
    return x.to(target)


def _reinterpret(x: torch.Tensor, source: str, dtype: str) -> torch.Tensor:
    bits = _bits(dtype)
    if source in FLOATS:
        x = x.contiguous().view(VIEWS[bits]).to(torch.int64)
    if dtype in FLOATS:
        return _wrap(x, f"int{bits}").to(VIEWS[bits]).view(FLOATS[dtype])
    return _wrap(x, dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return (
        x.float() if x.dtype in LARGEST else x if x.is_floating_point() or x.dtype == torch.bool else x.long()
    )


def _divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _floor_mod(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a - torch.div(a, b, rounding_mode="floor") * b


Operation = Callable[..., torch.Tensor]
BINARY: dict[str, Operation] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": _divide, "Mod": torch.fmod,
    "FloorDiv": lambda a, b: torch.div(a, b, rounding_mode="floor"), "FloorMod": _floor_mod,
    # A NaN loses against a number, as fmaxf and fminf of the GPU have it.
    "Max": lambda a, b: torch.fmax(a, b), "Min": lambda a, b: torch.fmin(a, b),
    "LT": torch.lt, "LE": torch.le, "GT": torch.gt, "GE": torch.ge, "EQ": torch.eq, "NE": torch.ne,
    "And": torch.logical_and, "Or": torch.logical_or,
    "shift_left": torch.bitwise_left_shift, "shift_right": torch.bitwise_right_shift,
    "bitwise_and": torch.bitwise_and, "bitwise_or": torch.bitwise_or, "bitwise_xor": torch.bitwise_xor,
    "pow": torch.pow, "atan2": torch.atan2, "fmod": torch.fmod,
}  # fmt: skip
UNARY: dict[str, Operation] = {
    "exp": torch.exp, "exp2": torch.exp2, "log": torch.log, "log2": torch.log2, "log1p": torch.log1p,
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "fabs": torch.abs, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "ceil": torch.ceil, "floor": torch.floor, "round": torch.round, "trunc": torch.trunc, "cos": torch.cos,
    "sin": torch.sin, "isnan": torch.isnan, "isfinite": torch.isfinite, "isinf": torch.isinf,
    "bitwise_not": torch.bitwise_not,
}  # fmt: skip
REDUCE: dict[str, tuple[Operation, Operation]] = {  # over a dimension; with what was there before
    "sum": (lambda x, d: x.sum(d), torch.add),
    "abssum": (lambda x, d: x.abs().sum(d), torch.add),
    "max": (lambda x, d: x.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).amax(d), torch.fmax),
    "min": (lambda x, d: x.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf).amin(d), torch.fmin),
    "absmax": (lambda x, d: x.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(d), torch.fmax),
}
IGNORED = {"tirx.assume", "tirx.tvm_storage_sync", "tl.sync_warp", "tl.pdl_sync", "tl.pdl_trigger"}


class _Buffer:
    """Values of a buffer and, on the chip, which of them were written."""

    def __init__(self, data: torch.Tensor, scope: str) -> None:
        self.data, self.scope = data, scope
        self.written = None if scope == "global" else torch.zeros(data.shape, dtype=torch.bool)


class _Interpreter:
    def __init__(self, program: Any) -> None:
        self.program = program
        self.names: dict[Any, Any] = {}
        self.buffers: dict[Any, _Buffer] = {}
        self.by_data: dict[Any, _Buffer] = {}
        self.nest: list[int] = []  # extents of the parallel loops around
        self.mask: torch.Tensor | None = None  # which of their iterations run

    def run(self, args: tuple[Any, ...]) -> None:
        back = []
        for parameter, value in zip(self.program.params, args, strict=True):
            if parameter not in self.program.buffer_map:
                self.names[parameter] = torch.as_tensor(value)
                continue
            buffer = self.program.buffer_map[parameter]
            dtype = _storage(str(buffer.dtype))
            kept = value.view(dtype) if value.element_size() == dtype.itemsize else value.to(dtype)
            if kept.data_ptr() != value.data_ptr():
                back.append((value, kept))
            for size, actual in zip(buffer.shape, value.shape, strict=True):
                if type(size).__name__ == "Var":
                    known = self.names.setdefault(size, torch.tensor(actual))
                    size = int(known)
                if int(size) != actual:
                    raise TileError(f"{buffer.name}: expected {size}, got {list(value.shape)}")
            self.buffers[buffer] = self.by_data[buffer.data] = _Buffer(kept, "global")
        self.statement(self.program.body)
        for value, kept in back:
            value.copy_(kept.to(value.dtype))

    # ---- expressions ----

    def scalar(self, e: Any) -> int:
        return int(self.value(e))

    def value(self, e: Any) -> torch.Tensor:
        kind = type(e).__name__
        if isinstance(e, (bool, int, float)):
            return torch.tensor(e)
        if kind in ("IntImm", "FloatImm"):
            dtype = str(e.dtype)
            return torch.tensor(float(e.value) if dtype in FLOATS else int(e.value)).to(
                FLOATS.get(dtype, torch.bool if dtype == "bool" else torch.int64)
            )
        if kind == "Var":
            if e not in self.names:
                raise TileError(f"{e} is not a tile-level value")
            return self.names[e]
        if kind == "Cast":
            return _cast(self.value(e.value), str(e.dtype))
        if kind == "BufferLoad":
            return self.load(e.buffer, [self.value(i) for i in e.indices])
        if kind == "Select":
            return self.choose(e.condition, e.true_value, e.false_value)
        if kind == "Not":
            return ~self.value(e.a).bool()
        if kind in BINARY:
            return self.binary(kind, e.a, e.b, str(e.dtype))
        if kind == "Call":
            return self.call(e)
        raise TileError(f"{kind} is not known: {e}")

    def binary(self, name: str, a: Any, b: Any, dtype: str) -> torch.Tensor:
        x, y = _wide(self.value(a)), _wide(self.value(b))
        if x.is_floating_point() != y.is_floating_point():
            x, y = (x, y.to(x.dtype)) if x.is_floating_point() else (x.to(y.dtype), y)
        if x.dtype == torch.bool and name not in ("And", "Or", "EQ", "NE"):
            x, y = x.long(), y.long()
        out = BINARY[name](x, y)
        if out.dtype == torch.bool:
            return out
        return out.to(FLOATS[dtype]) if dtype in FLOATS else _wrap(out, dtype)

    def choose(self, condition: Any, yes: Any, no: Any) -> torch.Tensor:
        c = self.value(condition).bool()
        if c.dim() == 0:
            return self.value(yes if bool(c) else no)
        kept = self.mask
        self.mask = c if kept is None else kept & c
        x = self.value(yes)
        self.mask = ~c if kept is None else kept & ~c
        y = self.value(no)
        self.mask = kept
        dtype = x.dtype
        return torch.where(c, _wide(x), _wide(y)).to(dtype)

    def call(self, e: Any) -> torch.Tensor:
        full = str(getattr(e.op, "name", e.op))
        name, args = full.rpartition(".")[2], e.args
        if name == "if_then_else":
            return self.choose(*args)
        if name == "infinity":
            return torch.tensor(math.inf)
        if name == "reinterpret":
            return _reinterpret(self.value(args[0]), str(args[0].dtype), str(e.dtype))
        if name in BINARY:
            return self.binary(name, args[0], args[1], str(e.dtype))
        if name in UNARY:
            x = _wide(self.value(args[0]))
            out = UNARY[name](x)
            return _wrap(out, str(e.dtype)) if name == "bitwise_not" else out
        if name in ("fma", "likely"):
            return (
                self.value(args[0]) * self.value(args[1]) + self.value(args[2])
                if name == "fma"
                else self.value(args[0])
            )
        if full in IGNORED:
            return torch.tensor(0)
        if name == "launch_thread_idx":
            raise TileError("thread indices are not tile-level")
        if full.startswith("tl.tileop."):
            self.tile(name, args)
            return torch.tensor(0)
        raise TileError(f"{full} is not tile-level")

    # ---- memory ----

    def buffer(self, b: Any) -> _Buffer:
        if b not in self.buffers:  # another view of the same memory
            base = self.by_data[b.data]
            view = _Buffer.__new__(_Buffer)
            view.scope = base.scope
            shape, dtype = [self.scalar(n) for n in b.shape], _storage(str(b.dtype))
            view.data = base.data.view(dtype).view(shape)
            view.written = None
            if base.written is not None and base.data.dtype.itemsize == dtype.itemsize:
                view.written = base.written.view(shape)
            self.buffers[b] = view
        return self.buffers[b]

    def places(self, b: Any, index: list[torch.Tensor], verb: str) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Broadcast indices and which of them are inside; outside on the chip is an error where it runs."""
        memory = self.buffer(b)
        spread = [i.long() for i in index]
        shape = torch.broadcast_shapes(
            *(i.shape for i in spread), () if self.mask is None else self.mask.shape
        )
        spread = [i.expand(shape) for i in spread]
        inside = torch.ones(shape, dtype=torch.bool)
        for i, size in zip(spread, memory.data.shape, strict=True):
            inside = inside & (i >= 0) & (i < size)
        runs = torch.ones((), dtype=torch.bool) if self.mask is None else self.mask
        if memory.scope != "global" and bool((~inside & runs).any()):
            raise TileError(f"{verb} outside {b.name} of {list(memory.data.shape)}")
        return spread, inside & runs

    def load(self, b: Any, index: list[torch.Tensor]) -> torch.Tensor:
        memory = self.buffer(b)
        spread, good = self.places(b, index, "read")
        at = tuple(i.clamp(0, max(n - 1, 0)) for i, n in zip(spread, memory.data.shape, strict=True))
        if memory.written is not None and bool((~memory.written[at] & good).any()):
            raise TileError(f"read of {b.name}, never written")
        if 0 in memory.data.shape:
            return torch.zeros(good.shape)
        dtype = str(b.dtype)
        out = (
            memory.data.view(torch.uint8)[at].view(memory.data.dtype)
            if memory.data.dtype in LARGEST
            else memory.data[at]
        )
        if dtype in FLOATS:
            return torch.where(good, _wide(out), 0.0).to(out.dtype)
        return torch.where(good, out.long() if dtype != "bool" else out, 0)

    def store(self, b: Any, index: list[torch.Tensor], value: torch.Tensor) -> None:
        memory, name = self.buffer(b), b.name
        value = _cast(value, str(b.dtype)).to(memory.data.dtype)
        index = [i.expand(torch.broadcast_shapes(i.shape, value.shape, tuple(self.nest))) for i in index]
        spread, good = self.places(b, index, "write")
        flat = torch.zeros(good.shape, dtype=torch.long)
        for i, size in zip(spread, memory.data.shape, strict=True):
            flat = flat * size + i
        raw = value.view(torch.uint8) if value.dtype in LARGEST else value
        flat, raw = flat[good], raw.expand(good.shape)[good]
        target = memory.data.view(torch.uint8) if memory.data.dtype in LARGEST else memory.data
        # Through indices, because the caller's tensor may be a strided view.
        at = tuple(i[good] for i in spread)
        target[at] = raw
        again = target[at]
        if bool((again != raw).any()) and not bool((again != again)[again != raw].all()):
            raise TileError(f"parallel iterations write different values to one element of {name}")
        if memory.written is not None:
            memory.written[at] = True

    def region(self, r: Any) -> tuple[Any, list[int], list[int]]:
        load, extents = r.args[0], [self.scalar(x) for x in r.args[2:]]
        begins = [self.scalar(i) for i in load.indices]
        return load.buffer, begins, [1] * (len(begins) - len(extents)) + extents

    def read(self, r: Any, used: bool = True) -> torch.Tensor:
        b, begins, extents = self.region(r)
        memory = self.buffer(b)
        clipped = [
            slice(max(0, a), max(0, min(a + x, n)))
            for a, x, n in zip(begins, extents, memory.data.shape, strict=True)
        ]
        whole = all(s.stop - s.start == x for s, x in zip(clipped, extents, strict=True))
        if memory.scope != "global":
            if not whole:
                raise TileError(f"region {begins} + {extents} outside {b.name} of {list(memory.data.shape)}")
            if used and memory.written is not None and not bool(memory.written[tuple(clipped)].all()):
                raise TileError(f"read of {b.name}, never written")
        if whole:
            return memory.data[tuple(clipped)]
        out = torch.zeros(extents, dtype=torch.float32).to(memory.data.dtype)
        part = memory.data[tuple(clipped)]
        if part.numel():
            inner = tuple(slice(s.start - a, s.stop - a) for s, a in zip(clipped, begins, strict=True))
            out[inner] = part
        return out

    def write(self, r: Any, value: torch.Tensor) -> None:
        b, begins, extents = self.region(r)
        memory = self.buffer(b)
        value = _cast(value, str(b.dtype)).to(memory.data.dtype).reshape(extents)
        clipped = [
            slice(max(0, a), max(0, min(a + x, n)))
            for a, x, n in zip(begins, extents, memory.data.shape, strict=True)
        ]
        if memory.scope != "global" and any(
            s.stop - s.start != x for s, x in zip(clipped, extents, strict=True)
        ):
            raise TileError(f"region {begins} + {extents} outside {b.name} of {list(memory.data.shape)}")
        if all(s.stop > s.start for s in clipped):
            inner = tuple(slice(s.start - a, s.stop - a) for s, a in zip(clipped, begins, strict=True))
            memory.data[tuple(clipped)] = value[inner]
            if memory.written is not None:
                memory.written[tuple(clipped)] = True

    def tile(self, name: str, args: Any) -> None:
        if name == "copy":
            (_, _, extents), source = self.region(args[1]), self.read(args[0], used=False)
            if source.numel() != math.prod(extents):
                raise TileError(f"copy of {list(source.shape)} to {extents}")
            self.write(args[1], source)
        elif name == "fill":
            self.write(args[0], self.value(args[1]).expand(self.region(args[0])[2]))
        elif name == "reduce":
            source, kind = _wide(self.read(args[0])), args[2].value
            over, join = REDUCE[kind]
            result = over(source, self.scalar(args[3]))
            if not bool(self.value(args[4])):
                old = _wide(self.read(args[1]))
                result = join(old, result.reshape(old.shape))
            self.write(args[1], result)
        elif name == "gemm":
            a, b = (_wide(self.read(r)) for r in args[:2])
            a, b = a.reshape(a.shape[-2:]).double(), b.reshape(b.shape[-2:]).double()
            a, b = a.T if bool(self.value(args[3])) else a, b.T if bool(self.value(args[4])) else b
            product = (a @ b).float()
            if not bool(self.value(args[9])):
                product = product + self.read(args[2]).float().reshape(product.shape)
            self.write(args[2], product)
        else:
            raise TileError(f"tile operation {name} is not known")

    # ---- statements ----

    def allocate(self, b: Any) -> None:
        dtype = _storage(str(b.dtype))
        shape = [self.scalar(n) for n in b.shape]
        poison = (
            torch.full(shape, math.nan).to(dtype)
            if str(b.dtype) in FLOATS
            else torch.full(shape, 0x5A).to(dtype)
        )
        for old in [k for k in self.buffers if k.data.same_as(b.data)]:
            del self.buffers[old]
        self.buffers[b] = self.by_data[b.data] = _Buffer(poison, b.scope())

    def statement(self, s: Any) -> None:
        kind = type(s).__name__
        if kind == "SeqStmt":
            for part in s.seq:
                self.statement(part)
        elif kind == "SBlockRealize":
            self.statement(s.block)
        elif kind == "SBlock":
            for b in s.alloc_buffers:
                self.allocate(b)
            self.statement(s.body)
        elif kind == "For":
            self.loop(s)
        elif kind == "BufferStore":
            self.store(s.buffer, [self.value(i) for i in s.indices], self.value(s.value))
        elif kind == "Evaluate":
            self.value(s.value)
        elif kind in ("Bind", "LetStmt"):
            if "launch_thread_idx" not in str(s.value):  # bound in every kernel; an error where it is used
                self.names[s.var] = self.value(s.value)
            if hasattr(s, "body"):
                self.statement(s.body)
        elif kind == "AttrStmt":
            self.statement(s.body)
        elif kind in ("AllocBuffer", "DeclBuffer"):
            self.allocate(s.buffer)
            if hasattr(s, "body"):
                self.statement(s.body)
        elif kind == "IfThenElse":
            self.branch(s)
        elif kind == "While":
            while bool(self.value(s.condition)):
                self.statement(s.body)
        else:
            raise TileError(f"statement {kind} is not known")

    def branch(self, s: Any) -> None:
        c = self.value(s.condition).bool()
        if c.dim() == 0:
            if bool(c):
                self.statement(s.then_case)
            elif s.else_case is not None:
                self.statement(s.else_case)
            return
        kept = self.mask
        for chosen, body in ((c, s.then_case), (~c, s.else_case)):
            self.mask = chosen if kept is None else kept & chosen
            if body is not None and bool(self.mask.any()):
                self.statement(body)
        self.mask = kept

    def loop(self, s: Any) -> None:
        begin, extent = self.scalar(s.min), self.scalar(s.extent)
        if int(s.kind) != 1:  # serial, pipelined, unrolled, the grid
            for i in range(begin, begin + extent):
                self.names[s.loop_var] = torch.tensor(i)
                self.statement(s.body)
            return
        depth = len(self.nest)
        loops = [s]
        while type(loops[-1].body).__name__ == "For" and int(loops[-1].body.kind) == 1:
            loops.append(loops[-1].body)
        self.nest += [self.scalar(x.extent) for x in loops]
        for j, x in enumerate(loops):
            shape = [-1 if axis == depth + j else 1 for axis in range(len(self.nest))]
            self.names[x.loop_var] = (torch.arange(self.nest[depth + j]) + self.scalar(x.min)).reshape(shape)
        self.statement(loops[-1].body)
        del self.nest[depth:]
