"""The numerics of V4.1-Flash in plain PyTorch: one function an op, and a dense whole-sequence model.

Imports torch only, never ``dsv41``. Used as the CPU implementation of ``dsv41.ops``, as the oracle of the
kernel tests, and as the executable definition in the documentation.
"""

from .numerics import accumulate, keep_weights

__all__ = ["accumulate", "keep_weights"]
