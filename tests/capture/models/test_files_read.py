"""Which files of the user's own a factory reads: heard of while it reads them."""

import importlib
import json
import linecache
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from threading import Thread

import pytest

from fxpart.capture.captured import captured_graph, captured_symbolic
from fxpart.capture.models import files_read as module_under_test
from fxpart.capture.models.files_read import CHANGED, files_read_by, note_files, noted_files
from fxpart.capture.models.spec import ModelSpec
from fxpart.errors import CaptureError
from fxpart.support.digest import file_digest

NAME = "mine:build"
READS = """
import json
from pathlib import Path
import torch
from torch import nn

def build(batch_size, dtype, file="width.json"):
    width = json.loads(Path(file).read_text())
    return nn.Linear(width, width, dtype=dtype), (torch.zeros(batch_size, width, dtype=dtype),)
"""


@pytest.fixture(autouse=True)
def _nothing_read_before() -> Iterator[None]:
    module_under_test._read.clear()
    yield
    module_under_test._read.clear()


def noted(read: Callable[[], object]) -> dict[Path, str]:
    with noted_files(NAME, ()):
        read()
    return dict(files_read_by(NAME))


def test_one_inside_another_ends_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "read.txt"
    path.write_text("read")
    with noted_files(NAME, ()):
        with noted_files("mine:inner", ()):
            pass
        path.read_text()
    assert set(files_read_by(NAME)) == {path}
    assert not files_read_by("mine:inner")
    assert not module_under_test._watches


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def test_what_is_opened_to_be_read_is_noted_with_what_it_said(tmp_path: Path) -> None:
    table, lines = tmp_path / "table.json", tmp_path / "lines.txt"
    table.write_text("[1]")
    lines.write_text("one")

    def read() -> None:
        json.loads(table.read_text())
        with os.fdopen(os.open(lines, os.O_RDONLY)) as file:
            file.read()

    assert noted(read) == {table: digest("[1]"), lines: digest("one")}
    (tmp_path / "later.txt").write_text("")
    (tmp_path / "later.txt").read_text()
    assert len(files_read_by(NAME)) == 2
    assert files_read_by("another:build") == files_read_by(None) == {}


