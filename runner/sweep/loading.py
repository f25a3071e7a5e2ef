"""Composing the jobs of a sweep: as Hydra does, and the same for less where jobs share parts.

Hydra takes 100 ms and more for a job: it reads each file again, and merges all of them. A sweep
asks for the same few files many times, so here each is read once, which files a job is made of is
still Hydra's own answer, and sections that are made of the same parts are merged once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hydra._internal import defaults_list as hydras
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

from runner.cli.composing import composing
from runner.sweep.merging import NotApartError, Part, SectionStore

if TYPE_CHECKING:
    from hydra._internal.config_repository import CachingConfigRepository
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.default_element import InputDefault, ResultDefault
    from hydra.core.override_parser.types import Override

__all__ = ["SweepLoad", "job_defaults"]


# Which files a job is made of: Hydra's own answer, asked quickly and for many jobs.


def job_defaults(
    repository: "CachingConfigRepository", config_name: str | None, overrides: Sequence["Override"]
) -> hydras.DefaultsList:
    """Return Hydra's defaults list for a job with these overrides, but for Hydra's own files.

    Those are the same for all jobs of a sweep; looking for them takes half of the time.

    Raises:
        HydraException: for choices that do not exist or contradict each other.

    """
    asked = hydras.Overrides(repo=repository, overrides_list=list(overrides))
    with _maps_where_used():
        defaults, tree = hydras._create_defaults_list(
            repository, config_name, asked, prepend_hydra=False, skip_missing=False
        )
    for key in [key for key in asked.override_metadata if key.startswith("hydra/")]:
        del asked.override_metadata[key]
    asked.ensure_overrides_used()
    asked.ensure_deletions_used()
    return hydras.DefaultsList(defaults, tree, asked.config_overrides, asked)


@contextmanager
def _maps_where_used() -> Iterator[None]:
    """Have Hydra map the choices made so far only for files that refer to them.

    It does so for every file, for a choice such as ``${mode}_options`` that hardly any file has:
    ten times what the rest takes.
    """
    make_map, no_choices = hydras._create_interpolation_map, OmegaConf.create({})

    def map_where_used(
        overrides: hydras.Overrides, defaults_list: list["InputDefault"], self_added: bool
    ) -> DictConfig:
        said = [str(vars(default)) for default in defaults_list]
        refers = any("${" in one for one in said)
        if refers and any("hydra" in one for one in said):
            raise ConfigCompositionException("a choice refers to Hydra's own")
        return make_map(overrides, defaults_list, self_added) if refers else no_choices

    hydras._create_interpolation_map = map_where_used
    try:
        yield
    finally:
        hydras._create_interpolation_map = make_map


class SweepLoad:
    """Composes jobs of one sweep. Not for several threads at a time."""

    def __init__(self, config_loader: "ConfigLoader", master: DictConfig) -> None:
        self._loader, self._master = config_loader, master
        self._shared: _Shared | None = None
        self.is_exact: bool | None = None
        """Whether `quick` agreed with Hydra where both were asked; None before."""

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """Return what Hydra itself composes for a job, its own section included.

        Raises:
            HydraException: for overrides that mean nothing.

        """
        with composing():
            composed: DictConfig = self._loader.load_sweep_config(self._master, list(overrides))
        return composed

    def quick(self, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, Any]] | None:
        """Return the job's configuration without Hydra's section, and the choices by group.

        The configuration is the same object each time: read it before the next call. None is for
        Hydra to compose, or to refuse: a mistake, or parts that cannot be told apart.
        """
        if self.is_exact is False:
            return None
        try:
            if self._shared is None:
                self._shared = _Shared(self._loader, self._master)
            return self._shared.compose(overrides)
        except Exception:  # whatever it is, Hydra knows how to say it, or how to do it
            return None


class _Shared:
    """What the jobs of a sweep have in common."""

    def __init__(self, loader: "ConfigLoader", master: DictConfig) -> None:
        if not isinstance(loader, ConfigLoaderImpl):
            raise NotApartError(type(loader).__name__)
        self._loader, self._master = loader, master
        self._name = master.hydra.job.config_name
        hydras = list(master.hydra.overrides.hydra)  # where else to look for files, say
        _, self._files = loader._parse_overrides_and_create_caching_repo(self._name, hydras)
        self._parsed: dict[str, Override] = {}
        self._parts: dict[tuple[object, ...], Part] = {}
        self._sections: SectionStore | None = None

    def compose(self, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, Any]]:
        """Return the job's configuration, and its choices."""
        parsed = [self._parse(override) for override in overrides]
        found = job_defaults(self._files, self._name, parsed)
        parts = [self._part(one) for one in found.defaults if not _is_hydras(one)]
        if self._sections is None:
            self._sections = SectionStore(parts[0])
        composed = self._sections.assemble(parts, found.config_overrides)
        # As in Hydra: what was resolved for the sweep, such as the time, is not resolved again.
        OmegaConf.copy_cache(from_config=self._master, to_config=composed)
        return composed, dict(found.overrides.known_choices)

    def _parse(self, override: str) -> "Override":
        from hydra.core.override_parser.overrides_parser import OverridesParser

        if override not in self._parsed:
            (parsed,) = OverridesParser.create().parse_overrides([override])
            if parsed.is_sweep_override():
                raise NotApartError(override)
            self._parsed[override] = parsed
        return self._parsed[override]

    def _part(self, default: "ResultDefault") -> Part:
        key = (default.config_path, default.package, default.primary)
        if key not in self._parts:
            loaded = self._loader._load_single_config(default=default, repo=self._files).config
            if not isinstance(loaded, DictConfig):
                raise NotApartError(default.config_path)
            # Of a job's own folder, say, which only the job's own process knows.
            if "${hydra" in OmegaConf.to_yaml(_without_hydra(loaded)):
                raise NotApartError(default.config_path)
            self._parts[key] = Part.of(loaded)
        return self._parts[key]


def _is_hydras(default: "ResultDefault") -> bool:
    return str(default.config_path).startswith("hydra/")


def _without_hydra(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
