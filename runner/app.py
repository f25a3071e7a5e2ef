"""The main command: Hydra composes a config, a job runs it, and user errors print as one line."""

import sys
from dataclasses import asdict, replace
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from fxpart.errors import FxpartError
from runner.cli.ending import USER_ERROR, reported
from runner.config.paths import conf_dir, plugins_dir, unread_choices
from runner.output import stdout

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from runner.config.schema import Config
    from runner.job.identity import JobIdentity
    from runner.job.job import Outcome

__all__ = ["main"]


def main() -> int:
    """Run the command line and return its exit code. Also the ``fxpart`` entry point."""
    return reported(_compose_and_run)


def _compose_and_run() -> int:
    # Before Hydra first scans for plugins. An installed package has them on Python's path already.
    sys.path.append(str(plugins_dir()))
    import hydra

    from runner.cli.composing import composing, show_package, work_begins
    from runner.cli.ending import exit_code

    sys.argv[1:] = arguments = _hydra_arguments()
    if _is_plain_help(arguments):
        _print_help(arguments[1:])
        return 0
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def job(config: "DictConfig") -> str:
        work_begins()
        from runner.config.read import read_tracking
        from runner.sweep.launching import JOB_KEY, TRACKING_KEY, run_job_file

        if JOB_KEY in config:  # a sweep's job, in a process started by its launcher
            return run_job_file(Path(config[JOB_KEY]), read_tracking(config[TRACKING_KEY]))
        status, code = run_composed(config)
        codes.append(code)
        return status

    packages = [flag.partition("=")[2] for flag in arguments if flag.startswith("--package=")]
    with composing():
        if packages:
            show_package(job, packages[0])
        else:
            job()
    swept = exit_code()
    return swept if swept is not None else max(codes, default=0)


def _hydra_arguments() -> list[str]:
    """Register our configuration with Hydra and return the arguments to pass to it.

    Warnings and the version are printed here, ahead of any output of Hydra.
    """
    from fxpart.support.host import installed_version
    from runner.cli.arguments import hydra_arguments
    from runner.config import choices
    from runner.config.read import register
    from runner.sweep.launchers.tickets import prefer_own_launchers

    register()
    choices.register()
    _warn_of_unread_choices()
    prefer_own_launchers()
    arguments = choices.quoted_overrides(hydra_arguments(sys.argv[1:]))
    if "--version" in arguments:
        # At once, before Hydra prints its own version.
        stdout.write(f"fxpart {installed_version('fxpart')}\n")
    return arguments


def _is_plain_help(arguments: list[str]) -> bool:
    """Return whether ``--help`` comes first, without other flags or settings of Hydra's own."""
    return arguments[:1] == ["--help"] and not any(
        text.startswith("-") or text.lstrip("+~").startswith("hydra") for text in arguments[1:]
    )


def _print_help(overrides: list[str]) -> None:
    """Print Hydra's ``--help`` text, faster than Hydra does.

    Hydra lists every config group first, for templates that show them. Ours does not.
    """
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf, open_dict

    from runner.cli.composing import composing

    with composing(), initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("config", overrides, return_hydra_config=True)
    template = Template(config.hydra.help.template)
    with open_dict(config):
        del config["hydra"]
    stdout.write(f"{template.substitute(CONFIG=OmegaConf.to_yaml(config))}\n")


def _warn_of_unread_choices() -> None:
    unread = unread_choices()
    if unread:
        sys.stderr.write(
            f"{', '.join(unread)} is not read: fxpart has a file of that name; rename it\n"
        )


def run_composed(composed: "DictConfig") -> tuple[str, int]:
    """Run the job that Hydra composed and return its status and exit code."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.utils import get_original_cwd

    from runner.cli.arguments import refuse_sweep_settings
    from runner.config.read import read_config, read_tracking
    from runner.experiment.check import check_all
    from runner.job.identity import Choices, JobIdentity
    from runner.job.job import is_kept, keep_failure

    hydra_config = HydraConfig.get()
    identity = JobIdentity(
        choices=Choices.of(hydra_config.runtime.choices, None),
        overrides=tuple(hydra_config.overrides.task),
        folder=Path(hydra_config.runtime.output_dir),
        root=Path(get_original_cwd()),
    )
    try:
        identity = replace(identity, tracking=read_tracking(composed.tracking))
        config = read_config(composed)
        refuse_sweep_settings(config)
        if not config.rerun:
            check_all(config)
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
    from runner.job.identity import Choices
    from runner.job.job import Outcome, remove_unused, run_job

    if not config.rerun:
        choices = Choices.of(asdict(identity.choices), config)
        return run_job(config, replace(identity, choices=choices))
    from runner.job.rerun import rerun

    try:
        return rerun(config, identity)
    except FxpartError as error:
        remove_unused(identity.folder)
        return Outcome("failed", str(error))
