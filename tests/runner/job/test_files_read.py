"""What a result says of the files that its model read."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from fxpart.capture.models.files_read import note_files
from runner.job.files_read import FILES_TAG, changed_file, files_of, files_tags, job_files_read
from tests.runner.command import OWN
from tests.runner.composed import read


def test_files_are_named_as_from_the_folder(tmp_path: Path) -> None:
    config = read(*OWN)
    factory = "files_are_named:build"
    config = replace(config, model=replace(config.model, factory=factory))
    digest = sha256(b"1").hexdigest()
    note_files(factory, {tmp_path / "here" / "a.json": digest, Path("/far/b.json"): digest})
    assert job_files_read(config, tmp_path) == {
        "here/a.json": digest[:16],
        "/far/b.json": digest[:16],
    }
    assert job_files_read(None, tmp_path) == {}


def test_a_file_stands_while_it_says_the_same(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    files = {}
    for path in (first, second):
        path.write_text(path.name)
        files[path.name] = sha256(path.name.encode()).hexdigest()[:16]
    assert changed_file(files, tmp_path) is None
    second.write_text("other")
    assert changed_file(files, tmp_path) == "second"
    second.write_text("second")
    assert changed_file(files, tmp_path) is None
    first.unlink()
    assert changed_file(files, tmp_path) == "first"
    assert changed_file({}, tmp_path) is None


def test_a_tag_is_read_as_it_was_written() -> None:
    files = {"a.json": "0" * 16, "ä.json": "1" * 16}
    assert files_of(files_tags(files)) == files
    assert files_tags({}) == {}
    assert files_of({}) == {}


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_a_tag_that_says_nothing_never_stands(text: str, tmp_path: Path) -> None:
    assert changed_file(files_of({FILES_TAG: text}), tmp_path) is not None


@pytest.mark.parametrize(("count", "stands"), [(0, True), (50, True), (301, True), (2001, False)])
def test_as_many_files_as_tags_can_name_stand(count: int, stands: bool, tmp_path: Path) -> None:
    files = {}
    for number in range(count):
        (tmp_path / f"{number}").write_text(f"{number}")
        files[f"{number}"] = sha256(f"{number}".encode()).hexdigest()[:16]
    assert changed_file(files, tmp_path) is None
    tags = files_tags(files)
    assert all(len(text) < 8000 for text in tags.values())
    assert (files_of(tags) == files) is stands
    assert (changed_file(files_of(tags), tmp_path) is None) is stands


def test_a_path_that_is_longer_than_a_tag_never_stands(tmp_path: Path) -> None:
    files = {f"{number}/{'deep/' * 40}x": "0" * 16 for number in range(40)}
    assert changed_file(files_of(files_tags(files)), tmp_path) is not None
