"""A case small enough to run in processes in a test, and one with a wrong report."""

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.batch_dim_cases import Case
from fxpart.capture.batch_dim.analyze import analyze_batch_dims
from fxpart.capture.batch_dim.layout import Layout
from tests.capture.batch_dim.traced import exported

BATCH = 6


def _model(x: Tensor) -> tuple[Tensor, ...]:
    weight = torch.arange(10.0).view(2, 5) / 7
    hidden = (x @ weight.t()).tanh()
    centred = hidden - hidden.mean(0)
    twice = torch.cat([centred, hidden])
    chosen = x[torch.arange(x.shape[0]), 2]
    return twice, hidden.t() @ x, hidden.amax(0), chosen, hidden.mean() + 1, x.cumsum(0)


def tiny() -> Case:
    """Return a graph with a value of every kind."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, 5)
    program = exported(_model, x)
    report = analyze_batch_dims(program)
    module = program.graph_module
    names = [spec.arg.name for spec in program.graph_signature.input_specs]
    values = [program.constants.get(str(s.target), x) for s in program.graph_signature.input_specs]
    dims = [0 if tensor is x else None for tensor in values]
    assert len(names) == len(values)
    return Case(module, module, report, values, dims)


def lying() -> Case:
    """Return the same case with every answer changed."""
    case = tiny()
    nodes = tuple(
        replace(node, layouts=tuple(_lie(layout) for layout in node.layouts))
        for node in case.report.nodes
    )
    return replace(case, report=replace(case.report, nodes=nodes))


def _lie(layout: Layout) -> Layout:
    if layout.is_partial:
        return replace(layout, dim=-1)
    if layout.is_split:
        return replace(layout, dim=-2, outer=1)
    return replace(layout, dim=0, scale=layout.scale + 1)
