"""Device memory of training steps of timm's models, compared with nvidia-smi on an A100.

    python -m benchmarks.truth.timm_memory --data FOLDER [--sample N [--seed S]] [--rows]

The measurements do not state all settings. These explain them: SGD with momentum and ``zero_grad``,
float32, images of the model's native size. The memory of the process that does not depend on the
model, mostly its CUDA context, is one number, fitted to half of the models by their names; the
other half is held out. The share that convolutions take, and that the optimizer is SGD with
momentum, were found by trial on 18 models of both halves. The rest is fxpart's prediction with the
numbers of ``conf/reserve/cuda.yaml``.

Rows that no step explains are left out: those at the limit of the card, and models whose memory
does not grow with the batch because they failed before completing a step.
"""

import argparse
import csv
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from benchmarks.text_table import table
from benchmarks.truth.measured import add_data_argument, skipped_without_files
from benchmarks.truth.row import HEADS, Row, summary
from fxpart.capture.captured import captured_graph, captured_symbolic
from fxpart.capture.models.spec import ModelSpec, library_spec
from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.optimizer import Optimizer, with_optimizer
from fxpart.core.reserve import Interval, Reserve, rounded
from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.cost.device_memory import device_memory_of
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import make_problem
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import CaptureError, FxpartError
from runner.config.schema import ReserveConfig
from runner.experiment.topology import reserve_of

__all__ = [
    "NAME",
    "PROCESS_MIB",
    "SOURCE",
    "Measured",
    "fitted_rows",
    "measured",
    "process_mib",
    "rows",
]

NAME = "timm training memory"
SOURCE = (
    "itu-rad/GPUMemNet (no licence stated), nvidia-smi on an A100 of 40 GB; held out from"
    " the process's size, not from what convolutions and SGD take, found on models of both"
)
_FILE = "timm_training_memory.csv"
_CAPPED_MIB = 36_000
"""From this size on the card may have been full: the figures stop growing."""
_STEADY = 1.02
"""Models whose figures at all batch sizes are within this factor never completed a step."""
_CACHE = Path.home() / ".cache" / "fxpart"
_CUDA = Path(__file__).resolve().parents[2] / "conf" / "reserve" / "cuda.yaml"
_MIB = 2**20
PROCESS_MIB = 1713
"""Memory of the measured process that does not depend on the model, mostly its context: the median
over the models of a sample of 29 that are not held out. It does not carry over to other machines:
with lazy loading of kernels it is about 500."""
_SEED = 0
_FEW = 24
"""Models used beside other sets: each is captured once, which takes 5 to 40 s; `main` uses all."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured memory of one model at several batch sizes."""

    model: str
    mib: Mapping[int, int]
    """Memory by batch size, ascending."""

    @property
    def step_figures(self) -> dict[int, int]:
        """Return the figures of complete steps: those that grow with the batch, below the cap."""
        if max(self.mib.values()) <= _STEADY * min(self.mib.values()):
            return {}
        figures: dict[int, int] = {}
        for size in sorted(self.mib):
            if self.mib[size] >= _CAPPED_MIB or self.mib[size] <= max(figures.values(), default=0):
                break
            figures[size] = self.mib[size]
        return figures

    @property
    def is_held_out(self) -> bool:
        """Return whether `PROCESS_MIB` is not fitted to the model: half of all names.

        The share of convolutions, and SGD with momentum, were found on models of both halves.
        """
        return hashlib.sha256(self.model.encode()).digest()[0] % 2 == 1


