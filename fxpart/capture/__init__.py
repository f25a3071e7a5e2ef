"""From an `nn.Module` to a captured graph and its `OpGraph`.

The names in ``__init__.pyi`` are imported when they are first used, since the cache of graphs in
here needs no torch.
"""

from fxpart.support.lazy_import import attach_stub

__getattr__, __all__ = attach_stub(__name__, __file__)
