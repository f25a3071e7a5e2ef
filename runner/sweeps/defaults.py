"""Which files a job is made of: Hydra's own answer, asked quickly and for many jobs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hydra._internal import defaults_list as hydras
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from hydra._internal.config_repository import CachingConfigRepository
    from hydra.core.default_element import InputDefault
    from hydra.core.override_parser.types import Override

__all__ = ["job_defaults"]


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
