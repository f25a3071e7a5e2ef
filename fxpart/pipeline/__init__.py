"""Pipelines: a model cut into stages after named modules, and stages made ready for an engine."""

from fxpart.pipeline.build import build_pipeline_model
from fxpart.pipeline.chain import Chain, StageModule, chain_stages
from fxpart.pipeline.cut_points import generate_pipeline_partition
from fxpart.pipeline.engines import ENGINES, pipeline_stage
from fxpart.pipeline.liveness import analyze_pipeline_module
from fxpart.pipeline.tied_weights import TiedGradient, analyze_tie_weights, tied_gradient_stages

__all__ = [
    "ENGINES",
    "Chain",
    "StageModule",
    "TiedGradient",
    "analyze_pipeline_module",
    "analyze_tie_weights",
    "build_pipeline_model",
    "chain_stages",
    "generate_pipeline_partition",
    "pipeline_stage",
    "tied_gradient_stages",
]
