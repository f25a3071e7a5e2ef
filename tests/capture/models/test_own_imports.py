"""What of the user's own a module imports: found by reading, never by running."""

import importlib
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from fxpart.capture.models import own_imports as module_under_test
from fxpart.capture.models.own_imports import as_read, is_own, own_imports, source_digest
from fxpart.capture.models.spec import ModelSpec
from fxpart.errors import CaptureError

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return what writes a module of a project that is the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return written


def found(path: Path, name: str = "mine") -> list[str]:
    return list(own_imports(name, path))


def test_all_that_is_imported_counts_however_deep(write: Write) -> None:
    path = write("mine.py", "import layers\nraise RuntimeError('never run')\n")
    write("layers.py", "def f():\n    from sizes import WIDTH\n")
    sizes = write("sizes.py", "WIDTH = 1\n")
    write("unrelated.py", "1\n")
    digests = own_imports("mine", path)
    assert list(digests) == ["layers", "sizes"]
    assert (
        digests["sizes"] == sha256(sizes.read_bytes()).hexdigest() == source_digest(sizes, "sizes")
    )
    assert not {"mine", "layers", "sizes"} & set(sys.modules)


def test_what_is_installed_or_not_there_does_not(write: Write) -> None:
    path = write(
        "mine.py", "import json, os.path, numpy as np, torch.nn, fxpart.core.graph, nowhere\n"
    )
    assert found(path) == []
    assert {"numpy", "torch", "fxpart"} <= module_under_test._installed
    assert not is_own(Path(pytest.__file__))
    assert not is_own(Path(module_under_test.__file__))
    assert is_own(path)


@pytest.mark.parametrize(
    ("said", "modules"),
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
def test_packages_and_relative_names(write: Write, said: str, modules: list[str]) -> None:
    """A package without an ``__init__.py``, such as `side`, has no source of its own."""
    path = write("pkg/net.py", said + "\n")
    for name in ("pkg/__init__.py", "pkg/deep/__init__.py", "pkg/deep/head.py", "pkg/blocks.py"):
        write(name, "")
    write("side/a.py", "")
    assert found(path, "pkg.net") == modules


def test_modules_that_import_each_other(write: Write) -> None:
    path = write("mine.py", "import one\n")
    write("one.py", "import two, mine\n")
    write("two.py", "import one, two\n")
    assert found(path) == ["one", "two"]


def test_what_is_no_python_is_known_by_its_bytes(write: Write) -> None:
    path = write("mine.py", "import broken, wide\n")
    write("broken.py", "import unseen (\n")
    write("wide.py", "PATTERN = '\\d'\n")  # a warning of the compiler's
    write("unseen.py", "")
    assert found(path) == ["broken", "wide"]


def test_an_edit_of_what_a_factory_imports_changes_its_key(write: Write) -> None:
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
    own_imports("mine", path)
    read = module_under_test._read.cache_info().misses
    own_imports("mine", path)
    assert module_under_test._read.cache_info().misses == read
    write("layers.py", "12\n")
    own_imports("mine", path)
    assert module_under_test._read.cache_info().misses == read + 1


def test_what_was_imported_is_what_it_was_then(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("mine_a.py", "import mine_b\n")
    write("mine_b.py", "WIDTH = 1\n")
    lazy = write("mine_c.py", "WIDTH = 1\n")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    with as_read("mine_a"):
        importlib.import_module("mine_a")
    before = own_imports("mine_a", path), source_digest(path, "mine_a")
    write("mine_b.py", "WIDTH = 20\n")
    lazy.write_text("WIDTH = 20\n")
    assert (own_imports("mine_a", path), source_digest(path, "mine_a")) == before
    write("mine_a.py", "import mine_b, mine_c\n")
    importlib.reload(sys.modules["mine_a"])
    assert own_imports("mine_a", path)["mine_b"] == before[0]["mine_b"]
    assert own_imports("mine_a", path)["mine_c"] == sha256(lazy.read_bytes()).hexdigest()
    assert source_digest(path, "mine_a") != before[1]


def test_a_file_that_changes_while_it_is_imported_is_refused(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from pathlib import Path\nPath(__file__).write_text('edited = True')\n"
    path = write("mine_d.py", source)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    with (
        pytest.raises(CaptureError, match=r"mine_d\.py changed while it was imported"),
        as_read("mine_d"),
    ):
        importlib.import_module("mine_d")
    # It stays so: nobody knows which code is in memory.
    with pytest.raises(CaptureError, match=r"mine_d\.py changed"):
        source_digest(path, "mine_d")
    importlib.reload(sys.modules["mine_d"])
    assert source_digest(path, "mine_d") == sha256(b"edited = True").hexdigest()


def _import_and_fail(name: str) -> None:
    importlib.import_module(name)
    raise RuntimeError("of the user")


def test_a_module_whose_function_fails_is_in_memory_all_the_same(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("mine_e.py", "WIDTH = 1\n")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    before = source_digest(path, "mine_e")
    with pytest.raises(RuntimeError, match="of the user"), as_read("mine_e"):
        _import_and_fail("mine_e")
    write("mine_e.py", "WIDTH = 20\n")
    with as_read("mine_e"):
        pass
    assert source_digest(path, "mine_e") == before


def test_what_can_be_imported_only_after_a_run_changes_nothing(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factory that adds to the path, or writes a module: the identity is that of before."""
    path = write("mine_f.py", "import aside_f, sizes_f\n")
    write("sizes_f.py", "WIDTH = 1\n")
    write("aside/aside_f.py", "WIDTH = 1\n")
    before = own_imports("mine_f", path)
    assert list(before) == ["sizes_f"]
    monkeypatch.syspath_prepend(str(path.parent / "aside"))
    assert own_imports("mine_f", path) == before
    # What it was made of is another: then all is looked up again.
    write("sizes_f.py", "WIDTH = 20\n")
    assert list(own_imports("mine_f", path)) == ["aside_f", "sizes_f"]
