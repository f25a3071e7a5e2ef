"""References, ``${section.key}``, of a configuration that lead nowhere, as one line."""

import re
from pathlib import Path
from traceback import walk_tb

from omegaconf import Container, DictConfig, Node
from omegaconf.errors import OmegaConfBaseException

from fxpart.errors import nearest_names
from runner.paths import shown_path, user_conf_dir
from runner.tracking import without_password

__all__ = ["broken_reference"]

_RESOLVERS = ("hydra", "now", "oc.create", "oc.decode", "oc.dict.keys", "oc.env", "oc.select")
"""Of OmegaConf's and Hydra's, those that a user's file has a use for."""
_CHOICE = re.compile(r"hydra\.runtime\.choices\.(\w+)")


def broken_reference(error: OmegaConfBaseException) -> str | None:
    """Return what is wrong with the value that `error` was raised for.

    None where that is not a reference. The value is said as it is written, and the file of the
    user's that has it; a password in it is left out.
    """
    said = str(error.msg or error)
    meaning = _meaning(said)
    if meaning is None:
        return None
    key, raw = _key_and_text(error)
    choice = _CHOICE.search(said)
    if choice and "not found" in said:
        group = choice[1]
        return f"{group} must be chosen, by one name; write {group}=..., and no list and no ~"
    value = f"={without_password(raw)}" if raw else ""
    where = f"{_file_of(raw)}: " if raw and _file_of(raw) else ""
    if key == "_dummy_":  # Hydra's, for an entry of a defaults list
        return f"{where}defaults refer to {raw}, which is no choice; write a name"
    return f"{where}{key or 'a value'}{value} {meaning}"


def _meaning(said: str) -> str | None:
    missing = re.search(r"Interpolation key '([^']*)' not found", said)
    if missing:
        return f"refers to {missing[1]}, which does not exist{_near(missing[1])}"
    variable = re.search(r"Environment variable '([^']+)' not found", said)
    if variable:
        name = variable[1]
        return f"needs the environment variable {name}; set it, or write ${{oc.env:{name},default}}"
    resolver = re.search(r"Unsupported interpolation type ([\w.]+)", said)
    if resolver:
        return f"asks for ${{{resolver[1]}:...}}, which there is not; {_resolvers(resolver[1])}"
    empty = re.search(r"resolving interpolation.*Missing mandatory value: (\S+)", said, re.DOTALL)
    if empty:
        return f"refers to {empty[1]}, which has no value here; give it one"
    if "Recursive interpolation" in said or "recursion" in said:
        return "refers to itself; write a value"
    raised = re.search(r"(\w+) raised while resolving interpolation: ([^\n]*)", said)
    return f"cannot be worked out ({raised[2]}); mend it" if raised else None


def _near(path: str) -> str:
    from runner.wrong_values import unknown_key

    if not path or path.startswith("hydra"):
        return ""
    return unknown_key(path).partition(" does not exist")[2]


def _resolvers(asked: str) -> str:
    return nearest_names(asked, _RESOLVERS)


def _key_and_text(error: OmegaConfBaseException) -> tuple[str | None, str | None]:
    """Return the key of the value at fault and how it is written, as far as they can be told."""
    holder, key, full_key = error.parent_node, error.key, error.full_key
    for frame, _ in walk_tb(error.__traceback__):
        # Where all values are resolved at once, the error has the outermost key.
        if frame.f_code.co_name == "_resolve_container_value":
            holder, key = frame.f_locals["cfg"], frame.f_locals["key"]
            full_key = holder._get_full_key(key)
    node = error.child_node
    if isinstance(holder, Container) and key is not None:
        node = holder._get_node(key, validate_access=False) or node
    if node is None:
        node = _selected(error)
    raw = node._value() if isinstance(node, Node) else None
    return full_key, raw if isinstance(raw, str) else None


def _selected(error: OmegaConfBaseException) -> object:
    """Return what was asked for by its path, as Hydra asks for the folder of a run."""
    for frame, _ in walk_tb(error.__traceback__):
        names = frame.f_locals
        if frame.f_code.co_name == "select_value" and isinstance(names.get("cfg"), Container):
            node: object = names["cfg"]
            for part in str(names.get("key")).split("."):
                node = node._get_node(part) if isinstance(node, DictConfig) else None
            return node
    return None


def _file_of(raw: str) -> str | None:
    """Return the user's only file that has `raw` in it."""
    mine = user_conf_dir()
    found = [path for path in (mine.rglob("*.yaml") if mine else ()) if _has(path, raw)]
    return shown_path(found[0]) if len(found) == 1 else None


def _has(path: Path, raw: str) -> bool:
    try:
        return raw in path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
