"""Compiled loops are rebuilt when a function they call has changed in any file."""

import runpy
import shutil
from pathlib import Path

import pytest

import fxpart.support.compiled
from benchmarks.fork_server import fork_command
from fxpart.support.compiled import _loops_digest, compiled

_INNER = """from {package}.support.compiled import compiled


@compiled
def inner(x):
    return x + {n}
"""
_OUTER = """from {package}.support.compiled import compiled
from {package}.inner import inner


@compiled
def outer(x):
    return 10 * inner(x)
"""


def _printed(folder: Path, code: str) -> str:
    """Return what a process prints that has Numba imported and no loop of `folder`."""
    status, out, err = fork_command(folder, ("-c", code), [], 120)
    assert status == 0, err
    return out.strip()


def _run(folder: Path, package: str) -> str:
    code = (
        f"from {package}.outer import outer; from {package}.support.compiled import is_kept;"
        "print(is_kept(outer), outer(1), sum(outer.stats.cache_hits.values()))"
    )
    return _printed(folder, code)


def _package(home: Path) -> Path:
    """Create a package with only a copy of the compiler in it."""
    (home / "support").mkdir(parents=True)
    for folder in (home, home / "support"):
        (folder / "__init__.py").write_text("")
    shutil.copy(fxpart.support.compiled.__file__, home / "support" / "compiled.py")
    return home


@pytest.fixture(scope="module")
def _kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    home = _package(folder / "loops")
    (home / "outer.py").write_text(_OUTER.format(package="loops"))
    (home / "inner.py").write_text(_INNER.format(package="loops", n=1))
    assert _run(folder, "loops") == "False 20 0"
    return home


@pytest.fixture
def home(_kept: Path, tmp_path: Path) -> Path:
    """A package whose loops are compiled and kept."""
    return Path(shutil.copytree(_kept, tmp_path / "loops"))


def _change(inner: Path) -> None:
    """Make `inner` add 2, in a longer file: one of equal length is not read anew in a second."""
    inner.write_text(_INNER.format(package="loops", n=2) + "# Changed.\n")


def test_a_change_in_another_file_triggers_a_rebuild(home: Path, tmp_path: Path) -> None:
    # Only comments and lines have changed: the cached code is used.
    outer = home / "outer.py"
    outer.write_text(f"# A comment.\n{outer.read_text()}")
    assert _run(tmp_path, "loops") == "True 20 1"
    _change(home / "inner.py")
    assert _run(tmp_path, "loops") == "True 30 0"
    # The code of the earlier source is gone.
    assert len(list(home.rglob("outer.outer-*.nbc"))) == 1


def test_a_process_that_dies_while_it_saves_leaves_no_code_of_an_earlier_source(
    home: Path, tmp_path: Path
) -> None:
    _change(home / "inner.py")
    dies = (
        "import os; from loops.outer import outer;"
        "outer._cache._cache_file._save_data = lambda *_: os._exit(3); outer(1)"
    )
    assert fork_command(tmp_path, ("-c", dies), [], 120)[0] == 3
    assert _run(tmp_path, "loops") == "True 30 0"
    assert _run(tmp_path, "loops") == "True 30 1"


@pytest.mark.parametrize("pattern", ["outer.*.nbc", "outer.*.nbi"])
def test_damaged_code_is_compiled_anew(home: Path, tmp_path: Path, pattern: str) -> None:
    (cached,) = home.rglob(pattern)
    cached.write_bytes(cached.read_bytes()[:-20])
    assert _run(tmp_path, "loops") == "True 20 0"
    assert _run(tmp_path, "loops") == "True 20 1"


_AT_ONCE = """
import os, time
from pathlib import Path
from loops.inner import inner

cache_file = inner._cache._cache_file
save, save_index = cache_file.save, cache_file._save_index

def wait_for(name):
    for _ in range(6000):  # the other process may have failed
        if Path(name).exists():
            return
        time.sleep(0.01)  # polling: it sends no signal
    os._exit(1)

def save_second(*args):
    Path("saving").touch()
    save(*args)

def save_first(overloads):
    Path("reading").touch()
    wait_for("saving")
    time.sleep(0.5)  # in which the other process would save, without a lock
    save_index(overloads)

if child := os.fork():
    wait_for("reading")
    cache_file.save = save_second
    inner(0.5)
    assert os.waitpid(child, 0)[1] == 0
else:
    cache_file._save_index = save_first
    inner(1)
    os._exit(0)
"""


def test_processes_that_save_at_once_lose_nothing(tmp_path: Path) -> None:
    home = _package(tmp_path / "loops")
    (home / "inner.py").write_text(_INNER.format(package="loops", n=1))
    _printed(tmp_path, _AT_ONCE)
    reads = (
        "from loops.inner import inner;"
        "print(inner(1), inner(0.5), sum(inner.stats.cache_hits.values()))"
    )
    assert _printed(tmp_path, reads) == "2 1.5 2"


_LOOP = """
from typing import NamedTuple
from fxpart.support.compiled import compiled

STEP = {step}
UNUSED = {unused}

class Table(NamedTuple):
    {fields}

class Tables(NamedTuple):
    inner: Table

@compiled
def loop(tables: Tables) -> int:
    {docstring}
    return called(tables) + STEP

@compiled
def called(tables: Tables) -> int:
    return {result}
"""
_PARTS = {
    "step": 1,
    "unused": "print",
    "fields": "x: int; y: int",
    "docstring": '"""Return a number."""',
    "result": "tables.inner.x",
}


def _digest(folder: Path, **changed: object) -> str:
    path = folder / "loop.py"
    path.write_text(_LOOP.format(**{**_PARTS, **changed}))
    namespace = runpy.run_path(str(path))
    return _loops_digest(namespace["loop"])


def test_the_digest_covers_what_decides_the_code_and_nothing_else(tmp_path: Path) -> None:
    digest = _digest(tmp_path)
    assert _digest(tmp_path, unused="len", docstring='"""Return the sum\n    of two."""') == digest
    changed = [
        _digest(tmp_path, step=2),
        _digest(tmp_path, step=1.0),
        _digest(tmp_path, fields="y: int; x: int"),
        _digest(tmp_path, result="tables.inner.y"),
    ]
    assert len({digest, *changed}) == 5
    with pytest.raises(TypeError, match=r"loop uses STEP, which is neither a loop, a table nor"):
        _digest(tmp_path, step="print")


def test_numba_still_has_the_internals_relied_on() -> None:
    @compiled
    def nothing(x: int) -> int:
        return x

    assert nothing(3) == 3
    cache_file = nothing._cache._cache_file  # type: ignore[attr-defined]
    _, digest = cache_file._version
    assert cache_file._data_name(3).endswith(f".{digest[:12]}.3.nbc")
    assert cache_file.save.__name__ == "save_locked"


_TABLE = """from typing import NamedTuple


class Table(NamedTuple):
    x: int
"""
_READER = """from {package}.support.compiled import compiled
from {package}.{name} import Table


@compiled
def reader(table: Table):
    return table.x
"""


def test_a_table_moved_to_another_file_is_no_error(tmp_path: Path) -> None:
    package = "loops"
    home = _package(tmp_path / package)
    for name in ("first", "second"):
        (home / f"{name}.py").write_text(_TABLE)
        (home / "reader.py").write_text(_READER.format(package=package, name=name))
        code = f"from {package}.reader import Table, reader; print(reader(Table(20)))"
        assert _printed(tmp_path, code) == "20"
        (home / f"{name}.py").unlink()
