"""Confidence-scheduled speculative decoding: calibrate, budget, split, verify, generate."""

from .accept import Accepted, accept
from .budget import (
    budget_curve,
    budget_of_tier,
    joint_tier,
    solve_budget,
    solve_budget_early_stop,
    solve_budget_joint,
    solve_budget_lossless,
    split_budget,
)
from .confidence import (
    Calibration,
    StaleConfidence,
    expected_calibration_error,
    first_survival,
    fit_calibration,
    survival,
)
from .cost import StepCost
from .decode import DecodeGraphs, Emission, default_sizes
from .generate import DraftCounts, Generated, OracleDrafter, generate
from .streams import Streams

__all__ = [
    "Accepted",
    "Calibration",
    "DecodeGraphs",
    "DraftCounts",
    "Emission",
    "Generated",
    "OracleDrafter",
    "StaleConfidence",
    "StepCost",
    "Streams",
    "accept",
    "budget_curve",
    "budget_of_tier",
    "default_sizes",
    "expected_calibration_error",
    "first_survival",
    "fit_calibration",
    "generate",
    "joint_tier",
    "solve_budget",
    "solve_budget_early_stop",
    "solve_budget_joint",
    "solve_budget_lossless",
    "split_budget",
    "survival",
]
