"""Check sweeper and launcher settings before any job starts: a wrong one would fail them all."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fxpart.errors import SpecError, nearest_names
from runner.config.paths import conf_dir
from runner.sweep.launchers.ray_address import LOCAL, address_of, check_address
from runner.sweep.launchers.submitit_jobs import refuse_without_slurm
from runner.sweep.launchers.tickets import needs

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["check_cores", "check_launcher", "check_sweeper"]


def check_sweeper(config: "DictConfig") -> None:
    """Check the settings of the chosen sweeper.

    Raises:
        SpecError: if a setting does not exist, or ``params`` is not a mapping.

    """
    from omegaconf import DictConfig, OmegaConf

    # A user's own sweeper file may have one of our sweepers as target.
    section = config.hydra.sweeper
    shipped = map(OmegaConf.load, sorted((conf_dir() / "hydra" / "sweeper").glob("*.yaml")))
    known = next(
        (settings for settings in shipped if settings._target_ == section.get("_target_")), section
    )
    for name in section:
        if name not in known:
            suggestion = nearest_names(str(name), map(str, known))
            raise SpecError(f"hydra.sweeper.{name} does not exist; {suggestion}")
    params = section.get("params")
    if params is not None and not isinstance(params, DictConfig):
        raise SpecError(
            f"hydra.sweeper.params={params} must be keys with their values, such as"
            " 'hydra.sweeper.params={devices: \"2x16gb,4x16gb\"}'"
        )


_SECTION = "hydra.launcher"


@dataclass(frozen=True, slots=True)
class _Number:
    """A number with a minimum."""

    least: float | None
    whole: bool = True
    optional: bool = False

    def refuse(self, path: str, value: object) -> None:
        if value is None and self.optional:
            return
        kinds = (int,) if self.whole else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if is_number and (self.least is None or value >= self.least):  # type: ignore[operator]
            return
        kind = "a whole number" if self.whole else "a number"
        start = "" if self.least is None else f" from {self.least:g}"
        other = ", or null" if self.optional else ""
        raise SpecError(f"{_SECTION}.{path}={_shown(value)} must be {kind}{start}{other}")


@dataclass(frozen=True, slots=True)
class _OneOf:
    """One of a few words."""

    words: tuple[object, ...]

    def refuse(self, path: str, value: object) -> None:
        # 1 and True are equal in Python, but not here.
        if any(value == word and type(value) is type(word) for word in self.words):
            return
        known = ", ".join(map(_shown, self.words))
        raise SpecError(f"{_SECTION}.{path}={_shown(value)} must be one of {known}")


_Rules = Mapping[str, _Number | _OneOf]
_SWITCH = _OneOf((True, False))
_PROCESSES: _Rules = {
    "jobs_per_process": _Number(1, optional=True),
    "timeout_min": _Number(1, optional=True),
    "stderr_to_stdout": _SWITCH,
}
_RULES: Mapping[str, _Rules] = {
    "joblib": {"n_jobs": _Number(None)},
    "ray": {
        "init.num_cpus": _Number(0, optional=True),
        "init.num_gpus": _Number(0, whole=False, optional=True),
        "init.include_dashboard": _OneOf((True, False, None)),
        "init.log_to_driver": _SWITCH,
        "remote.num_cpus": _Number(0, whole=False, optional=True),
        "remote.max_retries": _Number(-1, optional=True),
    },
    "submitit_local": {**_PROCESSES, "array_parallelism": _Number(1, optional=True)},
    "submitit_slurm": {
        **_PROCESSES,
        "array_parallelism": _Number(1),
        "nodes": _Number(1, optional=True),
        "tasks_per_node": _Number(1, optional=True),
        "cpus_per_task": _Number(1, optional=True),
        "mem_gb": _Number(0, whole=False, optional=True),
        "gpus_per_node": _Number(0, optional=True),
    },
}
_TARGETS = {
    "hydra_plugins.fxpart_plugins.JoblibLauncher": "joblib",
    "hydra_plugins.fxpart_plugins.RayLauncher": "ray",
    "hydra_plugins.fxpart_plugins.LocalLauncher": "submitit_local",
    "hydra_plugins.fxpart_plugins.SlurmLauncher": "submitit_slurm",
}
_OPEN = ("submitit_local", "submitit_slurm")
"""Launchers that pass all settings on to submitit, which checks them itself."""
_PACKAGES = {"ray": ("ray", "ray")}
"""Package of a launcher and the extra that installs it, if not `_EXTRA`."""
_EXTRA = "parallel"


def check_launcher(config: "DictConfig") -> None:
    """Check the settings of the chosen launcher, its package and its cluster.

    Raises:
        SpecError: if a setting is invalid, the package is not installed, or the cluster does not
            answer.

    """
    from omegaconf import DictConfig, OmegaConf

    section = config.hydra.launcher
    if not isinstance(section, DictConfig):
        raise SpecError(
            f"{_SECTION}={section} is not a launcher; choose one by name, such as "
            "hydra/launcher=joblib"
        )
    launcher = _TARGETS.get(str(section.get("_target_")))
    if launcher is None:
        return
    settings: Any = OmegaConf.to_container(section, resolve=True)
    for path, rule in _RULES[launcher].items():
        rule.refuse(path, _at(settings, path))
    _need(launcher)
    if launcher not in _OPEN:
        _refuse_unknown(settings, launcher)
    if launcher == "joblib":
        _check_workers(settings["n_jobs"])
    elif launcher == "ray":
        check_cores(settings)
        _check_cluster(settings)
    elif launcher == "submitit_slurm":
        refuse_without_slurm()


def _at(settings: Mapping[str, Any], path: str) -> object:
    value: Any = settings
    for key in path.split("."):
        if not isinstance(value, Mapping):
            above = path.rpartition(".")[0]
            raise SpecError(
                f"{_SECTION}.{above}={_shown(value)} must be several values; set one of them, such"
                f" as {_SECTION}.{path}="
            )
        value = value.get(key)
    return value


def _need(launcher: str) -> None:
    package, extra = _PACKAGES.get(launcher, (launcher.partition("_")[0], _EXTRA))
    with needs(launcher, package, extra):
        if find_spec(package) is None:
            raise ModuleNotFoundError(name=package)


def _refuse_unknown(settings: Mapping[str, Any], launcher: str) -> None:
    known = {path.partition(".")[0] for path in _RULES[launcher]}
    for key in settings:
        if key not in known and not key.startswith("_"):
            raise SpecError(f"{_SECTION}.{key} does not exist; {nearest_names(key, known)}")


def _check_workers(n_jobs: int) -> None:
    from joblib.externals.loky import cpu_count

    from runner.sweep.launchers.joblib_workers import worker_count

    worker_count(n_jobs, cpu_count())


def _shown(value: object) -> str:
    """Return `value` as typed on a command line."""
    spellings = {None: "null", True: "true", False: "false"}
    return spellings[value] if value is None or isinstance(value, bool) else str(value)


# Checks that Ray can run a job at all: otherwise it would wait or retry for a long time.


def _check_cluster(settings: Mapping[str, Any]) -> None:
    """Connect to a running cluster, for use by the sweep; a local cluster is started later.

    Raises:
        SpecError: if nothing answers or Ray cannot connect.

    """
    init = settings["init"]
    address = address_of(init)
    if address == LOCAL:
        return
    check_address(address)
    from runner.sweep.launchers.ray_apart import connect_apart

    connect_apart(init)


def check_cores(settings: Mapping[str, Any]) -> None:
    """Raise `SpecError` if jobs request more cores than a cluster started here has."""
    named = settings["init"].get("num_cpus")
    cores = os.cpu_count() if named is None else named  # Ray's default
    needed = settings["remote"].get("num_cpus", 1)  # Ray's default
    if address_of(settings["init"]) == LOCAL and needed and cores is not None and needed > cores:
        limit = f"the {cores} of this machine"
        if named is not None:
            limit = f"hydra.launcher.init.num_cpus={named}"
        raise SpecError(
            f"hydra.launcher.remote.num_cpus={needed:g} is more than {limit}; no job could start;"
            " ask for fewer, or give the cluster more"
        )
