"""gpt-fast's tokens per second at batch 1 on A100s, compared with runs that decode these models.

    python -m benchmarks.truth --data FOLDER --set gpt_fast

A row is a run of the command: ``phase=decode runtime=compiled mode=single latency=kernels``, which
uses the roofline for low-bit products. The card was limited to 330 W, which is not modelled.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.truth.measured import published
from benchmarks.truth.planned_run import time_of_alike_layers_s
from benchmarks.truth.row import Row
from fxpart.errors import FxpartError

__all__ = ["CONTEXT", "MODELS", "NAME", "SOURCE", "Point", "points", "rows"]

NAME = "gpt_fast"
SOURCE = "pytorch-labs/gpt-fast README.md@32971d3 (BSD-3), batch 1, prompt 5, 200 tokens, A100 80GB"

_LLAMA_2: dict[str, object] = {"vocab_size": 32000, "rope_theta": 10000.0}
_405B: dict[str, object] = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "Llama-2-7B": ("llama2_7b", {}),
    "Llama-2-13B": ("llama2_13b", {}),
    "Llama-2-70B": ("llama3_70b", _LLAMA_2),
    "Llama-3-8B": ("llama3_1_8b", {}),
    "Llama-3.1-8B": ("llama3_1_8b", {}),
    "Llama-3-70B": ("llama3_70b", {}),
    "Llama-3.1-70B": ("llama3_70b", {}),
    "Llama-3.1-405B": ("llama3_70b", _405B),
    "Mixtral-8x7B": ("mixtral_8x7b", {}),
}
"""For each model name, the preset and the changes to its configuration."""
CONTEXT = 5 + 200 // 2
"""Tokens in the cache halfway through the generation."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measured decode."""

    model: str
    dtype: str
    """``bf16``, or a low-bit layout with its group size: ``int4-g32``."""
    devices: int
    tokens_per_s: float

    @property
    def label(self) -> str:
        """Return a label that identifies the row."""
        return f"{self.model} {self.dtype} on {self.devices}"

    def token_s(self) -> float:
        """Return the predicted time per token.

        Raises:
            FxpartError: if the run cannot be planned.

        """
        preset, changed = MODELS[self.model]
        return time_of_alike_layers_s(preset, changed, self._overrides())

    def _overrides(self) -> tuple[str, ...]:
        layout, _, group = self.dtype.partition("-g")
        few_bits = (f"weights={layout}", "weights.keep=[]")  # the output layer too
        return (
            "phase=decode",
            f"context_len={CONTEXT}",
            f"devices={self.devices}xa100_80gb",
            f"tensor_parallel={self.devices}",
            "transfer_rate=nvlink3",
            "runtime=compiled",
            "mode=single",
            "latency=kernels",
            *(() if layout == "bf16" else few_bits),
            *((f"weights.group_size={group}",) if group else ()),
        )


def points(data: Path) -> list[Point]:
    """Return the rows that a preset describes; print the others with the reason and a count.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    figures = published(data, "gpt-fast")
    reasons = [_reason(figure) for figure in figures]
    for figure, reason in zip(figures, reasons, strict=True):
        if reason:
            print(f"{_point(figure).label} of {figure['hardware']} is left out: {reason}")
    if left_out := Counter(filter(None, reasons)):
        print(f"{left_out.total()} of {len(figures)} rows are left out: {dict(left_out)}")
    return [_point(f) for f, reason in zip(figures, reasons, strict=True) if not reason]


def _reason(point: Mapping[str, Any]) -> str:
    """Return why no run can express a published row, or an empty string if one can."""
    if point["metric"] != "tokens_per_s":
        return f"{point['metric']} has no relative error"
    if point["model"] not in MODELS:
        return "no preset describes the model"
    return "" if "A100" in point["hardware"] else "not on A100s"


def _point(fields: Mapping[str, Any]) -> Point:
    devices, value = int(fields["n_devices"]), float(fields["value"])
    return Point(fields["model"], fields["dtype"], devices, value)


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each model, weight layout and number of devices.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    for point in points(data):
        try:
            predicted = 1 / point.token_s()
        except FxpartError as error:
            print(f"{point.label} is left out: {error}")
            continue
        # The read_share of a low-bit layout is fitted to its row with one device.
        held_out = point.dtype == "bf16" or point.devices > 1
        yield Row(point.label, predicted, point.tokens_per_s, "tokens/s", held_out=held_out)
