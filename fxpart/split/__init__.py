"""Cut an fx module into submodules, one for each partition, which compute the same together."""

from fxpart.split.api import split_module
from fxpart.split.placement import split_by_assignment
from fxpart.split.tags import split_by_tags

__all__ = ["split_by_assignment", "split_by_tags", "split_module"]
