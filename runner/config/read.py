"""The configuration that Hydra composes, as plain, typed values.

`register` gives the shape to Hydra; `read_config` makes a `Config` of a composed configuration.
"""

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from traceback import walk_tb

from hydra.core.config_store import ConfigStore
from omegaconf import Container, DictConfig, Node, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from fxpart.errors import SpecError, nearest_names
from runner.config.passwords import without_password
from runner.config.paths import shown_path, user_conf_dir
from runner.config.sections import Config, ModeConfig, Schema, TrackingConfig

__all__ = ["broken_reference", "read_config", "read_tracking", "register"]


# References, ``${section.key}``, of a configuration that lead nowhere, as one line.

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
    from runner.config.wrong_values import unknown_key

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


def register() -> None:
    """Give Hydra the shape; ``schema`` must stand first in the defaults of ``config.yaml``."""
    schema = OmegaConf.structured(Schema)
    # Hydra closes dictionaries against new keys. These are open, so that
    # model.config.num_hidden_layers=4 needs no +; the model and the mode refuse wrong names.
    for open_dict in (schema.model.config, schema.model.factory_args, schema.mode):
        OmegaConf.set_struct(open_dict, False)
    ConfigStore.instance().store(name="schema", node=schema, provider="fxpart")
    _share_store()


def _share_store() -> None:
    """Have Hydra share its store of schemas where it would copy it.

    It does so once for each group that it lists, and for each composition: 15 ms each time, of
    what only registering changes. A node that is loaded from the store is copied all the same.
    """
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]


def read_config(composed: DictConfig) -> Config:
    """Return the typed values of a configuration that Hydra has composed.

    Raises:
        SpecError: for a value that is needed and not given, or that refers to nothing.

    """
    model = composed.get("model") or {}
    # Checked before values are resolved: a model's name may refer to either of the two.
    if model.get("architecture") is None and model.get("factory") is None:
        raise SpecError(
            "the model has neither an architecture nor a factory; give model.architecture=..., a"
            " class of transformers, or model.factory=package.module:function"
        )
    try:
        values = OmegaConf.to_object(composed)
    except MissingMandatoryValue as error:
        key = re.sub(r"\[(\d+)\]", r".\1", error.full_key or "a value")  # as it can be typed
        raise SpecError(f"{key} is needed; give {key}=...") from error
    except OmegaConfBaseException as error:
        raise _unresolved(error, "value") from error
    if not isinstance(values, Schema):
        raise SpecError("the configuration has no schema; list `schema` first in its defaults")
    options = dict(values.mode)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise SpecError(f"mode.name must be a mode's name, got {name!r}; such as mode=kl_based")
    sections = {key: value for key, value in vars(values).items() if key != "mode"}
    _refuse_unknown(values, [section.name for section in fields(Config)], "")
    return Config(**sections, mode=ModeConfig(name, options))


def read_tracking(section: DictConfig) -> TrackingConfig:
    """Return the typed values of the section ``tracking`` alone.

    Raises:
        SpecError: for a value that refers to nothing.

    """
    try:
        values = OmegaConf.to_object(section)
    except OmegaConfBaseException as error:
        raise _unresolved(error, "tracking") from error
    if not isinstance(values, TrackingConfig):
        raise SpecError("the configuration has no schema; list `schema` first in its defaults")
    _refuse_unknown(values, [section.name for section in fields(TrackingConfig)], "tracking.")
    return values


def _unresolved(error: OmegaConfBaseException, where: str) -> SpecError:
    said = broken_reference(error)
    if said is None:
        said = f"configuration: {error.full_key or where}: {str(error).splitlines()[0]}"
    return SpecError(said)


def _refuse_unknown(section: object, known: Sequence[str], path: str) -> None:
    """Refuse keys that a ``+`` on the command line has added, in `section` and all inside it."""
    for key, value in vars(section).items():
        if key not in known:
            raise SpecError(f"{path}{key} does not exist; {nearest_names(key, known)}")
        for index, inner in enumerate(value if isinstance(value, list) else [value]):
            if is_dataclass(inner):
                where = f"{path}{key}.{index}." if isinstance(value, list) else f"{path}{key}."
                _refuse_unknown(inner, [f.name for f in fields(inner)], where)
