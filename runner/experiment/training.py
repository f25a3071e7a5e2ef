"""The options of a training step: optimizer, fine-tuning, recomputation and backward order."""

import math

from fxpart.core.optimizer import Optimizer
from fxpart.core.phases import CHECKPOINTING, StepOptions
from fxpart.errors import NotApplicableError, SpecError, nearest_names, refuse_unfitting
from runner.config.schema import BUDGET, Config, FinetuneConfig

__all__ = [
    "backward_engine",
    "check_decided",
    "check_training",
    "finetunes",
    "is_megatron",
    "is_training",
    "left_out_here",
    "optimizer_of",
    "step_options",
]

_FINETUNES = ("none", "lora")
_ENGINES = {
    "late_weight_gradients": (
        "a zero-bubble schedule of torch.distributed.pipelining (ScheduleInterleavedZeroBubble,"
        " ScheduleZBVZeroBubble); autograd alone does not put weight gradients last"
    )
}


def is_training(config: Config) -> bool:
    """Return whether a training step is planned."""
    return config.phase.name == "training"


def is_megatron(config: Config) -> bool:
    """Return whether the training step is Megatron-LM's."""
    return config.engine == "megatron"


def optimizer_of(config: Config) -> Optimizer:
    """Return the optimizer.

    Megatron-LM always uses the fused one of Apex or Transformer Engine, ignoring
    ``implementation``.

    Raises:
        SpecError: if the optimizer, dtype or implementation is unknown.

    """
    chosen = config.optimizer
    return Optimizer(
        name=chosen.name,
        state_dtype=chosen.state_dtype,
        master_weights=chosen.master_weights or is_megatron(config),
        main_gradients=is_megatron(config),
        implementation="fused" if is_megatron(config) else chosen.implementation,
    )


def finetunes(config: Config) -> bool:
    """Return whether only adapters are trained."""
    return config.finetune.name != "none"


def _check_finetune(config: Config) -> None:
    """Raise `SpecError` if the fine-tuning is unknown, out of range or not supported."""
    chosen, name = config.finetune, f"finetune={config.finetune.name}"
    if chosen.name not in _FINETUNES:
        raise SpecError(f"{name} does not exist; {nearest_names(chosen.name, _FINETUNES)}")
    if not finetunes(config):
        for field, usual in vars(FinetuneConfig()).items():
            if (value := getattr(chosen, field)) != usual:
                raise NotApplicableError(
                    f"finetune.{field}={value} applies to adapters, got finetune=none; add "
                    "finetune=lora"
                )
        return
    if not is_training(config):
        raise NotApplicableError(
            f"{name} applies to a training step, not to phase={config.phase.name}; add "
            "phase=training"
        )
    if not math.isfinite(chosen.alpha):
        raise SpecError(f"finetune.alpha={chosen.alpha} must be a finite number")
    if chosen.rank < 1:
        raise SpecError(f"finetune.rank={chosen.rank} must be 1 or more")
    if not 0 <= chosen.dropout < 1:
        raise SpecError(f"finetune.dropout={chosen.dropout} must be at least 0 and below 1")
    against = {
        f"execute={config.execute.name}": config.execute.name != "none",
        f"capture.symbolic={config.capture.symbolic}": config.capture.symbolic != "none",
        f"tensor_parallel={config.tensor_parallel}": config.tensor_parallel > 1,
    }
    for conflict in (name for name, is_set in against.items() if is_set):
        raise NotApplicableError(
            f"{name} is supported for whole layers at one size; leave out {conflict}"
        )


def step_options(config: Config) -> StepOptions:
    """Return the options for capturing a training step.

    Raises:
        SpecError: if the checkpointing or the backward order is unknown.

    """
    fused = config.phase.fused_kernels
    # `checkpointing=budget` is resolved before anything is planned.
    return StepOptions(
        "none" if config.checkpointing == BUDGET else config.checkpointing,
        recomputed=tuple(config.recomputed_blocks),
        fused_attention=fused,
        fused_dropout=fused,
        backward_order=config.backward_order,
    )


def backward_engine(backward_order: str) -> str:
    """Return the engines that run this backward order; empty for ``autograd``."""
    return _ENGINES.get(backward_order, "")


