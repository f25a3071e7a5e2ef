"""The common setup of all tests."""

import gc
import os
import random
import sys
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from _pytest.assertion import rewrite
from hypothesis import settings

from benchmarks.fork_server import shared_imports
from fxpart.support.garbage import collect_rarely

# Waiting threads of torch yield to the other workers instead of spinning, which takes
# most of the time of small models. OpenMP reads it when torch is loaded, in this process and in
# its child processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
collect_rarely()
# Each run tries the same fifty examples of a property; a test that needs more asks for them.
settings.register_profile(
    "fxpart", max_examples=50, deadline=None, derandomize=True, print_blob=True
)
settings.load_profile("fxpart")


def pytest_configure(config: pytest.Config) -> None:
    """Let workers share the rewriting of asserts, and the imports of the commands they run."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        _rewrite_asserts(config)
        open_until_end = ExitStack()
        open_until_end.enter_context(shared_imports())
        config.add_cleanup(open_until_end.close)


def _rewrite_asserts(config: pytest.Config) -> None:
    """Write what pytest makes of the test files, on all cores; else every worker makes it anew."""
    paths = [Path(argument.partition("::")[0]) for argument in config.args]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    files = sorted({file.resolve() for file in files if file.match("test_*.py")})
    cores = os.cpu_count() or 1
    children = []
    for core in range(cores if not sys.dont_write_bytecode else 0):
        child = os.fork()
        if child == 0:
            # Where pytest has changed, workers do it themselves.
            with suppress(Exception):
                for file in files[core::cores]:
                    _rewrite(config, file)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def _rewrite(config: pytest.Config, file: Path) -> None:
    """Do as `AssertionRewritingHook.exec_module` does, without running the module."""
    folder = rewrite.get_cache_dir(file)
    folder.mkdir(exist_ok=True)
    kept = folder / f"{file.stem}{rewrite.PYC_TAIL}"
    if rewrite._read_pyc(file, kept) is None:
        source, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, kept)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Start every test with the same random seeds."""
    random.seed(0)
    np.random.seed(0)


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection: a tenth of a worker's time."""
    gc.freeze()


def pytest_report_header() -> list[str]:
    """Report the versions under test."""
    return [f"{name}: {version(name)}" for name in ("torch", "mlflow", "hydra-core", "numba")]
