"""Imports follow the layers, and start-up stays light: tested by reading imports and by running."""

import ast
import json
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "fxpart.errors": (),
    "fxpart.support": ("fxpart.errors",),
    "fxpart.core": ("fxpart.support", "fxpart.errors"),
    "fxpart.cost": ("fxpart.core", "fxpart.support", "fxpart.errors"),
    "fxpart.schedule": ("fxpart.cost", "fxpart.core", "fxpart.support", "fxpart.errors"),
    "fxpart.placement": (
        "fxpart.plan_export",
        "fxpart.schedule",
        "fxpart.cost",
        "fxpart.core",
        "fxpart.support",
        "fxpart.errors",
    ),
    "fxpart.plan_export": ("fxpart.core", "fxpart.errors"),
    "fxpart.sharding": ("fxpart.core", "fxpart.support", "fxpart.errors"),
    "fxpart.capture": ("fxpart.sharding", "fxpart.core", "fxpart.support", "fxpart.errors"),
    "fxpart.execution": (
        "fxpart.capture",
        "fxpart.sharding",
        "fxpart.schedule",
        "fxpart.cost",
        "fxpart.core",
        "fxpart.support",
        "fxpart.errors",
    ),
    "fxpart.torch_compat": (
        "fxpart.execution",
        "fxpart.capture",
        "fxpart.core",
        "fxpart.support",
        "fxpart.errors",
    ),
    "runner.errors": (),
    "runner.config": ("runner.errors",),
    "runner.cli": ("runner.output", "runner.config", "runner.errors"),
    "runner.output": ("runner.config", "runner.errors"),
    "runner.tracking": ("runner.output", "runner.config", "runner.errors"),
    "runner.experiment": ("runner.output", "runner.config", "runner.errors"),
    "runner.plans": ("runner.experiment", "runner.output", "runner.config", "runner.errors"),
    "runner.job": (
        "runner.plans",
        "runner.experiment",
        "runner.tracking",
        "runner.output",
        "runner.config",
        "runner.errors",
    ),
    "runner.report": (
        "runner.job",
        "runner.tracking",
        "runner.output",
        "runner.cli",
        "runner.config",
        "runner.errors",
    ),
    "runner.sweep": (
        "runner.report",
        "runner.job",
        "runner.experiment",
        "runner.tracking",
        "runner.output",
        "runner.cli",
        "runner.config",
        "runner.errors",
    ),
    "runner.recommend": (
        "runner.sweep",
        "runner.job",
        "runner.plans",
        "runner.experiment",
        "runner.tracking",
        "runner.output",
        "runner.cli",
        "runner.config",
        "runner.errors",
    ),
}
"""Each package, and the packages below it that it may import; a module that is not here is a
front door at a root, and may import all of them.
"""
WITHOUT_TORCH = ("core", "cost", "placement", "plan_export", "schedule", "support")
AT_THE_ROOTS = {
    "fxpart": {"__init__", "errors"},
    "runner": {"__init__", "__main__", "app", "calibrate", "errors", "send"},
}
MOST_LINES = 500


