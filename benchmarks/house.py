"""Measure the code base: files, lines, import cycles, and the files that one job executes.

    python -m benchmarks.house [CHECKOUT ...]

Prints one column for each checkout, by default this one, so that two commits can be compared side
by side.
"""

import argparse
import ast
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx

from benchmarks.text_table import table

_PACKAGES = ("fxpart", "runner")
_JOB = ["model=gpt2", "mode=size_based", "devices=2x16gb"]
_LIST_FILES = """
import os, runpy, sys, threading
root = sys.argv.pop(1) + os.sep
files = set()
def profile(frame, event, argument):
    name = frame.f_code.co_filename
    # Imports run the bodies of modules and classes: these are not steps of the job.
    if event == "call" and name.startswith(root) and frame.f_code.co_flags & 1:
        files.add(name[len(root):])
sys.setprofile(profile)
threading.setprofile(profile)
sys.argv[0] = "runner"
try:
    runpy.run_module("runner", run_name="__main__")
except SystemExit:
    pass
sys.setprofile(None)
sys.stderr.write("FILES " + " ".join(sorted(files)) + "\\n")
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="CHECKOUT")
    here = Path(__file__).resolve().parent.parent
    checkouts = [path.resolve() for path in parser.parse_args().checkouts] or [here]
    columns = [_measures(checkout) for checkout in checkouts]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    print(table(["", *(checkout.name for checkout in checkouts)], rows))


def _measures(checkout: Path) -> dict[str, str]:
    """Return the measures of a checkout as text."""
    modules = dict(_modules(checkout))
    trees = {name: ast.parse(path.read_text()) for name, path in modules.items()}
    lines = {name: len(path.read_text().splitlines()) for name, path in modules.items()}
    docstrings = {name: _docstring_lines(tree) for name, tree in trees.items()}
    imports = _imports(modules, trees)
    importers = Counter(imported for targets in imports.values() for imported in targets)
    functions = [
        node.end_lineno - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None
    ]
    cycles = _import_cycles(imports)
    private, used_once = _private_functions(trees)
    runner_files = sum(name.startswith("runner") for name in modules)
    runner_lines = sum(count for name, count in lines.items() if name.startswith("runner"))
    single, swept = (_files_of_job(checkout, options) for options in ([], ["-m"]))
    return {
        "files": f"{len(modules)} (runner {runner_files})",
        "lines": f"{sum(lines.values())} (runner {runner_lines})",
        "lines of docstrings": str(sum(docstrings.values())),
        "top-level modules, fxpart / runner": " / ".join(
            str(sum(1 for path in (checkout / package).glob("*.py"))) for package in _PACKAGES
        ),
        "modules in import cycles": str(sum(map(len, cycles))),
        "files under 40 lines": str(sum(count < 40 for count in lines.values())),
        "modules with one importer": str(
            sum(importers[name] == 1 and not _is_package(modules[name]) for name in modules)
        ),
        "private functions, used once": f"{private}, {used_once}",
        "lines of a file, p50 / p90": _p50_p90(list(lines.values())),
        "lines of a function, p50 / p90": _p50_p90(functions),
        "files of the runner in one run": str(single),
        "files of the runner in a sweep of one job": str(swept),
    }


def _modules(checkout: Path) -> Iterator[tuple[str, Path]]:
    for package in _PACKAGES:
        for path in sorted((checkout / package).rglob("*.py")):
            parts = path.relative_to(checkout).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _is_package(path: Path) -> bool:
    return path.name == "__init__.py"


def _docstring_lines(tree: ast.Module) -> int:
    """Return the lines of standalone strings: docstrings, also of attributes."""
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _imports(modules: dict[str, Path], trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return the modules that each module imports, at any place in it."""
    imports: dict[str, set[str]] = {}
    for module, tree in trees.items():
        names: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names}
                names.update(submodules & set(modules) or {node.module})
        imports[module] = (names & set(modules)) - {module}
    return imports


def _import_cycles(imports: dict[str, set[str]]) -> list[set[str]]:
    graph = networkx.DiGraph((a, b) for a, targets in imports.items() for b in targets)
    return [part for part in networkx.strongly_connected_components(graph) if len(part) > 1]


def _private_functions(trees: dict[str, ast.Module]) -> tuple[int, int]:
    """Return the number of private functions, and of those referred to exactly once."""
    private = used_once = 0
    for tree in trees.values():
        names = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Name | ast.Attribute)
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_"):
                if node.name.startswith("__"):
                    continue
                private += 1
                used_once += names[node.name] == 1
    return private, used_once


def _p50_p90(counts: list[int]) -> str:
    deciles = statistics.quantiles(counts, n=10)
    return f"{statistics.median(counts):.0f} / {deciles[-1]:.0f}"


def _files_of_job(checkout: Path, options: list[str]) -> int:
    """Return how many files of the runner execute a function for one job with a warm cache."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):  # the second time with cached graphs
            done = subprocess.run(
                [sys.executable, "-c", _LIST_FILES, str(checkout), *options, *_JOB],
                cwd=folder,
                env={
                    "PATH": "/usr/bin:/bin",
                    "HOME": folder,
                    "PYTHONPATH": f"{checkout}:{checkout / 'runner' / 'plugins'}",
                },
                capture_output=True,
                text=True,
                check=True,
            )
    files = done.stderr.rpartition("FILES ")[2].split()
    return sum(name.startswith("runner/") for name in files)


if __name__ == "__main__":
    main()
