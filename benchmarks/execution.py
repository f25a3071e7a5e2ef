"""``python -m benchmarks.execution``: predictions for split models beside measurements.

Mid-size models are built with random weights, cut into stages (`mode=pipeline`), and run in this
process, one stage after the other, on one thread. All models are run and profiled in turn, several
times, since the speed of a machine shared with others drifts; times are medians over these rounds.
The prediction is the sum of operator times:

- profiled: each operator measured on its own, as ``latency=profiled`` does;
- calibrated: the roofline fitted to the profiles of all models, with a few coefficients;
- held out: the same, fitted only to the other models.

Memory is that of the largest stage: live bytes counted in a run, beside those predicted. With a GPU
the same is done there, and the bytes given out by torch's allocator are shown too.

``--markdown`` prints the tables as in docs/execution.md, ``--only NAME`` selects one model,
``--pipeline`` runs the stages of a GPT-2 as processes instead: see `benchmarks.execution_pipeline`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch

from benchmarks.execution_models import MODELS
from benchmarks.execution_pipeline import pipeline_rows
from benchmarks.execution_scene import machine_topology
from benchmarks.text_table import markdown, table
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.assignment import Assignment
from fxpart.core.graph import without_python
from fxpart.cost.calibration import Calibration
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.fit import calibrate
from fxpart.cost.problem import make_problem
from fxpart.cost.profile import OperatorProfile
from fxpart.execution.device import checked_device, device_name, torch_threads
from fxpart.execution.local import LocalRun, run_local
from fxpart.execution.profiling.api import profile_operators
from fxpart.execution.real_model import RealModel, real_model
from fxpart.placement.pipeline import PipelineOptions, pipeline

STAGES = 4
ROUNDS = 5
HEADS = (
    "model",
    "operators",
    "measured ms",
    "unsplit ms",
    "profiled",
    "calibrated",
    "held out",
    "peak MiB",
    "predicted",
    "allocator MiB",
    "results",
)


@dataclass(slots=True)
class Case:
    """One model on one device, with its placement and the profile and run of each round."""

    spec: ModelSpec
    real: RealModel
    assignment: Assignment
    profiles: list[OperatorProfile]
    runs: list[LocalRun]

    @property
    def profile(self) -> OperatorProfile:
        """The median time of each operator over all rounds."""
        seconds = np.median([profile.seconds for profile in self.profiles], axis=0)
        return replace(self.profiles[0], seconds=seconds)

    @property
    def latency_s(self) -> float:
        """The median time of a run over all rounds."""
        return median(run.latency_s for run in self.runs)

    def measure(self, device: str, repeats: int) -> None:
        """Add a round of a run and a profile."""
        real = self.real
        self.runs.append(run_local(real, self.assignment, STAGES, repeats=repeats))
        self.profiles.append(
            profile_operators(real.program, real.graph, device=device, repeats=repeats)
        )


def _case(spec: ModelSpec, device: str) -> Case:
    real = real_model(spec, device=device)
    profile = profile_operators(real.program, real.graph, device=device, repeats=1)
    problem = make_problem(real.graph, machine_topology(STAGES), profile)
    assignment = pipeline(problem, PipelineOptions(stages=STAGES))
    return Case(spec, real, assignment, [], [])


def _error(predicted_s: float, measured_s: float) -> str:
    return f"{(predicted_s / measured_s - 1) * 100:+.1f}%"


def _row(case: Case, cases: Sequence[Case], fitted: Calibration) -> list[str]:
    others = [(c.real.graph, c.profile) for c in cases if c is not case]
    # Stages drop a value after its last reader, whatever the module's variables refer to.
    graph, measured_s = without_python(case.real.graph), case.latency_s
    problem = make_problem(graph, machine_topology(STAGES), case.profile)
    predicted = max(peak_bytes(problem.memory, case.assignment.device_of, STAGES).tolist())
    counted = max(case.runs[0].peak_bytes)
    held_out = calibrate(others).seconds(graph).sum() if others else float("nan")
    allocator = max(case.runs[0].allocator_peak_bytes, default=0)
    unsplit_s = median(run.unsplit_latency_s for run in case.runs)
    difference = max(run.max_difference for run in case.runs)
    return [
        case.spec.name,
        str(graph.n_ops),
        f"{measured_s * 1e3:.1f}",
        f"{unsplit_s * 1e3:.1f}",
        _error(case.profile.total_s, measured_s),
        _error(float(fitted.seconds(graph).sum()), measured_s),
        _error(float(held_out), measured_s),
        f"{counted / 2**20:.1f}",
        _error(predicted, counted),
        f"{allocator / 2**20:.1f}" if allocator else "-",
        "equal" if difference == 0 else f"within {difference:.1g}",
    ]


def _local_rows(specs: Sequence[ModelSpec], device: str, repeats: int) -> list[list[str]]:
    cases = [_case(spec, device) for spec in specs]
    for number in range(ROUNDS):
        for case in cases:
            case.measure(device, repeats)
        print(f"{device}: round {number + 1} of {ROUNDS}", flush=True)
    fitted = calibrate([(case.real.graph, case.profile) for case in cases])
    return [_row(case, cases, fitted) for case in cases]


def main() -> None:
    """Measure the models and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help="one model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--pipeline", action="store_true")
    chosen = parser.parse_args()
    render = markdown if chosen.markdown else table
    if chosen.pipeline:
        print(render(*pipeline_rows()))
        return
    specs = [spec for spec in MODELS if chosen.only in (None, spec.name)]
    with torch_threads(1):
        rows = _local_rows(specs, "cpu", chosen.repeats)
        print(f"\none thread of {device_name(checked_device('cpu'))}, {STAGES} stages")
        print(render(HEADS, rows))
        if torch.cuda.is_available():
            rows = _local_rows(specs, "cuda", chosen.repeats)
            print(f"\n{device_name(checked_device('cuda'))}, {STAGES} stages")
            print(render(HEADS, rows))
        else:
            print("\nGPU: none found; with one, the same table follows for it")


if __name__ == "__main__":
    main()
