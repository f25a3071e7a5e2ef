"""Pipelines: a model cut into stages after named modules, and stages made ready for an engine.

Names are imported when they are first used: the process of a stage needs none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# Under two names, or a type checker would take them for private; at run time they are not imported.
if TYPE_CHECKING:
    from fxpart.pipeline.build import build_pipeline_model as build_pipeline_model
    from fxpart.pipeline.chain import Chain as Chain
    from fxpart.pipeline.chain import StageModule as StageModule
    from fxpart.pipeline.chain import chain_stages as chain_stages
    from fxpart.pipeline.cut_points import (
        generate_pipeline_partition as generate_pipeline_partition,
    )
    from fxpart.pipeline.engines import ENGINES as ENGINES
    from fxpart.pipeline.engines import pipeline_stage as pipeline_stage
    from fxpart.pipeline.liveness import analyze_pipeline_module as analyze_pipeline_module
    from fxpart.pipeline.tied_weights import TiedGradient as TiedGradient
    from fxpart.pipeline.tied_weights import analyze_tie_weights as analyze_tie_weights
    from fxpart.pipeline.tied_weights import tied_gradient_stages as tied_gradient_stages

_HOMES = {
    "fxpart.pipeline.build": ("build_pipeline_model",),
    "fxpart.pipeline.chain": ("Chain", "StageModule", "chain_stages"),
    "fxpart.pipeline.cut_points": ("generate_pipeline_partition",),
    "fxpart.pipeline.engines": ("ENGINES", "pipeline_stage"),
    "fxpart.pipeline.liveness": ("analyze_pipeline_module",),
    "fxpart.pipeline.tied_weights": (
        "TiedGradient",
        "analyze_tie_weights",
        "tied_gradient_stages",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> object:
    """Import a public name from the module that it lives in."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fxpart.pipeline' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
