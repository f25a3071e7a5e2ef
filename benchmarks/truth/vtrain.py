"""Iteration times of small GPTs trained by Megatron-DeepSpeed on one node of A100s.

The steps are planned by the functions of the command with ``latency=kernels``, and nothing is
fitted to them: the launch time is that of the accelerator's file. `vtrain_calibrated` fits five
numbers to a tenth of the same rows. A GPT is a transformers Starcoder2, whose layers are the same
(biases, LayerNorm, GELU, as many key heads as query heads); attention is two products with one
kernel between them, as in 2022; the dtype is not stated, float16 is likely. Blocks are recomputed,
the default of vTrain's configurations (``use_checkpoint``). Layers and stages are alike: see
`step_of_many_layers_s`.
"""

import csv
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

from benchmarks.truth.megatron_steps import (
    gpt_overrides,
    parallel_overrides,
    planned_step,
    schedule_of,
    step_of_many_layers_s,
)
from benchmarks.truth.row import Row
from fxpart.errors import FxpartError

__all__ = ["FEW", "NAME", "SOURCE", "Plan", "plan_of", "plans", "rows", "rows_of"]

NAME = "vtrain"
SOURCE = "VIA-Research/vTrain data/ground_truth_single.csv (MIT), Megatron-DeepSpeed on A100"
_FILE = "vtrain_single.csv"
FEW = 10
"""Random workloads used beside other sets, each with all of its measured plans."""
_SEED = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One measured run; the fields are the columns of the file, in their order."""

    devices: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int
    iteration_ms: float

    @property
    def microbatches(self) -> int:
        """Return the microbatches that a replica runs in a step."""
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def label(self) -> str:
        """Return a label that identifies the row."""
        return f"{self.workload} {self.degrees}"

    @property
    def workload(self) -> str:
        """Return a label of the model and batch, whatever the devices."""
        return f"h{self.hidden} l{self.layers} b{self.global_batch}/{self.micro_batch}"

    @property
    def degrees(self) -> str:
        """Return a label of the parallel degrees."""
        return f"tp{self.tensor} dp{self.data} pp{self.pipeline}"

    @property
    def is_held_out(self) -> bool:
        """Return whether no set fits anything to the row: nine of ten rows, by their labels."""
        return hashlib.sha256(self.label.encode()).digest()[0] % 10 != 0

    def step_s(self) -> float:
        """Return the predicted time of a step.

        Raises:
            FxpartError: if the step cannot be planned.

        """

        def step_s(stages: int, layers_each: int) -> float:
            return _step_s(self.overrides(stages * layers_each, self.microbatches))

        return step_of_many_layers_s(step_s, self.pipeline, self.layers / self.pipeline)

    def overrides(self, layers: int, microbatches: int) -> tuple[str, ...]:
        """Return the overrides of the command for a step with that many layers in all."""
        degrees = (self.tensor, self.pipeline, self.data)
        return (
            *gpt_overrides(self.hidden, self.heads, layers, self.sequence),
            f"model.batch_size={self.micro_batch * self.data}",
            f"microbatches={microbatches}",
            "checkpointing=block",
            "transfer_rate=nvlink3",
            *parallel_overrides(*degrees, "a100_80gb", has_pieces=False),
        )


@lru_cache(maxsize=16384)
def _step_s(overrides: tuple[str, ...]) -> float:
    return schedule_of(planned_step(overrides)).step_s


def plans(data: Path, workloads: int | None = None) -> list[Plan]:
    """Return the rows of the file, or those of a random sample of `workloads` workloads.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    with (data / _FILE).open(newline="", encoding="utf-8") as file:
        _, *lines = csv.reader(file)
    every = [plan_of(line) for line in lines]
    names = sorted({plan.workload for plan in every})
    if workloads is None or workloads >= len(names):
        return every
    drawn = set(random.Random(_SEED).sample(names, workloads))
    return [plan for plan in every if plan.workload in drawn]


def plan_of(line: Sequence[str]) -> Plan:
    """Return the plan that a line of the file describes."""
    numbers = dict(zip((field.name for field in fields(Plan)), line, strict=True))
    iteration_ms = float(numbers.pop("iteration_ms"))
    return Plan(
        **{name: int(number) for name, number in numbers.items()}, iteration_ms=iteration_ms
    )


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each plan of some workloads.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    drawn = plans(data, FEW)
    print(f"{NAME}: {len(drawn)} of {len(plans(data))} rows, of random workloads")
    yield from rows_of(drawn, lambda plan: plan.step_s())


def rows_of(
    measured: Sequence[Plan], step_s: Callable[[Plan], float], *, is_fitted: bool = False
) -> Iterator[Row]:
    """Yield a row for each plan with the prediction of `step_s`; print the plans that fail.

    A fitted `step_s` is fitted to the plans that are not held out.
    """
    for plan in measured:
        try:
            predicted_ms = step_s(plan) * 1e3
        except FxpartError as error:
            print(f"{plan.label} is left out: {error}")
            continue
        held_out = not is_fitted or plan.is_held_out
        yield Row(plan.label, predicted_ms, plan.iteration_ms, "ms", held_out=held_out)
