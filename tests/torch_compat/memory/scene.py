"""Small graphs of ATen calls on tensors without memory, by hand or from a seed."""

import operator
import random
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

aten = torch.ops.aten


def value(argument: Any) -> Any:  # noqa: ANN401 - of a node, what it returns
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


class Drawing:
    """A graph under construction; each call runs on tensors without memory to get its result."""

    def __init__(self, device: str = "cpu") -> None:
        self.mode = FakeTensorMode()
        self.graph = fx.Graph()
        self.device = device

    def input(self, name: str, *shape: int) -> fx.Node:
        """Add an input of float32 numbers."""
        with self.mode:
            return self.given(name, torch.empty(shape, device=self.device))

    def given(self, name: str, tensor: object) -> fx.Node:
        """Add an input whose example value is `tensor`."""
        node = self.graph.placeholder(name)
        node.meta["val"] = tensor
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:  # noqa: ANN401
        """Add a call."""
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            node.meta["val"] = target(*map_arg(args, value), **map_arg(kwargs, value))
        return node

    def done(self, *results: fx.Node) -> fx.Graph:
        """Return the graph, which returns `results`."""
        self.graph.output(results)
        return self.graph


def never(_: fx.Node) -> bool:
    return False


def always(_: fx.Node) -> bool:
    return True


def no_primal(node: fx.Node) -> bool:
    return not node.name.startswith("primals")


def random_drawing(
    seed: int, *, device: str = "cpu", operators: int = 25, unread: bool = True
) -> fx.Graph:
    """Return a graph with views, tuples, in-place writes and, if `unread`, unread results.

    Its values are float32 of at most 12 numbers.
    """
    rng, drawing = random.Random(seed), Drawing(device)
    values = [drawing.input(name, 4, 3) for name in ("primals_1", "x", "y")]
    for _ in range(operators):
        values.append(_operator(drawing, rng, values))
    idle = [node for node in drawing.graph.nodes if not node.users and node.op == "call_function"]
    chosen = rng.sample(values, 2) if unread else idle
    return drawing.done(*dict.fromkeys(chosen))


def _operator(drawing: Drawing, rng: random.Random, values: list[fx.Node]) -> fx.Node:
    a, b = rng.choice(values[-8:]), rng.choice(values)
    call, result = drawing.call, a
    match rng.randrange(8):
        case 0:
            result = call(aten.add.Tensor, a, a)
        case 1:
            result = call(aten.reshape.default, a, [-1])
        case 2:
            result = call(aten.slice.Tensor, a, 0, 0, max(1, len(value(a)) // 2))
        case 3:
            parts = call(aten.split.Tensor, a, 2)
            result = call(operator.getitem, parts, rng.randrange(len(parts.meta["val"])))
        case 4:
            result = call(aten.relu_.default, call(aten.neg.default, a))
        case 5:
            result = call(operator.getitem, call(aten.max.dim, a, 0, True), 0)
        case 6:
            flat = [call(aten.reshape.default, node, [-1]) for node in (a, b)]
            result = call(aten.cat.default, [call(aten.slice.Tensor, n, 0, 0, 5) for n in flat])
        case _:
            result = call(aten.fill_.Scalar, call(aten.clone.default, b), 2.0)
    return result
