"""Small fx graphs from a seed, with every kind of node."""

import operator
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

__all__ = ["Holder", "by_name", "call_nodes", "inputs", "random_graph", "same"]


class Pair(nn.Module):
    """Returns two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both signs."""
        return x, -x


class Holder(nn.Module):
    """Modules and attributes for random graphs; two of its weights are tied."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.linear = nn.Linear(4, 4)
            self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.pair = Pair()
            self.scale = nn.Parameter(torch.randn(4))
            self.inner = nn.Module()
            self.inner.shift = nn.Parameter(torch.randn(4))
            self.inner.tied = self.scale
            self.register_buffer("mean", torch.randn(4))


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    """Return the two tensors that a random graph takes; a third input has a default."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator)


def call_nodes(module: GraphModule) -> list[Node]:
    """Return the operators of a graph."""
    return [n for n in module.graph.nodes if n.op not in {"placeholder", "get_attr", "output"}]


def by_name(**ids: object) -> Callable[[Node], object]:
    """Return a callback that knows each operator by its name."""
    return lambda node: ids[node.name]


def _operator(graph: Graph, rng: random.Random, values: list[Node], numbers: list[Node]) -> None:
    """Add one operator, and those that unpack its result."""
    a, b = rng.choice(values), rng.choice(values)
    match rng.randrange(11):
        case 0:
            values.append(graph.call_function(operator.add, (a, b)))
        case 1:
            values.append(graph.call_function(torch.sub, (a,), {"other": b, "alpha": 2}))
        case 2:
            values.append(graph.call_method("clamp", (a,), {"min": -1.0, "max": 1.0}))
        case 3:
            values.append(graph.call_module(rng.choice(["linear", "block.0", "block"]), (a,)))
        case 4:
            values.append(
                graph.get_attr(rng.choice(["scale", "inner.shift", "inner.tied", "mean"]))
            )
        case 5:
            halves = graph.call_function(torch.chunk, (a, 2), {"dim": -1})
            items = [graph.call_function(operator.getitem, (halves, i)) for i in (0, 1)]
            values.append(graph.call_function(torch.cat, ([items[1], items[0]],), {"dim": -1}))
        case 6:
            both = graph.call_module("pair", (a,))
            values.append(graph.call_function(operator.getitem, (both, rng.randrange(2))))
        case 7:
            size = graph.call_method("size", (a, -1))
            values.append(graph.call_function(operator.truediv, (b, size)))
        case 8:
            # An in-place write whose result alone is read.
            fresh = graph.call_function(torch.neg, (a,))
            values.append(graph.call_method(rng.choice(["relu_", "sigmoid_"]), (fresh,)))
        case 9:
            values.append(graph.call_function(torch.mul, (a, rng.choice(numbers))))
        case _:
            graph.call_method("tanh", (a,))  # nothing uses it


def random_graph(seed: int, *, operators: int | None = None) -> GraphModule:
    """Return a graph that takes two tensors of shape (2, 4) and a number with a default."""
    rng = random.Random(seed)
    graph = Graph()
    values = [graph.placeholder("x"), graph.placeholder("y")]
    numbers = [graph.placeholder("factor", default_value=1.5)]
    for _ in range(rng.randint(2, 14) if operators is None else operators):
        _operator(graph, rng, values, numbers)
    for index, node in enumerate(graph.nodes):
        node.meta["mark"] = index
    last = rng.sample(values, rng.randint(1, min(4, len(values))))
    nested: list[Any] = [last[0], tuple(last), {"first": last[0], "all": [*last, last[0], 3, None]}]
    graph.output(rng.choice(nested))
    return GraphModule(Holder(seed), graph)


def same(a: object, b: object) -> bool:
    """Return whether two nested results are equal bit for bit."""
    flat, form = torch.utils._pytree.tree_flatten(a)
    other, other_form = torch.utils._pytree.tree_flatten(b)
    return form == other_form and all(
        torch.equal(x, y) if isinstance(x, Tensor) else x == y
        for x, y in zip(flat, other, strict=True)
    )
