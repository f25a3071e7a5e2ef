"""Small modules that are traced in the tests, some of them random."""

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxpart.torch_compat.partitioner import get_size_of_all_nodes

WIDTH = 4
ROWS = 8

Step = Callable[[list[Tensor], Tensor], Tensor]


class RandomModel(nn.Module):
    """A chain of random steps; each reads earlier results, inputs, weights or a table."""

    def __init__(self, seed: int, steps: int, embeddings: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.rng = random.Random(seed)
        self.kinds = ["linear", "again", "add", "relu", "cat", "scale", "kwargs", "method"]
        self.kinds += ["embedding"] * (4 if embeddings else 0)
        self.plan = [self._step(index) for index in range(steps)]
        self.two_outputs = self.rng.random() < 0.3

    def _step(self, index: int) -> tuple[str, int, float, float]:
        """Create the modules of step `index`; return its kind and what it reads."""
        kind = self.rng.choice(self.kinds) if index else "linear"
        if kind == "linear":
            self.add_module(f"linear_{index}", nn.Linear(WIDTH, WIDTH, self.rng.random() < 0.5))
        elif kind == "cat":
            self.add_module(f"join_{index}", nn.Linear(2 * WIDTH, WIDTH))
        elif kind == "embedding":
            self.add_module(f"table_{index}", nn.Embedding(self.rng.randint(5, 900), WIDTH))
        elif kind == "scale":
            name, shape = f"scale_{index % 3}", self.rng.choice([(WIDTH,), (ROWS, WIDTH)])
            if not hasattr(self, name):
                self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        return kind, index, self.rng.random(), self.rng.random()

    def forward(self, x: Tensor, ids: Tensor, y: Tensor, unused: Tensor) -> object:
        del unused
        values = [x, y]
        for kind, index, first, second in self.plan:
            # Usually the newest results, so that graphs are deep and wide in turn.
            a = values[-1 - int(first * first * len(values))]
            b = values[-1 - int(second * len(values))]
            values.append(self._carry_out(kind, index, a, b, ids))
        return (values[-1], values[-2]) if self.two_outputs else values[-1]

    def _carry_out(self, kind: str, index: int, a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
        steps: dict[str, Callable[[], Tensor]] = {
            "linear": lambda: self.get_submodule(f"linear_{index}")(a),
            "again": lambda: self.get_submodule("linear_0")(a),
            "add": lambda: a + b,
            "relu": lambda: torch.relu(a),
            "cat": lambda: self.get_submodule(f"join_{index}")(torch.cat([a, b], dim=1)),
            "scale": lambda: getattr(self, f"scale_{index % 3}") * a,
            "kwargs": lambda: torch.add(input=a, other=b),
            "method": lambda: a.sub(b),
            "embedding": lambda: self.get_submodule(f"table_{index}")(ids),
        }
        return steps[kind]()


def random_inputs() -> list[Tensor]:
    """Return inputs of a `RandomModel`."""
    x, y, unused = (torch.randn(ROWS, WIDTH) for _ in range(3))
    return [x, torch.randint(0, 5, (ROWS,)), y, unused]


def traced(model: nn.Module, inputs: list[Tensor]) -> GraphModule:
    """Return the traced module with the sizes of its nodes."""
    graph_module = symbolic_trace(model)
    get_size_of_all_nodes(graph_module, inputs)
    return graph_module


def random_graph(
    seed: int, steps: int = 14, embeddings: bool = False
) -> tuple[RandomModel, GraphModule, list[Tensor]]:
    """Return a random module, its graph, and inputs."""
    model = RandomModel(seed, steps, embeddings)
    inputs = random_inputs()
    return model, traced(model, inputs), inputs
