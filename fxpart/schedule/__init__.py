"""Simulated pipeline schedules over microbatches: the time and memory of a step."""

from fxpart.schedule.costs import PipelineCosts, StageCost, StageLink
from fxpart.schedule.engine_memory import engine_peak_bytes
from fxpart.schedule.engine_stages import EngineStage, engine_stages
from fxpart.schedule.from_assignment import stage_costs
from fxpart.schedule.least_step import least_interleaved_share, least_step_s
from fxpart.schedule.orders import SCHEDULES, Action, ordered_actions
from fxpart.schedule.result import (
    ReplicaSum,
    ScheduleResult,
    StageEvent,
    StageTransfer,
    StageUpdate,
)
from fxpart.schedule.shared_cores import step_on_cores
from fxpart.schedule.simulate import simulate_schedule

__all__ = [
    "SCHEDULES",
    "Action",
    "EngineStage",
    "PipelineCosts",
    "ReplicaSum",
    "ScheduleResult",
    "StageCost",
    "StageEvent",
    "StageLink",
    "StageTransfer",
    "StageUpdate",
    "engine_peak_bytes",
    "engine_stages",
    "least_interleaved_share",
    "least_step_s",
    "ordered_actions",
    "simulate_schedule",
    "stage_costs",
    "step_on_cores",
]
