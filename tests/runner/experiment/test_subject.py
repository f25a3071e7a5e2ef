"""Graphs are shared between jobs, only a few are kept, and none is outdated."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fxpart.core.granularity import group_operators
from fxpart.core.reserve import rounded
from fxpart.cost.problem import Problem
from fxpart.errors import FxpartError, SpecError
from runner.config.schema import Config, ModeConfig
from runner.experiment import subject as module_under_test
from runner.experiment.experiment import problem_of
from runner.experiment.model_spec import model_spec
from runner.experiment.subject import Subject, placed_graph, shared_subject
from tests.runner.command import OWN
from tests.runner.composed import read

PARTS = "from torch import nn\n\ndef layer(width):\n    return nn.Linear(width, width)\n"
MINE = """
import torch
from torch import nn
from parts import layer

def build(batch_size, dtype, width=8):
    return nn.Sequential(layer(width), nn.ReLU()).to(dtype), (torch.zeros(batch_size, width),)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module_under_test, "_kept", type(module_under_test._kept)())
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "mine.py").write_text(MINE)
    yield read(*OWN, "model.factory=mine:build", f"capture.cache_dir={tmp_path / 'cache'}")
    for name in ("mine", "parts"):
        sys.modules.pop(name, None)


def subject(config: Config) -> Subject:
    return shared_subject(config, model_spec(config))


def with_batch(config: Config, size: int) -> Config:
    return replace(config, model=replace(config.model, batch_size=size))


def test_a_graph_is_captured_once_and_then_shared(config: Config) -> None:
    first = subject(config).captured
    assert not first.from_cache
    # Settings that do not affect the graph may differ.
    other = read("model=custom", "model.factory=mine:build", "model.name=another", "mode=single")
    again = subject(replace(other, capture=config.capture)).captured
    assert again.graph is first.graph
    assert again.from_cache
    assert again.seconds < first.seconds


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"batch_size": 2}},
        {"model": {"factory_args": {"width": 4}}},
        {"capture": {"level": "module"}},
        {"phase": {"name": "training"}},
    ],
)
def test_settings_that_affect_the_graph_make_another(
    config: Config, change: dict[str, dict[str, object]]
) -> None:
    first = subject(config).captured.graph
    ((section, values),) = change.items()
    other = replace(config, **{section: replace(getattr(config, section), **values)})
    assert subject(other).captured.graph is not first
    assert subject(config).captured.graph is first


def test_the_dtype_of_sums_is_part_of_the_graph(config: Config) -> None:
    sharded = ("phase=training", "devices=2x16gb", "data_parallel=2", "zero=3")
    step = read(*OWN, "model.factory=mine:build", "model.batch_size=2", *sharded)
    step = replace(step, capture=config.capture)
    plain, wider = (subject(replace(step, reduce_dtype=d)).captured for d in (None, "float64"))
    assert wider.graph.value_bytes.sum() > plain.graph.value_bytes.sum()


def test_an_optimizer_is_part_of_the_graph(config: Config) -> None:
    step = replace(config, phase=replace(config.phase, name="training"))
    plain = replace(step, optimizer=replace(step.optimizer, name="none"))
    adam = replace(step, optimizer=replace(step.optimizer, name="adam"))
    assert subject(plain).captured.graph.n_ops < subject(adam).captured.graph.n_ops


def test_a_changed_file_of_the_user_gives_no_old_graph(config: Config, tmp_path: Path) -> None:
    """Also a file that the factory's module imports, which no key covers."""
    first = subject(config).captured.graph
    was = (tmp_path / "parts.py").stat()
    changed = PARTS.replace("nn.Linear(width, width)", "nn.Linear(width, width, bias=False)")
    (tmp_path / "parts.py").write_text(changed)
    os.utime(tmp_path / "parts.py", ns=(was.st_atime_ns, was.st_mtime_ns))
    for name in ("mine", "parts"):
        del sys.modules[name]
    second = subject(config).captured
    assert not second.from_cache
    assert second.graph.total_weight_bytes < first.total_weight_bytes
    assert subject(config).captured.graph is second.graph
    (tmp_path / "parts.py").unlink()
    for name in ("mine", "parts"):
        del sys.modules[name]
    with pytest.raises(FxpartError, match="parts"):
        subject(config)


def test_only_the_latest_are_kept(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "MOST_KEPT_GRAPHS", 2)
    first, second = subject(config).captured.graph, subject(with_batch(config, 2)).captured.graph
    assert subject(config).captured.graph is first  # and so the second is removed
    subject(with_batch(config, 3))
    assert len(module_under_test._kept) == 2
    assert subject(config).captured.graph is first
    assert subject(with_batch(config, 2)).captured.graph is not second
    assert len(module_under_test._kept) == 2


def test_without_a_cache_nothing_is_shared(config: Config) -> None:
    config = replace(config, capture=replace(config.capture, use_cache=False))
    assert subject(config).captured.graph is not subject(config).captured.graph
    assert not module_under_test._kept


def test_symbolic_sizes_are_shared_too(config: Config, tmp_path: Path) -> None:
    config = replace(config, capture=replace(config.capture, symbolic="batch"))
    first = subject(config)
    assert subject(config).captured.graph is first.captured.graph
    (tmp_path / "parts.py").write_text(PARTS.replace("width, width", "width, width, bias=False"))
    for name in ("mine", "parts"):
        del sys.modules[name]
    assert subject(config).captured.graph.n_ops == first.captured.graph.n_ops
    assert subject(config).captured.graph is not first.captured.graph


def test_a_changed_file_that_the_model_depends_on_makes_another(
    config: Config, tmp_path: Path
) -> None:
    (tmp_path / "sizes.json").write_text("1")
    config = replace(config, model=replace(config.model, depends_on=["sizes.json"]))
    first = subject(config).captured.graph
    assert subject(config).captured.graph is first
    (tmp_path / "sizes.json").write_text("2")
    assert subject(config).captured.graph is not first


def test_placed_graphs_are_those_of_the_two_steps(config: Config) -> None:
    graph = subject(config).captured.graph
    expected = group_operators(rounded(graph, 512), "module")
    placed = placed_graph(graph, 512, "module")
    assert placed is placed_graph(graph, 512, "module")
    assert placed.group.tolist() == expected.group.tolist()
    assert placed.weight_bytes.tolist() == expected.weight_bytes.tolist()
    assert placed_graph(graph, 1, "operator") is graph
    with pytest.raises(SpecError, match="granularity=x does not exist"):
        placed_graph(graph, 1, "x")


def test_plans_that_differ_only_in_placement_share_their_problem(config: Config) -> None:
    def problem(changed: Config) -> Problem:
        spec = model_spec(changed)
        return problem_of(changed, shared_subject(changed, spec), spec)[0]

    first = problem(config)
    assert problem(replace(config, mode=ModeConfig("pipeline", {}))) is first
    assert problem(replace(config, granularity="module")) is not first
