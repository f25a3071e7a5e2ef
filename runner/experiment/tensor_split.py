"""Tensor parallelism: what the groups of devices exchange, and what that costs."""

from dataclasses import dataclass

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.tensor_groups import TensorGroups
from fxpart.cost.collective_times import collective_bytes
from fxpart.cost.problem import Problem
from fxpart.errors import NotApplicableError, SpecError
from runner.config.sections import Config
from runner.experiment.serving import is_serving
from runner.output.terminal import counted
from runner.output.units import GIB, format_s, format_size

__all__ = ["TensorSplit", "check_split", "split_cost", "split_line", "split_metrics"]


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """What tensor parallelism costs a placement; of the group that takes longest for it."""

    size: int
    """Devices of a group."""
    groups: int
    collectives: int
    collective_bytes: int
    """That they sum or gather."""
    collective_s: float
    """All of it is waited for: an operator needs the result."""


def check_split(config: Config) -> None:
    """Raise `SpecError` for tensor parallelism that does not go with the rest of `config`."""
    size = config.tensor_parallel
    if size < 1:
        raise SpecError(f"tensor_parallel={size} must be 1 or more")
    if config.sequence_parallel:
        _check_sequence(config)
    if size == 1:
        return
    rest = {
        f"execute={config.execute.name}": config.execute.name != "none",
        f"capture.level={config.capture.level}": config.capture.level != "operator",
        f"capture.symbolic={config.capture.symbolic}": config.capture.symbolic != "none",
        f"latency={config.latency.name}": config.latency.source not in ("roofline", "kernels")
        and not config.latency.file,
    }
    for choice, is_chosen in rest.items():
        if is_chosen:
            raise NotApplicableError(
                f"tensor_parallel={size} is planned operator by operator at one size, and not run"
                f" here; leave out {choice}, or tensor_parallel"
            )


def _check_sequence(config: Config) -> None:
    if config.tensor_parallel == 1:
        raise NotApplicableError(
            "sequence_parallel=true splits what lies between tensor-parallel layers, got"
            " tensor_parallel=1; add tensor_parallel=2 or more"
        )
    if is_serving(config):
        raise NotApplicableError(
            f"sequence_parallel=true splits whole sequences, got phase={config.phase.name}; use"
            " phase=training or phase=inference"
        )


def split_cost(problem: Problem, assignment: Assignment, groups: TensorGroups) -> TensorSplit:
    """Return what the collectives of a placement on `groups` come to."""
    sizes = collective_bytes(problem.graph)
    ops = np.array(sorted(sizes), dtype=np.int64)
    home = assignment.device_of[ops]
    seconds = problem.costs.op_time_s[ops, home]
    n = problem.topology.n_devices
    busy_s = np.bincount(home, weights=seconds, minlength=n)
    most = int(busy_s.argmax())
    there = [sizes[op] for op in ops[home == most].tolist()]
    return TensorSplit(groups.size, len(groups.members), len(there), sum(there), busy_s[most])


def split_line(split: TensorSplit) -> str:
    """Return what tensor parallelism costs in one line."""
    takes = "takes" if split.collectives == 1 else "take"
    return (
        f"{counted(split.groups, 'group')} of {split.size} devices;"
        f" {counted(split.collectives, 'collective')} of {format_size(split.collective_bytes)}"
        f" {takes} {format_s(split.collective_s)}, all of it waited for"
    )


def split_metrics(split: TensorSplit) -> dict[str, float]:
    """Return the metrics of tensor parallelism by name."""
    return {
        "tensor_parallel": float(split.size),
        "collectives": float(split.collectives),
        "collective_gib": split.collective_bytes / GIB,
        "collective_ms": split.collective_s * 1e3,
        "exposed_collective_ms": split.collective_s * 1e3,
    }
