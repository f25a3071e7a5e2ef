"""Pipeline engines that run stages, by name. Each is imported only when it is used."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxpart.errors import SpecError, nearest_names, one_line
from fxpart.execution.stages.chain import Chain, StageModule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.pipelining import PipelineStage

__all__ = ["ENGINES", "Engine", "engine_named", "pipeline_stage"]


@dataclass(frozen=True, eq=False, slots=True)
class Engine:
    """A pipeline engine, and how to wrap stages for it."""

    package: str
    """The required package."""
    wrap: Callable[..., Any]
    """Called with the chain and the options of `build_pipeline_model`."""


def pipeline_stage(
    stage: StageModule,
    num_stages: int,
    device: torch.device,
    group: "ProcessGroup | None" = None,
) -> "PipelineStage":
    """Return `stage` for a schedule of ``torch.distributed.pipelining``, on `device`.

    Call it in the stage's process, after ``init_process_group``. The stage's parameters are moved
    to `device`. Shapes and dtypes are inferred from the first microbatch.

    Raises:
        SpecError: if there is no process group, or the stage takes or returns no tensor.

    """
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage

    if not (dist.is_available() and dist.is_initialized()):
        raise SpecError(
            f"stage {stage.index} of {num_stages}: there is no process group; call"
            " torch.distributed.init_process_group first, in each process"
        )
    if not stage.inputs or not stage.outputs:
        side = "takes no tensor" if not stage.inputs else "passes on no tensor"
        raise SpecError(
            f"stage {stage.index} of {num_stages} {side}: torch.distributed.pipelining passes at"
            " least one; join it with the stage beside it"
        )
    return PipelineStage(stage.module, stage.index, num_stages, device, group=group)


def _for_torch(
    chain: Chain,
    *,
    stage_index: int | None = None,
    device: torch.device | str | None = None,
    group: "ProcessGroup | None" = None,
) -> "PipelineStage":
    """Return the stage of this process, by default the one of its rank."""
    import torch.distributed as dist

    count = len(chain.stages)
    if stage_index is None and dist.is_available() and dist.is_initialized():
        stage_index = dist.get_rank(group)
    if stage_index is not None and not 0 <= stage_index < count:
        raise SpecError(
            f"stage {stage_index} was asked for, and there are {count}, from 0; start one process"
            " a stage"
        )
    stage = chain.stages[stage_index or 0]
    return pipeline_stage(stage, count, torch.device(device or "cpu"), group)


class _OneArgument(nn.Module):
    """A stage for an engine that passes one tuple from layer to layer."""

    def __init__(self, stage: StageModule) -> None:
        super().__init__()
        self.stage = stage.module

    def forward(self, values: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the results of the stage."""
        results: tuple[Tensor, ...]
        results = self.stage(*(values if isinstance(values, tuple) else (values,)))
        return results


def _for_deepspeed(chain: Chain, **options: Any) -> Any:  # noqa: ANN401 - deepspeed's own
    """Return a ``deepspeed.pipe.PipelineModule`` with one layer per stage."""
    layers = [_OneArgument(stage) for stage in chain.stages]
    module = import_module("deepspeed.pipe").PipelineModule
    try:
        return module(layers=layers, num_stages=len(layers), partition_method="uniform", **options)
    except RuntimeError as error:
        raise SpecError(
            f"deepspeed does not take {len(layers)} stages: {one_line(error)}; start a number of"
            f" processes that {len(layers)} divides"
        ) from error


ENGINES: dict[str, Engine] = {
    "torch": Engine("torch", _for_torch),
    "deepspeed": Engine("deepspeed", _for_deepspeed),
}


def engine_named(name: str) -> Engine:
    """Return the engine of that name.

    Raises:
        SpecError: if there is no such engine, or its package is not installed.

    """
    if name not in ENGINES:
        raise SpecError(f"there is no pipeline engine {name!r}; {nearest_names(name, ENGINES)}")
    engine = ENGINES[name]
    if find_spec(engine.package) is None:
        raise SpecError(
            f"engine {name} needs the package {engine.package}, which is not installed; run"
            f" pip install {engine.package}, or use engine='torch'"
        )
    return engine
