"""The wheel contains everything that a run reads: installed, it runs from its own folder."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)], check=True)
    (path,) = folder.glob("fxpart-*.whl")
    return path


@pytest.fixture(scope="module")
def bin_dir(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an environment with this one's packages, but not the checkout."""
    home = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    python = str(home / "bin" / "python")
    subprocess.run([*pip, "--python", python, "install", "-q", "--no-deps", str(wheel)], check=True)
    # Without anything that a *.pth file there adds, such as the checkout.
    (site / "packages.pth").write_text(sysconfig.get_paths()["purelib"])
    return home / "bin"


def _run(folder: Path, *command: str | Path) -> str:
    without = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**without, "NUMBA_DISABLE_JIT": "1"},  # nothing is compiled there yet
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_every_file_of_both_packages(wheel: Path) -> None:
    in_wheel = set(ZipFile(wheel).namelist())
    listed = subprocess.run(
        ["git", "ls-files", "fxpart", "runner", "conf"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert {"fxpart/py.typed", "fxpart/__init__.pyi", "runner/py.typed"} <= set(listed)
    in_checkout = {
        name.replace("runner/plugins/", "").replace("conf/", "runner/conf/", name[:5] == "conf/")
        for name in listed
    }
    assert in_checkout <= in_wheel


def test_the_installed_wheel_runs_from_another_folder(bin_dir: Path, tmp_path: Path) -> None:
    code = "import fxpart, runner; print(fxpart.__file__, runner.__file__)"
    homes = _run(tmp_path, bin_dir / "python", "-c", code).split()
    assert [home for home in homes if not home.startswith(str(bin_dir.parent))] == []
    assert "4x16gb" in _run(tmp_path, bin_dir / "fxpart", "--help")
    # A sweep needs the sweeper and launcher that Hydra finds as plugins.
    swept = ["-m", "model=gpt2", "model.config.n_layer=1", "devices=2x16gb"]
    swept += ["mode=single,size_based"]
    shown = _run(tmp_path, bin_dir / "fxpart", *swept)
    assert "size_based" in shown
    assert (tmp_path / "outputs" / "mlflow.db").is_file()
    assert len(list(tmp_path.glob("outputs/sweeps/**/result.json"))) == 2
