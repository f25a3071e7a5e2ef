"""Sections of a configuration, merged once for all jobs that are made of the same parts.

A section, such as ``model``, is what the files and overrides that touch it make of it, in their
order. Jobs of a sweep differ in few of them, so most sections are merged once. References such as
``${schedule.name}`` stay what they are until a whole job is read.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, ListConfig, Node, OmegaConf

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

__all__ = ["NotApartError", "Part", "SectionStore"]

_HYDRA = "hydra"
_BETWEEN_KEYS = re.compile(r"[.\[\]]+")


class NotApartError(Exception):
    """Sections that cannot be merged each on its own; the whole must be."""


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """What one file says, where it says it."""

    config: DictConfig
    keys: tuple[str, ...]
    """The sections that it touches."""
    is_typed: bool
    """Whether it is a schema, which cannot be taken apart."""

    @classmethod
    def of(cls, config: DictConfig) -> "Part":
        """Return the part that a file is, its package around it."""
        keys = tuple(str(key) for key in config if key != _HYDRA)
        return cls(config, keys, OmegaConf.get_type(config) is not dict)

    def of_section(self, section: str) -> DictConfig:
        """Return what the file says of one section."""
        return OmegaConf.masked_copy(self.config, section)


class SectionStore:
    """Merges sections, and remembers them by what they were made of."""

    def __init__(self, schema: Part) -> None:
        self._schema = schema
        self._root: DictConfig = OmegaConf.create()
        self._root.merge_with(schema.config)
        OmegaConf.set_struct(self._root, True)
        self._names = schema.keys
        self._empty = {name: copy.deepcopy(_node(self._root, name)) for name in schema.keys}
        self._merged: dict[tuple[object, ...], Node] = {}

    def assemble(self, parts: Sequence[Part], overrides: Sequence["Override"]) -> DictConfig:
        """Return the configuration that the parts and then the overrides make, but for Hydra's own.

        It is the same object each time, with other sections in it: read it before the next call.

        Raises:
            NotApartError: when a section cannot be merged on its own.
            OmegaConfBaseException: for values that do not go together.

        """
        parts_of: dict[str, list[Part]] = {name: [] for name in self._names}
        first, *others = parts
        if first is not self._schema or any(part.is_typed for part in others):
            raise NotApartError("schema")
        for part in others:
            for key in part.keys:
                self._list_of(parts_of, key).append(part)
        overrides_of: dict[str, list[Override]] = {name: [] for name in self._names}
        for override in overrides:
            if not override.is_hydra_override():
                self._list_of(overrides_of, _path(override)[0]).append(override)
        for name in self._names:
            node = self._section(name, parts_of[name], overrides_of[name])
            _put(self._root, name, node)
        return self._root

    @staticmethod
    def _list_of(lists: Mapping[str, list[Any]], section: str) -> list[Any]:
        if section not in lists:
            raise NotApartError(section)
        return lists[section]

    def _section(self, name: str, parts: Sequence[Part], overrides: Sequence["Override"]) -> Node:
        made_of = (name, *map(id, parts), *(override.input_line for override in overrides))
        if made_of not in self._merged:
            self._merged[made_of] = _merge(name, self._empty[name], parts, overrides)
        return self._merged[made_of]


def _merge(name: str, empty: Node, parts: Sequence[Part], overrides: Sequence["Override"]) -> Node:
    """Return the node of one section, merged as Hydra merges the whole; `empty` is the schema's."""
    root: DictConfig = OmegaConf.create()
    _put(root, name, copy.deepcopy(empty))
    for part in parts:
        said = part.of_section(name)
        _refuse_following(root, said)
        root.merge_with(said)
    OmegaConf.set_struct(root, True)
    for override in overrides:
        _refuse_path_through(root, override)
        ConfigLoaderImpl._apply_overrides_to_config([override], root)
    return _node(root, name)


def _node(root: DictConfig, name: str) -> Node:
    node = root._get_node(name)
    assert isinstance(node, Node)
    return node


def _put(root: DictConfig, name: str, node: Node) -> None:
    """Put `node` under `name`: itself, where OmegaConf would put a copy."""
    node._set_parent(root)
    root.__dict__["_content"][name] = node


def _refuse_following(below: DictConfig, above: DictConfig) -> None:
    """Refuse a merge onto a reference, for which OmegaConf takes what it refers to."""
    if not (_has_keys(below) and _has_keys(above)):
        return
    for key in above:
        new = above._get_node(key, validate_access=False)
        old = below._get_node(key, validate_access=False)
        if not OmegaConf.is_config(new) or not isinstance(old, Node):
            continue
        if old._is_interpolation():
            raise NotApartError(key)
        if isinstance(old, DictConfig) and isinstance(new, DictConfig):
            _refuse_following(old, new)


def _has_keys(config: DictConfig) -> bool:
    return not (config._is_none() or config._is_missing() or config._is_interpolation())


def _refuse_path_through(root: DictConfig, override: "Override") -> None:
    """Refuse an override whose effect depends on what a reference refers to."""
    *above, last = _path(override)
    node: Node | None = root
    for key in above:
        node = _inside(node, key)
        if node is not None and node._is_interpolation():
            raise NotApartError(override.input_line)
    old = _inside(node, last)
    is_plain = not (override.is_add() or override.is_delete())
    sets_value = is_plain and not isinstance(override.value(), dict | list)
    if old is not None and old._is_interpolation() and not sets_value:
        raise NotApartError(override.input_line)


def _inside(node: Node | None, key: str) -> Node | None:
    """Return what `node` has under `key`, None where it has nothing."""
    found: object = None
    if isinstance(node, ListConfig) and key.isdigit() and int(key) < len(node):
        found = node._get_node(int(key))
    elif isinstance(node, DictConfig) and _has_keys(node):
        found = node._get_node(key, validate_access=False)
    return found if isinstance(found, Node) else None


def _path(override: "Override") -> list[str]:
    return [key for key in _BETWEEN_KEYS.split(override.key_or_group) if key]
