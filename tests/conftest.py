"""The common setup of all tests."""

import gc
import os
import random
from contextlib import ExitStack
from importlib.metadata import version
from multiprocessing import forkserver

import numpy as np
import pytest
from hypothesis import settings

from benchmarks.fork_server import shared_imports
from fxpart.support.call_stack import in_one_piece
from fxpart.support.garbage import collect_rarely

# Workers already use all cores, and small models gain nothing from more threads: one each, and
# where a test asks for more, waiting threads yield instead of spinning. OpenMP reads both when
# torch is loaded, in this process and in its child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
collect_rarely()
settings.register_profile("fxpart", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("fxpart")


def pytest_configure(config: pytest.Config) -> None:
    """Let the commands that workers run share their imports."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        open_until_end = ExitStack()
        open_until_end.enter_context(shared_imports())
        config.add_cleanup(open_until_end.close)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Start every test with the same random seeds."""
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(scope="module")
def new_forkserver() -> None:
    """Have multiprocessing start a new server, which imports what these processes need.

    That of an earlier module has imported something else, and each process would do the rest, which
    took half a minute of CPU. There is no public way to end it.
    """
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Run each test in one piece of stack, since pytest's own frames nearly fill the first.

    Mapping the next ones took half the system time of ``pytest tests/capture``, 4 of 8 s.
    """
    pyfuncitem.obj = in_one_piece(pyfuncitem.obj)


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection: a tenth of a worker's time."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _frozen_leftovers() -> None:
    """Exclude what earlier modules left alive from garbage collection.

    Tests that measure memory collect first, which would traverse all of it. Captures call
    `gc.get_referrers`, which does not see it either, so their tests build models of their own.
    """
    gc.collect()
    gc.freeze()


def pytest_report_header() -> list[str]:
    """Report the versions under test."""
    return [f"{name}: {version(name)}" for name in ("torch", "mlflow", "hydra-core", "numba")]
