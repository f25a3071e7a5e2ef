"""The device mesh of replicas that share experts, or the sequence of each example.

Devices are divided among `replica_count` replicas of a placement. `data_parallel` of them share the
batch, and `context_parallel` neighbours share each sequence. `expert_parallel` neighbours share the
experts: as in Megatron-LM and torchtitan, that degree is part of the data-parallel one. With
`tensor_parallel`, these are the devices of whole tensor-parallel groups.
"""

import numpy as np

from fxpart.core.data_parallel import share_of_sequence
from fxpart.core.graph import IntArray, OpGraph
from fxpart.cost.collective_times import expert_weights
from fxpart.errors import NotApplicableError, SpecError
from runner.config.schema import Config
from runner.experiment.degrees import check_expert_degree, check_tensor_degree, device_count
from runner.experiment.serving import is_serving

__all__ = [
    "GATHERING",
    "check_imbalance",
    "check_mesh",
    "replica_count",
    "replica_degrees",
    "shares_something",
    "weight_replicas",
]

GATHERING = 2
"""The first ZeRO stage that gathers weights."""


def replica_count(config: Config) -> int:
    """Return the number of replicas that all-reduce gradients."""
    return config.data_parallel * config.context_parallel


def replica_degrees(config: Config) -> str:
    """Return the overrides behind `replica_count`, for messages; ``data_parallel=1`` if none."""
    degrees = {"data_parallel": config.data_parallel, "context_parallel": config.context_parallel}
    overrides = [f"{name}={degree}" for name, degree in degrees.items() if degree > 1]
    return " ".join(overrides) or "data_parallel=1"


def shares_something(config: Config) -> bool:
    """Return whether replicas exchange values within the model."""
    return config.expert_parallel > 1 or config.context_parallel > 1


def check_mesh(config: Config) -> None:
    """Raise `SpecError` if a degree is below 1 or conflicts with the rest of `config`."""
    for name in ("expert_parallel", "context_parallel"):
        if getattr(config, name) < 1:
            raise SpecError(f"{name}={getattr(config, name)} must be 1 or more")
    check_tensor_degree(config, config.tensor_parallel, device_count(config))
    check_imbalance(config.expert_imbalance, config.expert_parallel)
    if not shares_something(config):
        return
    experts, context = config.expert_parallel, config.context_parallel
    chosen = f"expert_parallel={experts}" if experts > 1 else f"context_parallel={context}"
    for choice, is_chosen in _against(config).items():
        if is_chosen:
            raise NotApplicableError(
                f"{chosen} is planned operator by operator at one size, and cannot be run here; "
                f"leave out {choice}, or {chosen.partition('=')[0]}"
            )
    if context > 1 and is_serving(config) and config.phase.name != "prefill":
        raise NotApplicableError(
            f"context_parallel={context} splits the sequences of a pass, but a step of "
            f"phase={config.phase.name} has one token per sequence; use phase=prefill, or leave "
            "out context_parallel"
        )
    if config.model.seq_len is not None:
        share_of_sequence(config.model.seq_len, context)
    if experts > 1:
        _check_experts(config)


def _against(config: Config) -> dict[str, bool]:
    return {
        f"finetune={config.finetune.name}": config.finetune.name != "none",
        f"weights={config.weights.name}": config.weights.name != "none" and not is_serving(config),
        f"execute={config.execute.name}": config.execute.name != "none",
        f"capture.level={config.capture.level}": config.capture.level != "operator",
        f"capture.symbolic={config.capture.symbolic}": config.capture.symbolic != "none",
        f"granularity={config.granularity}": config.granularity != "operator",
        f"latency={config.latency.name}": not config.latency.is_computed
        and not config.latency.file,
    }


def check_imbalance(imbalance: float, degree: int) -> None:
    """Raise `SpecError` unless `imbalance` is from 1 to `degree`, the expert-parallel degree."""
    if not 1 <= imbalance <= degree:
        hint = f"from 1 to expert_parallel={degree}" if degree > 1 else "1 without expert_parallel"
        raise SpecError(
            f"expert_imbalance={imbalance} is the ratio of the busiest device's tokens to an equal "
            f"share; use {hint}"
        )


def _check_experts(config: Config) -> None:
    degree, tensor, replicas = config.expert_parallel, config.tensor_parallel, replica_count(config)
    check_expert_degree(config, tensor, replicas)
    if tensor == 1 and replicas % degree:
        need = -(-replicas // degree) * degree
        raise NotApplicableError(
            f"expert_parallel={degree} spreads experts over replicas, each with tokens of its own,"
            f" and must divide their number, got data_parallel={config.data_parallel}"
            f" context_parallel={config.context_parallel}; add"
            f" data_parallel={max(1, need // config.context_parallel)} with a model.batch_size that"
            " it divides"
        )
    if config.zero >= GATHERING and tensor * replicas != degree:
        raise NotApplicableError(
            f"zero={config.zero} with expert_parallel={degree} requires that all replicas share "
            f"the experts, but there are {replicas} replicas; use "
            f"expert_parallel={tensor * replicas}, or zero=1"
        )


def weight_replicas(config: Config, graph: OpGraph) -> IntArray:
    """Return the number of replicas that hold the same copy of each weight. Shape (W,)."""
    count = replica_count(config)
    replicas = np.full(len(graph.weight_names), count, dtype=np.int64)
    if config.expert_parallel > 1:
        homes = config.expert_parallel // config.tensor_parallel
        replicas[expert_weights(graph)] = count // homes
    return replicas
