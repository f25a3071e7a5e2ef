"""The options of a training step: updates and recomputation."""

from fxpart.core.optimizer import Optimizer
from fxpart.core.phases import StepOptions
from fxpart.errors import SpecError
from runner.config.sections import Config

__all__ = ["check_training", "is_training", "optimizer_of", "step_options"]


def is_training(config: Config) -> bool:
    """Return whether a training step is planned."""
    return config.phase.name == "training"


def optimizer_of(config: Config) -> Optimizer:
    """Return what updates the weights.

    Raises:
        SpecError: for an optimizer, a dtype or an implementation that does not exist.

    """
    chosen = config.optimizer
    return Optimizer(
        name=chosen.name,
        state_dtype=chosen.state_dtype,
        master_weights=chosen.master_weights,
        implementation=chosen.implementation,
    )


def step_options(config: Config) -> StepOptions:
    """Return how a training step is captured.

    Raises:
        SpecError: for a way of checkpointing that does not exist.

    """
    fused = config.phase.fused_kernels
    return StepOptions(
        config.checkpointing,
        fused_attention=fused,
        fused_dropout=fused,
        backward_order=config.phase.backward_order,
    )


def check_training(config: Config) -> None:
    """Raise `SpecError` for parts of a training step that do not exist or do not go together."""
    optimizer_of(config)
    step_options(config)
    if not is_training(config):
        if config.checkpointing != "none":
            raise SpecError(
                f"checkpointing={config.checkpointing} is of a training step, got"
                f" phase={config.phase.name}; add phase=training"
            )
        return
    if config.execute.name != "none":
        _refuse_what_is_not_run(config)


def _refuse_what_is_not_run(config: Config) -> None:
    """Refuse to run what a run here leaves out and the plan would count."""
    unsupported = {
        "optimizer=none": config.optimizer.name != "none",
        "phase.train_mode=false": config.phase.train_mode,
        "checkpointing=none": config.checkpointing != "none",
    }
    missing = " ".join(override for override, is_set in unsupported.items() if is_set)
    if missing:
        raise SpecError(
            f"execute={config.execute.name} runs forward and backward to be compared with the"
            f" unsplit model, without dropout, recomputation or updates; add {missing}"
        )
