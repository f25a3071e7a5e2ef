"""Training steps of Megatron-LM as the command plans them, for sets that measured such steps."""

from collections.abc import Sequence
from functools import lru_cache

from benchmarks.truth.planned_run import planned_run
from fxpart.schedule import ScheduleResult
from runner.experiment.result import Result

__all__ = ["parallel_overrides", "planned_step", "schedule_of"]

_MEGATRON = (
    "engine=megatron",
    "phase=training",
    "phase.train_mode=true",
    "optimizer=adamw",
    "schedule=1f1b",
    "mode=equal_layers",
    "latency=kernels",
)


@lru_cache(maxsize=64)
def planned_step(overrides: tuple[str, ...]) -> Result:
    """Return the step that ``python -m runner`` plans with `overrides` and those of Megatron-LM.

    Raises:
        FxpartError: for a step that cannot be planned.

    """
    return planned_run((*_MEGATRON, *overrides))


def schedule_of(result: Result) -> ScheduleResult:
    """Return the pipeline of a planned step."""
    assert result.schedule is not None, "every step here has microbatches"
    return result.schedule


def parallel_overrides(
    tensor: int,
    pipeline: int,
    data: int,
    device: str,
    *,
    has_pieces: bool = True,
    context: int = 1,
    experts: int = 1,
) -> Sequence[str]:
    """Return the overrides for so many devices of one machine; with pieces of sequences, or not."""
    replicas = data * context
    return (
        f"devices={tensor * pipeline * replicas}x{device}",
        f"tensor_parallel={tensor}",
        f"sequence_parallel={str(has_pieces and tensor > 1).lower()}",
        f"data_parallel={data}",
        f"context_parallel={context}",
        f"expert_parallel={experts}",
        f"zero={int(replicas > 1)}",
    )
