"""How a command ends: what went wrong is one line on stderr, and a code."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from fxpart.errors import SpecError
from runner.cli.mistakes import explain

__all__ = ["USER_ERROR", "Parser", "exit_code", "remember", "reported"]


_FULL_ERROR = "HYDRA_FULL_ERROR"
USER_ERROR = 2
"""Exit code when the user can mend it: a wrong override, a model that does not fit."""


class _TerminatedError(KeyboardInterrupt):
    """SIGTERM, which ends a run as Ctrl-C does."""


def reported(work: Callable[[], int]) -> int:
    """Run `work` and return its exit code; what a user can mend is one line, and `USER_ERROR`.

    With ``HYDRA_FULL_ERROR=1`` it is a traceback. An interrupt and SIGTERM are said, with what
    was noted to them, and end the command with their own codes.
    """
    wants_traceback = os.environ.get(_FULL_ERROR) == "1"
    try:
        with _sigterm_raises(), _hydra_raises():
            return work()
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
    """Return what was noted on the way out: of a sweep, how far it came and how it goes on."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f": {notes}" if notes else ""


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Let mistakes out of Hydra as exceptions; it would print them in its own words and exit."""
    before = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = before


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Raise `_TerminatedError` on the first SIGTERM inside; a second one ends the process."""

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


# Command lines in which a mistake is one line.


class Parser(argparse.ArgumentParser):
    """Raises `SpecError` for what it cannot read, where Python's own ends the program."""

    def error(self, message: str) -> NoReturn:
        """Raise `SpecError` with `message` and where the help is."""
        raise SpecError(f"{message}; see {self.prog} --help")


# How the sweeps of this process ended: Hydra returns nothing from a sweep.

_codes: list[int] = []


def remember(code: int) -> None:
    """Keep the exit code of a sweep that this process led."""
    _codes.append(code)


def exit_code() -> int | None:
    """Return the largest of them, None if this process led no sweep."""
    return max(_codes, default=None)
