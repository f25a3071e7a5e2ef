"""A report as a file: with links to the jobs beside them, without where it is kept elsewhere."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fxpart.errors import CacheError
from runner.output.text_files import write_text
from runner.report.html import report_html
from runner.report.rows import SweepData

__all__ = ["kept_copy", "write_report"]


def write_report(path: Path, data: SweepData, *, first: str = "") -> None:
    """Write the report to `path`, with links to the files of its jobs that are there.

    `first` is a section to begin with. Raises `CacheError` when the place cannot be written.
    """
    write_text(path, report_html(data, path.parent, first=first))


@contextmanager
def kept_copy(path: Path, data: SweepData, *, first: str = "") -> Iterator[Path]:
    """Give a file of the name of `path` with the report as a store is to keep it.

    It has no links, which would lead nowhere from there. It is gone after the block.

    Raises `CacheError` when there is no place for it.
    """
    try:
        made = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    except OSError as error:
        raise CacheError(f"cannot make a temporary file: {error.strerror}; set TMPDIR") from None
    with made as folder:
        copy = Path(folder, path.name)
        write_text(copy, report_html(data, first=first))
        yield copy
