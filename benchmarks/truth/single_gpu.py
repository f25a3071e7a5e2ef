"""Memory of one GPU: forwards and training steps of models that fxpart ships.

Measured by ``python -m benchmarks.gpu.measure`` on an H100; the figures are in
``benchmarks/gpu/h100.json``. A case has two rows: the peak allocated by torch's allocator, and the
memory in use on the device as ``nvidia-smi`` shows it.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import benchmarks.gpu
from benchmarks.gpu.cases import CASES, Case
from benchmarks.truth.planned_run import planned_run
from benchmarks.truth.row import Row
from runner.experiment.result import Result

__all__ = ["NAME", "SOURCE", "is_held_out", "measured_cases", "planned", "rows"]

NAME = "single_gpu"
SOURCE = "fxpart's own: python -m benchmarks.gpu.measure on an H100 SXM, torch 2.11, CUDA 13.0"
_FILE = Path(benchmarks.gpu.__file__).with_name("h100.json")
_FITTED = ("gpt2 ", "bert_large ")
"""Models whose products with unaligned rows `unaligned_shares` is fitted to."""
_OTHER_ATTENTION = "t5_large "
"""Measured with transformers 5.17, whose bias of T5's attention was not contiguous, so that torch
computed it in float32 without a fused kernel; 5.23, which is captured here, makes it contiguous."""
_ALLOCATED = ("tensors", "unread weights", "kernel workspaces", "library workspaces")
"""Parts of a device's memory that torch's allocator gives out."""


def rows(_: Path) -> Iterator[Row]:
    """Yield two rows for each case that was measured."""
    for case, measured in measured_cases():
        (need,) = planned(case).device_needs
        allocated = sum(need.parts[part].expected for part in _ALLOCATED if part in need.parts)
        for label, predicted_bytes in (
            ("allocated", allocated),
            ("device", need.needed.expected),
        ):
            measured_gib = measured[f"{label}_bytes"] / 2**30
            yield Row(
                f"{case.label}, {label}",
                predicted_bytes / 2**30,
                measured_gib,
                "GiB",
                held_out=True,
            )


def is_held_out(case: Case) -> bool:
    """Return whether no curve is fitted to the time of `case`; nothing is fitted to memory."""
    return not case.label.startswith(_FITTED)


def measured_cases() -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yield each measured case of the captured implementation with its measurements."""
    measured = json.loads(_FILE.read_text(encoding="utf-8"))["cases"]
    for case in CASES:
        if case.label in measured and not case.label.startswith(_OTHER_ATTENTION):
            yield case, measured[case.label]


@cache
def planned(case: Case) -> Result:
    """Return the plan of `case`, which both sets of this GPU use."""
    return planned_run((*case.overrides, "devices=1xh100", "mode=single"))