def test_a_link_counts_as_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("v1", "v2"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to("v1")
    monkeypatch.chdir(tmp_path)
    assert noted(Path("link").read_text) == {tmp_path / "link": digest("v1")}
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("v2")
    assert file_digest(tmp_path / "link") == digest("v2")


def test_what_is_not_the_users_is_not(tmp_path: Path) -> None:
    def read() -> None:
        (tmp_path / "own").write_text("x")
        Path("/proc/self/status").read_text()
        Path(pytest.__file__).read_text()
        Path(module_under_test.__file__).read_text()
        with pytest.raises(FileNotFoundError):
            (tmp_path / "nowhere").read_text()
        (tmp_path / "passing").write_text("x")
        (tmp_path / "passing").read_text()
        (tmp_path / "passing").unlink()

    assert noted(read) == {}


def test_what_the_block_wrote_and_read_counts_as_it_is_left(tmp_path: Path) -> None:
    """A default that is made where there is none is the user's to edit afterwards."""
    default, memo, log = tmp_path / "default", tmp_path / "memo", tmp_path / "log"
    memo.write_text("old")

    def read() -> None:
        default.write_text("6")
        default.read_text()
        with memo.open("r+") as file:
            file.write("mem")
        other = tmp_path / "memo.new"
        other.write_text("memo")
        other.replace(memo)
        with log.open("a") as file:
            file.write("made")

    assert noted(read) == {default: digest("6"), memo: digest("memo")}


def test_a_thread_of_the_factory_reads_for_it(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text("x")
    assert noted(lambda: _elsewhere(path.read_text)) == {path: digest("x")}


def test_a_block_in_a_block_is_noted_by_both(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    with noted_files("outer:f", ()), noted_files("inner:f", ()):
        path.read_text()
    assert files_read_by("outer:f") == files_read_by("inner:f") == {path: digest("x")}


def test_factories_of_one_module_share_what_it_read(tmp_path: Path) -> None:
    """A module runs once: whichever factory is first reads its files."""
    path, module, other = tmp_path / "settings", tmp_path / "m.py", tmp_path / "n.py"
    path.write_text("x")
    with noted_files("m:small", [module]):
        path.read_text()
    with noted_files("m:large", [module, other]), noted_files("n:alone", [other]):
        pass
    assert files_read_by("m:large") == {path: digest("x")}
    assert files_read_by("n:alone") == {}


def _elsewhere(work: Callable[[], object]) -> None:
    thread = Thread(target=work)
    thread.start()
    thread.join()


def test_source_counts_when_it_is_run_and_not_when_it_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "by_name.py").write_text("A = 1\n")
    (tmp_path / "quoted.py").write_text("B = 1\n")
    known = tmp_path / "known_before.py"
    known.write_text("C = 1\n")

    def run() -> None:
        importlib.import_module("by_" + "name")
        importlib.import_module("known_before")
        linecache.getlines(str(tmp_path / "quoted.py"))

    for _ in range(2):  # the second time from the compiled file
        module_under_test._read.clear()
        for name in ("by_name", "known_before"):
            sys.modules.pop(name, None)
        with noted_files(NAME, [known]):
            run()
        assert list(files_read_by(NAME)) == [tmp_path / "by_name.py"]


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text("[1]")

    def read() -> None:
        table.read_text()
        subprocess.run(["bash", "-c", f"echo '[22]' > {table}"], check=True)

    with pytest.raises(CaptureError, match=r"table\.json changed while a model was made of it"):
        noted(read)
    # What was read cannot be told: at least it is known to depend on the file.
    assert list(files_read_by(NAME)) == [table]


def test_what_fails_has_read_too(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text("[")
    with pytest.raises(json.JSONDecodeError):
        noted(lambda: json.loads((tmp_path / "table.json").read_text()))
    assert list(files_read_by(NAME)) == [tmp_path / "table.json"]


def test_what_is_read_again_is_what_it_says_now(tmp_path: Path) -> None:
    table, other = tmp_path / "table.json", tmp_path / "other.json"
    table.write_text("[1]")
    assert noted(table.read_text) == {table: digest("[1]")}
    other.write_text("[3]")
    assert noted(other.read_text) == {table: digest("[1]"), other: digest("[3]")}
    table.write_text("[2]")
    assert noted(table.read_text)[table] == digest("[2]")


def test_of_a_file_that_said_two_things_nobody_knows_which_was_kept(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    for text in ("[1]", "[2]"):
        table.write_text(text)
        noted(table.read_text)
    # A model is made of what code in memory has kept, of the first or of the second.
    assert noted(lambda: None) == {table: CHANGED}
    assert noted(table.read_text) == {table: digest("[2]")}
    module_under_test._read.clear()
    note_files(NAME, {table: digest("[1]")})
    note_files(NAME, {tmp_path / "other": digest("[1]")})
    assert files_read_by(NAME)[table] == digest("[1]")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelSpec]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "reads_width.py").write_text(READS)
    (tmp_path / "width.json").write_text("4")
    yield ModelSpec("mine", factory="reads_width:build", batch_size=4)
    sys.modules.pop("reads_width", None)


def test_a_graph_is_kept_as_long_as_the_files_say_the_same(
    model: ModelSpec, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    first = captured_graph(model, "operator", cache)
    assert captured_graph(model, "operator", cache).from_cache
    (tmp_path / "width.json").write_text("8")
    second = captured_graph(model, "operator", cache)
    assert not second.from_cache
    assert second.graph.total_weight_bytes == 4 * (8 * 8 + 8) != first.graph.total_weight_bytes
    assert files_read_by(model.factory) == {tmp_path / "width.json": digest("8")}
    module_under_test._read.clear()
    assert captured_graph(model, "operator", cache).from_cache
    assert files_read_by(model.factory) == {tmp_path / "width.json": digest("8")}


def test_so_is_a_graph_in_symbols(model: ModelSpec, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    captured_symbolic(model, ("batch",), cache)
    module_under_test._read.clear()
    assert captured_symbolic(model, ("batch",), cache).from_cache
    assert list(files_read_by(model.factory)) == [tmp_path / "width.json"]
    (tmp_path / "width.json").write_text("8")
    again = captured_symbolic(model, ("batch",), cache)
    assert not again.from_cache
    assert again.symbolic.graph.total_weight_bytes == 4 * (8 * 8 + 8)


def test_a_copy_elsewhere_has_files_of_its_own(
    model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, copy = tmp_path / "cache", tmp_path / "copy"
    captured_graph(model, "operator", cache)
    captured_symbolic(model, ("batch",), cache)
    copy.mkdir()
    (copy / "width.json").write_text("8")
    monkeypatch.chdir(copy)
    module_under_test._read.clear()
    there = captured_graph(model, "operator", cache)
    assert there.graph.total_weight_bytes == 4 * (8 * 8 + 8)
    symbolic = captured_symbolic(model, ("batch",), cache)
    assert symbolic.symbolic.graph.total_weight_bytes == 4 * (8 * 8 + 8)


def test_what_reads_nothing_is_shared_by_all_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "reads_nothing.py").write_text(
        READS.replace("json.loads(Path(file).read_text())", "4")
    )
    plain = ModelSpec("plain", factory="reads_nothing:build")
    assert not captured_graph(plain, "operator", tmp_path / "cache").from_cache
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert captured_graph(plain, "operator", tmp_path / "cache").from_cache
