from .api import engram_gate, engram_hash, engram_lookup

__all__ = ["engram_gate", "engram_hash", "engram_lookup"]
