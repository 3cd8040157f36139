"""Heads of the drafter."""

from .api import DraftBlock, markov_bias

__all__ = ["DraftBlock", "markov_bias"]
