"""Iteration times of GPTs trained by Megatron-DeepSpeed on 64 to 512 A100s.

The settings are those of vTrain's configurations: machines of eight A100s, 800 Gbit/s of InfiniBand
between machines, an eighth for each device, all blocks recomputed (``use_checkpoint``), ``1f1b``.
The time with many layers and stages follows from fewer (`step_of_many_layers_s`); the rest is as in
`vtrain`: nothing is fitted.
"""

import csv
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmarks.truth import vtrain
from benchmarks.truth.measured import count_left_out
from benchmarks.truth.megatron_steps import (
    Cluster,
    gpt_overrides,
    parallel_overrides,
    planned_step,
    schedule_of,
    step_of_many_layers_s,
)
from benchmarks.truth.row import Row
from benchmarks.truth.vtrain import Plan
from fxpart.errors import FxpartError

__all__ = ["NAME", "SOURCE", "rows"]

NAME = "vtrain_multi"
SOURCE = "VIA-Research/vTrain data/ground_truth_multi.csv (MIT), Megatron-DeepSpeed on A100s"
_FILE = "vtrain_multi.csv"
_NODE = 8
_NODE_BYTES_PER_S = 100e9
"""800 Gbit/s of InfiniBand."""


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each plan; print those that cannot be planned.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    left_out: Counter[str] = Counter()
    for plan in _plans(data):
        label = f"{plan.devices} devices, {plan.label}"
        try:
            predicted_ms = _step_s(plan) * 1e3
        except FxpartError as error:
            print(f"{label} is left out: {error}")
            left_out[type(error).__name__] += 1
            continue
        yield Row(label, predicted_ms, plan.iteration_ms, "ms", held_out=True)
    count_left_out(left_out)


def _plans(data: Path) -> list[Plan]:
    with (data / _FILE).open(newline="", encoding="utf-8") as file:
        _, *lines = csv.reader(file)
    # The first column is the number of parameters.
    return [vtrain.plan_of(line[1:]) for line in lines]


def _step_s(plan: Plan) -> float:
    def step_s(stages: int, layers_each: int) -> float:
        return _planned_step_s(plan, stages, layers_each)

    return step_of_many_layers_s(step_s, plan.pipeline, plan.layers / plan.pipeline)


@cache
def _planned_step_s(plan: Plan, stages: int, layers_each: int) -> float:
    cluster = Cluster("a100_80gb", _NODE_BYTES_PER_S / _NODE)
    overrides = (
        *gpt_overrides(plan.hidden, plan.heads, stages * layers_each, plan.sequence),
        f"model.batch_size={plan.micro_batch * plan.data}",
        f"microbatches={plan.microbatches}",
        "transfer_rate=nvlink3",
        *parallel_overrides(plan.tensor, stages, plan.data, cluster.device, has_pieces=False),
        *cluster.overrides(plan.tensor * plan.data * stages),
        "checkpointing=block",
    )
    return schedule_of(planned_step(overrides, cluster.bytes_per_s)).step_s
