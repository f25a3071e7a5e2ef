"""From an `nn.Module` to a captured graph and its `OpGraph`."""

from fxpart.capture.api import Capture, capture, capture_graph
from fxpart.capture.eager_lifetimes import eager_graph
from fxpart.capture.export import export_program
from fxpart.capture.from_export import op_graph
from fxpart.capture.joint import JointCapture, joint_capture, joint_graph
from fxpart.capture.module_level import module_graph, trace_modules

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
