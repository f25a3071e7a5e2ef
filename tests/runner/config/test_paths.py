"""Where the configuration is found."""

import runpy
import shutil
from pathlib import Path

import pytest

from runner.config import paths


def test_in_a_checkout_it_is_beside_the_package() -> None:
    root = Path(paths.__file__).resolve().parents[2]
    assert paths.conf_dir() == root / "conf"


def test_when_installed_it_is_inside_the_package(tmp_path: Path) -> None:
    package = tmp_path / "runner"
    for folder in (package / "conf", tmp_path / "conf"):
        folder.mkdir(parents=True)
        (folder / "config.yaml").touch()
    (package / "config").mkdir()
    shutil.copy(paths.__file__, package / "config")
    assert runpy.run_path(str(package / "config" / "paths.py"))["conf_dir"]() == package / "conf"


def test_an_installation_without_it_is_broken(tmp_path: Path) -> None:
    (tmp_path / "runner" / "config").mkdir(parents=True)
    copy = str(shutil.copy(paths.__file__, tmp_path / "runner" / "config"))
    with pytest.raises(FileNotFoundError, match="reinstall"):
        runpy.run_path(copy)["conf_dir"]()


def test_the_shipped_folder_is_not_taken_for_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(paths.conf_dir().parent)
    assert paths.user_conf_dir() is None


def test_the_users_folder_is_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert paths.user_conf_dir() is None
    (tmp_path / "conf").mkdir()
    assert paths.user_conf_dir() == tmp_path / "conf"


def test_a_file_with_the_name_of_a_shipped_choice_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert paths.unread_choices() == []
    for name in ("config", "mine", "mode/kl_based", "mode/mine", "hydra/launcher/ray"):
        path = tmp_path / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert paths.unread_choices() == [
        "conf/config.yaml",
        "conf/hydra/launcher/ray.yaml",
        "conf/mode/kl_based.yaml",
    ]
