"""A lock of a file has one holder at a time."""

import os
from pathlib import Path
from threading import Event, Thread

import pytest

from fxpart.support.file_lock import file_lock


def _begin_to_take(path: Path) -> tuple[Thread, Event]:
    """Start a thread that takes the lock, and return it with what it sets then."""
    taken = Event()

    def take() -> None:
        with file_lock(path):
            taken.set()

    thread = Thread(target=take, daemon=True)
    thread.start()
    return thread, taken


def test_another_waits_until_the_lock_is_released(tmp_path: Path) -> None:
    with file_lock(tmp_path / "lock"):
        thread, taken = _begin_to_take(tmp_path / "lock")
        assert not taken.wait(0.2)
    thread.join(10)
    assert taken.is_set()


def test_a_process_forked_meanwhile_does_not_keep_it(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    with file_lock(tmp_path / "lock"):
        child = os.fork()
        if child == 0:
            os.read(reads, 1)  # keeps the file open until then
            os._exit(0)
    thread, taken = _begin_to_take(tmp_path / "lock")
    thread.join(10)
    os.write(writes, b".")
    os.waitpid(child, 0)
    assert taken.is_set()
    for descriptor in (reads, writes):
        os.close(descriptor)


def test_a_file_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), file_lock(tmp_path / "no folder" / "lock"):
        pass
