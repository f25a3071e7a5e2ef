"""Small ATen graphs, traced from functions of tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from fxpart.capture.batch_dim.analyze import BatchDimReport, analyze_batch_dims
from fxpart.capture.batch_dim.layout import Layout


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """Return the function as a graph; placeholders are named x0, x1, ..."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    for number, node in enumerate(module.graph.find_nodes(op="placeholder")):
        node.name = node.target = f"x{number}"
    module.recompile()
    return module


def answered(
    function: Callable[..., Any], *inputs: Tensor, **dims: int
) -> tuple[list[Layout], BatchDimReport]:
    """Return the layouts of the function's results, and the whole report."""
    report = analyze_batch_dims(traced(function, *inputs), dims or {"x0": 0})
    return [report.of(name).layouts[0] for name in report.outputs], report


def dims_of(function: Callable[..., Any], *inputs: Tensor, **dims: int) -> list[int]:
    """Return the dimension, -1 or -2 of each result of the function."""
    return [layout.dim for layout in answered(function, *inputs, **dims)[0]]


class Calls(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:  # noqa: ANN401 - whatever the function returns
        """Call the function."""
        return self.function(*inputs)


def exported(function: Callable[..., Any], *inputs: Tensor) -> ExportedProgram:
    """Return the function exported with a symbolic batch as first dimension of each input."""
    batch = Dim("batch", min=2, max=64)
    shapes = (tuple({0: batch} for _ in inputs),)
    return torch.export.export(Calls(function), inputs, dynamic_shapes=shapes, strict=False)
