"""How long operators really take: measured on this machine's device, one by one, in order."""

from fxpart.profiling.api import profile_operators

__all__ = ["profile_operators"]
