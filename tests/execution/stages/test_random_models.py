"""Random models and cuts: results and gradients of the stages, against the whole."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from fxpart.execution.stages.chain import chain_stages
from fxpart.torch_compat.pipeline.cut_points import generate_pipeline_partition
from fxpart.torch_compat.pipeline.liveness import analyze_pipeline_module
from fxpart.torch_compat.pipeline.tied_weights import analyze_tie_weights
from fxpart.torch_compat.split_module import split_module
from tests.execution.stages.small_models import WIDTH, Block, assert_same, assert_same_gradients
from tests.execution.stages.test_chain import assert_links


class Branches(nn.Module):
    """Runs its parts in order; every other result is added at the end of the module."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.part = nn.ModuleList(parts)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        kept = x * self.gain
        for index, part in enumerate(self.part):
            x = part(x)
            if index % 2:
                kept = kept + x
        return x + kept * self.gain


@st.composite
def models(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """Draw a nested module of blocks, linear layers, chains and branches."""
    if depth == 0 or draw(st.booleans()):
        return Block() if draw(st.booleans()) else nn.Linear(WIDTH, WIDTH)
    parts = draw(st.lists(models(depth=depth - 1), min_size=1, max_size=3))
    return Branches(parts) if draw(st.booleans()) else nn.Sequential(*parts)


@st.composite
def cut_models(draw: st.DrawFn) -> tuple[nn.Module, list[str]]:
    """Draw a nested module, partly tied, and some of its modules as cuts."""
    parts = draw(st.lists(models(), min_size=2, max_size=4))
    # The last module is never cut after, so something always remains.
    model = nn.Sequential(*parts, nn.Linear(WIDTH, WIDTH))
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    for tied in draw(st.sets(st.integers(1, len(linears) - 1), max_size=2)):
        linears[tied].weight = linears[0].weight
    outer = {str(len(parts))}
    inside = [
        name
        for name, m in model.named_modules()
        if name
        and name not in outer
        and not isinstance(m, nn.ModuleList)
        # Modules inside a block cannot be traced.
        and not any(isinstance(model.get_submodule(p), Block) for p in _holders(name))
    ]
    return model, draw(st.lists(st.sampled_from(inside), min_size=1, max_size=4, unique=True))


def _holders(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def _without_shared_ends(model: nn.Module, cuts: list[str]) -> list[str]:
    """Drop cuts at the end of a chain that is also cut after: one position, one cut."""
    ends: dict[str, str] = {}
    for path in sorted(cuts, key=len):
        end = path
        while isinstance(inner := model.get_submodule(end), nn.Sequential):
            end = f"{end}.{len(inner) - 1}"
        ends.setdefault(end, path)
    return list(ends.values())


@settings(max_examples=40, deadline=None)
@given(cut_models(), st.integers(0, 10))
def test_stages_of_nested_models_compute_and_train_as_the_whole(
    case: tuple[nn.Module, list[str]], seed: int
) -> None:
    model, paths = case
    cuts = _without_shared_ends(model, paths)
    torch.manual_seed(seed)
    x = torch.randn(2, WIDTH)
    split = generate_pipeline_partition(model, cuts)
    chain = chain_stages(split)
    assert len(chain.stages) == len(cuts) + 1
    assert_links(chain)
    assert_same(split(x), model(x))
    assert_same(chain(x), model(x))
    assert_same_gradients(model, chain(x), model(x))
    original = dict(model.named_parameters(remove_duplicate=False))
    for stage in chain.stages:
        assert all(original[n] is p for n, p in stage.module.named_parameters())
    # The same values cross, counted on the split and in the chain.
    live = analyze_pipeline_module(split)[2]
    assert [len(live[s.index]) for s in chain.stages] == [len(s.inputs) for s in chain.stages]
    for weight, uses in analyze_tie_weights(split, True).items():
        assert {stage for _, stage in uses} == {
            s.index for s in chain.stages if any(p is weight for p in s.module.parameters())
        }


class _Graph:
    """Additions, sines, halves and sizes, each in a stage such that no read goes back."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.graph = fx.Graph()
        self.values = [self.graph.placeholder(f"in{i}") for i in range(draw(st.integers(1, 3)))]
        self.numbers: list[fx.Node] = []
        self.stage = dict.fromkeys(self.values, 0)
        for _ in range(draw(st.integers(1, 12))):
            self._add()
        returned = draw(
            st.lists(st.sampled_from([*self.values, *self.numbers, None, 7]), max_size=4)
        )
        self.graph.output({"first": self.values[-1], "rest": returned})
        self.module = fx.GraphModule(nn.Module(), self.graph)

    def _add(self) -> None:
        a, b = (self.draw(st.sampled_from(self.values)) for _ in range(2))
        match self.draw(st.sampled_from(["add", "sin", "halves", "size", "scale"])):
            case "add":
                self.values.append(self._call(torch.add, a, b))
            case "sin":
                self.values.append(self._call(torch.sin, a))
            case "size":
                self.numbers.append(self._call(getattr, a, "ndim"))
            case "scale" if self.numbers:
                number = self.draw(st.sampled_from(self.numbers))
                doubled = self._call(operator.mul, number, 2)
                self.values.append(self._call(torch.mul, a, doubled))
            case _:
                halves = self._call(torch.chunk, a, 2, -1)
                items = [self._call(operator.getitem, halves, item) for item in (0, 1)]
                self.values.extend(self._call(torch.cat, [item, item], -1) for item in items)

    def _call(self, function: Callable[..., Any], *args: Any) -> fx.Node:  # noqa: ANN401
        node = self.graph.call_function(function, args)
        later = self.draw(st.integers(0, 2))
        self.stage[node] = later + max(self.stage[n] for n in node.all_input_nodes)
        return node


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_chains_of_random_graphs_compute_the_same(data: Any) -> None:  # noqa: ANN401
    random_graph = _Graph(data.draw)
    module, stage_of = (
        random_graph.module,
        {n.name: stage for n, stage in random_graph.stage.items()},
    )
    for node in module.graph.find_nodes(op="placeholder"):
        del stage_of[node.name]
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4) for _ in module.graph.find_nodes(op="placeholder")]
    used = {stage: rank for rank, stage in enumerate(sorted(set(stage_of.values())))}
    split = split_module(module, module, lambda n: used[stage_of[n.name]], keep_original_order=True)
    chain = chain_stages(split)
    assert len(chain.stages) == len(used)
    assert_links(chain)
    assert_same(chain(*inputs), module(*inputs))
    values = chain.flat_inputs(inputs)
    for stage in chain.stages:
        values = stage.module(*values)
        assert all(isinstance(value, Tensor) for value in values)
