"""Compose all jobs of a sweep before the first one starts: edits of ``conf/`` affect none of them.

Hydra takes about 110 ms per job, since it reads and merges all files again, its own included. A
`SweepLoad` takes 3 to 4 ms for the same steps: each file is read once; each section is merged once
for all jobs with the same files, which share it unless they override something in it; and the order
of files is computed once for all jobs that choose from the same groups.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fxpart.errors import SpecError
from fxpart.support.digest import stable_digest
from runner.cli.composing import composing
from runner.config.read import read_config
from runner.config.schema import Config
from runner.errors import message_of
from runner.experiment.model_spec import model_spec
from runner.job.identity import Choices, config_key, deciding, inputs_key, without_elsewhere
from runner.sweep.axes import Axis
from runner.sweep.merged_files import FilePart, MergedFiles, file_part
from runner.sweep.swept_job import Job

if TYPE_CHECKING:
    from hydra._internal.config_repository import CachingConfigRepository
    from hydra._internal.defaults_list import Overrides
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.default_element import InputDefault, ResultDefault
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

__all__ = ["Composed", "Load", "SweepLoad", "compose_grid", "compose_one", "make_job"]

Load = Callable[[Sequence[str]], "tuple[DictConfig, Mapping[str, Any]]"]
"""Maps a job's overrides to its configuration, without Hydra's section, and choices by group."""


@dataclass(frozen=True, eq=False, slots=True)
class Composed:
    """A composed job. Jobs share no mutable state."""

    overrides: tuple[str, ...]
    config: Config | None
    """None if it is invalid."""
    choices: Choices
    error: str | None
    """Why it is invalid, in one line."""


class SweepLoad:
    """Composes the jobs of one sweep. Not thread-safe."""

    def __init__(self, config_loader: "ConfigLoader", master: "DictConfig") -> None:
        """Take Hydra's loader and its configuration of the sweep."""
        self._loader: Any = config_loader
        self._master = master
        self._files: CachingConfigRepository | None = None
        self._parts: dict[tuple[object, ...], FilePart] = {}
        self._merged_files = MergedFiles()
        self._defaults: dict[tuple[object, ...], _Defaults] = {}
        self._alone: dict[tuple[str, str], str | None] = {}
        self._groups: dict[str, bool] = {}

    def __call__(self, overrides: Sequence[str]) -> "tuple[DictConfig, Mapping[str, Any]]":
        """Return a job's configuration without Hydra's section, and its choices by group.

        Raises:
            HydraException: if Hydra rejects an override.

        """
        try:
            return self._merged(overrides)
        except Exception:
            # Hydra raises the right error. And if the private API used by `_merged` changes some
            # day, the sweep is only slower.
            return self.in_full(overrides)

    def in_full(self, overrides: Sequence[str]) -> "tuple[DictConfig, Mapping[str, Any]]":
        """Return the same, composed entirely by Hydra."""
        from omegaconf import open_dict

        with composing():
            composed: DictConfig = self._loader.load_sweep_config(self._master, list(overrides))
        choices = dict(composed.hydra.runtime.choices)
        with open_dict(composed):
            del composed["hydra"]
        return composed, choices

    def _merged(self, overrides: Sequence[str]) -> "tuple[DictConfig, Mapping[str, Any]]":
        """Compose by the steps of Hydra's loader, without Hydra's own files."""
        from omegaconf import OmegaConf

        if self._files is None:
            # Hydra's overrides may add search paths.
            hydras = list(self._master.hydra.overrides.hydra)
            name = self._master.hydra.job.config_name
            _, self._files = self._loader._parse_overrides_and_create_caching_repo(name, hydras)
        parsed = self._parsed(overrides)
        defaults = self._defaults_of(parsed)
        values = [
            part for part in parsed if not self._chooses(part) and not part.is_hydra_override()
        ]
        # A later override may be inside a value that is an interpolation.
        refers = any("${" in str(part.input_line) for part in values)
        composed = self._merged_files.merged(
            [
                self._part(default)
                for default in defaults.files
                if not str(default.config_path).startswith("hydra/")
            ],
            None if refers else [part.key_or_group for part in values],
        )
        self._loader._apply_overrides_to_config(values, composed)
        # As in Hydra: values resolved for the sweep, such as the time, are not resolved again.
        OmegaConf.copy_cache(from_config=self._master, to_config=composed)
        return composed, dict(defaults.choices)

    def _defaults_of(self, parsed: Sequence["Override"]) -> "_Defaults":
        """Return the ordered files of a job.

        Jobs that differ only in files without defaults of their own share a list, except for these.
        """
        from hydra._internal.defaults_list import create_defaults_list

        assert self._files is not None
        chosen: dict[str, str] = {}
        group_key: list[object] = []
        for part in (part for part in parsed if self._chooses(part)):
            package = self._package_of_lone(part)
            if package is None:
                group_key.append(part.input_line)
            else:
                group_key.append((part.key_or_group, package))
                chosen[part.key_or_group] = str(part.value())
        known = self._defaults.get(tuple(group_key))
        if known is not None and (changed := known.with_choices(chosen)) is not None:
            return changed
        name = self._master.hydra.job.config_name
        with _choices_mapped_where_used() as uses:
            defaults_list = create_defaults_list(
                self._files, name, list(parsed), prepend_hydra=True, skip_missing=False
            )
        result = _Defaults(
            tuple(defaults_list.defaults), dict(defaults_list.overrides.known_choices), chosen
        )
        if not any(uses):
            self._defaults[tuple(group_key)] = result
        return result

    def _package_of_lone(self, override: "Override") -> str | None:
        """Return the package in the header of the chosen file, empty if there is none.

        None if the file has defaults of its own, or if the override is not a plain choice of one
        file.
        """
        from hydra.core.override_parser.types import OverrideType

        value = override.value()
        is_plain = override.type == OverrideType.CHANGE and override.package is None
        if not is_plain or not isinstance(value, str) or self._files is None:
            return None
        key = (override.key_or_group, value)
        if key not in self._alone:
            loaded = self._files.load_config("/".join(key))
            package = None if loaded is None else (loaded.header.get("package") or "")
            is_lone = (
                loaded is not None and not loaded.defaults_list and "_name_" not in str(package)
            )
            self._alone[key] = package if is_lone else None
        return self._alone[key]

    def _chooses(self, override: "Override") -> bool:
        """Return whether an override chooses a file of a group, by Hydra's rule."""
        name = override.key_or_group
        if name not in self._groups:
            self._groups[name] = self._files is not None and self._files.group_exists(name)
        return self._groups[name] and not isinstance(override.value(), dict)

    def _parsed(self, overrides: Sequence[str]) -> list["Override"]:
        from hydra.types import RunMode

        parsed = [_parsed_override(text) for text in overrides]
        self._loader.validate_sweep_overrides_legal(
            overrides=parsed, run_mode=RunMode.RUN, from_shell=True
        )
        return parsed

    def _part(self, default: "ResultDefault") -> FilePart:
        """Return the content of a file in its package, without Hydra's section."""
        from omegaconf import OmegaConf

        key = (default.config_path, default.package, default.primary)
        if key not in self._parts:
            part = self._loader._load_single_config(default=default, repo=self._files).config
            if "hydra" in part:
                part = OmegaConf.masked_copy(part, [name for name in part if name != "hydra"])
            self._parts[key] = file_part(key, part)
        return self._parts[key]


