"""What Hydra refuses of its own settings and of how choices are asked for, as one line."""

import re
from collections.abc import Mapping, Sequence
from traceback import walk_tb

from runner.config.passwords import without_password
from runner.config.wrong_values import unknown_key

__all__ = ["refused_setting"]

_MEANINGS = (
    (
        r"Could not append to config\. An item is already at '([^']+)'",
        "{0} exists already; write {0}=..., without +",
    ),
    (
        r"Multiple values for ([\w/]+)\S*\.(?: To override a value use '[^:]*: ([^']*))?",
        "{0} is chosen twice, once as {1}; write {0}=..., without +, and in a file"
        " `- override /{0}: ...`",
    ),
    (
        r"force-add of config groups is not supported: '\++([^=']+)",
        "{0} is chosen already; write {0}=..., without ++",
    ),
    (
        r"Error merging override ~(\S+)\s.*does not support deletion",
        "{0} cannot be taken away; give it another value, {0}=...",
    ),
    (
        r"Could not delete from config\. The value of '([^']+)' is (.*) and not",
        "{0} is {1}; write ~{0} to take it away whatever it is",
    ),
    (
        r"^Could not override '([\w/]+)@([^']+)'",
        "{0}@{1} is not chosen by default; write {0}=...",
    ),
    (
        r"^Could not override '([\w/]+)'\. No match in the defaults list",
        "{0} is not chosen by default; write +{0}=...",
    ),
    (
        r"looks like a config group override, but config group '([^']+)' does not exist",
        "{0} is not a group of choices; --help lists them",
    ),
    (
        r"Invalid value '([^']*)', expected one of \[RUN, MULTIRUN\]",
        "hydra.mode={0} must be RUN or MULTIRUN",
    ),
    (
        r"hydra\.searchpath must be a list of strings\. Got: ([^\n]*)",
        "hydra.searchpath={0} must be a list of folders, such as hydra.searchpath=[file://mine]",
    ),
    (
        r"provider=(hydra\.searchpath)[^,]*, path=(.*) is not available",
        "{0}: there is no folder {1}; give one that exists",
    ),
    (
        r"No config source registered for schema (\w+)",
        "hydra.searchpath: {0}:// is no kind of folder; write file://folder or pkg://package",
    ),
    (
        r"Error locating target '([^']+)'",
        "_target_={0} cannot be imported; correct it, or leave it out",
    ),
    (
        r"Input config does not have a `_target_` field",
        "hydra.launcher and hydra.sweeper are chosen with a slash, hydra/launcher=joblib; in a file"
        " by an entry of its defaults, `- override /hydra/launcher: joblib`",
    ),
    (
        r"(Cannot instantiate) config of type (\w+)",
        "a launcher, sweeper or callback of Hydra's must be {{_target_: package.Class}}, got {1}",
    ),
    (
        r"--resolve flag",
        "--resolve is about --cfg and --help; add --cfg job, or leave it out",
    ),
    (
        r"Only one of --run, --multirun, --cfg, --info and --shell_completion",
        "--run, -m, --cfg, --info and -sc exclude each other; leave all but one out",
    ),
    (
        r"Expecting one subcommand from",
        "-sc needs what it is to do; write -sc install=bash, zsh or fish, or -sc uninstall=bash",
    ),
    (
        r"No completion plugin for '([^']*)'",
        "-sc: there is no completion for {0!r}; there are: bash, fish, zsh",
    ),
)
"""What Hydra says, and what it means."""


def refused_setting(chain: Sequence[BaseException]) -> str | None:
    """Return what is wrong with a setting of Hydra's, None where the error is of something else.

    `chain` are the error and what it came from.
    """
    for link in chain:
        line = _by_frame(link)
        if line:
            return line
    said = "\n".join(map(str, chain))
    for pattern, meaning in _MEANINGS:
        found = re.search(pattern, said, re.DOTALL)
        if found:
            return without_password(meaning.format(*found.groups()))
    deleted = re.search(r"Could not delete from config\. '([^']+)' does not exist", said)
    return f"~{deleted[1]}: {unknown_key(deleted[1])}" if deleted else None


def _by_frame(error: BaseException) -> str | None:
    """Return the line for what Hydra does not say, or not of which setting."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    inside = {
        frame.f_code.co_name: frame.f_locals
        for frame in frames
        if str(frame.f_globals.get("__name__")).startswith("hydra.")
    }
    if "Config group override must be a string" in str(error):
        override = next((one["override"] for one in inside.values() if "override" in one), None)
        asked = "a choice" if override is None else without_password(str(override.input_line))
        return f"{asked} names nothing; give a name, which --help lists"
    if isinstance(error, KeyError) and "_load_configuration_impl" in inside:
        return (
            f"hydra.job.env_copy: the environment has no {error.args[0]}; set it, or leave it out"
        )
    if "configure_log" in inside and type(error) in (ValueError, AssertionError):
        return _of_logging(error, inside["configure_log"])
    return None


def _of_logging(error: BaseException, names: Mapping[str, object]) -> str:
    if isinstance(error, AssertionError):
        asked = names.get("verbose_config")
        return f"hydra.verbose={asked} must be true, false, or the names of loggers: [fxpart]"
    why = f" ({error.__cause__})" if error.__cause__ else ""
    return f"hydra.job_logging or hydra.hydra_logging: {error}{why}; leave it out, or correct it"
