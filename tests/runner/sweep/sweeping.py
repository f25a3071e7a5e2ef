"""Sweeps in this process: the work of the command, without its start-up."""

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.types import HydraContext, RunMode

from runner.cli import ending as exit_codes
from runner.cli.arguments import hydra_arguments
from runner.config import choices
from runner.config.paths import conf_dir
from runner.config.read import register
from runner.sweep.grid import run_grid

__all__ = ["sweep"]


def sweep(*arguments: str) -> int:
    """Run the sweep of the command line in the working directory; return its exit code."""
    register()
    choices.register()
    overrides = choices.quoted_overrides(hydra_arguments(arguments))
    with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="fxpart"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        config = hydra.compose_config(
            "config", overrides, run_mode=RunMode.MULTIRUN, with_log_configuration=False
        )
        context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks())
        exit_codes._codes.clear()
        run_grid(context, _no_task, config, list(config.hydra.overrides.task))
    code = exit_codes.exit_code()
    assert code is not None
    return code


def _no_task(_: object) -> None:
    raise AssertionError("a sweep in this process needs no task of Hydra's")
