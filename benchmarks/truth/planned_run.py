"""A run as ``python -m runner`` plans it, for sets whose rows are such runs."""

from hydra import compose, initialize_config_dir

from runner.config import choices
from runner.config import read as registered
from runner.config.paths import conf_dir
from runner.config.read import read_config
from runner.experiment.experiment import Result, model_spec, plan

__all__ = ["planned_run"]


def planned_run(overrides: tuple[str, ...]) -> Result:
    """Return what ``python -m runner`` plans with `overrides`.

    Raises:
        FxpartError: for what cannot be planned.

    """
    registered.register()
    choices.register()
    quoted = choices.quoted_overrides((*overrides, "tracking=none"))
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = read_config(compose("config", overrides=quoted))
    return plan(config, model_spec(config))
