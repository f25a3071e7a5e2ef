"""The files that a job chooses, merged as Hydra merges them, but section by section.

A file of a group says its own section alone. Jobs that differ in one choice share all other
sections, so that each is merged once for each choice of the files that set any of its keys.
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
"""Sections that are kept merged: some MB."""
_Path = tuple[str | int, ...]
_OF_A_JOB = re.compile(r"\$\{(?!oc\.env:)")
"""A reference to what may differ between jobs: to anything but the environment."""


@dataclass(frozen=True, eq=False, slots=True)
class FilePart:
    """The content of one file, in its package."""

    key: tuple[object, ...]
    """The same for the same file in the same place."""
    config: "DictConfig"
    paths: frozenset[_Path]
    """Of all its keys."""
    references: Mapping[_Path, str]
    """Those of them that refer to something else, and how."""
    is_plain: bool
    """Whether the file sets nothing but keys of its sections: it has no type and no flags."""


def file_part(key: tuple[object, ...], config: "DictConfig") -> FilePart:
    """Return `config`, the file known by `key`, with what decides how it is merged."""
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
    """Merges the files of one job after another. Not for several threads at a time."""

    def __init__(self) -> None:
        self._sections: dict[tuple[object, ...], bytes] = {}
        self._roots: dict[tuple[object, ...], bytes] = {}
        self._typed: dict[tuple[object, ...], TypedSection] = {}
        """Of those that refer to nothing, whatever other sections say."""
        self._shared: dict[tuple[object, ...], Any] = {}
        """Those of them that are read and not changed, by their root and section."""

    def merged(self, parts: Sequence[FilePart], changed: Collection[str] | None) -> "DictConfig":
        """Return what `parts` say, a later one over those before it, closed against new keys.

        Results share sections that refer to nothing and in which no key of `changed` is, which are
        those that the caller will change; nothing where it cannot tell (None).
        """
        sections: dict[Any, list[FilePart]] = {}
        for part in parts:
            for name in part.config:
                sections.setdefault(name, []).append(part)
        keys = {name: (name, *(part.key for part in of)) for name, of in sections.items()}
        root = tuple(part.key for part in parts if not part.is_plain)
        if root not in self._roots or any(key not in self._sections for key in keys.values()):
            return self._whole(parts, root, {keys[n]: of for n, of in sections.items()})
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

    def _whole(
        self,
        parts: Sequence[FilePart],
        root: tuple[object, ...],
        sections: dict[tuple[Any, ...], list[FilePart]],
    ) -> "DictConfig":
        """Merge all of `parts`, and keep the sections that depend on nothing else."""
        from omegaconf import OmegaConf

        merged = OmegaConf.create()
        for part in parts:
            merged.merge_with(part.config)
        OmegaConf.set_struct(merged, True)
        while len(self._sections) + len(sections) > _MOST_SECTIONS and self._sections:
            first = next(iter(self._sections))
            del self._sections[first]
            self._typed.pop(first, None)
            self._shared.clear()
        content: Any = merged._content
        for key, of in sections.items():
            if not _goes_elsewhere(of):
                self._sections[key] = _pickled_alone(content[key[0]])
                refers = any(
                    path[0] == key[0] and _OF_A_JOB.search(text)
                    for part in of
                    for path, text in part.references.items()
                )
                if not refers:
                    self._typed[key] = TypedSection()
        # Nothing of a section is in its root: its type and its flags are.
        vars(merged)["_content"] = {}
        self._roots[root] = pickle.dumps(merged)
        vars(merged)["_content"] = content
        # Read back, it shares nothing with the files.
        copied: DictConfig = pickle.loads(pickle.dumps(merged))
        return copied


def _goes_elsewhere(parts: Sequence[FilePart]) -> bool:
    """Return whether a file sets what an earlier one only refers to.

    OmegaConf then merges into a copy of what it refers to, in whatever section that is.
    """
    references: set[_Path] = set()
    for part in parts:
        if references & part.paths:
            return True
        references |= part.references.keys()
    return False


def _below_a_reference(keys: Collection[str], parts: Sequence[FilePart]) -> bool:
    """Return whether one of `keys` is inside of what a file only refers to.

    A change there changes what is referred to, in whatever section that is.
    """
    above = [f"{'.'.join(map(str, path))}." for part in parts for path in part.references]
    return any(key.startswith(path) for key in keys for path in above)


def _pickled_alone(node: Any) -> bytes:  # noqa: ANN401
    """Return `node` without all that it is a part of."""
    above = node._get_parent()
    node._set_parent(None)
    try:
        return pickle.dumps(node)
    finally:
        node._set_parent(above)
