"""Turn exceptions into one line for the user: the request, what exists, what to change.

Hydra's and OmegaConf's messages span several lines, with hints about internals. Their exceptions
are put into the form of all our errors, using only types, public attributes and messages; as a
fallback, Hydra's own lines are joined into one.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.errors import FxpartError, nearest_names
from runner.config.passwords import without_password
from runner.config.paths import conf_dir, shown_path, user_conf_dir
from runner.errors import message_of

if TYPE_CHECKING:
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError  # type: ignore[import-untyped]

__all__ = ["explain", "unreadable_override"]


_NEEDED = ("hydra", "omegaconf", "numpy", "numba", "torch", "mlflow", "sympy", "networkx")
"""Packages that every command needs."""


def explain(error: BaseException) -> str | None:
    """Return the user error behind `error` as one line; None if it is not one."""
    if isinstance(error, ModuleNotFoundError) and error.name in _NEEDED:
        return (
            f"{sys.executable} has no {error.name}; use the Python that fxpart is installed for,"
            " such as .venv/bin/python after `make demo`"
        )
    chain = list(_with_causes(error))
    ours = next((link for link in chain if isinstance(link, FxpartError)), None)
    if ours is not None:
        return message_of(ours)
    if not any(map(_is_hydras, chain)):
        return None
    line = _of_override(chain) or _of_file(chain) or _of_setting(chain) or _own_words(chain)
    return " ".join(line.split())


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    step: BaseException | None = error
    passed: list[BaseException] = []
    while step is not None and step not in passed:
        passed.append(step)
        yield step
        # The context of a bug is not its cause, but Hydra raises without `from`.
        step = step.__cause__ or (step.__context__ if _is_hydras(step) else None)


def _is_hydras(error: BaseException) -> bool:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    return isinstance(error, HydraException | OmegaConfBaseException)


def _messages(chain: Sequence[BaseException]) -> str:
    """Return the messages of the exceptions, one per line."""
    shown = (
        # `composing` repeats the message of the original exception.
        str(link) if _is_worded(link) else f"{type(link).__name__}: {link}"
        for link in chain
        if link.__cause__ is None or str(link) != str(link.__cause__)
    )
    return "\n".join(shown)


# Errors in typed overrides.


def _of_override(chain: Sequence[BaseException]) -> str | None:
    """Return the line for an override that cannot be parsed or has an invalid value, or None."""
    from hydra.errors import OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    from runner.config.wrong_values import refused_by_omegaconf

    for link in chain:
        if isinstance(link, OverrideParseException):
            return unreadable_override(link.override, _messages(chain))
        merged = re.match(r"Error merging override (.*)", str(link), re.DOTALL)
        if merged and isinstance(link.__cause__, OmegaConfBaseException):
            return refused_by_omegaconf(link.__cause__, merged[1])
    return None


_REASON = re.compile(
    r"token recognition error at: .+|(?:extraneous|mismatched) input '[^']*'"
    r"|no viable alternative at input .+|missing \w+ at .+|\w+ while evaluating .+"
)
"""The reason given by Hydra's parser, or by one of its functions."""
_TOO_EARLY = ("mismatched input '<EOF>'", "it ends too early")


def unreadable_override(override: str, message: str) -> str:
    """Return the error for an override that Hydra cannot parse, given its `message`.

    If the value has a password, it is removed together with Hydra's quotes of the value.
    """
    key, equals, value = override.partition("=")
    shown = without_password(override)
    if not equals:
        return f"{shown} has no =; write key=value, such as mode=kl_based"
    function = re.search(r"Unknown function '(\w+)'\s+Available: ([\w,]+)", message)
    if function:
        suggestion = nearest_names(function[1], function[2].split(","))
        return f"{shown}: there is no function {function[1]}; {suggestion}"
    reason = _REASON.search(message) if shown == override else None
    cause = f": {reason[0].replace(*_TOO_EARLY)}" if reason else ""
    quoted = without_password(shlex.quote(f'{key}="{value}"'))
    # Quotes would turn a list or a mapping into text.
    as_it_is = value[:1] in ("[", "{") or set("\"'") & set(value)
    return f"{shown} cannot be read{cause}; correct it" + (
        "" if as_it_is else f", or quote it: {quoted}"
    )


# Errors in files.


def _of_file(chain: Sequence[BaseException]) -> str | None:
    """Return the line for an invalid file, key or value, or None."""
    from hydra.errors import MissingConfigException
    from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
    from yaml import MarkedYAMLError

    for link in chain:
        if isinstance(link, MarkedYAMLError):
            return _bad_yaml(link)
        if isinstance(link, UnicodeDecodeError):
            return f"{_file_with(link.object)} is not UTF-8 text ({link}); save it as UTF-8"
        if isinstance(link, OSError) and link.filename:
            return _not_accessible(link)
        if isinstance(link, MissingConfigException) and link.missing_cfg_file:
            group, _, name = link.missing_cfg_file.rpartition("/")
            suggestion = (
                nearest_names(name, link.options) if link.options else "--help lists the choices"
            )
            return f"{_file_named(chain)}{group}={name} does not exist; {suggestion}"
        if isinstance(link, OmegaConfBaseException) and (
            link.full_key is not None or isinstance(link, InterpolationResolutionError)
        ):
            return _of_value(link, _file_named(chain))
    return None