@dataclass(frozen=True, eq=False, slots=True)
class _Defaults:
    """The files of a job, in Hydra's order."""

    files: "tuple[ResultDefault, ...]"
    choices: dict[str, Any]
    """All choices, by group."""
    lone: dict[str, str]
    """The overridden choices whose files have no defaults of their own."""

    def with_choices(self, lone: Mapping[str, str]) -> "_Defaults | None":
        """Return the list with `self.lone` replaced by `lone`; None if a file is not unique."""
        files, choices = list(self.files), dict(self.choices)
        for group, option in lone.items():
            path = f"{group}/{self.lone[group]}"
            places = [i for i, file in enumerate(files) if file.config_path == path]
            if len(places) != 1 or choices.get(group) != self.lone[group]:
                return None
            files[places[0]] = replace(files[places[0]], config_path=f"{group}/{option}")
            choices[group] = option
        return _Defaults(tuple(files), choices, dict(lone))


@lru_cache(maxsize=4096)
def _parsed_override(text: str) -> "Override":
    """Return `text` parsed by Hydra, cached for all jobs that share it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(text)


@contextmanager
def _choices_mapped_where_used() -> Iterator[list[bool]]:
    """Patch Hydra to build its map of choices only for files that refer to a choice.

    Hydra builds it for every file, for choices such as ``${mode}_options``, which takes half of a
    job's time. Yields a list that records for each file whether it refers to a choice.
    """
    from hydra._internal import defaults_list as hydras
    from omegaconf import OmegaConf

    map_choices, no_choices = hydras._create_interpolation_map, OmegaConf.create()
    uses: list[bool] = []

    def map_where_used(
        overrides: "Overrides", defaults_list: "list[InputDefault]", self_added: bool
    ) -> "DictConfig":
        refers = any("${" in str(vars(default)) for default in defaults_list)
        uses.append(refers)
        return map_choices(overrides, defaults_list, self_added) if refers else no_choices

    hydras._create_interpolation_map = map_where_used
    try:
        yield uses
    finally:
        hydras._create_interpolation_map = map_choices


def compose_one(load: Load, overrides: Sequence[str]) -> Composed:
    """Compose the job of `overrides`.

    Raises:
        HydraException: if Hydra rejects an override, such as an unknown choice or key.

    """
    composed, chosen = load(overrides)
    config, error = None, None
    try:
        config = read_config(composed)
    except SpecError as wrong:
        error = message_of(wrong)
    return Composed(tuple(overrides), config, Choices.of(chosen, config), error)


def compose_grid(load: Load, fixed: Sequence[str], axes: Sequence[Axis]) -> list[Composed]:
    """Compose all combinations of the axes' values, varying the last axis fastest.

    Raises:
        HydraException: if Hydra rejects a combination.

    """
    return [
        compose_one(load, (*fixed, *itertools.chain.from_iterable(picked)))
        for picked in itertools.product(*(axis.values for axis in axes))
    ]


def make_job(index: int, composed: Composed) -> Job:
    """Return the job with its identity.

    The key of an invalid job is a hash of its overrides and error.
    """
    config, error = composed.config, composed.error
    key, inputs = "", None
    if config is not None:
        try:
            inputs = inputs_key(config, model_spec(config).key())
            key = config_key(config, inputs)
        except SpecError as wrong:
            config, error = None, message_of(wrong)
    if not key:
        key = stable_digest({"overrides": deciding(composed.overrides), "error": error})[:16]
    # Overrides go into files and messages, and those of tracking may hold a password.
    overrides = without_elsewhere(composed.overrides)
    return Job(index, overrides, composed.choices, config, error, key, inputs)
