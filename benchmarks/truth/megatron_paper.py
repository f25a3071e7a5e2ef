"""Steps published by Korthikanti et al., compared with plans of the same steps.

    python -m benchmarks.truth --data FOLDER --set megatron_paper megatron_paper_memory

Iteration times are from table 5: GPTs on Selene, with eight A100s per machine and an InfiniBand HDR
adapter for each. The time with many layers follows from fewer (`step_of_many_layers_s`).
Selective recomputation is ``checkpointing=core_attention``, full is ``block``. Nothing is fitted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.truth.measured import published
from benchmarks.truth.megatron_steps import (
    Cluster,
    gpt_overrides,
    parallel_overrides,
    planned_step,
    schedule_of,
    step_of_many_layers_s,
)
from benchmarks.truth.row import Row

__all__ = ["MODELS", "NAME", "PAPER", "SEQUENCE", "SOURCE", "TENSOR", "Gpt", "rows"]

NAME = "megatron_paper"
PAPER = "arXiv:2205.05198"
SOURCE = f"Korthikanti et al. 2022, {PAPER} (table 5), by calculon-ai/calculon; A100 80 GB"
_SELENE = Cluster("a100_80gb", 25e9)
SEQUENCE, TENSOR = 2048, 8


@dataclass(frozen=True, slots=True)
class Gpt:
    """A model of the paper's table 3."""

    hidden: int
    heads: int
    layers: int
    stages: int
    chunks: int
    """Model chunks per device."""
    micro_batch: int
    microbatches: int

    @property
    def layers_each(self) -> int:
        """Return the layers per chunk."""
        return self.layers // (self.stages * self.chunks)


MODELS: Mapping[str, Gpt] = {
    "Megatron-22B": Gpt(6144, 64, 48, 1, 1, 4, 1),
    "GPT-3-175B": Gpt(12288, 96, 96, 8, 3, 1, 64),
    "MT-NLG-530B": Gpt(20480, 128, 105, 35, 3, 1, 280),
    "Megatron-1T": Gpt(25600, 160, 128, 64, 1, 1, 512),
}


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each iteration time.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    for point in published(data, PAPER):
        if point["metric"] == "step_time":
            label = f"{point['model']} {point['parallel']}, {point['activation_checkpointing']}"
            predicted_s = _step_s(MODELS[point["model"]], point)
            yield Row(label, predicted_s, float(point["value"]), point["unit"], held_out=True)


def _step_s(gpt: Gpt, point: Mapping[str, Any]) -> float:
    checkpointing = {"selective": "core_attention", "full": "block"}
    recomputed = checkpointing[point["activation_checkpointing"]]
    chunks = ("schedule=interleaved", f"mode.interleave={gpt.chunks}") if gpt.chunks > 1 else ()

    def step_s(stages: int, layers_each: int) -> float:
        layers = stages * gpt.chunks * layers_each
        degrees = parallel_overrides(
            TENSOR, stages, 1, _SELENE.device, has_pieces="+SP" in point["parallel"]
        )
        overrides = (
            *gpt_overrides(gpt.hidden, gpt.heads, layers, SEQUENCE),
            f"model.batch_size={gpt.micro_batch}",
            f"microbatches={gpt.microbatches}",
            "transfer_rate=nvlink3",
            *degrees,
            *_SELENE.overrides(stages * TENSOR),
            *chunks,
            f"checkpointing={recomputed}",
        )
        return schedule_of(planned_step(overrides, _SELENE.bytes_per_s)).step_s

    return step_of_many_layers_s(step_s, gpt.stages, gpt.layers_each)
