"""Sampling and verification as PyTorch operators on the device: the reference's own, none of which waits for
the host.

For what the Triton kernels do not take: top-k and top-p, which sort the vocabulary, f64 logits, and the
residual masses of `block`. Several times the logits are allocated, in a graph from its pool.
"""

from dsv41_reference.verify import sample_tokens, verify_drafts

__all__ = ["sample_tokens", "verify_drafts"]
