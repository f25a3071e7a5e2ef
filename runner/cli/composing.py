"""Hydra's composition: what it raises, warns of or prints, turned into Hydra's own exceptions."""

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
    """Let Hydra raise, in the block, nothing but its own exceptions for the mistakes of a user.

    For some it raises a bare ValueError, KeyError or AssertionError, and for a missing folder it
    only warns. After `work_begins` all exceptions are left as they are.

    Raises:
        ConfigCompositionException: with the message of the exception that it comes from.

    """
    from hydra.errors import ConfigCompositionException, HydraException
    from omegaconf.errors import OmegaConfBaseException

    before = _COMPOSING.set(True)
    try:
        with _hydra_raises(), warnings.catch_warnings():
            warnings.filterwarnings("error", "provider=.* is not available", UserWarning)
            # Of -m where a file says hydra.mode: RUN, which is what was asked for.
            warnings.filterwarnings("ignore", r"\s*Running Hydra app with --multirun", UserWarning)
            yield
    except (FxpartError, HydraException, OmegaConfBaseException, BrokenPipeError):
        raise
    except Exception as error:
        if not _COMPOSING.get():
            raise
        raise ConfigCompositionException(str(error)) from error
    finally:
        _COMPOSING.reset(before)


def work_begins() -> None:
    """Leave the exceptions from here on as they are: they are not Hydra's but the runner's."""
    _COMPOSING.set(False)


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Let exceptions out of ``hydra.main``, which would print them and exit."""
    before = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = before


def show_package(work: Callable[[], None], package: str) -> None:
    """Do `work`, which shows one package of the configuration.

    Raises:
        SpecError: if there is no such package, or nothing in it; Hydra would print it and exit.

    """
    from runner.config.wrong_values import unknown_key

    printed = StringIO()
    try:
        with redirect_stderr(printed):
            work()
    except SystemExit:
        near = unknown_key(package) or f"{package} is null, there is nothing to show"
        raise SpecError(f"--package {near}") from None
    sys.stderr.write(printed.getvalue())