def measured(data: Path, sample: int | None = None, seed: int = _SEED) -> list[Measured]:
    """Return the models of the file by name, or a random `sample` of that many.

    Raises:
        FileNotFoundError: if `data` lacks the file.

    """
    by_model: dict[str, dict[int, int]] = {}
    with (data / _FILE).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            sizes = by_model.setdefault(row["model"], {})
            sizes[int(row["batch"])] = int(row["max_gpu_memory_mib"])
    models = [Measured(name, sizes) for name, sizes in sorted(by_model.items())]
    if sample is None or sample >= len(models):
        return models
    return sorted(random.Random(seed).sample(models, sample), key=lambda model: model.model)


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each figure of a complete step, for `_FEW` models.

    Raises:
        FileNotFoundError: if the file is missing or timm is not installed.

    """
    models = measured(data, _FEW)
    if find_spec("timm") is None:
        raise FileNotFoundError(2, "not installed", "timm: pip install 'fxpart[timm]'")
    yield from fitted_rows(models)


def fitted_rows(models: Sequence[Measured], cache_dir: Path | None = _CACHE) -> Iterator[Row]:
    """Yield a row for each figure of the `models` that can be captured, in their order.

    The others are printed with the reason and counted.
    """
    reserve, left_out = _reserve(), 0
    for model in models:
        try:
            needs = _predictions(model, reserve, cache_dir)
        except FxpartError as error:
            print(f"{model.model} is left out: {error}")
            left_out += 1
            continue
        if not needs:
            print(f"{model.model} is left out: no figure grows with the batch below the card's end")
            left_out += 1
        for size, need in needs.items():
            yield Row(
                f"{model.model}, batch {size}",
                need.expected / _MIB + PROCESS_MIB,
                model.mib[size],
                "MiB",
                held_out=model.is_held_out,
            )
    if left_out:
        print(f"{left_out} of {len(models)} models are left out")


def process_mib(rows_fitted: Sequence[Row]) -> float:
    """Return the `PROCESS_MIB` that rows imply: the weighted median of measured less predicted.

    The weight is 1 / measured, so that the median relative error is zero.
    """
    pairs = [(row.measured - row.predicted, 1 / row.measured) for row in rows_fitted]
    differences, weights = np.array(sorted(pairs)).T
    return PROCESS_MIB + float(differences[np.searchsorted(np.cumsum(weights), weights.sum() / 2)])


def _reserve() -> Reserve:
    """Return the numbers of ``reserve=cuda`` without the context, for one process on an A100."""
    shipped = OmegaConf.merge(OmegaConf.structured(ReserveConfig), OmegaConf.load(_CUDA))
    shipped.context_bytes = 0
    config = OmegaConf.to_object(shipped)
    assert isinstance(config, ReserveConfig)
    return reserve_of(config)


def _predictions(model: Measured, reserve: Reserve, cache_dir: Path | None) -> dict[int, Interval]:
    return {
        size: _needed(graph, reserve)
        for size, graph in _graphs(model.model, list(model.step_figures), cache_dir)
    }


def _graphs(
    name: str, sizes: Sequence[int], cache_dir: Path | None
) -> Iterator[tuple[int, OpGraph]]:
    """Yield the training step at each batch size, from one symbolic capture if that succeeds."""
    if not sizes:
        return
    spec = ModelSpec(name, batch_size=sizes[0], **library_spec("timm", name, {}))
    try:
        symbolic = captured_symbolic(
            spec, ("batch",), cache_dir, "training", train_mode=True
        ).symbolic
        for size in sizes:
            yield size, symbolic.at(batch=size)
    except CaptureError:
        for size in sizes:
            spec = ModelSpec(name, batch_size=size, **library_spec("timm", name, {}))
            captured = captured_graph(spec, "operator", cache_dir, "training", train_mode=True)
            yield size, captured.graph


def _needed(graph: OpGraph, reserve: Reserve) -> Interval:
    """Return the memory that one device needs for a step."""
    step = rounded(with_optimizer(graph, Optimizer("momentum")), reserve.rounding_bytes)
    device = DeviceSpec("a100_40gb", 2**50, {"float32": 19.5e12}, 1.555e12)
    problem = make_problem(step, uniform_topology((device,), Link(1e9)), LatencyModel())
    plan = Assignment(np.zeros(step.n_ops, dtype=np.int64), ((0,),))
    peak = evaluate(problem, plan).devices[0].peak_bytes
    (need,) = device_memory_of(problem, plan, [reserve], tensor_bytes={0: peak}, peers={})
    return need.needed


@skipped_without_files("timm training memory")
def main(arguments: Sequence[str] | None = None) -> None:
    """Print the errors of the fitted models and of those held out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth.timm_memory")
    add_data_argument(parser)
    parser.add_argument("--sample", type=int, help="use N random models only")
    parser.add_argument("--seed", type=int, default=_SEED, help="seed of the sample")
    parser.add_argument("--rows", action="store_true", help="also print every row")
    options = parser.parse_args(arguments)
    all_rows = list(fitted_rows(measured(options.data, options.sample, options.seed)))
    parts = {
        "fitted": [row for row in all_rows if not row.held_out],
        "held out": [row for row in all_rows if row.held_out],
        "all": all_rows,
    }
    print(table(["timm", *HEADS], [[name, *summary(part)] for name, part in parts.items()]))
    if parts["fitted"]:
        print(
            f"the models not held out imply {process_mib(parts['fitted']):.0f} MiB for the process;"
            f" {PROCESS_MIB} are assumed"
        )
    for row in all_rows if options.rows else ():
        print(f"{row.label:48} {row.predicted:8.0f} {row.measured:8.0f} {100 * row.error:+6.1f} %")


if __name__ == "__main__":
    main()
