"""Arrows go one way, and start-up stays light: held by reading imports, and by running them."""

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import fxpart
from fxpart.lazy_names import HOMES

ROOT = Path(__file__).resolve().parent.parent
TORCH_ROOMS = (
    "fxpart/batch_dim",
    "fxpart/capture",
    "fxpart/execution",
    "fxpart/memory",
    "fxpart/models",
    "fxpart/partitioner",
    "fxpart/pipeline",
    "fxpart/profiling",
    "fxpart/split",
)
MLFLOW_FILES = "runner/mlflow_"
MOST_LINES = 300
TORCH_SIDE = (
    "fxpart.batch_dim",
    "fxpart.capture",
    "fxpart.captured",
    "fxpart.captured_symbolic",
    "fxpart.execution",
    "fxpart.memory",
    "fxpart.models",
    "fxpart.partitioner",
    "fxpart.pipeline",
    "fxpart.profiling",
    "fxpart.split",
)
PLACING_SIDE = ("fxpart.modes", "fxpart.cost", "fxpart.problem")


def _imports(path: Path) -> set[str]:
    """Return every module that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports from a dot: write the name in full"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _files(room: str) -> list[Path]:
    """Return the files of a folder, or the one file of that name."""
    path = ROOT / room
    found = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert found, f"there is no {room}"
    return found


def _uses(path: Path, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in _imports(path))


@pytest.mark.parametrize("package", ["hydra", "omegaconf", "mlflow", "rich", "runner"])
def test_the_library_knows_no_runner(package: str) -> None:
    assert [str(p) for p in _files("fxpart") if _uses(p, package)] == []


def test_only_the_rooms_of_torch_know_torch() -> None:
    rooms = [ROOT / room for room in TORCH_ROOMS]
    strangers = [
        str(path)
        for path in _files("fxpart")
        if (_uses(path, "torch") or _uses(path, "transformers"))
        and not any(path.is_relative_to(room) for room in rooms)
    ]
    assert strangers == []


def test_only_tracking_knows_mlflow() -> None:
    users = [str(p.relative_to(ROOT)) for p in _files("runner") if _uses(p, "mlflow")]
    assert users
    assert all(name.startswith(MLFLOW_FILES) for name in users), users


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("fxpart/cost", ("fxpart.static", "fxpart.modes", *TORCH_SIDE)),
        ("fxpart/modes", ("fxpart.static", *TORCH_SIDE)),
        ("fxpart/static", (*TORCH_SIDE, *PLACING_SIDE)),
        ("fxpart/partitioner", ("fxpart.capture", "fxpart.models", *PLACING_SIDE)),
        ("fxpart/capture", (*PLACING_SIDE, "fxpart.static", "fxpart.partitioner")),
        ("fxpart/models", (*PLACING_SIDE, "fxpart.static", "fxpart.partitioner", "fxpart.capture")),
        ("fxpart/schedule", (*TORCH_SIDE, "fxpart.modes", "fxpart.static")),
        ("fxpart/leaving", (*TORCH_SIDE, *PLACING_SIDE, "fxpart.static")),
        (
            "fxpart/split",
            (
                *PLACING_SIDE,
                "fxpart.static",
                "fxpart.capture",
                "fxpart.models",
                "fxpart.partitioner",
                "fxpart.pipeline",
                "fxpart.execution",
            ),
        ),
        (
            "fxpart/pipeline",
            (
                *PLACING_SIDE,
                "fxpart.static",
                "fxpart.models",
                "fxpart.partitioner",
                "fxpart.execution",
            ),
        ),
        ("fxpart/execution", ("fxpart.modes", "fxpart.static", "fxpart.partitioner")),
        ("fxpart/profiling", ("fxpart.modes", "fxpart.static", "fxpart.partitioner")),
        ("fxpart/forward_devices.py", (*TORCH_SIDE, *PLACING_SIDE, "fxpart.static")),
        ("fxpart/partitions.py", (*TORCH_SIDE, *PLACING_SIDE)),
        ("fxpart/problem.py", (*TORCH_SIDE, "fxpart.modes", "fxpart.partitions")),
        ("fxpart/captured.py", PLACING_SIDE),
        ("fxpart/captured_symbolic.py", PLACING_SIDE),
        ("fxpart/batch_dim", (*PLACING_SIDE, "fxpart.static", "fxpart.partitioner")),
        ("fxpart/memory", (*PLACING_SIDE, "fxpart.static", "fxpart.partitioner")),
        ("fxpart/training", (*TORCH_SIDE, *PLACING_SIDE, "fxpart.static")),
        ("fxpart/symbolic", (*TORCH_SIDE, "fxpart.modes", "fxpart.static")),
        ("fxpart/phases.py", (*TORCH_SIDE, *PLACING_SIDE, "fxpart.static")),
        ("fxpart/reserve.py", (*TORCH_SIDE, *PLACING_SIDE, "fxpart.static")),
        ("fxpart/data_parallel.py", (*TORCH_SIDE, *PLACING_SIDE, "fxpart.static")),
        ("fxpart/graph.py", (*TORCH_SIDE, *PLACING_SIDE, "fxpart.static", "fxpart.partitions")),
        ("fxpart/assignment.py", (*TORCH_SIDE, *PLACING_SIDE, "fxpart.static")),
        ("fxpart/granularity.py", (*TORCH_SIDE, *PLACING_SIDE, "fxpart.static")),
        ("fxpart/saturate.py", (*TORCH_SIDE, "fxpart.modes", "fxpart.static")),
        ("fxpart/replicate.py", (*TORCH_SIDE, *PLACING_SIDE, "fxpart.static")),
        ("fxpart/saved_assignment.py", (*TORCH_SIDE, *PLACING_SIDE, "fxpart.static")),
        ("fxpart/valid_assignment.py", (*TORCH_SIDE, *PLACING_SIDE, "fxpart.static")),
        ("fxpart/graph_cache.py", (*TORCH_SIDE, *PLACING_SIDE, "fxpart.captured")),
    ],
)
def test_rooms_look_one_way(room: str, forbidden: tuple[str, ...]) -> None:
    wrong = [
        (str(path.relative_to(ROOT)), package)
        for path in _files(room)
        for package in forbidden
        if _uses(path, package)
    ]
    assert wrong == []


def test_the_table_of_lazy_names_is_what_the_library_offers() -> None:
    lazy = [name for names in HOMES.values() for name in names]
    assert sorted(lazy) == sorted(set(lazy))
    assert set(fxpart.__all__) == set(lazy)
    assert len(fxpart.__all__) == len(lazy)
    for module, names in HOMES.items():
        for name in names:
            assert getattr(fxpart, name) is getattr(import_module(module), name)
            assert name in import_module(module).__all__
    # What a type checker sees is the same again.
    assert _imports(ROOT / "fxpart/__init__.py") >= {
        f"{module}.{name}" for module, names in HOMES.items() for name in names
    }
    with pytest.raises(AttributeError, match="no attribute 'evaluat'"):
        getattr(fxpart, "evaluat")  # noqa: B009 - not there, as a type checker would say


def test_files_stay_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in ("fxpart", "runner", "tests", "benchmarks")
        for path in _files(folder)
        if (lines := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert long == {}


def _loaded(arguments: list[str]) -> set[str]:
    """Return the packages that a run of the command has loaded by its end."""
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
    assert loaded.isdisjoint({"torch", "mlflow", "transformers", "numba", "matplotlib", "pandas"})
    assert "hydra" in loaded


def test_importing_the_library_imports_no_torch() -> None:
    code = "import sys, fxpart; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "'torch'" not in done.stdout
    assert "'fxpart'" in done.stdout
