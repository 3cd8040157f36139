"""Sampling and verification on Ascend as PyTorch operators: the reference's own, none of which waits for the
host. Never run there; several times the logits are allocated.
"""

from dsv41_reference.verify import sample_tokens, verify_drafts

__all__ = ["sample_tokens", "verify_drafts"]
