"""Compare a recommendation with all combinations of its settings, each costed as a run.

    python -m benchmarks.recommend_everything [--models NAME] [--devices NAME] [-- OVERRIDE ...]

The combinations are enumerated here, without the search space and bounds of the command, and costed
by the functions that ``python -m runner`` calls. None may be faster than the recommended plan.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.composed import composed
from fxpart.errors import FxpartError, InfeasibleError
from runner.config.schema import Config, ModeConfig, ScheduleConfig
from runner.experiment.experiment import plan
from runner.experiment.headline import headline
from runner.experiment.model_spec import model_spec
from runner.experiment.topology import build_topology
from runner.experiment.training import is_training
from runner.output.terminal import without_progress
from runner.plans.chosen import best_of
from runner.plans.request import ONLY, Request

__all__ = ["Comparison", "combinations", "compare"]

MODELS = ("gpt2", "whisper_small", "llama3_1_8b")
DEVICES = ("2x16gb", "4x80gb", "1x80gb+2x24gb")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The best plan of a recommendation, and the best of all combinations."""

    recommended: str
    examples_per_s: float
    tried: int
    """Number of combinations."""
    fit: int
    """Number of combinations that are valid and fit."""
    most: str
    most_examples_per_s: float
    cpu_s: tuple[float, float]
    """CPU time of the recommendation and of all combinations."""


_SCHEDULES = (("1f1b", 8, 1), ("1f1b", 32, 1), ("interleaved", 8, 2), ("interleaved", 32, 2))
"""Schedules with their number of microbatches and of stages per device."""


def combinations(base: Config) -> Iterator[Config]:
    """Yield `base` with all combinations of a recommendation's settings, valid or not."""
    topology = build_topology(base.devices, base.transfer_rate, base.reserve)
    trains, n = is_training(base), topology.n_devices
    degrees = [d for d in range(1, n + 1) if n % d == 0]
    schedules = [("none", 1, 1), *(_SCHEDULES if trains else ())]
    for tensor, sequence, data, expert, zero, checkpointing, (
        schedule,
        count,
        chunks,
    ), mode in product(
        degrees,
        (False, True) if trains else (False,),
        degrees,
        degrees,
        (0, 1, 2, 3) if trains else (0,),
        ("none", "block") if trains else ("none",),
        schedules,
        ("single", "pipeline", "size_based", "kl_based"),
    ):
        is_pipeline = mode == "pipeline"
        if tensor * data > n or tensor * data % expert or (sequence and tensor == 1):
            continue
        if mode not in ("single", "pipeline") and (data > 1 or schedule != "none"):
            continue
        if schedule != "none" and not is_pipeline and (tensor * data < n or chunks > 1):
            continue
        options = {"schedule": schedule, "microbatches": count} if is_pipeline else {}
        options |= {"interleave": chunks} if chunks > 1 else {}
        yield replace(
            base,
            model=replace(base.model, batch_size=base.model.batch_size * data),
            tensor_parallel=tensor,
            sequence_parallel=sequence,
            data_parallel=data,
            expert_parallel=expert,
            zero=zero,
            checkpointing=checkpointing,
            schedule=ScheduleConfig(schedule),
            microbatches=count,
            mode=ModeConfig(mode, options),
        )


def compare(base: Config) -> Comparison:
    """Return the best plan of a recommendation of `base`, and of all combinations.

    Raises:
        FxpartError: if no plan fits.

    """
    begin_s = time.process_time()
    outcome = best_of({ONLY: base}, Request(), {}, base.model.batch_size, prefix="recommend.")
    best = outcome.ranking[0]
    searched_s = time.process_time() - begin_s
    tried, fit, most_rate, most = 0, 0, 0.0, ""
    for config in combinations(base):
        tried += 1
        try:
            with without_progress():
                result = plan(config, model_spec(config), advises=False)
        except FxpartError as error:
            if not isinstance(error, InfeasibleError | ValueError):
                raise
            continue
        fit += 1
        rate = headline(result)["examples_per_s"]
        if rate > most_rate:
            most_rate, most = rate, _describe(config)
    whole_s = time.process_time() - begin_s
    named = " ".join(best.candidate.overrides)
    cpu_s = (searched_s, whole_s - searched_s)
    return Comparison(named, best.examples_per_s, tried, fit, most, most_rate, cpu_s)


def _describe(config: Config) -> str:
    degrees = ("tensor_parallel", "data_parallel", "expert_parallel", "zero", "microbatches")
    shown = [f"{name}={value}" for name in degrees if (value := getattr(config, name)) > 1]
    return " ".join([f"mode={config.mode.name}", *shown, f"schedule={config.schedule.name}"])


def main() -> int:
    """Print a row for each model and device set; return 1 if a combination is faster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--devices", nargs="*", default=DEVICES)
    parser.add_argument("overrides", nargs="*")
    chosen = parser.parse_args()
    sys.stdout.write(
        "| model | devices | recommended, examples/s | CPU s | combinations | that fit | fastest |"
        f" CPU s |\n{'| --- ' * 8}|\n"
    )
    worse = 0
    for model, devices in product(chosen.models, chosen.devices):
        base = composed(f"model={model}", f"devices={devices}", *chosen.overrides)
        try:
            row = compare(replace(base, mode=ModeConfig("single", {})))
        except FxpartError as error:
            sys.stdout.write(f"| `{model}` | {devices} | {str(error).partition(';')[0]} |\n")
            continue
        worse += row.most_examples_per_s > row.examples_per_s
        sys.stdout.write(
            f"| `{model}` | {devices} | {row.examples_per_s:,.4f}: `{row.recommended}` |"
            f" {row.cpu_s[0]:.0f} | {row.tried} | {row.fit} | {row.most_examples_per_s:,.4f}:"
            f" `{row.most}` | {row.cpu_s[1]:.0f} |\n"
        )
        sys.stdout.flush()
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
