"""Only regular files are opened."""

import os
from pathlib import Path

import pytest

from fxpart.core.saved_assignment import assignment_path, read_assignment
from fxpart.cost.calibration import read_calibration
from fxpart.errors import SpecError
from fxpart.support.digest import file_digest
from fxpart.support.regular_file import read_regular


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    assert read_regular(tmp_path / "a") == b"content"


def test_an_endless_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (Path("/dev/zero"), tmp_path / "fifo"):
        with pytest.raises(OSError, match="a device, a pipe or a socket"):
            read_regular(path)
        with pytest.raises(OSError, match="a device, a pipe or a socket"):
            file_digest(path)
        for read in (read_calibration, read_assignment):
            with pytest.raises(SpecError, match=f"cannot read {path}: it is a device, a pipe"):
                read(path)


@pytest.mark.parametrize("name", ["a\0b", "a" * 5000, "."])
def test_an_impossible_name_is_a_system_error(name: str) -> None:
    with pytest.raises(OSError):  # noqa: PT011 - the system's words
        read_regular(Path(name))
    with pytest.raises(SpecError):
        read_assignment(assignment_path(name) if name != "." else Path(name))
