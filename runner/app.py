"""The command: Hydra composes a config, a job runs it, mistakes come out as one line."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.paths import conf_dir
from runner.reporting import USER_ERROR, reported

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["main"]


def main() -> int:
    """Run the command line; return the exit code. The entry point of ``fxpart`` too."""
    return reported(_compose_and_run)


def _compose_and_run() -> int:
    import hydra

    from runner import specs, sweep
    from runner.config import register

    register()
    specs.register()
    sys.argv[1:] = specs.quote_numbers(sys.argv[1:])
    finished: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def job(config: "DictConfig") -> str:
        status, code = run_composed(config)
        finished.append(code)
        return status

    try:
        job()
    except sweep.CallbackError as heard:
        raise heard.__cause__ or heard from None
    swept = sweep.exit_code()
    return swept if swept is not None else max(finished, default=0)


def run_composed(composed: "DictConfig") -> tuple[str, int]:
    """Run the job that Hydra composed; return its status and exit code."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.utils import get_original_cwd

    from runner.config import read_config
    from runner.identity import Choices
    from runner.job import JobIdentity, is_kept, keep_failure, run_job
    from runner.sweep import current_sweep

    hydra_config = HydraConfig.get()
    chosen = hydra_config.runtime.choices
    identity = JobIdentity(
        choices=Choices(
            model=chosen["model"],
            mode=chosen["mode"],
            devices=chosen["devices"],
            transfer_rate=chosen["transfer_rate"],
        ),
        overrides=tuple(hydra_config.overrides.task),
        folder=Path(hydra_config.runtime.output_dir),
        root=Path(get_original_cwd()),
        sweep=current_sweep(),
    )
    try:
        config = read_config(composed)
    except Exception as error:
        if not is_kept(identity, error):
            raise
        outcome = keep_failure(None, identity, error)
    else:
        # What a template such as `transformers` was filled with says more than its name.
        choices = replace(identity.choices, model=config.model.name)
        outcome = run_job(config, replace(identity, choices=choices))
    if outcome.error:
        sys.stderr.write(f"error: {outcome.error}\n")
    return outcome.status, 0 if outcome.error is None else USER_ERROR
