import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from fxpart.support.host import installed_version
from runner.job.job_identity import environment_tags


def _git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=trunk"]
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    _git(tmp_path, "init")
    (tmp_path / "file").write_text("1")
    _git(tmp_path, "add", "file")
    _git(tmp_path, "commit", "-m", "one")
    return tmp_path


def _tags_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(folder)
    return environment_tags()


def test_versions() -> None:
    tags = environment_tags()
    assert tags["torch_version"] == version("torch")
    assert tags["python_version"] == sys.version.split()[0]
    assert all(tags.values())


def test_a_clean_repository(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tags = _tags_in(repository, monkeypatch)
    assert tags["mlflow.source.git.commit"] == _git(repository, "rev-parse", "HEAD")
    assert tags["mlflow.source.git.branch"] == "trunk"
    assert tags["git_dirty"] == "false"


def test_a_change_makes_it_dirty(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "file").write_text("2")
    assert _tags_in(repository, monkeypatch)["git_dirty"] == "true"


def test_a_detached_head_has_no_branch(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _git(repository, "checkout", "--detach")
    tags = _tags_in(repository, monkeypatch)
    assert "mlflow.source.git.branch" not in tags
    assert len(tags["mlflow.source.git.commit"]) == 40


def test_no_repository_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "git_dirty" not in _tags_in(tmp_path, monkeypatch)


def test_a_package_that_is_missing_has_no_version() -> None:
    assert installed_version("no-such-package") is None
    assert installed_version("torch") == version("torch")


@pytest.mark.parametrize(
    ("program", "source"),
    [
        ("/x/runner/__main__.py", "python -m runner"),
        ("/x/bin/fxpart", "fxpart"),
        ("", "python"),
    ],
)
def test_source_is_the_command(program: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    assert environment_tags()["mlflow.source.name"] == source
