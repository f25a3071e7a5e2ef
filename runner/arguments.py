"""The command line before Hydra reads it: flags wherever they stand, and one of our own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxpart.errors import SpecError, nearest_names
from runner.flags import check_flags

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from runner.sections import Config

__all__ = ["hydra_arguments", "refuse_alone"]

_COMMAND = "python -m runner"
_CHOSEN_BY_SLASH = ("hydra.launcher", "hydra.sweeper")
"""Groups of Hydra's own, whose sections have the same name but for a dot."""


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
    """Return what Hydra is given: flags first, since it takes none after an override.

    ``-v`` becomes the override ``verbose=true``. ``rerun=ID`` is given a folder that says so: what
    the run is called is known when its configuration is read.

    Raises:
        SpecError: for flags that Hydra does not have, or that lack their value, and for overrides
            without a key.

    """
    parser = _parser()
    found, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        _refuse_flag(unknown[0], parser)
    given = vars(found)
    check_flags(given)
    overrides, is_verbose = given.pop("overrides"), given.pop("verbose")
    for one in overrides:
        _refuse_keyless(one)
    flags = [_flag(name, value) for name, value in given.items() if value not in (None, False)]
    if is_verbose:
        overrides.append("verbose=true")
    again = [one.partition("=")[2] for one in overrides if one.startswith("rerun=")]
    if (
        again
        and not given["multirun"]
        and not any(one.startswith("hydra.run.dir=") for one in overrides)
    ):
        overrides.append(
            "hydra.run.dir=outputs/runs/${now:%Y-%m-%d_%H-%M-%S-%f}_rerun_" + again[0][:8]
        )
    return [*flags, *overrides]


def _parser() -> "ArgumentParser":
    """Return Hydra's own parser with ``-v``; a mistake is an error of ours."""
    from hydra._internal.utils import get_args_parser

    from runner.parser import Parser

    parser = Parser(prog=_COMMAND, add_help=False, parents=[get_args_parser()])
    parser.add_argument("--verbose", "-v", action="store_true")
    return parser


def _flag(name: str, value: object) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag}={value}"


def _refuse_flag(asked: str, parser: "ArgumentParser") -> None:
    if "=" in asked.strip("-") and not asked.startswith("-="):
        raise SpecError(f"{asked} is no flag; write {asked.lstrip('-')}, without -")
    known = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    near = f"{nearest_names(asked, known)}; " if asked.startswith("--") else ""
    raise SpecError(
        f"{asked} is no flag; {near}-m runs a sweep, -v says more, --cfg job shows the values,"
        " --help all that can be chosen"
    )


def _refuse_keyless(override: str) -> None:
    key, equals, value = override.partition("=")
    if not key.strip("+~ "):
        raise SpecError(f"{override!r} has no key; write key=value, such as mode=kl_based")
    if equals and key in _CHOSEN_BY_SLASH and not value.startswith("{"):
        raise SpecError(f"{override} is chosen with a slash; write {key.replace('.', '/')}={value}")