def check_training(config: Config) -> None:
    """Raise `SpecError` if an option of a training step is unknown or conflicts with another."""
    optimizer_of(config)
    if is_megatron(config):
        _check_megatron(config)
    _check_finetune(config)
    known = (*CHECKPOINTING, BUDGET)
    if config.checkpointing not in known:
        suggestion = nearest_names(config.checkpointing, known)
        raise SpecError(f"checkpointing={config.checkpointing} does not exist; {suggestion}")
    options = step_options(config)
    if options.backward_order != "autograd":
        _check_order(config)
    if not is_training(config) and config.checkpointing != "none":
        raise NotApplicableError(
            f"checkpointing={config.checkpointing} applies to a training step, not to "
            f"phase={config.phase.name}; add phase=training"
        )
    if config.recomputed_blocks and config.checkpointing in ("none", BUDGET):
        raise NotApplicableError(
            "recomputed_blocks selects the blocks that checkpointing=block recomputes, got "
            f"checkpointing={config.checkpointing}; use checkpointing=block, or leave it out"
        )
    for index, path in enumerate(config.recomputed_blocks):
        if path in config.recomputed_blocks[:index]:
            raise SpecError(f"recomputed_blocks names {path} twice; leave one of them out")
    if not is_training(config):
        return
    if config.execute.name != "none":
        _refuse_what_is_not_run(config)


def check_decided(config: Config) -> None:
    """Raise `NotApplicableError` if ``checkpointing=budget`` has not been resolved."""
    if config.checkpointing == BUDGET:
        raise NotApplicableError(
            "checkpointing=budget is decided before a plan is made; take none, block, selective or"
            " core_attention"
        )


def _check_megatron(config: Config) -> None:
    """Raise `NotApplicableError` if Megatron-LM, or our plan of it, lacks a feature of `config`."""
    fitting = {
        f"phase={config.phase.name}": ("phase=training", is_training(config)),
        f"model.loss={config.model.loss}": ("model.loss=own", config.model.loss == "own"),
        f"data_parallel={config.data_parallel} zero={config.zero}": (
            "zero=1",
            config.data_parallel * config.context_parallel == 1 or config.zero == 1,
        ),
        f"execute={config.execute.name}": ("execute=none", config.execute.name == "none"),
        f"capture.symbolic={config.capture.symbolic}": (
            "capture.symbolic=none",
            config.capture.symbolic == "none",
        ),
        "optimizer=none": ("optimizer=adamw", config.optimizer.name != "none"),
        f"finetune={config.finetune.name}": ("finetune=none", not finetunes(config)),
        # `selective` is torchtitan's policy, and the next one the order of torch's schedules.
        f"checkpointing={config.checkpointing}": (
            "checkpointing=core_attention, which is its selective recomputation",
            config.checkpointing != "selective",
        ),
        f"backward_order={config.backward_order}": (
            "backward_order=autograd",
            config.backward_order == "autograd",
        ),
    }
    refuse_unfitting(
        "engine=megatron plans a training step with Megatron's distributed optimizer",
        fitting,
        "engine=torch",
    )


def _check_order(config: Config) -> None:
    """Raise `SpecError` if the backward order conflicts with the rest of `config`."""
    order = f"backward_order={config.backward_order}"
    if not is_training(config):
        raise SpecError(f"{order} applies to a training step, not to phase={config.phase.name}")
    if config.schedule.name != "none":
        raise SpecError(
            f"{order} applies to one input through the model; schedule={config.schedule.name} runs "
            "the whole backward of a stage at once; leave out one of the two"
        )
    if config.execute.name != "none" and config.execute.device != "cpu":
        raise SpecError(
            f"{order} runs on the CPU only, got execute.device={config.execute.device}; leave out "
            "one of the two"
        )


def left_out_here(config: Config) -> str:
    """Return the overrides that remove what execution here does not support; often empty."""
    unsupported = {
        "optimizer=none": config.optimizer.name != "none",
        "phase.train_mode=false": config.phase.train_mode,
        "checkpointing=none": config.checkpointing != "none",
    }
    return " ".join(override for override, is_set in unsupported.items() if is_set)


def _refuse_what_is_not_run(config: Config) -> None:
    """Raise `SpecError` if the plan counts parts of a step that execution here leaves out."""
    missing = left_out_here(config)
    if missing:
        raise SpecError(
            f"execute={config.execute.name} compares forward and backward with the unsplit model, "
            f"without dropout, recomputation or updates; add {missing}"
        )
