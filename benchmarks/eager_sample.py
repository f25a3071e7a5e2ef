"""``python -m benchmarks.eager_sample``: eager memory of architectures of transformers at random.

As `benchmarks.eager_memory`, for a sample of all model classes that transformers lists for its Auto
classes, at default sizes with 2 layers and a batch of 2, on one device: the forward, and the second
training step with AdamW for models of up to 80 million parameters. Larger models than 120 million
are left out. Weights that no operator reads count, since a run has them in memory. Each class is
tried in its own process with a limit of CPU time, two at a time.

    --sample N     size of the sample; 60 by default
    --seed N       seed of the sample; 0 by default
    --only NAME    this class alone
"""

import argparse
import random
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.architecture_job import Outcome, candidate_configs
from benchmarks.architectures import architectures, outcomes_of
from benchmarks.eager_memory import CPU_STEP, error_percent, peak_on_one
from fxpart.capture.api import capture_graph
from fxpart.capture.models.build import BuiltModel, build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.joint import joint_capture
from fxpart.core.graph import OpGraph
from fxpart.core.optimizer import Optimizer, with_optimizer
from fxpart.errors import FxpartError, one_line
from fxpart.execution.device import seeded
from fxpart.execution.real_step import forward_peak_bytes, real_optimizer, step_peak_bytes

__all__ = ["Comparison", "compare", "summary"]

_CPU = torch.device("cpu")
_MOST_PARAMETERS = {"forward": 120e6, "step": 80e6}
_LIMITS_PERCENT = (0.1, 1.0)


@dataclass(frozen=True, slots=True)
class Comparison(Outcome):
    """Predicted and counted bytes of one architecture.

    Its `status` is ``compared``, ``large``, ``refused`` by fxpart, or ``not run`` by the model.
    """

    forward: tuple[int, int] | None = None
    step: tuple[int, int] | None = None
    """None for a model that is too large for it, or for the `reason`."""


def compare(architecture: str) -> Comparison:
    """Predict and count the bytes of the first of its configurations that can be captured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _first_captured(architecture)


def _first_captured(architecture: str) -> Comparison:
    reason = ""
    for config in candidate_configs(architecture):
        spec = ModelSpec(architecture, architecture, config=config, batch_size=2)
        try:
            built = build_model(spec)
            if _parameters(built) > _MOST_PARAMETERS["forward"]:
                return Comparison(architecture, "large")
            graph = capture_graph(built.module, built.args, built.kwargs)
        except FxpartError as error:
            reason = one_line(error)
            continue
        return _compared(spec, built, graph)
    return Comparison(architecture, "refused", reason)


def _compared(spec: ModelSpec, built: BuiltModel, graph: OpGraph) -> Comparison:
    step, reason = None, ""
    try:
        with seeded(0, _CPU):
            real = build_model(spec, _CPU)
            counted = forward_peak_bytes(real.module, real.args, real.kwargs)
        if _parameters(built) <= _MOST_PARAMETERS["step"]:
            step = _step(replace(spec, loss="own"))
    except FxpartError as error:
        reason = one_line(error)
    # A model with random weights may raise anything.
    except Exception as error:
        return Comparison(spec.name, "not run", one_line(error))
    forward = peak_on_one(graph) + int(graph.unread_weight_bytes.sum()), counted
    return Comparison(
        spec.name, "compared", reason, operators=graph.n_ops, forward=forward, step=step
    )


def _step(spec: ModelSpec) -> tuple[int, int]:
    """Return the predicted and counted bytes of a training step."""
    planned = build_model(spec)
    graph = joint_capture(planned.module.train(), planned.args, planned.kwargs, CPU_STEP).graph
    predicted = peak_on_one(with_optimizer(graph, Optimizer("adamw")))
    with seeded(0, _CPU):
        real = build_model(spec, _CPU)
        updates = real_optimizer("adamw", real.module.parameters())
        counted = step_peak_bytes(real.module.train(), real.args, real.kwargs, updates)
    return predicted + int(graph.unread_weight_bytes.sum()), counted.peak_bytes


def _parameters(built: BuiltModel) -> int:
    return sum(parameter.numel() for parameter in built.module.parameters())


def summary(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield the numbers of outcomes, and how many errors of each part are small."""
    counts = Counter(comparison.status for comparison in comparisons)
    yield ", ".join(f"{count} {status}" for status, count in counts.most_common())
    for part in ("forward", "step"):
        pairs = [getattr(comparison, part) for comparison in comparisons]
        errors = sorted(abs(error_percent(*pair)) for pair in pairs if pair is not None)
        within = [
            f"{sum(e <= limit for e in errors)} within {limit:g} %" for limit in _LIMITS_PERCENT
        ]
        worst = f"; the largest error {errors[-1]:.2f} %" if errors else ""
        yield f"{part}: {len(errors)} compared, {', '.join(within)}{worst}"


def _line(comparison: Comparison) -> str:
    parts = [
        f"{name} {pair[0] / 1e6:.2f} MB of {pair[1] / 1e6:.2f} ({error_percent(*pair):+.2f} %)"
        for name, pair in (("forward", comparison.forward), ("step", comparison.step))
        if pair is not None
    ]
    told = "; ".join([*parts, *([comparison.reason] if comparison.reason else [])])
    return f"{comparison.architecture:<45} {comparison.status:<9} {told}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each architecture, then the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=60, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--only", metavar="NAME")
    chosen = parser.parse_args(arguments)
    names = architectures(bases_only=False)
    names = random.Random(chosen.seed).sample(names, min(chosen.sample, len(names)))
    comparisons = []
    for outcome in outcomes_of([chosen.only] if chosen.only else names, compare):
        comparison = (
            outcome
            if isinstance(outcome, Comparison)
            else Comparison(outcome.architecture, outcome.status, outcome.reason)
        )
        comparisons.append(comparison)
        print(_line(comparison), flush=True)
    print(*summary(comparisons), sep="\n")


if __name__ == "__main__":
    main()
