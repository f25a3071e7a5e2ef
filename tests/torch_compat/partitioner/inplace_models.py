"""Small modules that write to tensors in place, some of them random."""

# Calling a module returns Any, and so would every forward here.
# mypy: disable-error-code="no-any-return"

import operator
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from torch import Tensor, nn

WIDTH, ROWS = 8, 4

Forward = Callable[["Layers", Tensor], Any]


class Layers(nn.Module):
    """Three linear layers, a buffer and a weight, with the given forward."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.5)
        self.flat, self.table = nn.Flatten(), nn.Embedding(9, WIDTH, max_norm=1e-3)
        self.state: Tensor
        self.register_buffer("state", torch.ones(WIDTH))
        self.weight = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.chosen = forward
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401 - as the forward says
        return self.chosen(self, x)


def _view_of_the_first_half(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, :4].add_(1.0)
    return m.b(y)


def _plain(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    y.add_(1.0)
    return m.b(y)


def _early_reader(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    before = m.c(y)
    after = m.b(y.mul_(2.0))
    return before + after


def _reader_of_a_view(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    view = y.view(-1, 2)
    y.sub_(3.0)
    return m.b(y) * view.sum()


def _two_writes(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    y.add_(1.0)
    z = m.c(y)
    y.mul_(0.5)
    return m.b(y) + z


def _output_under_the_old_name(m: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.a(x)
    z = m.b(y)
    y.add_(z)
    return y, m.c(z)


def _chunks(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    left, right = torch.chunk(y, 2, dim=1)
    left.add_(right)
    torch.relu_(right)
    return m.b(y)


def _input_is_written(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    x.add_(1.0)
    return m.b(x) + m.c(y)


def _buffer_is_written(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x) * m.state
    m.state.add_(1.0)
    return m.b(y) + m.c(x * m.state)


def _weight_of_a_layer_is_written(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    with torch.no_grad():
        m.b.weight.mul_(0.5)
    return m.b(y)


def _inplace_argument(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    F.relu(y, inplace=True)
    return m.b(y)


def _inplace_by_place(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    F.leaky_relu(y, 0.1, True)
    return m.b(y)


def _inplace_module(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    z = m.c(m.flat(y))
    m.relu(m.drop(y))
    return m.b(y) + z


def _out(m: Layers, x: Tensor) -> Tensor:
    y, z = m.a(x), m.c(x)
    torch.mul(z, 2.0, out=y)
    return m.b(y)


def iadd(a: Tensor, b: Tensor) -> Tensor:
    """Stand for ``operator.iadd``, which tracing would replace by a sum."""
    a += b
    return a


def setitem(a: Tensor, index: int, value: float) -> None:
    """Stand for ``operator.setitem``, which tracing refuses."""
    a[index] = value


def perhaps_the_same(a: Tensor) -> Tensor:
    """Return the operand, which the graph does not show."""
    return a


for name in ("iadd", "setitem", "perhaps_the_same"):
    torch.fx.wrap(name)

STANDS_FOR: dict[object, Callable[..., Any]] = {iadd: operator.iadd, setitem: operator.setitem}


def _augmented(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    iadd(y, m.c(x))
    return m.b(y)


def _set_item(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    setitem(y, 0, 1.0)
    return m.b(y)


def _through_a_function_that_nobody_knows(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    perhaps_the_same(y).add_(1.0)
    return m.b(y)


def _renormalised_table(m: Layers, x: Tensor) -> Tensor:
    ids = m.a(x).argmax(1)
    before = m.table.weight.sum()
    rows = m.table(ids)
    return m.b(rows) + before + m.table.weight.sum()


def _no_grad(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    with torch.no_grad():
        y.detach().add_(1.0)
    return m.b(y)


def _asked_for_its_size(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    z = m.relu(y)
    return m.b(z) * y.size(0)


MODELS: dict[str, Forward] = {
    function.__name__.lstrip("_"): function
    for function in (
        _view_of_the_first_half,
        _plain,
        _early_reader,
        _reader_of_a_view,
        _two_writes,
        _output_under_the_old_name,
        _chunks,
        _input_is_written,
        _buffer_is_written,
        _weight_of_a_layer_is_written,
        _inplace_argument,
        _inplace_by_place,
        _inplace_module,
        _out,
        _augmented,
        _set_item,
        _through_a_function_that_nobody_knows,
        _renormalised_table,
        _no_grad,
        _asked_for_its_size,
    )
}


class RandomWrites(nn.Module):
    """Random steps: layers, views, writes to any earlier result, and readers of old names."""

    def __init__(self, seed: int, steps: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(steps))
        self.state: Tensor
        self.register_buffer("state", torch.randn(ROWS, WIDTH))
        kinds = ["linear"] * 4 + ["add", "relu_", "add_", "half", "view", "mul_", "state", "input"]
        drawn = ["linear", *(rng.choice(kinds) for _ in range(steps - 1))]
        self.requires_grad_(False)
        self.plan = [(kind, rng.random(), rng.random()) for kind in drawn]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values = [x.clone()]
        for index, (kind, first, second) in enumerate(self.plan):
            a = values[-1 - int(first * first * len(values))]
            b = values[-1 - int(second * len(values))]
            result = self._step(index, kind, a, b, x)
            if result is not None:
                values.append(result)
        return values[-1], values[-1 - len(values) // 2]

    def _step(self, index: int, kind: str, a: Tensor, b: Tensor, x: Tensor) -> Tensor | None:
        steps: dict[str, Callable[[], Tensor | None]] = {
            "linear": lambda: self.layers[index](a),
            "add": lambda: a + b,
            "relu_": lambda: torch.relu_(a),
            "half": lambda: _only(a[:, :4].neg_()),
            "view": lambda: a.view(ROWS, WIDTH),
            "add_": lambda: _only(a.add_(b.detach().clone())),
            "mul_": lambda: a.mul_(0.5),
            "state": lambda: _only(self.state.add_(1.0)) if index % 2 else a + self.state,
            "input": lambda: _only(x.mul_(0.5)) if index % 2 else a + x,
        }
        return steps[kind]()


def _only(written: Tensor) -> None:
    """Write, and read only the old name from there on."""
    del written
