"""Mistakes as one line: what was asked, what there is, what to change.

Hydra and OmegaConf know what is wrong but say it over several lines; here their exceptions are
taken apart and put into the form that all our errors have.
"""

import re
from collections.abc import Sequence
from traceback import walk_tb

from fxpart.errors import FxpartError, nearest_names
from runner.cli.refused_override import refused_value, unreadable

__all__ = ["explain"]

_NOISE = (
    "object_type",
    "reference_type",
    "full_key",
    "To append",
    "Config search path",
    "See http",
)


def explain(error: BaseException) -> str | None:
    """Return the mistake behind `error` as one line, or None when it is not the user's."""
    from runner.cli.hydra_settings import refused_setting
    from runner.cli.refused_file import refused_file

    chain: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in chain:
        chain.append(step)
        # What was under way when a bug came up is not its cause; Hydra does not say `from`.
        step = step.__cause__ or (step.__context__ if _is_hydras(step) else None)
    for link in chain:
        if isinstance(link, FxpartError):
            return _with_file(" ".join(str(link).split()), chain)
        inside = _inside_of_null(link)
        if inside:
            return inside
    for refused in (_refused, refused_file, _reference, refused_setting):
        line = refused(chain)
        if line:
            return " ".join(line.split())
    # What Hydra and the parser of YAML raise themselves, they raise at what they were given.
    said = [str(link) for link in chain if _is_hydras(link) or _raiser(link) in ("hydra", "yaml")]
    return _hydra_line("\n".join(said)) if said else _folder_line(error)


def _with_file(line: str, chain: Sequence[BaseException]) -> str:
    from runner.cli.refused_file import file_behind

    where = file_behind(chain)
    return f"{where}: {line}" if where else line


def _reference(chain: Sequence[BaseException]) -> str | None:
    from omegaconf.errors import OmegaConfBaseException

    from runner.config.read import broken_reference

    said = (broken_reference(one) for one in chain if isinstance(one, OmegaConfBaseException))
    return next((one for one in said if one), None)


def _refused(chain: Sequence[BaseException]) -> str | None:
    """Return the line for an override that Hydra names, None where it is about something else."""
    from hydra.errors import OverrideParseException

    said = "\n".join(map(str, chain))
    for link in chain:
        if isinstance(link, OverrideParseException):
            return unreadable(link.override, said)
        merged = re.match(r"Error merging override (.*)", str(link), re.DOTALL)
        if merged:
            return refused_value(merged[1], said)
    return None


def _is_hydras(error: BaseException) -> bool:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    return isinstance(error, HydraException | OmegaConfBaseException)


def _raiser(error: BaseException) -> str:
    """Return the top-level package whose code raised `error` itself, files aside."""
    if isinstance(error, OSError):
        return ""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")).partition(".")[0] if frames else ""


def _inside_of_null(error: BaseException) -> str | None:
    """Return the line for a value that is set inside of one that is null; OmegaConf asserts."""
    if not isinstance(error, AssertionError) or _raiser(error) != "omegaconf":
        return None
    for frame, _ in walk_tb(error.__traceback__):
        key = frame.f_locals.get("key")
        if frame.f_code.co_name == "update" and isinstance(key, str) and "." in key:
            above, _, last = key.rpartition(".")
            return (
                f"{above} is null, so {key} cannot be set; give all of it: {above}={{{last}: ...}}"
            )
    return None


def _folder_line(error: BaseException) -> str | None:
    """Return the line for a folder of the user's that Hydra, not we, could not make or fill."""
    if not isinstance(error, OSError) or error.filename is None:
        return None
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    callers = [name for name in modules if name.partition(".")[0] not in ("pathlib", "os")]
    if not callers or callers[-1].partition(".")[0] not in ("hydra", "omegaconf"):
        return None
    return (
        f"cannot write {error.filename}: {error.strerror}; choose another folder with"
        " hydra.run.dir= or, for a sweep, hydra.sweep.dir="
    )


def _hydra_line(said: str) -> str:
    """Return what Hydra says as one line, with the nearest names where it lacks them."""
    from runner.config.wrong_values import unknown_key

    options = re.search(
        r"Available options in '([^']+)':\s*(.*?)(?:Config search path|\n\s*\n|\Z)", said, re.DOTALL
    )
    missing = re.search(r"Could not find '([^']+)'", said)
    if missing and options:
        group, names = options.group(1), options.group(2).split()
        asked = missing.group(1).removeprefix(group).removeprefix("/")
        return f"{group}={asked} does not exist; {nearest_names(asked, names)}"
    unknown = re.search(r"Key '([^']+)' (?:not in '\w+'|is not in struct)", said)
    path = re.search(r"full_key: (\S+)", said)
    if unknown and path:
        return unknown_key(path.group(1))
    several = re.search(r"Ambiguous value for argument '([^']*)'", said)
    if several:
        return f"{several.group(1)} has several values; add -m for a sweep over them"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    kept = [line for line in dict.fromkeys(lines) if not line.startswith(_NOISE)]
    # OmegaConf's own text before it fills in what it is about; the filled one stands beside it.
    line = "; ".join(line.rstrip(";.") for line in kept if "$VALUE" not in line)
    return line or "Hydra refuses this, and does not say why; HYDRA_FULL_ERROR=1 shows where"
