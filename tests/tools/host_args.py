"""What a compiled TileLang kernel says to its arguments, on a machine without its device.

Beside the machine code TileLang compiles a function of the host, which checks the type, every size and every
stride of what it is given and then asks the driver to launch. Here tensors of the CPU say that they lie on a
GPU: a call ends with TileLang's refusal, or where the driver is missing.
"""

import ctypes
from typing import Any

import torch

_POINTER = ctypes.pythonapi.PyCapsule_GetPointer
_POINTER.restype, _POINTER.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_DEVICE = 8  # where a DLTensor has its device: behind the address of the data
_CUDA = 2


class _Elsewhere:
    """A tensor of the CPU that says it lies on the first GPU."""

    def __init__(self, x: torch.Tensor):
        self.capsule = x.__dlpack__()
        ctypes.c_int32.from_address(_POINTER(self.capsule, b"dltensor") + _DEVICE).value = _CUDA

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0


def refusal(kernel: Any, *args: Any) -> str | None:
    """Why a kernel that `dsv41.ops._tilelang.build` made does not take these arguments, or None.

    Args:
        kernel: compiled for CUDA.
        args: of its launch, tensors on the CPU.
    """
    import tvm_ffi

    assert not torch.cuda.is_available(), "it would be launched"
    given = [tvm_ffi.from_dlpack(_Elsewhere(a)) if isinstance(a, torch.Tensor) else a for a in args]
    try:
        kernel.adapter.get_exportable_executable()(*given)
    except Exception as error:
        said = str(error)
        return None if "driver" in said else said
    raise AssertionError("launched without a GPU")