@cache
def _import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return all imports of a file, at any place in it, and of its stub."""
    return [
        node
        for file in {path, path.with_suffix(".pyi")}
        if file.is_file()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]


def _imports(path: Path) -> set[str]:
    """Return every module that a file imports, at any place in it."""
    modules: set[str] = set()
    for node in _import_statements(path):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path} imports from a dot: write the name in full"
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return modules


def test_imports_are_seen_at_any_place(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import a\n"
        "if TYPE_CHECKING:\n    from b import c\n"
        "def f():\n    from d.e import g, h\n    import i.j as k\n"
    )
    assert _imports(path) == {"a", "b.c", "d.e.g", "d.e.h", "i.j"}


def _files(room: str) -> list[Path]:
    """Return the files of a folder, or the one file of that name."""
    path = ROOT / room
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files, f"there is no {room}"
    return files


def _uses(path: Path, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in _imports(path))


@pytest.mark.parametrize("package", ["hydra", "omegaconf", "mlflow", "rich", "runner"])
def test_the_library_does_not_import_the_runner(package: str) -> None:
    assert [str(p) for p in _files("fxpart") if _uses(p, package)] == []


def test_only_some_packages_import_torch() -> None:
    rooms = [ROOT / "fxpart" / room for room in WITHOUT_TORCH]
    assert all(room.is_dir() for room in rooms)
    strangers = [
        str(path)
        for room in rooms
        for path in room.rglob("*.py")
        if _uses(path, "torch") or _uses(path, "transformers")
    ]
    assert strangers == []


def test_only_tracking_imports_mlflow() -> None:
    users = [str(p.relative_to(ROOT)) for p in _files("runner") if _uses(p, "mlflow")]
    assert users
    assert all(name.startswith("runner/tracking/mlflow_") for name in users), users


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[:2] == ("runner", "plugins"):
        parts = parts[2:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _arrows() -> dict[str, set[str]]:
    """Return the modules that each module imports: at its top, in functions, or for types only."""
    modules = {_module(path): path for room in ("fxpart", "runner") for path in _files(room)}
    # A name exported by a package belongs to the package, not to a module of the same name.
    offered = {
        f"{package}.{name}"
        for package, path in modules.items()
        if path.name == "__init__.py"
        for name in _offered(path)
    }
    arrows: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = {
            name if name in modules and name not in offered else name.rpartition(".")[0]
            for name in _imports(path)
        }
        arrows[module] = (names & set(modules)) - {module}
    return arrows


def _offered(path: Path) -> frozenset[str]:
    """Return the names that a package's `__init__` imports from its modules."""
    return frozenset(
        alias.name
        for node in _import_statements(path)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    graph = networkx.DiGraph((a, b) for a, ends in arrows.items() for b in ends)
    return [sorted(part) for part in networkx.strongly_connected_components(graph) if len(part) > 1]


def test_there_are_no_import_cycles() -> None:
    assert len(_arrows()) > 200
    assert _circles(_arrows()) == []


def test_an_import_cycle_would_be_detected() -> None:
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_packages_import_only_the_packages_below_them() -> None:
    wrong = [
        (module, other)
        for module, others in _arrows().items()
        for other in others
        if _room(module) in MAY_IMPORT
        and _room(other) != _room(module)
        and _room(other).split(".")[0] == module.split(".")[0]
        and _room(other) not in MAY_IMPORT[_room(module)]
    ]
    assert sorted(wrong) == []


def test_the_allowed_imports_have_no_cycle_and_cover_every_package() -> None:
    assert _circles({room: set(below) for room, below in MAY_IMPORT.items()}) == []
    rooms = {
        f"{package}.{path.name}"
        for package in AT_THE_ROOTS
        for path in (ROOT / package).iterdir()
        if (path / "__init__.py").is_file()
    }
    assert rooms == {room for room in MAY_IMPORT if not room.endswith(".errors")}


def test_the_accounting_of_torch_is_independent() -> None:
    """The drop-in partitioner counts as torch does, whatever the runner's cost model becomes."""
    accounting = "fxpart.torch_compat.accounting"
    others = {
        other
        for module, ends in _arrows().items()
        if module.startswith(accounting)
        for other in ends
        if not other.startswith(accounting)
    }
    assert {_room(other) for other in others} <= {"fxpart.support", "fxpart.errors", "fxpart.core"}


@pytest.mark.parametrize("package", list(AT_THE_ROOTS))
def test_a_root_has_only_its_packages_and_front_doors(package: str) -> None:
    assert {path.stem for path in (ROOT / package).glob("*.py")} == AT_THE_ROOTS[package]


@pytest.mark.parametrize("package", ["fxpart", "fxpart.capture"])
def test_a_stub_lists_what_its_package_exports(package: str) -> None:
    module = import_module(package)
    stub = Path(str(module.__file__)).with_suffix(".pyi")
    names = _offered(stub)
    assert set(module.__all__) == names
    assert len(module.__all__) == len(names)
    for path in _imports(stub):
        home, _, name = path.rpartition(".")
        assert getattr(module, name) is getattr(import_module(home), name)
        assert name in import_module(home).__all__
    with pytest.raises(AttributeError, match="no attribute 'evaluat'"):
        getattr(module, "evaluat")  # noqa: B009 - not there, as a type checker would say


def test_files_stay_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in ("fxpart", "runner", "tests", "benchmarks")
        for path in _files(folder)
        if (lines := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert long == {}


def _loaded(arguments: list[str]) -> set[str]:
    """Return the packages loaded at the end of a run of the command."""
    code = (
        "import json, runpy, sys\n"
        f"sys.argv = ['runner', *{arguments!r}]\n"
        "try:\n    runpy.run_module('runner', run_name='__main__')\n"
        "except SystemExit:\n    pass\n"
        "sys.stderr.write(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_help_imports_neither_torch_nor_mlflow() -> None:
    loaded = _loaded(["--help"])
    heavy = {"torch", "mlflow", "transformers", "numba", "numpy", "matplotlib", "pandas"}
    assert loaded.isdisjoint(heavy)
    assert "hydra" in loaded


def test_importing_the_library_imports_no_torch() -> None:
    code = "import sys, fxpart; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "'torch'" not in done.stdout
    assert "'fxpart'" in done.stdout
