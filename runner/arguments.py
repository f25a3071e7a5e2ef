"""The command line before Hydra reads it: flags wherever they stand, and one of our own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpart.errors import SpecError

if TYPE_CHECKING:
    from runner.sections import Config

__all__ = ["hydra_arguments", "refuse_alone"]

_MULTIRUN = ("-m", "--multirun")
_VERBOSE = ("-v", "--verbose")


def refuse_alone(config: "Config") -> None:
    """Refuse what is said of a sweep where there is one run.

    Raises:
        SpecError: in one line.

    """
    for name in ("where", "zip"):
        if getattr(config, name):
            raise SpecError(f"{name}= is about the jobs of a sweep; add -m, or leave it out")
    if config.rerun == "":
        raise SpecError("rerun= names no run; give the run's id, which MLflow's page of it shows")


def hydra_arguments(arguments: Sequence[str]) -> list[str]:
    """Return what Hydra is given: ``-m`` first, since it takes no flag after an override.

    ``-v`` becomes the override ``verbose=true``. ``rerun=ID`` is given a folder that says so: what
    the run is called is known when its configuration is read.
    """
    flags = [one for one in arguments if one in _MULTIRUN]
    rest = [one for one in arguments if one not in (*_MULTIRUN, *_VERBOSE)]
    if len(flags) + len(rest) < len(arguments):
        rest.append("verbose=true")
    again = [one.partition("=")[2] for one in rest if one.startswith("rerun=")]
    if again and not flags and not any(one.startswith("hydra.run.dir=") for one in rest):
        rest.append("hydra.run.dir=outputs/runs/${now:%Y-%m-%d_%H-%M-%S-%f}_rerun_" + again[0][:8])
    return [*flags[:1], *rest]
