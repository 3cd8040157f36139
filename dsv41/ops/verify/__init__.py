from .api import (
    RaggedSplit,
    Verified,
    apply_token_bitmask,
    sample_tokens,
    split_budget_ragged,
    verify_drafts,
)

__all__ = [
    "RaggedSplit",
    "Verified",
    "apply_token_bitmask",
    "sample_tokens",
    "split_budget_ragged",
    "verify_drafts",
]
