"""Streams that are closed, by a reader such as `head` or from the start: no message, no error."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runner.command import COMMAND, OWN, SMALL, run

CLOSED = 128 + signal.SIGPIPE


def run_without_reader(folder: Path, *arguments: str, closed: str = "stdout") -> tuple[int, str]:
    """Run the command with a pipe that nobody reads; return its exit code and the other stream."""
    reading, writing = os.pipe()
    os.close(reading)
    with subprocess.Popen(
        [sys.executable, *COMMAND, *arguments],
        cwd=folder,
        text=True,
        stdout=writing if closed == "stdout" else subprocess.PIPE,
        stderr=writing if closed == "stderr" else subprocess.PIPE,
    ) as running:
        os.close(writing)
        out, err = running.communicate(timeout=120)
    return running.returncode, out or err or ""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--cfg", "all"], ["--cfg", "job", "-p", "model"]]
)
def test_what_hydra_prints_ends_quietly(folder: Path, arguments: list[str]) -> None:
    assert run_without_reader(folder, *arguments) == (CLOSED, "")


def test_a_python_without_the_packages_gets_one_line(folder: Path) -> None:
    (folder / "none").mkdir()
    (folder / "none" / "hydra.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'hydra'\", name='hydra')"
    )
    path = os.pathsep.join([str(folder / "none"), str(Path(__file__).resolve().parents[3])])
    done = subprocess.run(
        [sys.executable, *COMMAND, "mode=single"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {sys.executable} has no hydra; use the Python that fxpart is installed for, such"
        " as .venv/bin/python after `make demo`\n"
    )


def test_a_deleted_folder_gets_one_line(folder: Path) -> None:
    gone = folder / "gone"
    gone.mkdir()
    code = (
        "import os, runpy; os.rmdir(os.getcwd());"
        " runpy.run_module('runner', run_name='__main__', alter_sys=True)"
    )
    done = run(gone, "mode=single", program=("-c", code))
    assert (done.code, done.out) == (2, "")
    assert done.error == "the folder that this is started in was deleted; go to another"


def in_shell(folder: Path, line: str) -> "subprocess.CompletedProcess[str]":
    """Run Python with a line of arguments and redirections, which can import fxpart anywhere."""
    path = str(Path(__file__).resolve().parents[3])
    return subprocess.run(
        ["bash", "-c", f"{sys.executable} {line}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("program", ["runner", "runner.report", "runner.send", "runner.calibrate"])
def test_help_through_head(folder: Path, program: str) -> None:
    """With the real `head`, which closes the pipe at an unknown moment."""
    done = in_shell(folder, f"-m {program} --help | head -1; echo ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1] in ("0", str(CLOSED))


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(folder: Path, closed: str) -> None:
    mistake = "" if "2>&-" in closed else "error: mode=singel does not exist; nearest: single\n"
    for arguments, code, message in (("--help", 0, ""), ("mode=singel", 2, mistake)):
        done = in_shell(folder, f"-m runner {arguments} {closed}")
        assert (done.returncode, done.stderr) == (code, message)


FULL = (
    "error: stdout: No space left on device; the rest of the output is lost: free some space, or"
    " redirect it elsewhere\n"
)


@pytest.mark.parametrize(
    "program", ["runner --help", "runner --version", "runner.recommend -h", "runner.report --help"]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_text_for_a_full_disk_is_lost_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, program: str, unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    done = in_shell(folder, f"-m {program} >/dev/full")
    assert (done.returncode, done.stderr) == (2, FULL)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("err", ["", "2>&1"])
def test_a_run_whose_log_is_on_a_full_disk_is_completed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, err: str, unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    settings = " ".join([*OWN, SMALL, "mode=size_based", "tracking=none"])
    done = in_shell(folder, f"-m runner {settings} hydra.run.dir=outputs/one >/dev/full {err}")
    assert done.returncode == 2
    assert done.stderr.count("error: ") == done.stderr.count(FULL) == (0 if err else 1)
    result = json.loads((folder / "outputs" / "one" / "result.json").read_text())
    assert result["status"] == "finished"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_mistake_that_nothing_can_tell_has_its_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch, unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    assert in_shell(folder, "-m runner mode=singel >/dev/full 2>&1").returncode == 2


def test_a_bug_is_shown_although_stdout_is_on_a_full_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "")  # the text is refused at the end
    code = "from runner.cli.ending import reported; reported(lambda: print('text') or 1 / 0)"
    done = in_shell(folder, f'-c "{code}" >/dev/full')
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


PRINTS = """
import subprocess, sys
from runner.cli.ending import reported

def work():
    with open("own", "w") as own:
        prints = ["sh", "-c", "echo out; echo err >&2"]
        subprocess.run(prints, check=True, pass_fds=[own.fileno()])
    return 0

sys.exit(reported(work))
"""


def test_files_do_not_take_the_place_of_closed_streams(folder: Path) -> None:
    (folder / "prints.py").write_text(PRINTS)
    assert in_shell(folder, "prints.py <&- >&- 2>&-").returncode == 0
    assert (folder / "own").read_text() == ""


def test_a_run_is_completed_without_a_reader(folder: Path) -> None:
    arguments = [*OWN, SMALL, "mode=size_based", "tracking=none", "hydra.run.dir=outputs/one"]
    code, err = run_without_reader(folder, *arguments)
    assert code == 0
    assert "Traceback" not in err
    assert "error" not in err
    result = json.loads((folder / "outputs" / "one" / "result.json").read_text())
    assert result["status"] == "finished"


def test_a_mistake_without_a_reader_ends_quietly(folder: Path) -> None:
    assert run_without_reader(folder, "mode=nosuch", closed="stderr") == (CLOSED, "")
    assert run_without_reader(folder, "mode=nosuch")[0] == 2
