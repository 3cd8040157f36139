from .api import Boundary, mhc_boundary, mhc_collapse, mhc_expand, mhc_mixes, mhc_scratch

__all__ = ["Boundary", "mhc_boundary", "mhc_collapse", "mhc_expand", "mhc_mixes", "mhc_scratch"]
