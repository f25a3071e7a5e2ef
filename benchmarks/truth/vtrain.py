"""Iteration times of small GPTs that Megatron-DeepSpeed trains on one node of A100s.

    python -m benchmarks.truth.vtrain --data FOLDER [--sample N] [--rows]

The steps are planned by the command's own functions with ``latency=kernels``. One number is fitted,
to a tenth of the rows: what the host takes to start an operator, since most of these models are so
small that it decides. A GPT is a Starcoder2 of transformers, which has its layers (biases,
LayerNorm, GELU, as many keys as heads); attention is not fused, as in 2022; float16 is likely, and
not stated. Stages are alike, so that a step of n layers a stage takes t1 + (n - 1) (t2 - t1), of
steps with 1 and 2.
"""

import argparse
import csv
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from statistics import median

from benchmarks.text_table import table
from benchmarks.truth.megatron_steps import parallel_overrides, planned_step, schedule_of
from benchmarks.truth.row import HEADS, Row, summary
from fxpart.errors import FxpartError

__all__ = ["NAME", "SOURCE", "Plan", "asked_for", "plans", "rows"]

NAME = "vtrain"
SOURCE = "VIA-Research/vTrain data/ground_truth_single.csv (MIT), Megatron-DeepSpeed on A100"
_FILE = "vtrain_single.csv"
_FEW = 32
"""Rows among other sets, drawn by chance: each takes two captures of a few seconds."""
_SEED = 0
_HOST_LAUNCH_S = 36e-6
"""Of Megatron-DeepSpeed's Python on that machine, fitted to eight rows that are not held out."""
_FITTED = 8
_VOCABULARY = 51200
"""GPT-2's, as Megatron rounds it up."""


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
        """Return how many of them a replica runs in a step."""
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def label(self) -> str:
        """Return what tells the row from others."""
        degrees = f"tp{self.tensor} dp{self.data} pp{self.pipeline}"
        return f"h{self.hidden} l{self.layers} b{self.global_batch}/{self.micro_batch} {degrees}"

    @property
    def is_held_out(self) -> bool:
        """Whether nothing is fitted to it: nine of ten rows, by their labels."""
        return hashlib.sha256(self.label.encode()).digest()[0] % 10 != 0

    def step_s(self, host_launch_s: float = _HOST_LAUNCH_S) -> float:
        """Return the predicted time of a step.

        Raises:
            FxpartError: for a step that cannot be planned.

        """
        one, two = (self._of_layers(n * self.pipeline, host_launch_s) for n in (1, 2))
        return one + (self.layers / self.pipeline - 1) * (two - one)

    def _of_layers(self, layers: int, host_launch_s: float) -> float:
        sizes = {
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "vocab_size": _VOCABULARY,
            "max_position_embeddings": self.sequence,
            "tie_word_embeddings": "false",
            "attention_dropout": 0.1,
            "residual_dropout": 0.1,
            "embedding_dropout": 0.1,
            "attn_implementation": "eager",
        }
        overrides = (
            "model=transformers",
            "model.architecture=Starcoder2ForCausalLM",
            *(f"+model.config.{name}={value}" for name, value in sizes.items()),
            f"model.seq_len={self.sequence}",
            f"model.batch_size={self.micro_batch * self.data}",
            "model.dtype=float16",
            f"microbatches={self.microbatches}",
            "transfer_rate=nvlink3",
            f"runtime.host_launch_s={host_launch_s}",
        )
        degrees = (self.tensor, self.pipeline, self.data)
        chosen = parallel_overrides(*degrees, "a100_80gb", has_pieces=False)
        return _step_s((*overrides, *chosen))


@lru_cache(maxsize=4096)
def _step_s(overrides: tuple[str, ...]) -> float:
    return schedule_of(planned_step.__wrapped__(overrides)).step_s


def plans(data: Path, sample: int | None = None) -> list[Plan]:
    """Return the rows of the file; with `sample`, so many of them drawn by chance.

    Raises:
        FileNotFoundError: without the file.

    """
    with (data / _FILE).open(newline="", encoding="utf-8") as file:
        _, *lines = csv.reader(file)
    every = [_plan(line) for line in lines]
    if sample is None or sample >= len(every):
        return every
    return random.Random(_SEED).sample(every, sample)


def _plan(line: Sequence[str]) -> Plan:
    numbers = dict(zip((field.name for field in fields(Plan)), line, strict=True))
    iteration_ms = float(numbers.pop("iteration_ms"))
    return Plan(
        **{name: int(number) for name, number in numbers.items()}, iteration_ms=iteration_ms
    )


def rows(data: Path, sample: int | None = _FEW) -> Iterator[Row]:
    """Yield a row for each plan.

    Raises:
        FileNotFoundError: without the file.

    """
    drawn, every = plans(data, sample), plans(data)
    if len(drawn) < len(every):
        print(f"{NAME}: {len(drawn)} of {len(every)} rows, drawn by chance")
    for plan in drawn:
        try:
            predicted_ms = plan.step_s() * 1e3
        except FxpartError as error:
            print(f"{plan.label} is left out: {error}")
            continue
        yield Row(plan.label, predicted_ms, plan.iteration_ms, "ms", held_out=plan.is_held_out)


def asked_for(data: Path, _: Sequence[Row]) -> str:
    """Return what rows that are not held out, drawn by chance, ask a launch to take, in words."""
    candidates = [plan for plan in plans(data) if not plan.is_held_out]
    chosen = random.Random(_SEED).sample(candidates, min(_FITTED, len(candidates)))
    asked_us = [asked_s * 1e6 for plan in chosen if (asked_s := _asked_launch_s(plan))]
    if not asked_us:
        return "no row asks for any time of a launch"
    return (
        f"{len(asked_us)} of {len(chosen)} rows that are not held out ask for launches of"
        f" {median(asked_us):.0f} us ({min(asked_us):.0f} to {max(asked_us):.0f}),"
        f" {_HOST_LAUNCH_S * 1e6:.0f} are taken"
    )


def _asked_launch_s(plan: Plan) -> float | None:
    """Return the time of a launch with which a step takes what was measured, by a secant.

    None where the device decides, and launches do not.
    """
    longer_s = 1.25 * _HOST_LAUNCH_S
    at_s, at_longer_s = plan.step_s(), plan.step_s(longer_s)
    if at_longer_s <= at_s:
        return None
    lacking_s = plan.iteration_ms / 1e3 - at_s
    return _HOST_LAUNCH_S + lacking_s * (longer_s - _HOST_LAUNCH_S) / (at_longer_s - at_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the errors."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth.vtrain")
    parser.add_argument("--data", type=Path, required=True, help="folder of the published files")
    parser.add_argument("--sample", type=int, help="only so many rows, drawn by chance")
    parser.add_argument("--rows", action="store_true", help="also print every row")
    asked = parser.parse_args(arguments)
    every = []
    for row in rows(asked.data, asked.sample):
        every.append(row)
        if asked.rows:
            print(
                f"{row.label:44} {row.predicted:8.1f} {row.measured:8.1f} {100 * row.error:+6.1f} %"
            )
    parts = {"all": every, "held out": [row for row in every if row.held_out]}
    print(table(["vtrain", *HEADS], [[name, *summary(part)] for name, part in parts.items()]))


if __name__ == "__main__":
    main()
