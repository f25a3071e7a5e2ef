"""Settings of launchers that are refused before any job starts."""

import pytest
from omegaconf import DictConfig, OmegaConf

from fxpart.errors import SpecError
from runner.sweep.check_settings import check_cores, check_launcher
from tests.runner.composed import composed_with_hydra


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that all packages are installed: no launcher is started."""
    monkeypatch.setattr("runner.sweep.check_settings.find_spec", lambda _: True)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def _config(launcher: str, **settings: object) -> DictConfig:
    """Return the shipped configuration of a launcher, with `settings` by their path."""
    section = composed_with_hydra(f"hydra/launcher={launcher}").launcher
    OmegaConf.set_struct(section, False)
    section.pop("submitit_folder", None)  # which names the sweep's folder
    section.pop("name", None)
    for path, value in settings.items():
        OmegaConf.update(section, path.replace("__", "."), value)
    return OmegaConf.create({"hydra": {"launcher": section}})


@pytest.mark.parametrize("launcher", ["basic", "joblib", "ray", "submitit_local", "submitit_slurm"])
def test_shipped_settings_are_accepted(launcher: str) -> None:
    check_launcher(_config(launcher))


@pytest.mark.parametrize(
    ("launcher", "settings", "message"),
    [
        ("joblib", {"n_jobs": "foo"}, "n_jobs=foo must be a whole number"),
        ("joblib", {"n_jobs": 2.5}, "n_jobs=2.5 must be a whole number"),
        ("joblib", {"n_jobs": True}, "n_jobs=true must be a whole number"),
        ("joblib", {"n_jobs": None}, "n_jobs=null must be a whole number"),
        ("joblib", {"n_jobs": 0}, "n_jobs=0 leaves no process on"),
        ("joblib", {"jobs": 2}, "hydra.launcher.jobs does not exist; nearest: n_jobs"),
        ("ray", {"init__num_cpus": 2.5}, "num_cpus=2.5 must be a whole number from 0, or null"),
        (
            "ray",
            {"init__num_cpus": 0},
            "remote.num_cpus=1 is more than hydra.launcher.init.num_cpus=0; no job could start",
        ),
        ("ray", {"init__num_gpus": "a"}, "num_gpus=a must be a number from 0, or null"),
        ("ray", {"init__log_to_driver": 1}, "log_to_driver=1 must be one of true, false"),
        ("ray", {"remote__num_cpus": -1}, "remote.num_cpus=-1 must be a number from 0"),
        ("ray", {"remote": 3}, "hydra.launcher.remote=3 must be several values; set one of"),
        (
            "ray",
            {"remote__num_cpus": 4, "init__num_cpus": 2},
            "remote.num_cpus=4 is more than hydra.launcher.init.num_cpus=2; no job could start",
        ),
        ("submitit_local", {"array_parallelism": 0}, "must be a whole number from 1, or null"),
        ("submitit_slurm", {"array_parallelism": None}, "=null must be a whole number from 1"),
        ("submitit_slurm", {"mem_gb": "4gb"}, "mem_gb=4gb must be a number from 0, or null"),
    ],
)
def test_a_setting_that_would_fail_all_jobs_is_refused(
    launcher: str, settings: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(SpecError) as refused:
        check_launcher(_config(launcher, **settings))
    assert str(refused.value).startswith("hydra.launcher.")
    assert message in str(refused.value)


def test_a_cluster_started_here_has_the_cores_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    check_launcher(_config("ray", remote__num_cpus=2))
    check_launcher(_config("ray", remote__num_cpus=4, init__num_cpus=4))
    check_launcher(_config("ray", remote__num_cpus=0, init__num_cpus=0))
    with pytest.raises(SpecError, match=r"remote\.num_cpus=4 is more than the 2 of this machine; "):
        check_launcher(_config("ray", remote__num_cpus=4))


def test_an_existing_cluster_has_its_own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    check_cores({"init": {"num_cpus": 2}, "remote": {"num_cpus": 4}})


def test_a_missing_slurm_is_reported_before_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None if name == "sbatch" else name)
    with pytest.raises(SpecError, match=r"there is no Slurm here \(no sbatch on PATH\); start"):
        check_launcher(_config("submitit_slurm"))


@pytest.mark.parametrize("left_out", ["init", "remote"])
def test_an_omitted_number_is_the_default_of_ray(
    left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = _config("ray", init__num_cpus=1)
    del config.hydra.launcher[left_out].num_cpus
    check_launcher(config)


def test_an_unknown_launcher() -> None:
    with pytest.raises(SpecError, match=r"hydra\.launcher=3 is not a launcher; choose one by name"):
        check_launcher(OmegaConf.create({"hydra": {"launcher": 3}}))


def test_a_launcher_of_another_package_is_not_checked() -> None:
    check_launcher(OmegaConf.create({"hydra": {"launcher": {"_target_": "a.B", "n_jobs": "x"}}}))


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.sweep.check_settings.find_spec", lambda _: None)
    with pytest.raises(SpecError, match=r"hydra/launcher=ray needs ray; pip install .*\[ray\]"):
        check_launcher(_config("ray"))
    with pytest.raises(SpecError, match=r"submitit_slurm needs submitit; .*\[parallel\]"):
        check_launcher(_config("submitit_slurm"))
