"""The stages of a GPT-2 as processes on torch's engine: steps measured beside those predicted."""

import os
from collections.abc import Sequence

from benchmarks.execution_models import PIPELINED
from benchmarks.execution_scene import machine_topology
from runner.measured import error_pct

__all__ = ["pipeline_rows"]

HEADS = (
    "schedule",
    "stages",
    "work",
    "measured ms",
    "predicted ms",
    "error",
    "on own cores ms",
    "peak MiB",
    "predicted",
    "results",
)
MICROBATCHES = 8


def pipeline_rows() -> tuple[Sequence[str], list[list[str]]]:
    """Return heads and a row for each schedule, number of stages and kind of step."""
    raise NotImplementedError
