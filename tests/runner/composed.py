"""Configurations composed by Hydra as the command does it."""

from typing import cast

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from runner.config import choices
from runner.config import read as config
from runner.config.paths import conf_dir
from runner.config.read import read_config
from runner.config.sections import Config

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
"""Overrides of a model of a layer whose heads split over up to 4 devices."""
GROUPS = (
    "devices",
    "execute",
    "finetune",
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
"""What can be chosen on the command line: the folders of the configuration, but for accelerators,
which are parts of devices."""


def composed(*overrides: str) -> DictConfig:
    """Return the shipped configuration as Hydra composes it with `overrides`."""
    return _compose(overrides, with_hydra=False)


def composed_with_hydra(*overrides: str) -> DictConfig:
    """Return Hydra's own section of the same, with the folders that it would write to."""
    whole = _compose(overrides, with_hydra=True)
    return cast("DictConfig", whole.hydra)


def _compose(overrides: tuple[str, ...], *, with_hydra: bool) -> DictConfig:
    config.register()
    choices.register()
    quoted = choices.quoted_overrides(overrides)
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=quoted, return_hydra_config=with_hydra)


def read(*overrides: str) -> Config:
    """Return the typed values of the same."""
    return read_config(composed(*overrides))
