"""The data sent to a worker, and the report of a job's end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.sweep.launchers.tickets import (
    LostJobError,
    Ticket,
    Work,
    failed,
    python_path,
    run_ticket,
    why,
)


class _CannotTravelError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first}\n{second}")


def test_a_failure_is_kept_in_words() -> None:
    end = failed(Ticket(3, ("mode=single",)), _CannotTravelError("a", "b"))
    assert type(end._return_value) is LostJobError
    assert why([end]) == "_CannotTravelError: a b"
    assert end.overrides == ["mode=single"]


def test_the_reason_is_the_first_failure() -> None:
    first, second = (failed(Ticket(0, ()), LostJobError(word)) for word in ("one", "two"))
    assert why([first, second]) == "one"
    assert why([]) is None


def test_a_folder_missing_on_a_machine(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    end = run_ticket(Work("digest", b"", str(gone), "host", 1), Ticket(0, ()))
    assert why([end]) == (
        f"{gone} does not exist on the machine of a job (No such file or directory); start the "
        "sweep in a folder that all machines share"
    )


def test_another_process_finds_the_imports_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("answer = 42")
    monkeypatch.syspath_prepend(str(tmp_path))
    program = "import mine, runner.sweep.launchers.tickets; print(mine.answer)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": python_path()},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "42\n", done.stderr
    assert sys.prefix not in python_path().split(os.pathsep)
