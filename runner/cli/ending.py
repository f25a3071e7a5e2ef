"""How a command ends: what went wrong is one line on stderr, and a code."""

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

__all__ = ["USER_ERROR", "Parser", "exit_code", "remember", "reported"]


USER_ERROR = 2
"""Exit code when the user can mend it: a wrong override, a model that does not fit."""


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM, which ends a run as Ctrl-C does."""


def reported(work: Callable[[], int]) -> int:
    """Run `work` and return its exit code: `USER_ERROR`, with one line, for a mistake of the user.

    With ``HYDRA_FULL_ERROR=1`` a mistake is a traceback. Interrupts and SIGTERM print one line,
    with the notes of the exception, and a pipe closed by its reader, such as ``head``, prints
    nothing; all three end the command with the exit codes of a shell.
    """
    collect_rarely()
    try:
        try:
            return _reported(work)
        finally:
            sys.stdout.flush()  # Python's own flush, at exit, would complain of a closed pipe
    except BrokenPipeError:
        if not _let_go_of_closed_pipes():
            raise
        return 128 + signal.SIGPIPE


def _reported(work: Callable[[], int]) -> int:
    try:
        Path.cwd()
    except FileNotFoundError:
        sys.stderr.write("error: the folder that this is started in was deleted; go to another\n")
        return USER_ERROR
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        with _sigterm_raises():
            return work()
    except BrokenPipeError:
        raise
    except _TerminatedError as error:
        sys.stderr.write(f"terminated{_noted(error)}\n")
        return 128 + signal.SIGTERM
    except KeyboardInterrupt as error:
        sys.stderr.write(f"interrupted{_noted(error)}\n")
        return 130
    except Exception as error:
        line = None if wants_traceback else explain(error)
        if line is None:
            raise
        sys.stderr.write(f"error: {line}\n")
        return USER_ERROR


def _noted(error: KeyboardInterrupt) -> str:
    """Return the notes of `error`: of a sweep, how far it came and how to resume it."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f": {notes}" if notes else ""


def _let_go_of_closed_pipes() -> bool:
    """Redirect stdout and stderr to nowhere if they have no reader; return whether one had none."""
    closed = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)]
    for stream in closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return bool(closed)


def _has_no_reader(stream: TextIO) -> bool:
    polled = select.poll()
    polled.register(stream, 0)  # a pipe without a reader is reported whatever is asked for
    return bool(polled.poll(0))


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Raise `_TerminatedError` on the first SIGTERM; a second one ends the process."""

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise _TerminatedError

    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Parser(argparse.ArgumentParser):
    """A parser that raises `SpecError` where Python's own prints and exits."""

    def error(self, message: str) -> NoReturn:
        """Raise `SpecError` with `message` and where the help is."""
        raise SpecError(f"{message}; see {self.prog} --help")


_codes: list[int] = []
"""Exit codes of the sweeps that this process led: Hydra returns nothing from a sweep."""


def remember(code: int) -> None:
    """Keep the exit code of a sweep."""
    _codes.append(code)


def exit_code() -> int | None:
    """Return the largest code of this process's sweeps, None if it led none."""
    return max(_codes, default=None)
