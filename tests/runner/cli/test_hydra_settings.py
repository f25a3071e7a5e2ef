"""Hydra's own settings and flags, refused in one line of ours."""

import sys
from functools import partial
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fxpart.errors import SpecError
from runner.cli.shown_config import show_package
from tests.runner.command import OWN, SMALL, run
from tests.runner.composed import composed
from tests.runner.refused import refused_line


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+batch_sweep=3", "batch_sweep exists already; write batch_sweep=..., without +"),
        ("+model=gpt2", "model is chosen twice, once as gpt2; write model=..., without +, and in"),
        ("++model=gpt2", "model is chosen already; write model=..., without ++"),
        ("~model", "~model: a run needs one; choose another, model=..."),
        ("~model.name", "model.name cannot be taken away; give it another value"),
        ("~nosuch", "~nosuch: nosuch does not exist; there are: "),
        ("model=[gpt2]", "model=[gpt2]: one is chosen, not a list; write model=gpt2"),
        ("model=null", "model=null names nothing; give a name, which --help lists"),
        ("mode@x=single", "mode@x is not chosen by default; write mode=..."),
        ("hydra.mode=MULTI", "hydra.mode=MULTI must be RUN or MULTIRUN"),
        ("hydra.searchpath=x", "hydra.searchpath=x must be a list of folders"),
        ("hydra.job.env_copy=[NO_SUCH]", "hydra.job.env_copy: the environment has no NO_SUCH"),
    ],
)
def test_an_override_that_is_refused(override: str, said: str) -> None:
    assert said in refused_line(lambda: composed(override))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hydra.verbose=3"], "hydra.verbose=3 must be true, false, or the names of loggers"),
        (
            ["hydra.job_logging={version: 1, root: {level: NO}}"],
            "Unable to configure root logger",
        ),
        (["hydra.searchpath=[nosuch]"], "hydra.searchpath: there is no folder nosuch; give one"),
        (["hydra.run.dir=${nowhere}"], "hydra.run.dir=${nowhere} refers to nowhere, which does"),
        (["--cfg", "job", "--package", "nosuch"], "--package nosuch does not exist; there are: "),
        (["--cfg", "job", "--resolve", "model.name=${no}"], "model.name=${no} refers to no, which"),
        (["--cfg", "job", "-m"], "--run, -m, --cfg, --info and -sc exclude each other"),
    ],
)
def test_a_setting_that_is_refused(folder: Path, arguments: list[str], said: str) -> None:
    done = run(folder, *OWN, SMALL, "tracking=none", *arguments)
    assert done.code == 2
    assert said in done.error
    assert done.err.count("\n") == 1


def test_a_package_is_shown_or_refused_with_what_there_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = OmegaConf.create({"model": {"name": "a", "factory": None}})

    def show_cfg(package: str, cfg: object = config) -> None:
        sys.stderr.write(f"package '{package}' not found in config\n")
        sys.exit(1)

    for package, said in (
        ("modle", "--package modle does not exist; nearest: model"),
        ("model.nam", "--package model.nam does not exist; in model, nearest: name"),
        ("model.factory", "model.factory is null, there is nothing to show"),
        ("hydra.run", "there are: model; --cfg all shows Hydra's too"),
    ):
        with pytest.raises(SpecError) as refused:
            show_package(partial(show_cfg, package))
        assert said in str(refused.value)
    show_package(partial(print, "heed this", file=sys.stderr))
    assert capsys.readouterr().err == "heed this\n"
