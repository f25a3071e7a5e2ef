"""The user's own code: the imports of a module, found without running it, and the failing line."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fxpart.capture.models import user_code as module_under_test
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.models.user_code import (
    as_imported,
    files_at_import,
    imported_modules,
    is_user_file,
    module_digest,
    source_file_digest,
    user_line,
)
from fxpart.errors import CaptureError

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a module of a project to the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return written


def modules_of(path: Path, name: str = "mine") -> list[str]:
    return list(imported_modules(name, path))


def test_all_imports_count_at_any_depth(write: Write) -> None:
    path = write("mine.py", "import layers\nraise RuntimeError('never run')\n")
    write("layers.py", "def f():\n    from sizes import WIDTH\n")
    sizes = write("sizes.py", "WIDTH = 1\n")
    write("unrelated.py", "1\n")
    digests = imported_modules("mine", path)
    assert list(digests) == ["layers", "sizes"]
    assert digests["sizes"] == source_file_digest(sizes) == module_digest("sizes", sizes)
    assert not {"mine", "layers", "sizes"} & set(sys.modules)


def test_installed_and_missing_modules_do_not_count(write: Write) -> None:
    path = write(
        "mine.py", "import json, os.path, numpy as np, torch.nn, fxpart.core.graph, nowhere\n"
    )
    assert modules_of(path) == []
    assert not is_user_file(Path(pytest.__file__))
    assert not is_user_file(Path(module_under_test.__file__))
    assert is_user_file(path)


@pytest.mark.parametrize(
    ("statement", "modules"),
    [
        ("from . import blocks", ["pkg", "pkg.blocks"]),
        ("from .blocks import Block", ["pkg", "pkg.blocks"]),
        ("from .deep import head", ["pkg", "pkg.deep", "pkg.deep.head"]),
        ("from .deep.head import *", ["pkg", "pkg.deep", "pkg.deep.head"]),
        ("import pkg.deep", ["pkg", "pkg.deep"]),
        ("from ..other import x", ["pkg"]),  # beyond the outermost package
        ("from importlib import import_module\nimport_module('side.a')", ["pkg", "side.a"]),
        (
            "import importlib\nimportlib.import_module('.blocks', __package__)",
            ["pkg", "pkg.blocks"],
        ),
        ("import importlib\nimportlib.import_module('..blocks', __package__)", ["pkg"]),
        ("try:\n    import side.a as a\nexcept ImportError:\n    pass", ["pkg", "side.a"]),
        ("import side.a.b", ["pkg", "side.a"]),
        ("__import__(f'side.{1}')", ["pkg"]),
    ],
)
def test_packages_and_relative_names(write: Write, statement: str, modules: list[str]) -> None:
    """A package without an ``__init__.py``, such as `side`, has no source of its own."""
    path = write("pkg/net.py", statement + "\n")
    for name in ("pkg/__init__.py", "pkg/deep/__init__.py", "pkg/deep/head.py", "pkg/blocks.py"):
        write(name, "")
    write("side/a.py", "")
    assert modules_of(path, "pkg.net") == modules


def test_modules_may_import_each_other(write: Write) -> None:
    path = write("mine.py", "import one\n")
    write("one.py", "import two, mine\n")
    write("two.py", "import one, two\n")
    assert modules_of(path) == ["one", "two"]


def test_an_invalid_source_is_identified_by_its_bytes(write: Write) -> None:
    path = write("mine.py", "import broken, wide\n")
    write("broken.py", "import unseen (\n")
    write("wide.py", "PATTERN = '\\d'\n")  # a warning of the compiler
    write("unseen.py", "")
    assert modules_of(path) == ["broken", "wide"]


def test_comments_and_docstrings_of_imports_are_ignored(write: Write) -> None:
    path = write("mine.py", "import layers\n")
    write("layers.py", "def f(x):\n    return x\n")
    before = imported_modules("mine", path), module_digest("mine", path)
    write("mine.py", "# imports\nimport layers  # layers\n")
    write("layers.py", '"""Layers."""\n\n\ndef f(x):\n    """Return `x`."""\n    return (x)\n')
    assert (imported_modules("mine", path), module_digest("mine", path)) == before
    write("layers.py", "def f(x):\n    return -x\n")
    assert imported_modules("mine", path) != before[0]


def test_an_edit_of_an_import_changes_the_key_of_a_factory(write: Write) -> None:
    write("nets/__init__.py", "")
    write("nets/mine.py", "from .layers import Layer\n")
    write("nets/layers.py", "from sizes import WIDTH\n")
    write("nets/unrelated.py", "1\n")
    write("sizes.py", "WIDTH = 1\n")
    spec = ModelSpec("m", factory="nets.mine:f")
    before = spec.key()
    write("nets/unrelated.py", "12\n")
    assert spec.key() == before
    keys = [before]
    for name, text in (("nets/layers.py", "import sizes\n"), ("sizes.py", "WIDTH = 16\n")):
        write(name, text)
        keys.append(spec.key())
    write("nets/layers.py", "from sizes import WIDTH\n")
    write("sizes.py", "WIDTH = 1\n")
    assert spec.key() == before
    (Path.cwd() / "sizes.py").rename("other_sizes.py")
    keys.append(spec.key())
    digests = [str(key["factory_sha256"]) for key in keys]
    assert len(set(digests)) == 4
    del sys.modules["nets"]  # the package of this folder


def test_a_file_is_read_again_only_after_a_change(write: Write) -> None:
    path = write("mine.py", "import layers\n")
    write("layers.py", "1\n")
    imported_modules("mine", path)
    read = module_under_test._read_once.cache_info().misses
    imported_modules("mine", path)
    assert module_under_test._read_once.cache_info().misses == read
    write("layers.py", "12\n")
    imported_modules("mine", path)
    assert module_under_test._read_once.cache_info().misses == read + 1


def test_an_imported_module_keeps_its_identity(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("mine_a.py", "import mine_b\n")
    write("mine_b.py", "WIDTH = 1\n")
    lazy = write("mine_c.py", "WIDTH = 1\n")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    with as_imported("mine_a"):
        importlib.import_module("mine_a")
    before = imported_modules("mine_a", path), module_digest("mine_a", path)
    write("mine_b.py", "WIDTH = 20\n")
    lazy.write_text("WIDTH = 20\n")
    assert (imported_modules("mine_a", path), module_digest("mine_a", path)) == before
    write("mine_a.py", "import mine_b, mine_c\n")
    importlib.reload(sys.modules["mine_a"])
    assert imported_modules("mine_a", path)["mine_b"] == before[0]["mine_b"]
    assert imported_modules("mine_a", path)["mine_c"] == source_file_digest(lazy)
    assert module_digest("mine_a", path) != before[1]


def test_a_file_that_changes_during_its_import_is_refused(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from pathlib import Path\nPath(__file__).write_text('edited = True')\n"
    path = write("mine_d.py", source)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    with (
        pytest.raises(CaptureError, match=r"mine_d\.py changed while it was imported"),
        as_imported("mine_d"),
    ):
        importlib.import_module("mine_d")
    # It stays so: it is unknown which code is in memory.
    with pytest.raises(CaptureError, match=r"mine_d\.py changed"):
        module_digest("mine_d", path)
    importlib.reload(sys.modules["mine_d"])
    assert module_digest("mine_d", path) == source_file_digest(path)


def test_files_have_the_content_of_the_import(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("mine_g.py", "WIDTH = 1\n")
    table = write("table.json", "[1]")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    with as_imported("mine_g", [table]):
        importlib.import_module("mine_g")
    at_first = source_file_digest(table)
    write("table.json", "[2]")
    with as_imported("mine_g", [table]):
        pass
    assert files_at_import("mine_g") == {table: at_first} != {table: source_file_digest(table)}
    importlib.reload(sys.modules["mine_g"])
    assert files_at_import("mine_g") == {}


def _import_and_fail(name: str) -> None:
    importlib.import_module(name)
    raise RuntimeError("of the user")


def test_a_module_whose_function_fails_stays_in_memory(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("mine_e.py", "WIDTH = 1\n")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    before = module_digest("mine_e", path)
    with pytest.raises(RuntimeError, match="of the user"), as_imported("mine_e"):
        _import_and_fail("mine_e")
    write("mine_e.py", "WIDTH = 20\n")
    with as_imported("mine_e"):
        pass
    assert module_digest("mine_e", path) == before


def test_modules_that_can_be_imported_only_after_a_run_do_not_matter(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factory that extends the path, or writes a module: the identity is that of before."""
    path = write("mine_f.py", "import aside_f, sizes_f\n")
    write("sizes_f.py", "WIDTH = 1\n")
    write("aside/aside_f.py", "WIDTH = 1\n")
    before = imported_modules("mine_f", path)
    assert list(before) == ["sizes_f"]
    monkeypatch.syspath_prepend(str(path.parent / "aside"))
    assert imported_modules("mine_f", path) == before
    # If its own source changed, everything is looked up again.
    write("sizes_f.py", "WIDTH = 20\n")
    assert list(imported_modules("mine_f", path)) == ["aside_f", "sizes_f"]


def _failed(text: str, path: Path) -> Exception:
    path.write_text(text)
    names: dict[str, object] = {"json": json}
    try:
        exec(compile(text, str(path), "exec"), names)
    except Exception as error:
        return error
    raise AssertionError("it fails")


def test_the_innermost_line_of_user_code_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def f():\n    json.loads('[')\n\nf()\n"
    path = tmp_path / "deep" / "mine.py"
    path.parent.mkdir()
    error = _failed(text, path)
    assert user_line(error) == f" ({path}:2)"
    monkeypatch.chdir(tmp_path)
    assert user_line(error) == " (deep/mine.py:2)"


def test_a_cause_is_preferred_to_its_consequence(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    text = "try:\n    1 / 0\nexcept Exception as error:\n    raise ValueError from error\n"
    assert user_line(_failed(text, path)) == f" ({path}:2)"


def test_without_a_line_of_user_code_no_line_is_named() -> None:
    assert user_line(ValueError("never raised")) == ""
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("[")
    # This test is user code too; all frames below it belong to Python.
    assert user_line(caught.value).startswith(" (")
    inside = caught.value.with_traceback(caught.tb.tb_next)
    assert user_line(inside) == ""
