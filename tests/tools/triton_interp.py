"""Triton's interpreter with the arithmetic of a GPU: `interpret(module)` gives its kernels for CPU tensors.

As shipped (3.6, 3.7, 3.9) it is silently wrong for low precision: tl.dot multiplies the bit patterns of bf16,
casts to bf16 and fp8 truncate or round half up, fp8 overflow wraps where the GPU saturates, and a NaN wins in
tl.max, tl.minimum and tl.maximum where the GPU drops it. All of that goes through PyTorch or NumPy here. It
says nothing about layouts, races between programs, or the last bit of exp.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def available() -> bool:
    """Whether Triton is here, in a version whose interpreter works with this numpy."""
    if importlib.util.find_spec("triton") is None:
        return False
    triton, numpy = (
        tuple(int(part) for part in importlib.metadata.version(name).split(".")[:2])
        for name in ("triton", "numpy")
    )
    return triton >= (3, 7) or numpy < (2, 4)  # 3.6 turns one-element arrays into numbers, which numpy ended


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    import triton

    old, knobs = os.environ.get("TRITON_INTERPRET"), getattr(triton, "knobs", None)
    os.environ["TRITON_INTERPRET"] = "1"
    before = knobs.runtime.interpret if knobs else None
    if knobs:
        knobs.runtime.interpret = True
    try:
        yield
    finally:
        if knobs:
            knobs.runtime.interpret = before
        if old is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = old


def interpret(module: str, edit: dict[str, str] | None = None) -> types.ModuleType:
    """A copy of a kernel module whose `@triton.jit` functions run in the corrected interpreter.

    Args:
        module: its dotted name, such as "dsv41.ops.quant.triton_cuda".
        edit: text to replace in its source, each of which must occur: for planting faults.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(module)
    with open(spec.origin, encoding="utf-8") as file:
        text = file.read()
    for old, new in (edit or {}).items():
        if old not in text:
            raise ValueError(f"interpret: expected {old!r} in {module}")
        text = text.replace(old, new)
    importlib.import_module(module)  # what it imports stays compiled for others
    with _interpreting():
        _correct()
        from triton.runtime.interpreter import InterpretedFunction

        # A file, because Triton reads the source of its functions.
        folder = tempfile.mkdtemp(prefix="dsv41_triton_")
        path = os.path.join(folder, "kernels.py")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        name = f"_interpreted_{abs(hash((module, text)))}"
        made = importlib.util.spec_from_file_location(name, path)
        assert made is not None and made.loader is not None
        copy = importlib.util.module_from_spec(made)
        copy.__package__ = module.rpartition(".")[0]
        sys.modules[name] = copy
        made.loader.exec_module(copy)
        for name, function in list(vars(copy).items()):  # functions of another kernel file
            if hasattr(function, "fn") and type(function).__name__ == "JITFunction":
                setattr(copy, name, InterpretedFunction(function.fn))
    return copy


_corrected = False


def _correct() -> None:
    global _corrected
    if _corrected:
        return
    _corrected = True
    import triton.language as tl
    from triton.runtime import interpreter as shipped

    floats = {
        tl.float32: torch.float32,
        tl.float64: torch.float64,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    largest = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
    integers = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32)}
    integers[8] = (np.int64, torch.int64)

    def to_torch(data: np.ndarray, dtype: Any) -> torch.Tensor:
        data = np.ascontiguousarray(data)
        return torch.from_numpy(data.view(integers[data.dtype.itemsize][0]).copy()).view(floats[dtype])

    def convert(data: np.ndarray, source: Any, target: Any) -> np.ndarray:
        """To nearest even; fp8 saturates. In the interpreter's storage: bit patterns for 8 and 16 bits."""
        x = to_torch(data, source)
        if target in largest and source != target:
            wide = x.double() if source == tl.float64 else x.float()
            x = torch.where(wide.isnan(), wide, wide.clamp(-largest[target], largest[target]))
        y = x.to(floats[target])
        out = y.view(integers[y.element_size()][1]).numpy().reshape(np.shape(data))
        if target in (tl.float16, tl.float32, tl.float64):
            return out.view({2: np.float16, 4: np.float32, 8: np.float64}[out.dtype.itemsize])
        return out.view({1: np.uint8, 2: np.uint16}[out.dtype.itemsize])

    convert_shipped = shipped._convert_float

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        toward_zero = rounding is not None and rounding == shipped._ir.ROUNDING_MODE.RTZ
        if source not in floats or target not in floats or toward_zero:
            return convert_shipped(data, source, target, rounding)
        out = convert(data, source, target)
        return out.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[out.dtype.itemsize])

    shipped._convert_float = convert_float
    builder = shipped.InterpreterBuilder
    cast_shipped = builder.cast_impl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        s, t = source.dtype.scalar, target.scalar
        low = {s, t} & {tl.bfloat16, tl.float8e4nv, tl.float8e5}
        if s in floats and t in floats and s != t and low:
            return shipped.TensorHandle(convert(source.data, s, t), t)
        if s in (tl.bfloat16, tl.float8e4nv, tl.float8e5) and t not in floats:
            source = shipped.TensorHandle(convert(source.data, s, tl.float32), tl.float32)
        return cast_shipped(self, source, target)

    builder.cast_impl = cast_impl
    builder.create_fp_trunc = builder.create_fp_ext = cast_impl
    builder.create_fp_to_fp = lambda self, source, target, rounding=None: cast_impl(self, source, target)

    def operand(handle: Any) -> np.ndarray:
        dtype = handle.dtype.scalar
        if dtype in (tl.bfloat16, tl.float8e4nv, tl.float8e5, tl.float16):
            return convert(handle.data, dtype, tl.float32)
        return handle.data

    def create_dot(
        self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> Any:
        x, y = operand(a), operand(b)
        if x.dtype == np.float32:
            wide = np.matmul(x.astype(np.float64), y.astype(np.float64))
            product = wide.astype(d.data.dtype)
        else:
            product = np.matmul(x, y, dtype=d.data.dtype)
        return shipped.TensorHandle(product + d.data, d.dtype.scalar)

    builder.create_dot = create_dot

    # A NaN loses against a number in min and max, unless asked otherwise.
    for method, function in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
        setattr(builder, method, lambda self, a, b, f=function: self.binary_op(a, b, f))

    # The language's own functions (tl.max, tl.sum, ...) are compiled ones when Triton was imported before.
    import triton.language.standard as standard
    from triton.runtime.jit import JITFunction

    own = {n: f for n, f in vars(standard).items() if isinstance(f, JITFunction)}
    made = {n: shipped.InterpretedFunction(f.fn) for n, f in own.items()}
    execute = shipped.GridExecutor.__call__

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        places = [(where, n) for where in (standard, tl) for n in own if vars(where).get(n) is own[n]]
        for where, n in places:
            setattr(where, n, made[n])
        try:
            return execute(self, *args, **kwargs)
        finally:
            for where, n in places:
                setattr(where, n, own[n])

    shipped.GridExecutor.__call__ = run
