"""Expert-parallel load balancing: where the copies of experts live, how tokens split over them, and when to
change it.

NumPy and the standard library only. Start with ``rebalance_experts`` (a map from loads), ``water_fill`` and
``to_table`` (the split over existing copies, no transfers), ``repair`` (few transfers), ``Balancer`` (which
of these, and when).
"""

from .dispatch import dispatch
from .maps import count_transfers, duplicates, imbalance, logical_maps, lower_bound, rank_loads
from .plan import greedy_map, rebalance_experts
from .repair import Move, Repair, apply_moves, repair
from .split import equal_shares, to_table, water_fill
from .state import Balancer, Decision, Metrics, expected_maximum, metrics, noise_floor
from .stats import LoadWindow, Quality, count_pairs, roll
from .transfer import InMemory, Transport, transfer

__all__ = [
    "Balancer",
    "Decision",
    "InMemory",
    "LoadWindow",
    "Metrics",
    "Move",
    "Quality",
    "Repair",
    "Transport",
    "apply_moves",
    "count_pairs",
    "count_transfers",
    "dispatch",
    "duplicates",
    "equal_shares",
    "expected_maximum",
    "greedy_map",
    "imbalance",
    "logical_maps",
    "lower_bound",
    "metrics",
    "noise_floor",
    "rank_loads",
    "rebalance_experts",
    "repair",
    "roll",
    "to_table",
    "transfer",
    "water_fill",
]