def _of_value(error: "OmegaConfBaseException", where: str) -> str | None:
    from runner.config.wrong_values import refused_by_omegaconf

    if (
        error.full_key == "_dummy_"
    ):  # an entry of a defaults list, for which Hydra's message is better
        return None
    if where.endswith(".yaml: ") and where.split("/")[-2:-1] == [error.full_key]:
        return (
            f"{where}there is no section {error.full_key}; with `# @package _global_` as its first"
            " line, its keys are those of the whole configuration"
        )
    return f"{where}{refused_by_omegaconf(error)}"


def _bad_yaml(error: "MarkedYAMLError") -> str:
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return f"a configuration file is not valid YAML: {error}"
    position = f"line {mark.line + 1}, column {mark.column + 1}"
    return f"{shown_path(Path(mark.name))} is not valid YAML: {position}: {error.problem}"


def _file_with(text: bytes) -> str:
    """Return the path of the user's file that begins with `text`."""
    conf = user_conf_dir()
    files = sorted(conf.rglob("*.yaml")) if conf else []
    names = (shown_path(path) for path in files if path.read_bytes().startswith(text))
    return next(names, "a file of the configuration")


def _not_accessible(error: OSError) -> str:
    if str(error.filename).endswith(".yaml"):
        return f"{shown_path(Path(error.filename))} cannot be read: {error.strerror}"
    return (
        f"cannot write {error.filename}: {error.strerror}; choose another folder with"
        " hydra.run.dir= or, for a sweep, hydra.sweep.dir="
    )


def _file_named(chain: Sequence[BaseException]) -> str:
    """Return the user's file that Hydra's message names, as in ``In 'model/mine': ...``, or ""."""
    message = _messages(chain)
    named = re.search(r"\b[Ii]n '?([\w./-]+)'?(?:[:,]|$)", message, re.MULTILINE)
    if named is None or (conf_dir() / f"{named[1]}.yaml").is_file():
        return ""
    path = (user_conf_dir() or Path()) / f"{named[1]}.yaml"
    return f"{shown_path(path)}: " if path.is_file() else ""


# Choices and settings.

_MEANINGS = (
    (
        r"Multiple values for ([\w/]+)|^([\w/]+)\S* appears more than once in the final defaults",
        "{0} is chosen twice; write {0}=..., without +, and in a file `- override /{0}: ...`",
    ),
    (
        r"In '.*': Could not override '(\w+)@[^']+'\.\s+Did you mean to override \w+\?",
        "override /{0} applies to the section that the file is in; write `override "
        "/{0}@_global_.{0}: ...`",
    ),
    (
        r"In '.*': Could not override '([\w/]+)",
        "override {0} overrides nothing; write `override /GROUP: ...` for a group that --help "
        "lists",
    ),
    (
        r"(?:Ambiguous value for argument|Sweep parameters) '([^']*)'",
        "{0} has several values; add -m for a sweep over them",
    ),
    (
        r"int too large to convert to float|Exceeds the limit \(\d+ digits\) for integer",
        "an integer is larger than 1.8e308, the largest number; write a smaller one",
    ),
    (r"maximum recursion depth", "a defaults list leads back to itself; leave that entry out"),
    (r"Invalid loaded object type", "a file has a single value; write `key: value` lines"),
    (
        r"Unexpected type for root|AttributeError: 'NoneType' object has no attribute 'get'",
        "a section that is null has no values to set; set them in a file of that section, as "
        "conf/devices/2x_dgx_h100.yaml does for devices.between_nodes",
    ),
    (
        r"Input config does not have a `_target_` field",
        "choose hydra.launcher and hydra.sweeper with a slash, hydra/launcher=joblib; in a file "
        "by an entry of its defaults, `- override /hydra/launcher: joblib`",
    ),
    (
        r"^KeyError: '(\w+)'$",
        "the environment has no {0}, which hydra.job.env_copy names; set it, or leave it out",
    ),
)
"""Unhelpful messages of Hydra, with our wording."""


def _of_setting(chain: Sequence[BaseException]) -> str | None:
    from runner.config.wrong_values import unknown_key

    message = _messages(chain)
    deleted = re.search(r"Could not delete from config\. '([^']+)' does not exist", message)
    if deleted and (unknown := unknown_key(deleted[1])):
        return f"~{deleted[1]}: {unknown}"
    for pattern, meaning in _MEANINGS:
        match = re.search(pattern, message, re.MULTILINE)
        if match:
            groups = [without_password(text) for text in match.groups() if text]
            return f"{_file_named(chain)}{meaning.format(*groups)}"
    return None


_NOISE = re.compile(r"object_type|reference_type|full_key|To append|Config search path|See http")


def _own_words(chain: Sequence[BaseException]) -> str:
    """Return Hydra's own message, joined into one line."""
    lines = [line.strip().rstrip(";.:,") for line in _messages(chain).splitlines()]
    # Drop OmegaConf's templates: the filled-in message is also in the chain.
    informative = [
        line for line in lines if line and "$VALUE" not in line and not _NOISE.match(line)
    ]
    message = without_password("; ".join(dict.fromkeys(informative))) or "Hydra refuses this"
    if not informative or not all(map(_is_worded, chain)):
        message += "; HYDRA_FULL_ERROR=1 shows where"
    where = _file_named(chain)
    return where + re.sub(r"^In '?[^:]*: ", "", message) if where else message


def _is_worded(error: BaseException) -> bool:
    """Return whether the message of `error` is readable, unlike that of a KeyError."""
    return _is_hydras(error) or isinstance(error, ValueError | OSError | Warning | RecursionError)
