"""Time to split a large graph into submodules, torch's split_module and ours in one run.

Two times each: the split alone, and including the generated code of every submodule. Ours generates
code when a submodule is first run or read, torch's at once (and twice: for each submodule when it
is created, and again with the parent module). The results of both are compared.

    python -m benchmarks.split_cut [operators] [repeats]
"""

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.split_module import split_module as torch_split

from benchmarks.text_table import table
from fxpart.torch_compat.split_module import split_module

__all__ = ["CutTimes", "children", "compare_cuts", "long_graph"]

_Split = Callable[..., GraphModule]
_FUNCTIONS = (torch.maximum, torch.atan2, torch.minimum, torch.atan2)
"""Functions that do not grow without bound in a long chain."""
_MAX_DISTANCE = 40
"""Largest distance in operators between a value and its reader."""


@dataclass(frozen=True, slots=True)
class CutTimes:
    """Medians over the repeats."""

    torch_s: float
    ours_s: float
    ours_with_code_s: float
    """Ours, including the code of all submodules."""


def long_graph(operators: int, seed: int = 0) -> GraphModule:
    """Return a graph of functions, each of the previous one and another close to it."""
    rng, graph = random.Random(seed), Graph()
    values = [graph.placeholder("x")]
    for index in range(operators):
        other = values[-rng.randint(1, min(len(values), _MAX_DISTANCE))]
        function = _FUNCTIONS[index % len(_FUNCTIONS)]
        values.append(graph.call_function(function, (values[-1], other)))
    graph.output(values[-1])
    return GraphModule(nn.Module(), graph)


def children(module: GraphModule) -> dict[str, GraphModule]:
    """Return the submodules of a split module by name."""
    return {name: m for name, m in module.named_children() if isinstance(m, GraphModule)}


def _timed(split: _Split, module: GraphModule, part_of: dict[Node, int]) -> tuple[float, float]:
    """Return the seconds of the split alone, and including all code."""
    gc.collect()
    begin = time.perf_counter()
    cut = split(module, module, part_of.__getitem__)
    split_end = time.perf_counter()
    for child in children(cut).values():
        _ = child.code
    return split_end - begin, time.perf_counter() - begin


def _same(module: GraphModule, part_of: dict[Node, int], x: Tensor) -> bool:
    """Return whether both splits have the same code and compute the same as `module`."""
    theirs = torch_split(module, module, part_of.__getitem__)
    ours = split_module(module, module, part_of.__getitem__)
    our_parts, torch_parts = children(ours), children(theirs)
    return (
        ours.code == theirs.code
        and our_parts.keys() == torch_parts.keys()
        and all(our_parts[name].code == torch_parts[name].code for name in torch_parts)
        and torch.equal(ours(x), module(x))
        and torch.equal(theirs(x), module(x))
    )


def compare_cuts(operators: int, partitions: int, repeats: int) -> CutTimes:
    """Return the times of both, alternating, for partitions of equal length along the graph.

    Raises:
        AssertionError: if the two splits differ.

    """
    module = long_graph(operators)
    ops = list(module.graph.nodes)[1:-1]
    part_of = {op: index * partitions // len(ops) for index, op in enumerate(ops)}
    assert _same(module, part_of, torch.linspace(-1.0, 1.0, 4))
    theirs, ours = [], []
    for _ in range(repeats):
        theirs.append(_timed(torch_split, module, part_of))
        ours.append(_timed(split_module, module, part_of))
    return CutTimes(
        statistics.median(total for _, total in theirs),
        statistics.median(cut for cut, _ in ours),
        statistics.median(total for _, total in ours),
    )


def main(arguments: list[str]) -> None:
    """Print one row for each number of partitions."""
    operators = int(arguments[0]) if arguments else 24_000
    repeats = int(arguments[1]) if len(arguments) > 1 else 5
    rows = []
    for partitions in (8, 200):
        times = compare_cuts(operators, partitions, repeats)
        rows.append(
            [
                str(partitions),
                f"{times.torch_s:.2f}",
                f"{times.ours_s:.2f}",
                f"{times.torch_s / times.ours_s:.1f}",
                f"{times.ours_with_code_s:.2f}",
                f"{times.torch_s / times.ours_with_code_s:.1f}",
            ]
        )
    heads = [
        "partitions", "torch s", "fxpart s", "times faster", "fxpart with code s", "times faster",
    ]  # fmt: skip
    print(f"{operators} operators, median of {repeats}, outputs and code equal")
    print(table(heads, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
