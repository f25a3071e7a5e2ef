"""The command line before Hydra reads it: flags wherever they stand, and one of our own."""

from collections.abc import Sequence

__all__ = ["hydra_arguments"]

_MULTIRUN = ("-m", "--multirun")
_VERBOSE = ("-v", "--verbose")


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
    if again and not any(one.startswith("hydra.run.dir=") for one in rest):
        rest.append("hydra.run.dir=outputs/runs/${now:%Y-%m-%d_%H-%M-%S-%f}_rerun_" + again[0][:8])
    return [*flags[:1], *rest]
