"""The end of a command: errors become one line on stderr and an exit code."""

import argparse
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TextIO

from fxpart.errors import SpecError
from fxpart.support.garbage import collect_rarely
from runner.cli.mistakes import explain
from runner.output import stdout

__all__ = ["USER_ERROR", "Parser", "exit_code", "remember", "reported"]


USER_ERROR = 2
"""Exit code of user errors: a wrong override, a model that does not fit."""


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM, which ends a run like Ctrl-C."""


def reported(work: Callable[[], int]) -> int:
    """Run `work` and return its exit code, which is `USER_ERROR`, with one line, for a user error.

    With ``HYDRA_FULL_ERROR=1`` user errors have a traceback. Interrupts and SIGTERM print one line
    with the notes of the exception. A pipe closed by its reader, such as ``head``, prints nothing.
    All three return the exit codes of a shell. Text that stdout refuses, as on a full disk, is
    reported in one line and makes success a user error, although the work is completed.
    """
    collect_rarely()
    _open_closed_streams()
    try:
        try:
            code = _reported(work)
        finally:
            stdout.flush()
        return code if stdout.is_complete() else code or USER_ERROR
    except SystemExit as end:  # of argparse and Hydra, after text such as --help
        if end.code or stdout.is_complete():
            raise
        return USER_ERROR
    except BrokenPipeError:
        if not _let_go_of_closed_pipes():
            raise
        return 128 + signal.SIGPIPE


def _open_closed_streams() -> None:
    """Replace streams that were closed by whoever started this, as by ``>&-``; Python has None.

    Files opened later would take their descriptors, and what libraries and child processes print
    would be written to those.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, hence its own
            os.set_inheritable(descriptor, True)
            stream = os.fdopen(descriptor, mode, encoding="utf-8", errors="backslashreplace")
            setattr(sys, name, stream)


def _reported(work: Callable[[], int]) -> int:
    try:
        Path.cwd()
    except FileNotFoundError:
        _say("error: the folder that this is started in was deleted; go to another\n")
        return USER_ERROR
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        with _sigterm_raises():
            return work()
    except BrokenPipeError:
        raise
    except _TerminatedError as error:
        _say(f"terminated{_noted(error)}\n")
        return 128 + signal.SIGTERM
    except KeyboardInterrupt as error:
        _say(f"interrupted{_noted(error)}\n")
        return 130
    except Exception as error:
        line = None if wants_traceback else explain(error)
        if line is None:
            raise
        _say(f"error: {line}\n")
        return USER_ERROR


def _say(line: str) -> None:
    try:
        sys.stderr.write(line)
    except BrokenPipeError:
        raise
    except OSError:  # stderr is on a full disk, too: the exit code must do
        pass


def _noted(error: KeyboardInterrupt) -> str:
    """Return the notes of `error`, such as a sweep's progress and how to resume it."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f": {notes}" if notes else ""


def _let_go_of_closed_pipes() -> bool:
    """Redirect those of stdout and stderr without a reader to /dev/null; return whether any was."""
    closed = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)]
    for stream in closed:
        stdout.discard(stream)
    return bool(closed)


def _has_no_reader(stream: TextIO) -> bool:
    polled = select.poll()
    polled.register(stream, 0)  # poll reports a pipe without a reader in any case
    return bool(polled.poll(0))


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Raise `_TerminatedError` on the first SIGTERM; a second one ends the process."""

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise _TerminatedError

    if (
        threading.current_thread() is not threading.main_thread()
    ):  # only the main thread receives signals
        yield
        return
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `SpecError` instead of printing and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise `SpecError` with `message` and a pointer to the help."""
        raise SpecError(f"{message}; see {self.prog} --help")

    def print_help(self, file: object = None) -> None:
        """Print the help to stdout, which may be on a full disk."""
        stdout.write(self.format_help())


_codes: list[int] = []
"""Exit codes of this process's sweeps, which Hydra does not return."""


def remember(code: int) -> None:
    """Record the exit code of a sweep."""
    _codes.append(code)


def exit_code() -> int | None:
    """Return the largest exit code of this process's sweeps; None if there were none."""
    return max(_codes, default=None)
