"""Refusals that Hydra raises as other exceptions than its own are one line, too."""

import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException

from fxpart.errors import SpecError
from runner.cli.composing import composing, show_package, work_begins
from runner.cli.mistakes import explain
from tests.runner.command import OWN, SMALL, run
from tests.runner.refused import refused_line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hydra.verbose=3"], "AssertionError; HYDRA_FULL_ERROR=1 shows where"),
        (
            ["hydra.job_logging={version: 1, root: {level: NO}}"],
            "Unable to configure root logger; Unknown level: 'NO'",
        ),
        (
            ["hydra.searchpath=[nosuch]"],
            "provider=hydra.searchpath in command-line, path=nosuch is not available",
        ),
        (["hydra.run.dir=${nowhere}"], "hydra.run.dir=${nowhere} refers to nowhere, which does"),
        (["--cfg", "job", "--package", "nosuch"], "--package nosuch does not exist; there are: "),
        (["--cfg", "job", "--resolve", "model.name=${no}"], "a value refers to no, which does not"),
        (["--cfg", "job", "-m"], "Only one of --run, --multirun, --cfg, --info and --shell_compl"),
        (["--resolve"], "--resolve flag can only be used in conjunction with --cfg or --help"),
        (["-sc"], "Expecting one subcommand from ['install', 'uninstall', 'query'] to be set"),
    ],
)
def test_a_refused_setting_is_one_line(folder: Path, arguments: list[str], message: str) -> None:
    base = [] if "-sc" in arguments else [*OWN, SMALL, "tracking=none"]
    done = run(folder, *base, *arguments)
    assert done.code == 2
    assert message in done.error
    assert done.err.count("\n") == 1


def _begin_and_fail() -> None:
    work_begins()
    raise ValueError("odd")


def test_plain_exceptions_of_hydra_are_mistakes_until_the_work_begins() -> None:
    with pytest.raises(ConfigCompositionException, match="odd") as caught, composing():
        raise ValueError("odd")
    assert explain(caught.value) == "odd"
    with pytest.raises(ValueError, match="odd") as bug, composing():
        _begin_and_fail()
    assert explain(bug.value) is None
    for error in (SpecError("x"), BrokenPipeError()):
        with pytest.raises(type(error)) as passed, composing():
            raise error
        assert passed.value is error


def test_an_unwritable_folder_is_a_mistake_only_where_hydra_creates_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def make(*, is_hydra: bool) -> None:
        if not is_hydra:
            work_begins()
        (tmp_path / "file" / "x").mkdir()

    assert refused_line(partial(make, is_hydra=True)) == (
        f"cannot write {tmp_path}/file/x: Not a directory; choose another folder with"
        " hydra.run.dir= or, for a sweep, hydra.sweep.dir="
    )
    with pytest.raises(NotADirectoryError) as caught, composing():
        make(is_hydra=False)
    assert explain(caught.value) is None


def test_warnings_of_hydra_are_errors_or_left_out() -> None:
    with warnings.catch_warnings(record=True) as kept, composing():
        warnings.warn("\n\tRunning Hydra app with --multirun, overriding ...", stacklevel=1)
    assert kept == []


def test_a_package_is_shown_or_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def show_cfg() -> None:
        sys.stderr.write("package not found in config\n")
        sys.exit(1)

    for package, message in (
        ("modle", "--package modle does not exist; nearest: mode, model"),
        ("model.nam", "--package model.nam does not exist; in model, nearest: name"),
        ("model.factory", "--package model.factory is null, there is nothing to show"),
        ("hydra.rnu", "hydra.rnu does not exist; --cfg hydra --package hydra shows what does"),
    ):
        with pytest.raises(SpecError) as refused:
            show_package(show_cfg, package)
        assert message in str(refused.value)
    show_package(partial(print, "heed this", file=sys.stderr), "model")
    assert capsys.readouterr().err == "heed this\n"
