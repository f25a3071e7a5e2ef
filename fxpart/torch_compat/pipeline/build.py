"""`build_pipeline_model`: wrap stages for a pipeline engine."""

from typing import Any

from torch import fx

from fxpart.execution.stages.chain import Chain, chain_stages
from fxpart.execution.stages.engines import engine_named

__all__ = ["build_pipeline_model"]


def build_pipeline_model(
    stages: fx.GraphModule | Chain,
    engine: str = "torch",
    **options: Any,  # noqa: ANN401 - the engine's own
) -> Any:  # noqa: ANN401 - the engine's own
    """Return `stages` wrapped for an engine of `fxpart.execution.stages.engines.ENGINES`.

    `stages` is a chain, or a split module with children ``submod_0``, ``submod_1``, ...

    With ``torch``: the ``torch.distributed.pipelining.PipelineStage`` of this process, for any of
    torch's schedules. Call it in each process, after ``init_process_group``. Options are
    ``stage_index`` (the rank), ``device`` ("cpu") and ``group`` (all processes).

    With ``deepspeed``: a ``deepspeed.pipe.PipelineModule`` with one layer per stage. Call it in
    each process, after ``deepspeed.init_distributed``. Options are those of that class, such as
    ``loss_fn``. Layers exchange a single tuple of tensors.

    Raises:
        SpecError: if the engine is unknown or not installed, or does not take these stages.
        CycleError: if a stage reads from a later one.

    """
    chosen = engine_named(engine)
    chain = stages if isinstance(stages, Chain) else chain_stages(stages)
    return chosen.wrap(chain, **options)
