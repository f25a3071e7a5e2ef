"""What of the user's own a module imports: found by reading, never by running."""

import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from fxpart.models import own_imports as module_under_test
from fxpart.models.own_imports import is_own, own_imports, source_digest
from fxpart.models.spec import ModelSpec

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
    assert digests["sizes"] == sha256(sizes.read_bytes()).hexdigest() == source_digest(sizes)
    assert not {"mine", "layers", "sizes"} & set(sys.modules)


def test_what_is_installed_or_not_there_does_not(write: Write) -> None:
    path = write("mine.py", "import json, os.path, numpy as np, torch.nn, fxpart.graph, nowhere\n")
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
