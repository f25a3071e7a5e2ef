"""Turn what Hydra raises, warns of or prints while composing into Hydra's own exceptions."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from contextvars import ContextVar
from io import StringIO

from fxpart.errors import FxpartError, SpecError

__all__ = ["composing", "show_package", "work_begins"]

_FULL_ERROR = "HYDRA_FULL_ERROR"
_COMPOSING: ContextVar[bool] = ContextVar("composing", default=False)


@contextmanager
def composing() -> Iterator[None]:
    """Make Hydra raise only its own exceptions for user errors in the block.

    For some errors it raises a bare ValueError, KeyError or AssertionError, and for a missing
    folder it only warns. After `work_begins` exceptions are left alone.

    Raises:
        ConfigCompositionException: with the message of the original exception.

    """
    from hydra.errors import ConfigCompositionException, HydraException
    from omegaconf.errors import OmegaConfBaseException

    token = _COMPOSING.set(True)
    try:
        with _hydra_raises(), warnings.catch_warnings():
            warnings.filterwarnings("error", "provider=.* is not available", UserWarning)
            # Hydra warns about -m if a file has hydra.mode: RUN, although -m takes precedence.
            warnings.filterwarnings("ignore", r"\s*Running Hydra app with --multirun", UserWarning)
            yield
    except (FxpartError, HydraException, OmegaConfBaseException, BrokenPipeError):
        raise
    except Exception as error:
        if not _COMPOSING.get():
            raise
        raise ConfigCompositionException(str(error)) from error
    finally:
        _COMPOSING.reset(token)


def work_begins() -> None:
    """Leave all exceptions from here on alone: they come from the runner, not from Hydra."""
    _COMPOSING.set(False)


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Make ``hydra.main`` raise exceptions instead of printing them and exiting."""
    previous = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = previous


def show_package(work: Callable[[], None], package: str) -> None:
    """Call `work`, which shows one package of the configuration.

    Raises:
        SpecError: if the package does not exist or is null, where Hydra would print and exit.

    """
    from runner.config.wrong_values import unknown_key

    printed = StringIO()
    try:
        with redirect_stderr(printed):
            work()
    except SystemExit:
        message = unknown_key(package) or f"{package} is null, there is nothing to show"
        raise SpecError(f"--package {message}") from None
    sys.stderr.write(printed.getvalue())
