"""Configurations composed by Hydra as the command composes them."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig

from runner.config import choices
from runner.config import read as config
from runner.config.paths import conf_dir
from runner.config.read import read_config
from runner.config.schema import Config
from runner.sweep.composition import SweepLoad

TINY_LLAMA = (
    "model=llama2_7b",
    "model.config.num_hidden_layers=1",
    "model.config.hidden_size=64",
    "model.config.intermediate_size=176",
    "model.config.num_attention_heads=8",
    "model.config.num_key_value_heads=4",
    "model.config.vocab_size=256",
    "model.seq_len=16",
    "reserve=none",
)
"""Overrides of a model with one layer whose heads split over up to 4 devices."""
GROUPS = (
    "devices",
    "execute",
    "finetune",
    "float8",
    "latency",
    "mode",
    "model",
    "offload",
    "optimizer",
    "phase",
    "reserve",
    "runtime",
    "schedule",
    "tracking",
    "transfer_rate",
    "weights",
)
"""What can be chosen on the command line: the folders of the configuration except accelerators,
which are parts of devices.
"""


def composed(*overrides: str) -> DictConfig:
    """Return the shipped configuration as Hydra composes it with `overrides`.

    Composed like the jobs of a sweep, which takes a tenth of Hydra's time; that the two agree is
    tested in `tests/runner/sweep/test_exact_composition.py`. Composed by Hydra itself where it
    refuses the overrides or they belong to its own section, and where the working directory has a
    ``conf`` of its own.
    """
    own = Path("conf").is_dir() and not conf_dir().samefile("conf")
    if own or any(override.lstrip("+~").startswith("hydra") for override in overrides):
        return composed_by_hydra(*overrides)
    return _quick()(choices.quoted_overrides(overrides))[0]


def composed_by_hydra(*overrides: str) -> DictConfig:
    """Return the configuration composed as for a single run, which words mistakes differently."""
    return _compose(overrides, with_hydra=False)


class _Quick(SweepLoad):
    def in_full(self, overrides: Sequence[str]) -> tuple[DictConfig, Mapping[str, Any]]:
        return composed_by_hydra(*overrides), {}


@cache
def _quick() -> _Quick:
    config.register()
    choices.register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        return _Quick(loader, loader.load_configuration("config", [], RunMode.MULTIRUN))


def composed_with_hydra(*overrides: str) -> DictConfig:
    """Return Hydra's own section of the configuration, with the folders that it would write to."""
    whole = _compose(overrides, with_hydra=True)
    return cast("DictConfig", whole.hydra)


def _compose(overrides: tuple[str, ...], *, with_hydra: bool) -> DictConfig:
    config.register()
    choices.register()
    quoted = choices.quoted_overrides(overrides)
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=quoted, return_hydra_config=with_hydra)


def read(*overrides: str) -> Config:
    """Return the typed values of the configuration."""
    return read_config(composed(*overrides))
