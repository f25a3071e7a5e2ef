"""Digests of files: of what they say, and of large ones of when somebody wrote to them."""

import os
from hashlib import sha256
from pathlib import Path

import pytest

from fxpart.support.digest import LARGE_BYTES, file_digest, file_stamp


def test_it_is_of_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("one")
    assert file_digest(path) == sha256(b"one").hexdigest()
    path.write_text("two")
    assert file_digest(path) == sha256(b"two").hexdigest()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        file_digest(path)


def test_an_edit_of_the_same_size_at_the_same_time_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("one")
    before, stamp = file_digest(path), path.stat().st_mtime_ns
    path.write_text("two")
    os.utime(path, ns=(stamp, stamp))
    assert file_digest(path) != before


def test_a_large_file_is_known_by_its_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(LARGE_BYTES)  # a hole: no byte of it is written
    at_first = file_digest(path)
    assert at_first != sha256(bytes(LARGE_BYTES)).hexdigest()
    moved = path.rename(tmp_path / "moved")
    assert file_digest(moved) == at_first
    os.utime(moved, ns=(1, 1))
    assert file_digest(moved) != at_first
    with moved.open("r+b") as file:
        file.truncate(LARGE_BYTES - 1)
    assert file_digest(moved) == sha256(bytes(LARGE_BYTES - 1)).hexdigest()


def test_a_stamp_is_another_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("one")
    stamp = file_stamp(path)
    assert file_stamp(path) == stamp
    other = tmp_path / "other"
    other.write_text("one")
    other.rename(path)  # as editors save
    assert file_stamp(path) != stamp
