"""Split points: known ones, refusals, and torch's own pipeline built from them."""

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import Pipe, SplitPoint, pipeline
from torch.utils._pytree import tree_leaves, tree_map

from fxpart.capture.api import capture_graph
from fxpart.capture.models.build import BuiltModel, build_model
from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.errors import SpecError
from fxpart.plan_export import split_points
from tests.plan_export.scene import SPECS, scene
from tests.sketch import Sketch


def stages(*stage: int) -> Assignment:
    return Assignment(np.array(stage, dtype=np.int64), tuple((i,) for i in range(max(stage) + 1)))


def row(*modules: str) -> OpGraph:
    sketch = Sketch()
    value = sketch.input(1)
    for module in modules:
        value = sketch.op([value], 1, module=module)
    return sketch.graph(value)


def test_a_cut_is_placed_before_the_outermost_module_that_begins_there() -> None:
    graph = row("layers.0.up", "layers.0", "layers.1.up", "layers.1", "head")
    assert split_points(graph, stages(0, 0, 1, 1, 2)) == {
        "layers.1": "BEGINNING",
        "head": "BEGINNING",
    }
    assert split_points(graph, stages(0, 0, 0, 0, 0)) == {}


def test_a_module_list_is_not_a_split_point() -> None:
    graph = row("stem", "layers.0", "layers.1")
    assert split_points(graph, stages(0, 1, 1)) == {"layers.0": "BEGINNING"}


def test_a_cut_before_an_operator_of_the_model_itself_follows_a_module() -> None:
    graph = row("body.a", "body", "", "head")
    assert split_points(graph, stages(0, 0, 1, 1)) == {"body": "END"}


def test_a_module_called_twice_is_not_a_split_point() -> None:
    graph = row("act", "act", "other", "act")
    with pytest.raises(SpecError, match="operator op3 of act begins partition 1"):
        split_points(row("act", "", "", "act"), stages(0, 0, 0, 1))
    assert split_points(graph, stages(0, 0, 1, 1)) == {"other": "BEGINNING"}
    assert split_points(graph, stages(0, 0, 0, 1)) == {"other": "END"}


def test_a_module_cannot_be_cut_at_both_ends() -> None:
    graph = row("", "m", "")
    with pytest.raises(SpecError, match=r"op2 of the model itself begins partition 2.*already"):
        split_points(graph, stages(0, 1, 2))


def test_a_cut_inside_a_module_is_refused() -> None:
    graph = row("a", "m", "m", "b")
    with pytest.raises(SpecError, match=r"op2 of m begins partition 1.*granularity=module"):
        split_points(graph, stages(0, 0, 1, 1))


def test_partitions_that_are_not_consecutive_are_refused() -> None:
    graph = row("a", "b", "c")
    with pytest.raises(SpecError, match="op2 of c is in partition 0 and directly follows"):
        split_points(graph, stages(0, 1, 0))
    with pytest.raises(SpecError, match="op1 of b is in partition 2 and directly follows"):
        split_points(graph, stages(0, 2, 1))


def test_replicas_are_left_to_the_caller() -> None:
    plan = Assignment(np.array([0, 1]), ((0,), (1, 2)))
    assert split_points(row("a", "b"), plan) == {"b": "BEGINNING"}


def from_modules(graph: OpGraph, starts: list[str]) -> Assignment:
    """Return the plan whose stages begin with the first operator of each module."""
    stage = np.zeros(graph.n_ops, dtype=np.int64)
    for start in starts:
        first = next(
            op
            for op, module in enumerate(graph.modules)
            if f"{module}.".startswith(f"{start}.") and not graph.is_check[op]
        )
        stage[first:] += 1
    return stages(*stage.tolist())


def filled(name: str) -> BuiltModel:
    """Return a small model with weights drawn from a fixed seed, and inputs for it."""
    built = build_model(SPECS[name])
    generator = torch.Generator().manual_seed(0)

    def fill(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.is_floating_point():
            return torch.zeros(leaf.shape, dtype=leaf.dtype)
        return torch.rand(leaf.shape, generator=generator)

    model = built.module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(fill(tensor))  # type: ignore[arg-type]
    return BuiltModel(model, tree_map(fill, built.args), tree_map(fill, built.kwargs))


STARTS = {
    "gpt2": ["transformer.h.0", "transformer.h.1", "lm_head"],
    "llama": ["model.layers.1", "model.norm"],
    "bert": ["bert.encoder.layer.1", "cls"],
    "resnet": ["resnet.encoder.stages.1", "classifier"],
    "dlrm": ["tables.0", "top"],
}


@pytest.mark.parametrize("name", STARTS)
def test_torch_builds_as_many_stages_as_the_plan_has(name: str) -> None:
    pipe, _ = piped(name)
    assert pipe.num_stages == len(STARTS[name]) + 1


def piped(name: str) -> tuple[Pipe, BuiltModel]:
    """Return a small model as torch splits it at our split points, and the whole model."""
    plan, built = from_modules(scene(name)[1], STARTS[name]), filled(name)
    assert plan.n_partitions == len(STARTS[name]) + 1
    spec = {path: SplitPoint[at] for path, at in split_points(scene(name)[1], plan).items()}
    with torch.no_grad(), warnings.catch_warnings():
        # A warning of torch about its own tracing.
        warnings.simplefilter("ignore")
        return pipeline(built.module, built.args, built.kwargs, split_spec=spec), built


# This torch cannot run the modules that it outlines from llama, even without a split.
@pytest.mark.parametrize("name", [name for name in STARTS if name != "llama"])
def test_the_stages_built_by_torch_compute_the_same_as_the_model(name: str) -> None:
    pipe, built = piped(name)
    with torch.no_grad():
        whole = tree_leaves(built.module(*built.args, **built.kwargs))
        staged = tree_leaves(pipe(*tree_leaves(built.args), **built.kwargs))
    assert len(staged) == len(whole) > 0
    for from_stages, from_model in zip(staged, whole, strict=True):
        assert torch.isfinite(from_model).all()
        assert torch.equal(from_stages, from_model)


class Plain(nn.Module):
    """A chain of layers, with arithmetic of the model itself between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, 4)."""
        y: Tensor = self.first(x)
        z: Tensor = self.third(self.second(y * 2 + x))
        return z


@pytest.mark.parametrize(
    ("stage", "points"),
    [
        ((0, 0, 0, 1, 2), {"second": "BEGINNING", "third": "BEGINNING"}),
        ((0, 1, 1, 1, 2), {"first": "END", "third": "BEGINNING"}),
    ],
)
def test_torch_puts_each_operator_in_its_stage(
    stage: tuple[int, ...], points: dict[str, str]
) -> None:
    torch.manual_seed(0)
    model, x = Plain(), torch.randn(2, 4)
    graph = capture_graph(model, (x,))
    assert graph.n_ops == len(stage)
    computed = split_points(graph, stages(*stage))
    assert computed == points
    expected = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec = {path: SplitPoint[side] for path, side in computed.items()}
        pipe = pipeline(model, (x,), split_spec=spec)
    for index, child in enumerate(pipe.split_gm.children()):
        planned = {graph.targets[op] for op in range(graph.n_ops) if stage[op] == index}
        assert operators(child) == planned
    assert torch.equal(pipe(x)[0], expected)


def operators(module: nn.Module) -> set[str]:
    """Return the ATen operators called by the graphs in a module."""
    graphs = [getattr(part, "graph", None) for part in module.modules()]
    nodes = [node for graph in graphs if isinstance(graph, fx.Graph) for node in graph.nodes]
    return {str(node.target) for node in nodes if isinstance(node.target, torch._ops.OpOverload)}
