"""The command: Hydra composes a config, a job runs it, mistakes come out as one line."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.errors import FxpartError
from runner.cli.ending import USER_ERROR, reported
from runner.config.paths import conf_dir, plugins_dir, unread_choices

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from runner.config.sections import Config
    from runner.job.job import JobIdentity, Outcome

__all__ = ["main"]


def main() -> int:
    """Run the command line; return the exit code. The entry point of ``fxpart`` too."""
    return reported(_compose_and_run)


def _compose_and_run() -> int:
    # Before Hydra's first look for plugins; an installed package has them where Python looks.
    sys.path.append(str(plugins_dir()))
    import hydra

    from runner.cli.arguments import hydra_arguments
    from runner.cli.ending import exit_code
    from runner.cli.shown_config import heeded_warnings, show_package
    from runner.config import specs
    from runner.config.read import register
    from runner.sweep.launchers.extras import prefer_own_launchers

    register()
    specs.register()
    _tell_of_unread_choices()
    prefer_own_launchers()
    sys.argv[1:] = specs.quote_text(specs.quote_numbers(hydra_arguments(sys.argv[1:])))
    finished: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def job(config: "DictConfig") -> str:
        from runner.config.read import read_tracking
        from runner.sweep.snapshot import JOB_KEY, TRACKING_KEY

        if JOB_KEY in config:  # of a sweep, in a process that its launcher started
            from runner.sweep.one_job import run_job_file

            return run_job_file(Path(config[JOB_KEY]), read_tracking(config[TRACKING_KEY]))
        status, code = run_composed(config)
        finished.append(code)
        return status

    with heeded_warnings():
        if any(one.startswith("--package=") for one in sys.argv[1:]):
            show_package(job)
        else:
            job()
    swept = exit_code()
    return swept if swept is not None else max(finished, default=0)


def _tell_of_unread_choices() -> None:
    unread = unread_choices()
    if unread:
        sys.stderr.write(
            f"{', '.join(unread)} is not read: fxpart has a file of that name; rename it\n"
        )


def run_composed(composed: "DictConfig") -> tuple[str, int]:
    """Run the job that Hydra composed; return its status and exit code."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.utils import get_original_cwd

    from runner.cli.arguments import refuse_alone
    from runner.config.read import read_config, read_tracking
    from runner.job.identity import Choices
    from runner.job.job import JobIdentity, is_kept, keep_failure

    hydra_config = HydraConfig.get()
    chosen = hydra_config.runtime.choices
    identity = JobIdentity(
        choices=Choices(
            # Not even chosen where a file of the user's says `override /model: null`.
            **{name: str(chosen.get(name) or "") for name in Choices.__dataclass_fields__}
        ),
        overrides=tuple(hydra_config.overrides.task),
        folder=Path(hydra_config.runtime.output_dir),
        root=Path(get_original_cwd()),
    )
    try:
        identity = replace(identity, tracking=read_tracking(composed.tracking))
        config = read_config(composed)
        refuse_alone(config)
    except Exception as error:
        if not is_kept(identity, error):
            raise
        outcome = keep_failure(None, identity, error)
    else:
        outcome = _run(config, identity)
    if outcome.error:
        sys.stderr.write(f"error: {outcome.error}\n")
    return outcome.status, 0 if outcome.error is None else USER_ERROR


def _run(config: "Config", identity: "JobIdentity") -> "Outcome":
    from runner.job.job import Outcome, run_job

    if not config.rerun:
        # What a template such as `transformers` was filled with says more than its name.
        choices = replace(identity.choices, model=config.model.name)
        return run_job(config, replace(identity, choices=choices))
    from runner.job.rerun import rerun

    try:
        return rerun(config, identity)
    except FxpartError as error:
        return Outcome("failed", str(error))
