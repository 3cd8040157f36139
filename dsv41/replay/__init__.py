"""Bounded replay: run the decoder layers only on the end of a prompt.

The planner (`plan_decoder`, `plan_encoder_hit`) is NumPy only; `run_prefill` takes the layers as three hooks;
`dsv41.replay.device.to_device` turns a plan into torch tensors and is the only part that imports torch.
"""

from .config import ReplayConfig, ReplayConfigError, ReplayGeometry, ReplayMode, exact_keep
from .cost import Cost, flops, plan_flops
from .encoder import EncoderReplay, plan_encoder_hit
from .plan import PAD, ReplayPlan, plan_decoder
from .prefill import ReplayHooks, run_prefill
from .runtime import ReplayRuntime
from .spans import RequestSpan, SpanBatch

__all__ = [
    "PAD",
    "Cost",
    "EncoderReplay",
    "ReplayConfig",
    "ReplayConfigError",
    "ReplayGeometry",
    "ReplayHooks",
    "ReplayMode",
    "ReplayPlan",
    "ReplayRuntime",
    "RequestSpan",
    "SpanBatch",
    "exact_keep",
    "flops",
    "plan_decoder",
    "plan_encoder_hit",
    "plan_flops",
    "run_prefill",
]
