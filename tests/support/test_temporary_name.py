"""Files of processes that were killed while writing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from fxpart.support.whole_file import remove_abandoned, temporary_name, whole_file

_KILLED = """
import os, signal
from pathlib import Path
from fxpart.support.whole_file import temporary_name
from fxpart.support.whole_file import whole_file

Path(temporary_name()).mkdir()
Path(f"{temporary_name()}-wal").touch()
with whole_file(Path("below/result.json"), "it", "stop") as temporary:
    temporary.write_text("{")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_partial_file_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parent.parent.parent)
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    (half,) = (tmp_path / "below").iterdir()
    assert len(list(tmp_path.iterdir())) == 3
    remove_abandoned(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["below"]
    assert half.exists()
    remove_abandoned(tmp_path, below=True)
    assert not half.exists()


def test_files_that_may_still_be_written_stay(tmp_path: Path) -> None:
    number = str(os.getpid())
    current = temporary_name()
    assert number in current.split("_")
    elsewhere = f".{'0' * 8}_{current.partition('_')[2]}".replace(number, "999999999")
    # This process may not even query process 1.
    others = [current.replace(f"_{number}_", "_1_"), elsewhere, ".a.tmp", "b.tmp", f"{current}x"]
    for name in [current, *others]:
        (tmp_path / name).touch()
    with whole_file(tmp_path / "file", "it", "stop") as temporary:
        temporary.touch()
        remove_abandoned(tmp_path)
        assert temporary.exists()
    assert {path.name for path in tmp_path.iterdir()} == {current, *others, "file"}


def test_a_missing_folder_is_ignored(tmp_path: Path) -> None:
    remove_abandoned(tmp_path / "none", below=True)
    (tmp_path / "file").touch()
    remove_abandoned(tmp_path / "file")
