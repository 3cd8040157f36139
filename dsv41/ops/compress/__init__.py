from .api import compress_pairs, copy_records, write_cache

__all__ = ["compress_pairs", "copy_records", "write_cache"]
