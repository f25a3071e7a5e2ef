"""``python -m runner.calibrate``: measure some models here and fit one roofline to all of them.

The file it writes predicts operator times of other models on this machine without measuring again:
``latency=calibrated latency.file=<file>``.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from fxpart.errors import CacheError, SpecError
from runner.cli.ending import Parser, reported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fxpart.core.graph import OpGraph
    from fxpart.cost.calibration import Calibration
    from fxpart.cost.profile import OperatorProfile
    from runner.config.schema import Config

__all__ = ["Request", "main", "parsed"]

_COMMAND = "python -m runner.calibrate"
_CHOSEN = {
    "model": "name the presets without model=",
    "latency": "operators are measured; use --device, --threads and --repeats",
}
"""Config groups that cannot be overridden here, with what to use instead."""


@dataclass(frozen=True, slots=True)
class Request:
    """The parsed command line."""

    file: Path
    """The calibration file to write."""
    presets: tuple[str, ...]
    """Model presets, as named in ``model=``."""
    overrides: tuple[str, ...]
    """Hydra overrides of every model, the measurement settings first."""


def main() -> int:
    """Run the command line and return the exit code: 0, or 2 for a user error."""
    return reported(lambda: _calibrate(parsed(sys.argv[1:])))


def parsed(arguments: "Sequence[str]") -> Request:
    """Parse the command line.

    Raises:
        SpecError: if an argument is missing, unknown or not allowed here.

    """
    parser = Parser(
        prog=_COMMAND,
        usage=f"{_COMMAND} FILE PRESET [PRESET ...] [options] [override ...]",
        description="Measure some models here, and fit one roofline to them all.",
        epilog="Overrides, such as model.batch_size=4 or phase=training, count for all models."
        " Measurements are kept, and shared with latency=profiled.",
    )
    parser.add_argument("file", help="what to write, such as here.json")
    parser.add_argument("preset", nargs="+", help="models, such as gpt2; more are better")
    parser.add_argument("--device", default="cpu", help="cpu (if left out) or cuda")
    parser.add_argument(
        "--threads", type=int, default=1, help="that the CPU computes with; 1 if left out"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="runs of each kind of operator; 5 if left out"
    )
    request = parser.parse_intermixed_args(arguments)
    overrides = [
        argument for argument in request.preset if "=" in argument or argument.startswith("~")
    ]
    presets = tuple(
        dict.fromkeys(argument for argument in request.preset if argument not in overrides)
    )
    if not request.file.endswith(".json"):
        raise SpecError(f"the file comes first, got {request.file}; give one that ends in .json")
    if not presets:
        raise SpecError("there is no model to measure; name one or more, such as gpt2 bert")
    for override in overrides:
        group = override.lstrip("+~").partition("=")[0]
        if group in _CHOSEN:
            raise SpecError(f"{override} has no place here: {_CHOSEN[group]}")
    measured = (
        "latency=profiled",
        f"latency.device={request.device}",
        f"latency.threads={request.threads}",
        f"latency.repeats={request.repeats}",
    )
    return Request(Path(request.file), presets, (*measured, *overrides))


def _calibrate(request: Request) -> int:
    from fxpart.cost.calibration import write_calibration
    from fxpart.cost.fit import calibrate
    from runner.experiment.operator_times import busy_note
    from runner.output.terminal import show

    # Reject what is cheap to check before measuring anything.
    _check_place(request.file)
    configs = [_config(preset, request.overrides) for preset in request.presets]
    samples = [_sample(config) for config in configs]
    calibration = calibrate(samples)
    write_calibration(request.file, calibration)
    for config, (_, profile) in zip(configs, samples, strict=True):
        if note := busy_note(profile):
            show(f"times of {config.model.name}: {note}")
    _show_errors([config.model.name for config in configs], samples, calibration)
    show(f"use it: latency=calibrated latency.file={request.file}")
    return 0


def _check_place(file: Path) -> None:
    """Create the folder of `file` and check that it is writable.

    Raises:
        SpecError: if `file` is a folder.
        CacheError: if nothing can be written there.

    """
    if file.is_dir():
        raise SpecError(f"{file} is a folder; give the name of a file in it")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise CacheError(f"cannot write {file}: {error.strerror}; choose another place") from error


def _config(preset: str, overrides: "Sequence[str]") -> "Config":
    """Return the checked config that the main command would run for the preset."""
    from hydra import compose, initialize_config_dir

    from fxpart.core.granularity import check_level
    from fxpart.core.phases import check_phase
    from runner.cli.composing import composing
    from runner.config import choices
    from runner.config import read as config
    from runner.config.paths import conf_dir
    from runner.experiment.operator_times import check_latency

    config.register()
    choices.register()
    quoted = choices.quoted_overrides([f"model={preset}", *overrides])
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        with composing():
            composed = compose("config", overrides=quoted)
        read = config.read_config(composed)
    check_level(read.capture.level)
    check_phase(read.phase.name, read.capture.level)
    check_latency(read)
    if read.latency.source != "profiled":
        raise SpecError(f"latency.source={read.latency.source} measures nothing; leave it out")
    return read


def _sample(config: "Config") -> "tuple[OpGraph, OperatorProfile]":
    from fxpart.cost.profile import OperatorProfile
    from runner.experiment.model_spec import model_spec
    from runner.experiment.operator_times import operator_times
    from runner.experiment.subject import subject_of
    from runner.output.terminal import progress

    spec = model_spec(config)
    with progress(f"capturing {spec.name}"):
        subject = subject_of(config, spec)
    profile = operator_times(config, subject, spec.key())
    assert isinstance(profile, OperatorProfile), "another source was refused"
    return subject.captured.graph, profile


def _show_errors(
    names: "Sequence[str]",
    samples: "Sequence[tuple[OpGraph, OperatorProfile]]",
    calibration: "Calibration",
) -> None:
    """Print the measured and fitted sums of operator times of each model.

    With several models, the held-out error, of a fit to the others, predicts that of a new model.
    """
    from runner.output.terminal import add_numbers, empty_table, show

    table = empty_table("sum of operators")
    table.add_column("model", overflow="fold")
    held_out = calibration.held_out_errors
    held_out_heading = ["held out\n%"] if held_out else []
    add_numbers(table, "operators", "measured\nms", "fitted\nms", "error\n%", *held_out_heading)
    rows = zip(names, samples, calibration.total_errors, strict=True)
    for index, (name, (graph, profile), error) in enumerate(rows):
        measured_ms = profile.total_s * 1e3
        cells = (f"{measured_ms:.2f}", f"{measured_ms * (1 + error):.2f}", f"{error * 100:+.1f}")
        held_out_cell = [f"{held_out[index] * 100:+.1f}"] if held_out else []
        table.add_row(name, str(graph.n_ops), *cells, *held_out_cell)
    rates = _with_spread(calibration, calibration.flops_per_s)
    moves = {"move": calibration.bytes_per_s, **calibration.moves_per_s}
    show(
        table,
        f"device:    {calibration.device_name}",
        f"GFLOP/s:   {rates or 'none'}",
        f"GB/s:      {_with_spread(calibration, moves)}",
        "(x):       typical factor (RMS) on the operators that a rate was fitted to",
        f"operator:  {calibration.overhead_s * 1e6:.1f} us besides; a view"
        f" {calibration.view_s * 1e6:.1f} us",
        f"fit:       operators {calibration.op_error:.0%} apart, weighted by time; rank correlation"
        f" {calibration.spearman:.2f}",
        *_held_out_line(held_out),
    )


def _with_spread(calibration: "Calibration", rates: "Mapping[str, float]") -> str:
    """Return rates in billions, each with the typical error factor of the operators fitted."""
    texts = []
    for kind, rate in sorted(rates.items()):
        spread = calibration.spread.get(kind)
        typical = f" (x{spread:.2f})" if spread else ""
        texts.append(f"{kind} {rate / 1e9:.1f}{typical}")
    return ", ".join(texts)


def _held_out_line(errors: "Sequence[float]") -> list[str]:
    """Return a line on the expected error of another model, or of other sizes after one model."""
    if not errors:
        return []
    if len(errors) == 1:
        return [f"held out:  operators from a fit to other sizes are {errors[0]:+.1%} off in total"]
    sizes = sorted(map(abs, errors))
    return [
        f"held out:  each model from a fit to the others is {median(sizes):.0%} off in the median,"
        f" {sizes[-1]:.0%} at worst"
    ]


if __name__ == "__main__":
    sys.exit(main())
