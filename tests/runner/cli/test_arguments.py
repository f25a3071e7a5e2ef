from pathlib import Path

import pytest

from fxpart.errors import SpecError
from runner.cli.arguments import hydra_arguments


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["mode=single"], ["mode=single"]),
        (["mode=a,b", "-m", "devices=4x16gb"], ["--multirun", "mode=a,b", "devices=4x16gb"]),
        (["--multirun", "mode=a,b"], ["--multirun", "mode=a,b"]),
        (["mode=a,b", "-v", "-m"], ["--multirun", "mode=a,b", "verbose=true"]),
        (["-mv", "mode=a,b"], ["--multirun", "mode=a,b", "verbose=true"]),
        (["--verbose"], ["verbose=true"]),
        (["a=1", "--cfg", "job", "mode=single"], ["--cfg=job", "a=1", "mode=single"]),
        (["a=1", "-cd", "."], ["--config-dir=.", "a=1"]),
        (["mode=single", "--info"], ["--info=all", "mode=single"]),
        (["-sc", "install=bash"], ["--shell-completion", "install=bash"]),
        (["rerun=abc", "hydra.run.dir=x"], ["rerun=abc", "hydra.run.dir=x"]),
        (["~mode", "+a=-1", "a="], ["~mode", "+a=-1", "a="]),
    ],
)
def test_flags_stand_anywhere(typed: list[str], expected: list[str]) -> None:
    assert hydra_arguments(typed) == expected


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("outputs/runs/2026-11-02_10-15-30-123456_gpt2_2x16gb+host4gb_single", None),
        ("../runs/2026-11-02_10-15-30-123456_rerun_gpt2_2x16gb+host4gb_single/", None),
        ("'/else where/9_gpt2'", "9_gpt2"),
    ],
)
def test_a_rerun_of_a_folder_is_named_after_it(run: str, name: str | None) -> None:
    *_, folder = hydra_arguments([f"rerun={run}"])
    assert folder.endswith(f"}}_rerun_{name or 'gpt2_2x16gb+host4gb_single'}")


def test_a_rerun_gets_a_folder_named_as_such() -> None:
    *_, folder = hydra_arguments(["rerun=0123456789abcdef"])
    assert folder.startswith("hydra.run.dir=outputs/runs/${now:")
    assert folder.endswith("_rerun_01234567")
    assert hydra_arguments(["rerun=0123456789abcdef", "-cd", "."])[-1] == folder
    assert hydra_arguments(["rerun=0123456789abcdef", "-m"])[-1] == "rerun=0123456789abcdef"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["-q"], "-q is not a flag; -m runs a sweep, -v says more"),
        (["mode=single", "--multrun"], "--multrun is not a flag; nearest: --multirun"),
        (["--mode=single"], "--mode=single is not a flag; write mode=single, without -"),
        (["-c"], "argument --cfg/-c: expected one argument; see python -m runner --help"),
        (["mode=single", "-c", "joob"], "invalid choice: 'joob' (choose from "),
        (["--conf", "x"], "ambiguous option: --conf could match --config-path"),
        (["=3"], "'=3' has no key; write key=value"),
        ([""], "'' has no key"),
        (["hydra.launcher=joblib"], "chosen with a slash; write hydra/launcher=joblib"),
        (["hydra.sweeper=3"], "chosen with a slash; write hydra/sweeper=3"),
        (["--experimental-rerun", "x"], "use rerun=<run id> to repeat a logged run"),
        (
            ["--package", "model"],
            ("--package model applies to --cfg; add --cfg job, or leave it out"),
        ),
        (["--config-dir", "nosuch"], "--config-dir: there is no folder 'nosuch'; give one that"),
        (["--config-dir", ""], "--config-dir: there is no folder ''"),
        (["--config-path", "nosuch"], "--config-path: there is no folder 'nosuch'; give one that"),
        (["--config-name", "nosuch"], "'nosuch' is in none of fxpart's own conf; there are: con"),
        (["--config-name", ""], "--config-name '' is in none of fxpart's own conf"),
    ],
)
def test_meaningless_arguments_are_refused(typed: list[str], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        hydra_arguments(typed)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_without_the_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"has no config\.yaml, which every run"):
        hydra_arguments(["--config-path", str(tmp_path)])
    (tmp_path / "config.yaml").touch()
    assert hydra_arguments(["--config-path", str(tmp_path)]) == [f"--config-path={tmp_path}"]


def test_a_users_own_configuration_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").touch()
    assert hydra_arguments(["--config-name", "mine"]) == ["--config-name=mine"]
    with pytest.raises(SpecError, match=r"in none of fxpart's own conf, conf; nearest: mine"):
        hydra_arguments(["--config-name", "mines"])


def test_a_relative_folder_starts_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.yaml").touch()
    assert hydra_arguments(["--config-path", "own"]) == [f"--config-path={tmp_path}/own"]
