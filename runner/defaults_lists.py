"""What Hydra refuses of a defaults list, the part of a file that says what else is chosen."""

import re
from collections.abc import Sequence
from traceback import walk_tb

from fxpart.errors import nearest_names
from runner.paths import conf_dir, user_conf_dir

__all__ = ["refused_default"]

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
