"""On random graphs every answer agrees with processes that each have a part of the batch."""

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxpart.capture.batch_dim.analyze import analyze_batch_dims
from tests.capture.batch_dim.lockstep import disagreements, in_numbers

BATCH, WIDTH = 6, 5
ONE: list[Callable[[Tensor], Tensor]] = [
    torch.neg,
    torch.tanh,
    lambda x: x * 0.5,
    lambda x: x / 3,
    lambda x: x + 1,
    lambda x: x.sum(),
    lambda x: x.mean(),
    lambda x: x.sum(0) if x.dim() else x,
    lambda x: x.mean(0) if x.dim() else x,
    lambda x: x.mean(-1, keepdim=True) if x.dim() else x,
    lambda x: x.amax(0) if x.dim() else x,
    lambda x: x.amin(-1) if x.dim() else x,
    lambda x: x.softmax(-1) if x.dim() else x,
    lambda x: x.reshape(-1),
    lambda x: x.unsqueeze(0),
    lambda x: x.transpose(0, -1) if x.dim() else x,
    lambda x: x.flip(-1) if x.dim() else x,
    lambda x: x.repeat(2, *[1] * (x.dim() - 1)) if x.dim() else x,
    lambda x: x.cumsum(-1) if x.dim() else x,
    lambda x: x.square().clamp(max=1.0),
    lambda x: torch.where(x > 0.1, x, 0.0),
    lambda x: torch.ones_like(x) * 0.3,
    lambda x: torch.cat([x, x]) if x.dim() else x,
    lambda x: x.to(torch.float32).to(torch.float64),
]
TWO: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.sub,
    torch.mul,
    lambda x, y: x @ y if x.dim() and y.dim() else x * y,
    torch.maximum,
    lambda x, y: x.transpose(0, -1) @ y if x.dim() and y.dim() else x * y,
    lambda x, y: torch.stack([x, y]),
    lambda x, y: torch.where(y > 0, x, y),
    torch.nn.functional.linear,
]
STEPS = st.lists(
    st.tuples(st.integers(0, len(ONE) + len(TWO) - 1), st.integers(0, 99), st.integers(0, 99)),
    min_size=1,
    max_size=9,
)


def _program(steps: list[tuple[int, int, int]]) -> Callable[..., list[Tensor]]:
    def run(*inputs: Tensor) -> list[Tensor]:
        made = list(inputs)
        for choice, first, second in steps:
            x, y = made[-1 - first % len(made)], made[-1 - second % len(made)]
            try:
                new = ONE[choice](x) if choice < len(ONE) else TWO[choice - len(ONE)](x, y)
            except (RuntimeError, IndexError):
                # These two do not fit together.
                continue
            if new.numel() < 4000:
                made.append(new)
        return made[len(inputs) :]

    return run


@given(STEPS)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_parts_reproduce_the_whole(steps: list[tuple[int, int, int]]) -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(BATCH, WIDTH, dtype=torch.float64),
        torch.randn(BATCH, WIDTH, WIDTH, dtype=torch.float64),
        torch.randn(WIDTH, WIDTH, dtype=torch.float64),
        torch.randn(WIDTH, dtype=torch.float64),
    ]
    graph = make_fx(_program(steps), tracing_mode="symbolic")(*inputs)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    names = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    report = analyze_batch_dims(graph, {names[0]: 0, names[1]: 0})
    placeholders = graph.graph.find_nodes(op="placeholder")
    shapes = [
        (node.meta["val"].shape, x.shape) for node, x in zip(placeholders, inputs, strict=True)
    ]
    numbers = {
        symbol.node.expr: size
        for symbols, sizes in shapes
        for symbol, size in zip(symbols, sizes, strict=True)
    }
    report = in_numbers(report, numbers)
    assert disagreements(graph, report, inputs, [0, 0, None, None]) == []
