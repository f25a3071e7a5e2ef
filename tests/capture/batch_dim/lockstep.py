"""Several processes of one graph, run node by node in this process, and compared with the whole."""

from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxpart.capture.batch_dim.analyze import BatchDimReport, NodeBatchDim
from fxpart.capture.batch_dim.layout import Layout


def _joined(parts: list[Tensor], layout: Layout) -> Tensor:
    """Return the parts joined according to their layout."""
    if layout.is_split:
        rounds = [part.movedim(layout.dim, 0).tensor_split(int(layout.outer)) for part in parts]
        rows = [piece for turn in zip(*rounds, strict=True) for piece in turn]
        whole = torch.cat(rows).movedim(0, layout.dim)
    elif layout.is_partial:
        stacked = torch.stack(parts)
        if layout.reduction == "sum":
            whole = stacked.sum(0)
        else:
            whole = stacked.amax(0) if layout.reduction == "max" else stacked.amin(0)
    else:
        assert all(torch.equal(part, parts[0]) for part in parts), "copies differ"
        whole = parts[0]
    return whole / len(parts) ** layout.scale if layout.scale else whole


class _Process(fx.Interpreter):
    """Runs a graph one node at a time."""

    def start(self, inputs: list[Tensor]) -> None:
        """Take the inputs."""
        self.args_iter = iter(inputs)

    def step(self, node: fx.Node) -> Any:  # noqa: ANN401 - what a node makes is anything
        """Run one node and return a copy of its result."""
        self.env[node] = value = self.run_node(node)
        return value.clone() if isinstance(value, Tensor) else value


def disagreements(
    graph: fx.GraphModule, report: BatchDimReport, inputs: list[Tensor], dims: list[int | None]
) -> list[str]:
    """Return a line for each tensor of the graph that the parts of two processes do not reproduce.

    The graph must accept batches of any size. Results that differ by design are skipped.
    """
    parts = [
        [x if d is None else x.chunk(2, d)[rank].clone() for x, d in zip(inputs, dims, strict=True)]
        for rank in range(2)
    ]
    processes = [_Process(graph) for _ in range(3)]
    for process, values in zip(processes, [inputs, *parts], strict=True):
        process.start(values)
    others = processes[1:]
    different = []
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        answer = report.of(node.name)
        for operand in node.all_input_nodes:
            if operand.name in answer.all_reduced:
                layout = report.of(operand.name).layouts[0]
                reduced = _joined([process.env[operand] for process in others], layout)
                for process in others:
                    process.env[operand] = reduced.clone()
        expected, *outputs = (process.step(node) for process in processes)
        if isinstance(expected, Tensor) and not answer.layouts[0].differs:
            different += _compared(answer, outputs, expected)
    return different


def in_numbers(report: BatchDimReport, sizes: dict[sympy.Symbol, int]) -> BatchDimReport:
    """Return the report with its symbols replaced by numbers."""
    nodes = tuple(
        replace(
            node,
            layouts=tuple(
                replace(x, outer=int(sympy.sympify(x.outer).subs(sizes))) for x in node.layouts
            ),
        )
        for node in report.nodes
    )
    return replace(report, nodes=nodes)


def _compared(answer: NodeBatchDim, outputs: list[Tensor], expected: Tensor) -> list[str]:
    layout = answer.layouts[0]
    joined = _joined(outputs, layout)
    where = f"{answer.name} = {answer.target}: {layout}"
    if joined.shape != expected.shape:
        return [f"{where}: {tuple(joined.shape)} is not {tuple(expected.shape)}"]
    near = torch.allclose(joined.double(), expected.double(), rtol=1e-6, atol=1e-6)
    return [] if near else [where]
