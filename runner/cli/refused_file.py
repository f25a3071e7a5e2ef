"""What Hydra says of a configuration file that it cannot read, find or use, as one line.

Hydra says which choice it was at, not in which file, so the file is looked up in the frames that
the error came through; `runner.config.wrong_values` says which of its values is wrong.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from fxpart.errors import nearest_names
from runner.config.paths import conf_dir, shown_path, user_conf_dir
from runner.config.wrong_values import wrong_value

if TYPE_CHECKING:
    from hydra._internal.config_repository import IConfigRepository
    from hydra.plugins.config_source import ConfigSource
    from yaml import MarkedYAMLError  # type: ignore[import-untyped]

__all__ = ["file_behind", "refused_default", "refused_file"]


# What Hydra refuses of a defaults list, the part of a file that says what else is chosen.

_EXAMPLE = "`- override /model: gpt2`"


def refused_default(chain: Sequence[BaseException]) -> str | None:
    """Return what is wrong with an entry of a defaults list, without its file.

    None where the error is of something else. `chain` are the error and what it came from.
    """
    error = chain[-1]
    if isinstance(error, RecursionError):
        names = _circle(error)
        return f"its defaults list leads back to itself: {' > '.join(names)}" if names else None
    said = "\n".join(map(str, chain))
    for pattern, meaning in _MEANINGS:
        found = re.search(pattern, said)
        if found:
            return meaning.format(*found.groups(), example=_EXAMPLE)
    unused = re.search(r"Could not override '([^']+)'", said)
    if unused and re.search(r"In '([^']+)': Could not override", said):
        return _unused(unused[1])
    missing = re.search(r"In '[^']+': Could not (?:find|load) '([^']+)'", said)
    if missing and "Available options" not in said:
        group, _, name = missing[1].rpartition("/")
        if (conf_dir() / group).is_dir():
            return f"{missing[1]} does not exist"
        near = nearest_names(group or name, _groups())
        return f"/{group}: {name} does not exist; what can be chosen, {near}"
    return None


_MEANINGS = (
    (
        r"defaults must be a list \(got (\w+)\)",
        "defaults must be a list, of entries such as {example}, got {0}",
    ),
    (
        r"Unsupported item value in defaults : (\w+)",
        'defaults must name choices as text, got {0}; put it in quotes, such as "16e9"',
    ),
    (
        r"Unsupported type in defaults : (\w+)",
        "an entry of defaults must be text or such as {example}, got {0}",
    ),
    (
        r"Too many keys in default item ([^\n]*)",
        "an entry of defaults must be one choice, such as {example}, got {0}; give each a line",
    ),
    (r"Missing group name in ([^\n]*)", "an entry of defaults is empty; write such as {example}"),
    (
        r"([\w/]+)(?:@\S+)? appears more than once in the final defaults list",
        "/{0} is chosen already; write `- override /{0}: ...`",
    ),
    (
        r"Multiple values for ([\w/]+)(?:@\S+)?\.",
        "/{0} is chosen already; write `- override /{0}: ...`",
    ),
    (
        r"Override '(\S+) : (\S+)' is defined before '([^']*)'",
        "defaults must have `override /{0}: {1}` after `{2}`; what overrides stands last",
    ),
    (r"Duplicate _self_ defined", "defaults have _self_ twice; leave one out"),
    (
        r"Error resolving interpolation '([^']+)', possible interpolation keys: ([^\n]*)",
        "defaults refer to {0}, which does not exist; there are: {1}",
    ),
)
"""What Hydra says, and what it means."""


def _unused(key: str) -> str:
    """Return what to write for an `override` of what nothing has chosen before."""
    named = key.partition("@")[0]
    group = next((one for one in _groups() if f"/{named}".endswith(f"/{one}")), None)
    if group is None:
        near = nearest_names(named, _groups())
        return f"override /{named} overrides nothing; what can be chosen, {near}"
    if named != group:
        return f"override {group} lacks a slash; write `override /{group}: ...`"
    section = group.replace("/", ".")
    return (
        f"override /{group} would be for the section that the file is in; write"
        f" `override /{group}@_global_.{section}: ...`"
    )


def _groups() -> list[str]:
    """Return what can be chosen, longer names first."""
    folders = [one for one in (conf_dir(), user_conf_dir()) if one]
    found = {
        path.relative_to(one).as_posix()
        for one in folders
        for path in one.rglob("*")
        if path.is_dir() and any(path.glob("*.yaml"))
    }
    return sorted(found - {"accelerator"}, key=lambda group: (-len(group), group))


def _circle(error: RecursionError) -> list[str]:
    """Return the files that lead back to the first of them, none where Hydra was at none."""
    for frame, _ in walk_tb(error.__traceback__):
        root = frame.f_locals.get("root")
        if frame.f_code.co_name != "_create_defaults_tree_impl" or root is None:
            continue
        names: list[str] = []
        while root is not None and not root.node.is_virtual():
            names.insert(0, root.node.get_config_path())
            root = root.parent
        if len(set(names)) < len(names):
            return names[names.index(names[-1]) :]
    return []


_Names = Mapping[str, Any]
"""Local variables of a frame."""


def refused_file(chain: Sequence[BaseException]) -> str | None:
    """Return the line for a file at fault, None where no file is.

    `chain` are the error and what it came from.
    """
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

    # The innermost that says anything: the parser of references has one that does not.
    error = next((one for one in reversed(chain) if str(one) not in ("", "None")), chain[-1])
    names = _frame(chain, "config_repository", "load_config", "source")
    if names is not None:
        path = _path_in(names["source"], names["config_path"])
        return None if path is None else f"{path} {_unread(error)}"
    names = _frame(chain, "config_loader_impl", "_compose_config_from_defaults_list", "loaded")
    cause = next((one for one in chain if isinstance(one, OmegaConfBaseException)), None)
    if names is not None and cause is not None:
        path = f"{names['default'].config_path}.yaml"
        if names["loaded"].path.startswith("file://"):
            path = _shown(Path(names["loaded"].path.removeprefix("file://")) / path)
        said = _wrong_part(names)
        if said is None and isinstance(cause, ConfigKeyError) and cause.full_key:
            from runner.config.wrong_values import unknown_key

            said = unknown_key(cause.full_key)
        return f"{path}: {said or _first_line(str(cause))}"
    where = file_behind(chain)
    if where is None:
        return None
    said = refused_default(chain)
    return f"{where}: {said}" if said else None


def file_behind(chain: Sequence[BaseException]) -> str | None:
    """Return the file whose defaults list asks for what is refused, None for the command line."""
    names = _frame(chain, "defaults_list", "_create_defaults_tree_impl", "root")
    if names is not None:
        return _find(names["repo"], _asking(chain, names))
    tree = _frame(chain, "defaults_list", "create_defaults_list", "repo")
    if tree is None:
        return None
    twice = _frame(chain, "defaults_list", "ensure_no_duplicates_in_list", "item")
    unused = _frame(chain, "defaults_list", "ensure_overrides_used", "meta")
    asked_by = twice["item"].parent if twice else None
    return _find(tree["repo"], unused["meta"].containing_config_path if unused else asked_by)


def _asking(chain: Sequence[BaseException], names: _Names) -> str | None:
    """Return the config whose defaults list Hydra was at, None where the command line asked.

    `names` are those of its walk through the lists.
    """
    from hydra.core.default_element import GroupDefault

    node, parent = names["root"].node, names["root"].parent
    of_itself = ("_update_overrides", "_validate_self", "resolve_interpolation")
    if any(True for one in of_itself for _ in _frames(chain, one)):
        return str(node.get_config_path())
    if isinstance(node, GroupDefault):
        meta = names["overrides"].override_metadata.get(node.get_override_key())
        if meta is not None:
            return None if meta.external_override else str(meta.containing_config_path)
    return None if parent is None or parent.node.is_virtual() else parent.node.get_config_path()


def _frames(chain: Sequence[BaseException], function: str) -> Iterator[tuple[str, _Names]]:
    """Yield the module and the variables of each call of `function`, the innermost first."""
    for link in reversed(chain):
        for frame, _ in reversed(list(walk_tb(link.__traceback__))):
            if frame.f_code.co_name == function:
                yield str(frame.f_globals.get("__name__")), frame.f_locals


def _frame(
    chain: Sequence[BaseException], module: str, function: str, needed: str
) -> _Names | None:
    """Return the variables of a call inside Hydra, None where there was none."""
    for name, names in _frames(chain, function):
        if name == f"hydra._internal.{module}" and names.get(needed) is not None:
            return names
    return None


def _find(repo: "IConfigRepository", config_path: str | None) -> str | None:
    """Return the file of a config, None where it has none, or is one of ours."""
    if config_path is None:
        return None
    for source in repo.get_sources():
        if source.scheme() == "file" and source.is_config(config_path):
            path = _path_in(source, config_path)
            ours = Path(source.path).resolve() == conf_dir()
            return None if ours and config_path == "config" else path
    return None


def _path_in(source: "ConfigSource", config_path: str) -> str | None:
    if source.scheme() != "file":
        return None
    return _shown(Path(source.path) / f"{config_path.removesuffix('.yaml')}.yaml")


def _shown(path: Path) -> str:
    return shown_path(Path(os.path.normpath(path)))


def _wrong_part(names: _Names) -> str | None:
    """Return what is wrong with the first wrong value of a file that Hydra could not merge."""
    from hydra.conf import HydraConf
    from omegaconf import OmegaConf

    from runner.config.sections import Schema

    values = OmegaConf.to_container(names["loaded"].config, resolve=False)
    assert isinstance(values, dict)
    group = names["default"].config_path.partition("/")[0]
    if (
        isinstance(values.get(group), dict)
        and group not in Schema.__dataclass_fields__
        and group != "hydra"
    ):
        return (
            f"there is no section {group}; with `# @package _global_` as its first line, its keys"
            " are those of the whole configuration"
        )
    hydras = values.pop("hydra", {})
    if not isinstance(hydras, dict):
        return f"hydra: {hydras} must be several values, such as hydra: {{mode: MULTIRUN}}"
    for name in ("launcher", "sweeper"):
        if isinstance(hydras.get(name), str):
            return (
                f"hydra.{name}: {hydras[name]} is a choice; write it in defaults:"
                f" `- override /hydra/{name}: {hydras[name]}`"
            )
    return wrong_value(values, Schema) or wrong_value(hydras, HydraConf, "hydra")


def _unread(error: BaseException) -> str:
    """Return what keeps a file from being read, to follow its name."""
    from yaml import MarkedYAMLError, YAMLError

    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        return f"is not valid YAML: {at}{_problem(error)}"
    if isinstance(error, YAMLError):
        return f"is not valid YAML: {_first_line(str(error))}"
    if isinstance(error, UnicodeDecodeError):
        wrong = f"byte {error.start} is {error.object[error.start]:#04x}"
        return f"is not UTF-8 text: {wrong}; save it as UTF-8"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    said = refused_default([error])
    if said:
        return f"cannot be used: {said}"
    return _otherwise_unread(error)


def _otherwise_unread(error: BaseException) -> str:
    said = _first_line(str(error))
    if "Invalid loaded object type" in said:
        return "holds a single value; write `key: value` lines"
    if "@package" in said:
        return f"cannot be used: {said}; write one package, such as `# @package _global_`"
    if type(error).__name__ == "GrammarParseError":
        return f"has a reference that cannot be read: {said}; write ${{section.key}}"
    return f"cannot be used: {said}"


def _problem(error: "MarkedYAMLError") -> str:
    problem = str(error.problem)
    meanings: dict[str, Callable[[], str]] = {
        r"'\t' that cannot": lambda: "a tab; indent with spaces",
        "found duplicate key": lambda: f"{problem.removeprefix('found duplicate ')} is there twice",
        "determine a constructor": lambda: f"{problem.rpartition(' ')[2]} is no tag; leave it out",
        "but found another document": lambda: "a second document begins (---); leave it out",
        "undefined alias": lambda: f"{problem}; put what begins with * in quotes",
        "<stream end>": lambda: "a bracket or quote is not closed",
        "mapping values are not": lambda: (
            "a `: ` where none can stand; mend the indentation, or put the text in quotes"
        ),
        "unhashable key": lambda: "a key must be text",
    }
    return next((say() for part, say in meanings.items() if part in problem), problem)


def _first_line(said: str) -> str:
    return said.strip().partition("\n")[0].strip()
