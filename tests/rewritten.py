"""The files of tests as pytest runs them: with asserts rewritten to say what they compared.

Pytest rewrites a file when it imports it. Workers of a clean checkout import the same files at the
same time, and each would rewrite all of them.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["files_to_rewrite", "keep_rewritten"]


def files_to_rewrite() -> list[Path]:
    """Return the files whose asserts pytest rewrites."""
    tests = Path(__file__).resolve().parent
    return sorted([*tests.rglob("test_*.py"), *tests.rglob("conftest.py")])


def keep_rewritten(paths: Sequence[Path]) -> None:
    """Write what pytest makes of each file to where it looks for it.

    Pytest has no public function for this. Where there is none at all, or another pytest, each
    worker rewrites what it imports.
    """
    with suppress(ImportError, AttributeError, TypeError):
        from _pytest.assertion import rewrite

        for path in paths:
            folder = rewrite.get_cache_dir(path)
            kept = folder / (path.stem + rewrite.PYC_TAIL)
            if rewrite._read_pyc(path, kept) is None:
                source_hash, code = rewrite._rewrite_test(path, None)  # type: ignore[arg-type]
                folder.mkdir(exist_ok=True)
                unfinished = Path(f"{kept}.{os.getpid()}")
                with unfinished.open("wb") as file:
                    rewrite._write_pyc_fp(file, source_hash, code)
                unfinished.replace(kept)
