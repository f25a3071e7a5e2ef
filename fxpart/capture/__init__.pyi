"""The public names and the modules they live in. `__init__.py` imports each on first use."""

from fxpart.capture.api import Capture as Capture
from fxpart.capture.api import capture as capture
from fxpart.capture.api import capture_graph as capture_graph
from fxpart.capture.inference.export import export_program as export_program
from fxpart.capture.inference.from_export import op_graph as op_graph
from fxpart.capture.inference.module_level import module_graph as module_graph
from fxpart.capture.inference.module_level import trace_modules as trace_modules
from fxpart.capture.training.joint import JointCapture as JointCapture
from fxpart.capture.training.joint import joint_capture as joint_capture
from fxpart.capture.training.joint import joint_graph as joint_graph

__all__: list[str]
