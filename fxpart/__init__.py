"""Cut a PyTorch model over devices, and say whether it fits and how fast it will be.

The library knows neither Hydra nor MLflow. Its flow: a model is captured (`fxpart.capture`) as an
`OpGraph`; with a `Topology` it is a `Problem`; a mode (`fxpart.modes`) makes an `Assignment` of it;
`evaluate` says what that costs. What needs torch is in `fxpart.capture` and `fxpart.models`.

Names are imported when they are first used, so that importing one error class stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxpart.assignment import Assignment
    from fxpart.cost.evaluate import evaluate
    from fxpart.cost.evaluation import DeviceUse, Evaluation
    from fxpart.cost.roofline import LatencyModel
    from fxpart.errors import (
        CacheError,
        CaptureError,
        CycleError,
        FxpartError,
        InfeasibleError,
        SpecError,
    )
    from fxpart.graph import OpGraph
    from fxpart.modes import MODES, make_mode
    from fxpart.problem import Problem, make_problem
    from fxpart.topology import DeviceSpec, Link, Topology, uniform_topology

__all__ = [
    "MODES",
    "Assignment",
    "CacheError",
    "CaptureError",
    "CycleError",
    "DeviceSpec",
    "DeviceUse",
    "Evaluation",
    "FxpartError",
    "InfeasibleError",
    "LatencyModel",
    "Link",
    "OpGraph",
    "Problem",
    "SpecError",
    "Topology",
    "evaluate",
    "make_mode",
    "make_problem",
    "uniform_topology",
]

_HOMES = {
    "fxpart.assignment": ("Assignment",),
    "fxpart.cost.evaluate": ("evaluate",),
    "fxpart.cost.evaluation": ("DeviceUse", "Evaluation"),
    "fxpart.cost.roofline": ("LatencyModel",),
    "fxpart.errors": (
        "CacheError",
        "CaptureError",
        "CycleError",
        "FxpartError",
        "InfeasibleError",
        "SpecError",
    ),
    "fxpart.graph": ("OpGraph",),
    "fxpart.modes": ("MODES", "make_mode"),
    "fxpart.problem": ("Problem", "make_problem"),
    "fxpart.topology": ("DeviceSpec", "Link", "Topology", "uniform_topology"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name from the module that it lives in."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fxpart' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
