"""Capture an `nn.Module` as a graph and its `OpGraph`.

The names in ``__init__.pyi`` are imported on first use, since the graph cache in this package does
not need torch.
"""

from fxpart.support.lazy_import import attach_stub

__getattr__, __all__ = attach_stub(__name__, __file__)
