"""Graphs of models: captured once, and again when one of their files has changed."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fxpart.capture.captured import captured_graph, captured_symbolic
from fxpart.capture.models.spec import ModelSpec
from fxpart.errors import CaptureError, SpecError

FACTORY = """
import torch
from torch import nn
from outlying_part import WIDTH

def build(batch_size, dtype):
    return nn.Linear(WIDTH, WIDTH), (torch.zeros(batch_size, WIDTH),)

def broken(batch_size, dtype):
    raise OSError("no disk")
"""
READS = """
import json
from pathlib import Path
import torch
from torch import nn

def build(batch_size, dtype, edits=False):
    width = json.loads(Path("width.json").read_text())
    if edits:
        Path("width.json").write_text("5")
    return nn.Linear(width, width, dtype=dtype), (torch.zeros(batch_size, width, dtype=dtype),)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a user's folder with a factory that imports a second file."""
    (tmp_path / "outlying.py").write_text(FACTORY)
    (tmp_path / "outlying_part.py").write_text("WIDTH = 8")
    (tmp_path / "reads_width.py").write_text(READS)
    (tmp_path / "width.json").write_text("4")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    for name in ("outlying", "outlying_part", "reads_width"):
        sys.modules.pop(name, None)


def _reading(**fields: object) -> ModelSpec:
    return _spec(factory="reads_width:build", batch_size=4, depends_on=("width.json",), **fields)


def _spec(**fields: object) -> ModelSpec:
    return ModelSpec(**{"name": "m", "factory": "outlying:build", **fields})  # type: ignore[arg-type]


def test_a_graph_is_captured_once(folder: Path) -> None:
    first = captured_graph(_spec(), "operator", folder / "cache")
    again = captured_graph(_spec(name="another"), "operator", folder / "cache")
    assert (first.from_cache, again.from_cache) == (False, True)
    assert again.graph.names == first.graph.names
    assert not captured_graph(_spec(batch_size=2), "operator", folder / "cache").from_cache
    assert not captured_graph(_spec(), "module", folder / "cache").from_cache
    assert not captured_graph(_spec(), "operator", None).from_cache


def test_a_file_imported_by_the_factory_counts(folder: Path) -> None:
    assert captured_graph(_spec(), "operator", folder / "cache").graph.total_weight_bytes == 288
    for name in ("outlying", "outlying_part"):
        sys.modules.pop(name)
    (folder / "outlying_part.py").write_text("WIDTH = 16")
    changed = captured_graph(_spec(), "operator", folder / "cache")
    assert not changed.from_cache
    assert changed.graph.total_weight_bytes == (16 * 16 + 16) * 4


def test_a_comment_in_a_file_of_the_factory_keeps_the_graph(folder: Path) -> None:
    captured_graph(_spec(), "operator", folder / "cache")
    for name in ("outlying", "outlying_part"):
        sys.modules.pop(name)
    (folder / "outlying_part.py").write_text('"""Sizes."""\nWIDTH = 8  # of each layer\n')
    assert captured_graph(_spec(), "operator", folder / "cache").from_cache


def test_a_graph_is_cached_while_its_dependencies_are_unchanged(folder: Path) -> None:
    first = captured_graph(_reading(), "operator", folder / "cache")
    assert captured_graph(_reading(), "operator", folder / "cache").from_cache
    (folder / "width.json").write_text("8")
    second = captured_graph(_reading(), "operator", folder / "cache")
    assert not second.from_cache
    assert second.graph.total_weight_bytes == 4 * (8 * 8 + 8) != first.graph.total_weight_bytes


def test_a_symbolic_graph_is_cached_likewise(folder: Path) -> None:
    captured_symbolic(_reading(), ("batch",), folder / "cache")
    assert captured_symbolic(_reading(), ("batch",), folder / "cache").from_cache
    (folder / "width.json").write_text("8")
    again = captured_symbolic(_reading(), ("batch",), folder / "cache")
    assert not again.from_cache
    assert again.symbolic.graph.total_weight_bytes == 4 * (8 * 8 + 8)


def test_a_copy_of_the_factory_has_its_own_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = captured_graph(_reading(), "operator", folder / "cache").graph
    copy = folder / "copy"
    copy.mkdir()
    monkeypatch.chdir(copy)
    (copy / "width.json").write_text("4")
    assert captured_graph(_reading(), "operator", folder / "cache").from_cache
    (copy / "width.json").write_text("8")
    other = captured_graph(_reading(), "operator", folder / "cache")
    assert other.graph.total_weight_bytes == 4 * (8 * 8 + 8) != first.total_weight_bytes


def test_a_file_that_changes_during_the_capture_is_refused(folder: Path) -> None:
    with pytest.raises(CaptureError, match="changed during the capture; start again"):
        captured_graph(_reading(factory_args={"edits": True}), "operator", folder / "cache")
    assert not (folder / "cache").exists()


def test_a_level_that_does_not_exist_is_refused_before_anything_runs(folder: Path) -> None:
    with pytest.raises(SpecError, match=r"capture\.level=ops does not exist"):
        captured_graph(_spec(factory="outlying:broken"), "ops", folder / "cache")


def test_a_training_step_is_another_graph(folder: Path) -> None:
    forward = captured_graph(_spec(), "operator", folder / "cache")
    step = captured_graph(_spec(), "operator", folder / "cache", "training")
    again = captured_graph(_spec(), "operator", folder / "cache", "training")
    assert (step.from_cache, again.from_cache) == (False, True)
    assert not forward.graph.is_backward.any()
    assert again.graph.is_backward.any()
    assert again.graph.forward_of.tolist() == step.graph.forward_of.tolist()


@pytest.mark.parametrize(
    ("phase", "level", "message"),
    [
        ("train", "operator", "phase=train does not exist; nearest: training"),
        ("training", "module", r"got capture\.level=module; use capture\.level=operator"),
    ],
)
def test_a_phase_that_cannot_be_captured_is_refused(
    folder: Path, phase: str, level: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        captured_graph(_spec(factory="outlying:broken"), level, folder / "cache", phase)


def test_a_failed_capture_leaves_no_files(folder: Path) -> None:
    with pytest.raises(CaptureError, match="no disk"):
        captured_graph(_spec(factory="outlying:broken"), "operator", folder / "cache")
    assert not (folder / "cache").exists()
