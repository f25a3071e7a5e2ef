"""CPU seconds that the memory profile of a graph takes as it grows, ours and torch's in one run.

Three graphs: operators in a row, views of views, and one tuple of which each item is taken. Torch
goes through all items of a tuple for each of them, so it is not run on the longest. The graphs are
said to lie on a GPU, which nothing here needs: torch's estimator leaves tensors of the CPU out.

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

_MOST_ITEMS = 1000
"""Torch takes about a second for a tuple of as many, and four times that for twice as many."""


@dataclass(frozen=True, slots=True)
class ProfileTimes:
    """Medians over the repeats, in seconds of CPU: what else runs on the machine matters less."""

    profile_s: float
    tracker_s: float
    """A `MemoryTracker` made, and led through the graph in its order."""
    torch_s: float | None
    """None where it was not run."""


class _Drawing:
    """A graph of nodes whose example values are of 16 bytes on a GPU."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.last = self.graph.placeholder("x")
        self.last.meta["val"] = self.fresh()

    def fresh(self) -> FakeTensor:
        """Return a tensor of its own storage."""
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
    taken = [
        drawing.call(operator.getitem, whole, index, val=tensor)
        for index, tensor in enumerate(tensors)
    ]
    drawing.graph.output(taken)
    return drawing.graph


SHAPES: dict[str, Callable[[int], fx.Graph]] = {
    "operators in a row": _row,
    "views of views": _views,
    "items of a tuple": _items,
}
"""What makes a graph of about so many nodes."""


def _seconds(call: Callable[[], object]) -> float:
    gc.collect()
    begin = time.process_time()
    call()
    return time.process_time() - begin


def _releasable(node: fx.Node) -> bool:
    return node.op != "placeholder"


def _track(graph: fx.Graph) -> int:
    """Return the peak of the graph's own order."""
    tracker = MemoryTracker(graph, _releasable)
    for node in graph.nodes:
        tracker.schedule_node(node)
    return tracker.peak_memory


def compare_profiles(shape: str, nodes: int, repeats: int) -> ProfileTimes:
    """Return how long a graph of that shape takes, ours and torch's in turn.

    Raises:
        SystemExit: when the two profiles, or the tracker's peak, differ.

    """
    graph = SHAPES[shape](nodes)
    with_torch = shape != "items of a tuple" or nodes <= _MOST_ITEMS
    profile = build_memory_profile(graph, _releasable)
    if _track(graph) != max(profile):
        raise SystemExit(f"{shape}, {nodes} nodes: the tracker's peak is another")
    if with_torch and theirs.build_memory_profile(graph, _releasable) != profile:
        raise SystemExit(f"{shape}, {nodes} nodes: the profiles differ")
    ours, tracker, torchs = list[float](), list[float](), list[float]()
    for _ in range(repeats):
        ours.append(_seconds(lambda: build_memory_profile(graph, _releasable)))
        tracker.append(_seconds(lambda: _track(graph)))
        if with_torch:
            torchs.append(_seconds(lambda: theirs.build_memory_profile(graph, _releasable)))
    middle = statistics.median
    return ProfileTimes(middle(ours), middle(tracker), middle(torchs) if torchs else None)


def main(arguments: list[str]) -> None:
    """Print a row for each shape and size."""
    most = int(arguments[0]) if arguments else 100_000
    repeats = int(arguments[1]) if len(arguments) > 1 else 3
    rows = []
    for shape in SHAPES:
        for nodes in (most // 100, most // 10, most):
            times = compare_profiles(shape, nodes, repeats)
            torchs = times.torch_s
            rows.append(
                [
                    shape,
                    f"{nodes:,}",
                    f"{times.profile_s:.3f}",
                    f"{times.profile_s / nodes * 1e6:.1f}",
                    f"{times.tracker_s:.3f}",
                    "-" if torchs is None else f"{torchs:.3f}",
                    "-" if torchs is None else f"{torchs / times.profile_s:.1f}",
                ]
            )
    heads = ["graph", "nodes", "profile s", "us a node", "tracker s", "torch s", "torch / ours"]
    print(table(heads, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
