"""A configuration as ``python -m runner`` composes it, without tracking."""

from hydra import compose, initialize_config_dir

from runner.config import choices
from runner.config.paths import conf_dir
from runner.config.read import read_config, register
from runner.config.schema import Config

__all__ = ["composed"]


def composed(*overrides: str) -> Config:
    """Return the shipped configuration with `overrides`; later ones win."""
    register()
    choices.register()
    quoted = choices.quoted_overrides(["tracking=none", *overrides])
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return read_config(compose("config", overrides=quoted))
