"""Merge the config files of a job as Hydra does, but section by section.

A file of a group usually sets only its own section, and jobs that differ in one choice share all
other sections. So each section is merged once for each choice of the files that set its keys.
"""

import pickle
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.config.read import TypedSection

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["FilePart", "MergedFiles", "file_part"]

_MOST_SECTIONS = 4096
"""Most merged sections in the cache: some MB."""
_Path = tuple[str | int, ...]
_OF_A_JOB = re.compile(r"\$\{(?!oc\.env:)")
"""An interpolation that may differ between jobs: of anything but the environment."""


@dataclass(frozen=True, eq=False, slots=True)
class FilePart:
    """The content of one file, in its package."""

    key: tuple[object, ...]
    """Identifies the file and its package."""
    config: "DictConfig"
    paths: frozenset[_Path]
    """The paths of all its keys."""
    references: Mapping[_Path, str]
    """The interpolations among them, by path."""
    is_plain: bool
    """Whether the file only sets keys, without a type or flags at its root."""


def file_part(key: tuple[object, ...], config: "DictConfig") -> FilePart:
    """Return `config`, the file of `key`, with the properties that decide how it is merged."""
    nodes = list(_nodes(config, ()))
    is_typed = config._metadata.object_type not in (dict, None)
    return FilePart(
        key,
        config,
        frozenset(path for path, _ in nodes),
        {path: str(node._value()) for path, node in nodes if node._is_interpolation()},
        not is_typed and not any(config._metadata.flags or {}),
    )


def _nodes(node: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:  # noqa: ANN401 - OmegaConf's
    content = node._content if hasattr(node, "_content") else None
    items: Any = content.items() if isinstance(content, dict) else ()
    if isinstance(content, list):
        items = enumerate(content)
    for key, inner in items:
        yield (*path, key), inner
        yield from _nodes(inner, (*path, key))


class MergedFiles:
    """Merges the files of one job after another. Not thread-safe."""

    def __init__(self) -> None:
        self._sections: dict[tuple[object, ...], bytes] = {}
        self._roots: dict[tuple[object, ...], bytes] = {}
        self._typed: dict[tuple[object, ...], TypedSection] = {}
        """Typed sections of those without interpolations, which no other section affects."""
        self._shared: dict[tuple[object, ...], Any] = {}
        """The ones read and not changed, shared between results, by root and section."""

    def merged(self, parts: Sequence[FilePart], changed: Collection[str] | None) -> "DictConfig":
        """Merge `parts`, later ones over earlier ones, and close the result to new keys.

        Results share the sections without interpolations that contain no key of `changed`, the keys
        that the caller will change; they share nothing if these are unknown (None).
        """
        sections: dict[Any, list[FilePart]] = {}
        for part in parts:
            for name in part.config:
                sections.setdefault(name, []).append(part)
        keys = {
            name: (name, *(part.key for part in section_parts))
            for name, section_parts in sections.items()
        }
        root = tuple(part.key for part in parts if not part.is_plain)
        missing = {key: sections[n] for n, key in keys.items() if key not in self._sections}
        if root in self._roots and missing and not any(map(_goes_elsewhere, missing.values())):
            self._merge_sections(parts, missing)
        if root not in self._roots or any(key not in self._sections for key in keys.values()):
            return self._whole(
                parts, root, {keys[n]: section_parts for n, section_parts in sections.items()}
            )
        result: DictConfig = pickle.loads(self._roots[root])
        content: Any = result._content
        shares = changed is not None and not _below_a_reference(changed, parts)
        touched = {change.partition(".")[0] for change in changed or ()}
        for name, key in keys.items():
            is_shared = shares and name not in touched and key in self._typed
            node = self._shared.get((root, key)) if is_shared else None
            if node is None:
                node = pickle.loads(self._sections[key])
                node._set_parent(result)
                if is_shared:
                    vars(node)[TypedSection.ATTRIBUTE] = self._typed[key]
                    self._shared[root, key] = node
            content[name] = node
        return result

    def _merge_sections(
        self, parts: Sequence[FilePart], sections: Mapping[tuple[Any, ...], list[FilePart]]
    ) -> None:
        """Merge and cache only `sections`: a third of the time of a job with one new choice."""
        names = {key[0] for key in sections}
        # Merging copies from its argument and never changes it, so a view of a file is enough.
        views = [
            _only(part.config, names)
            for part in parts
            if not part.is_plain or any(name in part.config for name in names)
        ]
        self._cache(_merged(views), sections)

    def _whole(
        self,
        parts: Sequence[FilePart],
        root: tuple[object, ...],
        sections: dict[tuple[Any, ...], list[FilePart]],
    ) -> "DictConfig":
        """Merge all of `parts`, and cache the sections that depend on nothing else."""
        merged = _merged([part.config for part in parts])
        self._cache(merged, sections)
        # The root is cached without its sections, only with its type and flags.
        content: Any = merged._content
        vars(merged)["_content"] = {}
        self._roots[root] = pickle.dumps(merged)
        vars(merged)["_content"] = content
        # The round trip makes sure that nothing is shared with the files.
        copied: DictConfig = pickle.loads(pickle.dumps(merged))
        return copied

    def _cache(
        self, merged: "DictConfig", sections: Mapping[tuple[Any, ...], list[FilePart]]
    ) -> None:
        """Cache those of `sections` that depend on nothing else."""
        while len(self._sections) + len(sections) > _MOST_SECTIONS and self._sections:
            first = next(iter(self._sections))
            del self._sections[first]
            self._typed.pop(first, None)
            self._shared.clear()
        content: Any = merged._content
        for key, section_parts in sections.items():
            if not _goes_elsewhere(section_parts):
                self._sections[key] = _pickled_alone(content[key[0]])
                refers = any(
                    path[0] == key[0] and _OF_A_JOB.search(text)
                    for part in section_parts
                    for path, text in part.references.items()
                )
                if not refers:
                    self._typed[key] = TypedSection()


def _merged(configs: Sequence["DictConfig"]) -> "DictConfig":
    """Merge the files of a job, or some sections of each, and close the result to new keys."""
    from omegaconf import OmegaConf

    merged = OmegaConf.create()
    for config in configs:
        merged.merge_with(config)
    OmegaConf.set_struct(merged, True)
    return merged


def _only(config: "DictConfig", names: Collection[Any]) -> "DictConfig":
    """Return a view of `config` with only some of its sections, and with its type and flags."""
    view = object.__new__(type(config))  # a copy of OmegaConf's is deep
    content: Any = config._content
    only = {name: node for name, node in content.items() if name in names}
    vars(view).update(vars(config), _content=only)
    return view


def _goes_elsewhere(parts: Sequence[FilePart]) -> bool:
    """Return whether a file sets a key that is an interpolation in an earlier one.

    OmegaConf then merges into a copy of the referenced node, which may be in any section.
    """
    references: set[_Path] = set()
    for part in parts:
        if references & part.paths:
            return True
        references |= part.references.keys()
    return False


def _below_a_reference(keys: Collection[str], parts: Sequence[FilePart]) -> bool:
    """Return whether one of `keys` is below an interpolation.

    Changing it changes the referenced node, which may be in any section.
    """
    prefixes = [f"{'.'.join(map(str, path))}." for part in parts for path in part.references]
    return any(key.startswith(path) for key in keys for path in prefixes)


def _pickled_alone(node: Any) -> bytes:  # noqa: ANN401
    """Return the pickle of `node` without its parents."""
    parent = node._get_parent()
    node._set_parent(None)
    try:
        return pickle.dumps(node)
    finally:
        node._set_parent(parent)
