"""Compiled loops are made anew when what they call has changed, in whatever file it stands."""

import shutil
import subprocess
import sys
from pathlib import Path

import fxpart.support.compiled
from fxpart.support.compiled import compiled

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


def _run(folder: Path, package: str) -> str:
    code = (
        f"from {package}.outer import outer; from {package}.support.compiled import is_kept;"
        "print(is_kept(outer), outer(1), sum(outer.stats.cache_hits.values()))"
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_change_in_another_file_counts(tmp_path: Path) -> None:
    package = "loops"
    home = tmp_path / package
    (home / "support").mkdir(parents=True)
    for room in (home, home / "support"):
        (room / "__init__.py").write_text("")
    shutil.copy(fxpart.support.compiled.__file__, home / "support" / "compiled.py")
    (home / "outer.py").write_text(_OUTER.format(package=package))
    (home / "inner.py").write_text(_INNER.format(package=package, n=1))
    assert _run(tmp_path, package) == "False 20 0"
    # Nothing has changed: the code on disk serves.
    assert _run(tmp_path, package) == "True 20 1"
    (home / "inner.py").write_text(_INNER.format(package=package, n=2))
    assert _run(tmp_path, package) == "True 30 0"


def test_numba_still_has_what_this_relies_on() -> None:
    @compiled
    def nothing(x: int) -> int:
        return x

    stamp = nothing._cache._cache_file._source_stamp  # type: ignore[attr-defined]
    assert len(stamp) == 2
    assert len(stamp[1]) == 64
