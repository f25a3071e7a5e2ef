"""CPU time of the memory profile by graph size, ours and torch's in one run.

Three graphs: a chain of operators, views of views, and one tuple with every item read. Torch
visits all items of a tuple for each of them, so it is not run on the largest. The graphs pretend to
be on a GPU, which is not needed: torch's estimator ignores CPU tensors.

    python -m benchmarks.memory_profile [nodes] [repeats]
"""

import gc
import operator
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._inductor.fx_passes.memory_estimator as theirs
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from benchmarks.text_table import table
from fxpart.torch_compat.memory import MemoryTracker, build_memory_profile

__all__ = ["SHAPES", "ProfileTimes", "compare_profiles"]

_MAX_ITEMS = 1000
"""Torch takes about a second for a tuple of this size, and grows quadratically."""


@dataclass(frozen=True, slots=True)
class ProfileTimes:
    """Median CPU seconds over the repeats, which depend less on the load of the machine."""

    profile_s: float
    tracker_s: float
    """Creating a `MemoryTracker` and scheduling all nodes in graph order."""
    torch_s: float | None
    """None if torch was not run."""


class _Drawing:
    """A graph of nodes with example values of 16 bytes on a GPU."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.last = self.graph.placeholder("x")
        self.last.meta["val"] = self.fresh()

    def fresh(self) -> FakeTensor:
        """Return a tensor with its own storage."""
        return FakeTensor(self.mode, torch.empty(4, device="meta"), torch.device("cuda:0"))

    def call(self, target: Callable[..., object], *args: object, val: object) -> fx.Node:
        """Add a call that returns `val`."""
        self.last = self.graph.create_node("call_function", target, args)  # type: ignore[arg-type]
        self.last.meta["val"] = val
        return self.last


def _row(nodes: int) -> fx.Graph:
    drawing = _Drawing()
    for _ in range(nodes):
        drawing.call(torch.ops.aten.relu.default, drawing.last, val=drawing.fresh())
    drawing.graph.output(drawing.last)
    return drawing.graph


def _views(nodes: int) -> fx.Graph:
    drawing = _Drawing()
    tensor = drawing.last.meta["val"]
    for _ in range(nodes):
        drawing.call(torch.ops.aten.view.default, drawing.last, [4], val=tensor)
    drawing.graph.output(drawing.last)
    return drawing.graph


def _items(nodes: int) -> fx.Graph:
    drawing = _Drawing()
    tensors = [drawing.fresh() for _ in range(nodes)]
    whole = drawing.call(torch._foreach_neg, [drawing.last] * nodes, val=tensors)
    items = [
        drawing.call(operator.getitem, whole, index, val=tensor)
        for index, tensor in enumerate(tensors)
    ]
    drawing.graph.output(items)
    return drawing.graph


SHAPES: dict[str, Callable[[int], fx.Graph]] = {
    "operators in a row": _row,
    "views of views": _views,
    "items of a tuple": _items,
}
"""Functions that build a graph of about the given number of nodes."""


def _seconds(call: Callable[[], object]) -> float:
    gc.collect()
    begin = time.process_time()
    call()
    return time.process_time() - begin


def _releasable(node: fx.Node) -> bool:
    return node.op != "placeholder"


def _track(graph: fx.Graph) -> int:
    """Return the peak memory of the graph in its own order."""
    tracker = MemoryTracker(graph, _releasable)
    for node in graph.nodes:
        tracker.schedule_node(node)
    return tracker.peak_memory


def compare_profiles(shape: str, nodes: int, repeats: int) -> ProfileTimes:
    """Return the times for a graph of that shape, with ours and torch's alternating.

    Raises:
        SystemExit: if the two profiles or the tracker's peak differ.

    """
    graph = SHAPES[shape](nodes)
    with_torch = shape != "items of a tuple" or nodes <= _MAX_ITEMS
    profile = build_memory_profile(graph, _releasable)
    if _track(graph) != max(profile):
        raise SystemExit(f"{shape}, {nodes} nodes: the tracker's peak differs")
    if with_torch and theirs.build_memory_profile(graph, _releasable) != profile:
        raise SystemExit(f"{shape}, {nodes} nodes: the profiles differ")
    our_s, tracker_s, torch_s = list[float](), list[float](), list[float]()
    for _ in range(repeats):
        our_s.append(_seconds(lambda: build_memory_profile(graph, _releasable)))
        tracker_s.append(_seconds(lambda: _track(graph)))
        if with_torch:
            torch_s.append(_seconds(lambda: theirs.build_memory_profile(graph, _releasable)))
    median = statistics.median
    return ProfileTimes(median(our_s), median(tracker_s), median(torch_s) if torch_s else None)


def main(arguments: list[str]) -> None:
    """Print a row for each shape and size."""
    largest = int(arguments[0]) if arguments else 100_000
    repeats = int(arguments[1]) if len(arguments) > 1 else 3
    rows = []
    for shape in SHAPES:
        for nodes in (largest // 100, largest // 10, largest):
            times = compare_profiles(shape, nodes, repeats)
            torch_s = times.torch_s
            rows.append(
                [
                    shape,
                    f"{nodes:,}",
                    f"{times.profile_s:.3f}",
                    f"{times.profile_s / nodes * 1e6:.1f}",
                    f"{times.tracker_s:.3f}",
                    "-" if torch_s is None else f"{torch_s:.3f}",
                    "-" if torch_s is None else f"{torch_s / times.profile_s:.1f}",
                ]
            )
    heads = ["graph", "nodes", "profile s", "us a node", "tracker s", "torch s", "torch / ours"]
    print(table(heads, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
