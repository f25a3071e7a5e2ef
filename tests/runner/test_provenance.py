import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from runner.provenance import environment_tags


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


def test_versions_and_note(tmp_path: Path) -> None:
    tags = environment_tags(tmp_path, note="**fits**")
    assert tags["torch_version"] == version("torch")
    assert tags["python_version"] == sys.version.split()[0]
    assert tags["mlflow.note.content"] == "**fits**"
    assert all(tags.values())


def test_a_clean_repository(repository: Path) -> None:
    tags = environment_tags(repository)
    assert tags["mlflow.source.git.commit"] == _git(repository, "rev-parse", "HEAD")
    assert tags["mlflow.source.git.branch"] == "trunk"
    assert tags["git_dirty"] == "false"


def test_a_change_makes_it_dirty(repository: Path) -> None:
    (repository / "file").write_text("2")
    assert environment_tags(repository)["git_dirty"] == "true"


def test_a_detached_head_has_no_branch(repository: Path) -> None:
    _git(repository, "checkout", "--detach")
    tags = environment_tags(repository)
    assert "mlflow.source.git.branch" not in tags
    assert len(tags["mlflow.source.git.commit"]) == 40


def test_no_repository_and_no_folder_are_no_error(tmp_path: Path) -> None:
    assert "git_dirty" not in environment_tags(tmp_path)
    assert "git_dirty" not in environment_tags(tmp_path / "missing")


@pytest.mark.parametrize(
    ("program", "source"),
    [
        ("/x/runner/__main__.py", "python -m runner"),
        ("/x/bin/fxpart", "fxpart"),
        ("", "python"),
    ],
)
def test_source_is_the_command(
    program: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    assert environment_tags(tmp_path)["mlflow.source.name"] == source
