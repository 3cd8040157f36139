from .api import mhc_collapse, mhc_expand, mhc_mixes

__all__ = ["mhc_collapse", "mhc_expand", "mhc_mixes"]
