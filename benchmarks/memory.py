"""``python -m benchmarks.memory``: memory predicted from shapes beside live bytes in real runs.

Eleven architectures, each small and with 75 to 290 MB of weights, on one device. The prediction
comes from a capture on the meta device without creating weights. The measurement counts the bytes
of live tensors in a run with random weights on the CPU, by a dispatch mode over storages that is
independent of the prediction; it includes weights, buffers, inputs, gradients and optimizer state.

- graph: a forward pass of the exported graph, which drops a value after its last reader, as the
  stages of fxpart do;
- eager: a forward pass of the module itself, which keeps the values that its Python code refers to;
- step: a training step of the module itself: forward in train mode, fxpart's loss, backward,
update;
  the second step, after ``zero_grad(set_to_none=True)``.

Workspaces of kernels are in neither. The LSTM is the exception: on a CPU a library computes whole
layers and returns a workspace that is counted; captures do not use that library.

The last columns show the bytes that torch's allocator gave out for the same on a CUDA device, less
library workspaces, and the errors of predictions for it: with fused attention and dropout, and the
optimizer in its ``foreach`` form, as torch uses there. Without a CUDA device, and for AdamW, they
are those that an H100 allocated (``benchmarks/gpu/h100.json``).

``--quick`` runs only the small models, ``--only NAME`` one architecture, ``--optimizer NAME``
selects another optimizer than adamw, ``--markdown`` prints the table as in the docs.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.eager_memory import CPU_STEP
from benchmarks.memory_case import Counted, Predicted, counted, predicted, predicted_step
from benchmarks.memory_cuda import Allocated, allocated, recorded
from benchmarks.memory_models import MID_SIZE, SMALL
from benchmarks.text_table import markdown, table
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.optimizer import OPTIMIZERS, Optimizer
from fxpart.core.phases import StepOptions

__all__ = ["HEADS", "Case", "main", "row", "summary"]

FORWARD_TARGET, STEP_TARGET = 0.02, 0.05
"""Allowed error of a prediction, as a share of the counted bytes."""

HEADS = (
    "model",
    "weights MB",
    "graph MB",
    "counted",
    "error",
    "eager MB",
    "counted",
    "error",
    "step MB",
    "counted",
    "error",
    "peak in",
    "CUDA forward",
    "error",
    "CUDA step",
    "error",
)

# Torch's defaults on a CPU and on CUDA.
_CUDA_STEP = StepOptions()


@dataclass(frozen=True, slots=True)
class Case:
    """The predicted and measured memory of one model."""

    name: str
    predicted: Predicted
    counted: Counted
    cuda_step_bytes: int | None
    """Predicted for a training step on CUDA; None if none was measured."""
    allocated: Allocated | None
    """Measured on CUDA; None if unknown."""


def _case(spec: ModelSpec, size: str, optimizer: str) -> Case:
    begin = time.perf_counter()
    prediction = predicted(spec, Optimizer(optimizer), CPU_STEP)
    middle = time.perf_counter()
    counts = counted(spec, Optimizer(optimizer))
    name = f"{spec.name} {size}"
    foreach = Optimizer(optimizer, implementation="foreach")
    if torch.cuda.is_available():
        allocations: Allocated | None = allocated(spec, foreach, torch.device("cuda"))
    else:
        allocations = recorded(name) if optimizer == "adamw" else None
    cuda_step = predicted_step(spec, foreach, _CUDA_STEP) if allocations else None
    predict_s, run_s = middle - begin, time.perf_counter() - middle
    print(f"{name}: predicted in {predict_s:.1f} s, run in {run_s:.1f} s", file=sys.stderr)
    return Case(name, prediction, counts, cuda_step, allocations)


def row(case: Case) -> list[str]:
    """Return the cells of a case, under `HEADS`."""
    prediction, counts, allocations = case.predicted, case.counted, case.allocated
    cells = [case.name, _mb(prediction.weight_bytes)]
    cells += _pair(prediction.graph_bytes, counts.graph_bytes)
    cells += _pair(prediction.eager_bytes, counts.eager_bytes)
    cells += [*_pair(prediction.step_bytes, counts.step.peak_bytes), counts.step.phase]
    if allocations is None or case.cuda_step_bytes is None:
        return [*cells, "-", "-", "-", "-"]
    cells += _pair(prediction.eager_bytes, allocations.tensors_of_forward_bytes)[1:]
    return [*cells, *_pair(case.cuda_step_bytes, allocations.tensors_of_step_bytes)[1:]]


def _pair(predicted_bytes: int, counted_bytes: int) -> list[str]:
    error = f"{_error(predicted_bytes, counted_bytes):+.2%}"
    return [_mb(predicted_bytes), _mb(counted_bytes), error]


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.2f}"


def _error(predicted_bytes: int, counted_bytes: int) -> float:
    return predicted_bytes / counted_bytes - 1


def summary(cases: Sequence[Case]) -> str:
    """Return the lines below the table: how many predictions are within the target."""
    graph = [_error(c.predicted.graph_bytes, c.counted.graph_bytes) for c in cases]
    eager = [_error(c.predicted.eager_bytes, c.counted.eager_bytes) for c in cases]
    step = [_error(c.predicted.step_bytes, c.counted.step.peak_bytes) for c in cases]
    lines = [
        _line(kind, errors, target)
        for kind, errors, target in (
            ("graph", graph, FORWARD_TARGET),
            ("eager", eager, FORWARD_TARGET),
            ("step", step, STEP_TARGET),
        )
    ]
    on_cuda = [
        (case.allocated, case.cuda_step_bytes, case.predicted.eager_bytes)
        for case in cases
        if case.allocated and case.cuda_step_bytes is not None
    ]
    if not on_cuda:
        return "\n".join([*lines, "CUDA: not measured"])
    for kind, errors, target in (
        (
            "CUDA forward",
            [_error(eager, a.tensors_of_forward_bytes) for a, _, eager in on_cuda],
            FORWARD_TARGET,
        ),
        (
            "CUDA step",
            [_error(step, a.tensors_of_step_bytes) for a, step, _ in on_cuda],
            STEP_TARGET,
        ),
    ):
        lines.append(_line(kind, errors, target))
    workspaces = max(a.kept_bytes for a, _, _ in on_cuda)
    lines.append(f"CUDA: library workspaces of up to {_mb(workspaces)} MB are left out")
    return "\n".join(lines)


def _line(kind: str, errors: Sequence[float], target: float) -> str:
    return (
        f"{kind}: {_within(errors, target)} of {len(errors)} within {target:.0%},"
        f" largest error {max(errors, key=abs):+.2%}"
    )


def _within(errors: Sequence[float], target: float) -> int:
    return sum(abs(error) <= target for error in errors)


def main() -> None:
    """Print one row for each model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory")
    parser.add_argument("--quick", action="store_true", help="only the small models")
    parser.add_argument("--only", choices=sorted({spec.name for spec in (*SMALL, *MID_SIZE)}))
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    sized = [("small", spec) for spec in SMALL]
    sized += [] if options.quick else [("mid-size", spec) for spec in MID_SIZE]
    cases = [
        _case(spec, size, options.optimizer)
        for size, spec in sized
        if options.only in (None, spec.name)
    ]
    render = markdown if options.markdown else table
    print(render(HEADS, [row(case) for case in cases]))
    print(summary(cases))


if __name__ == "__main__":
    main()
