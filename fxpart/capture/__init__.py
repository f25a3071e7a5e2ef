"""From an `nn.Module` to a captured graph and its `OpGraph`.

Names are imported when they are first used, since the cache of graphs in here needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxpart.capture.api import Capture, capture, capture_graph
    from fxpart.capture.inference.eager_lifetimes import eager_graph
    from fxpart.capture.inference.export import export_program
    from fxpart.capture.inference.from_export import op_graph
    from fxpart.capture.inference.module_level import module_graph, trace_modules
    from fxpart.capture.training.joint import JointCapture, joint_capture, joint_graph

__all__ = [
    "Capture",
    "JointCapture",
    "capture",
    "capture_graph",
    "eager_graph",
    "export_program",
    "joint_capture",
    "joint_graph",
    "module_graph",
    "op_graph",
    "trace_modules",
]

_HOMES = {
    "api": ("Capture", "capture", "capture_graph"),
    "inference.eager_lifetimes": ("eager_graph",),
    "inference.export": ("export_program",),
    "inference.from_export": ("op_graph",),
    "inference.module_level": ("module_graph", "trace_modules"),
    "training.joint": ("JointCapture", "joint_capture", "joint_graph"),
}


def __getattr__(name: str) -> object:
    """Import a public name from the module that it lives in."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
