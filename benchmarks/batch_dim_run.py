"""Two processes run a graph on their halves of a batch; every value is compared with the whole's.

Each process runs the graph on the whole batch too. Values meet by gloo: split ones are gathered,
partial ones all-reduced. Where the report says that an operator needs a partial value as a whole,
the processes all-reduce it before they go on.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.multiprocessing.spawn import start_processes

from benchmarks.batch_dim_cases import Case
from fxpart.capture.batch_dim.analyze import NodeBatchDim
from fxpart.capture.batch_dim.layout import Layout

__all__ = ["Compared", "compare"]

TIMEOUT = timedelta(seconds=120)
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_UNWRITTEN = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")


@dataclass(frozen=True, slots=True)
class Compared:
    """What came of one value."""

    name: str
    target: str
    dim: int
    outer: str
    scale: int
    by_size: bool
    all_reduced: str
    """Partial operands that were all-reduced before."""
    verdict: str
    """``right``, ``wrong``, or ``not comparable``."""
    note: str
    """Why it is not comparable, or how far off it is."""


Found: TypeAlias = tuple[list[Compared], list[str]]


class _Recorder(fx.Interpreter):
    """Runs a graph, keeps every value as it was made, and all-reduces where asked to."""

    def __init__(self, graph: fx.GraphModule, layouts: dict[str, NodeBatchDim] | None) -> None:
        super().__init__(graph)
        self.layouts = layouts
        self.seen: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401 - what a node returns is anything
        """Run one node and keep a copy of what it makes."""
        answer = None if self.layouts is None else self.layouts.get(n.name)
        for operand in n.all_input_nodes if answer is not None and answer.all_reduced else ():
            if self.layouts is not None and operand.name in answer.all_reduced:  # type: ignore[union-attr]
                layout = self.layouts[operand.name].layouts[0]
                self.env[operand] = _summed(self.env[operand], layout)
        made = super().run_node(n)
        if n.op in {"placeholder", "call_function"}:
            self.seen[n.name] = _copy(made)
        return made


def _copy(made: Any) -> Any:  # noqa: ANN401 - what a node makes is anything
    if isinstance(made, list | tuple):
        return [_copy(item) for item in made]
    return made.detach().clone() if isinstance(made, Tensor) else made


def _summed(part: Tensor, layout: Layout) -> Tensor:
    whole = part.detach().clone()
    if whole.dtype == torch.bool:
        whole = whole.to(torch.uint8)
    dist.all_reduce(whole, op=_OPS[layout.reduction])
    if layout.scale:
        whole = whole / dist.get_world_size() ** layout.scale
    return whole.to(part.dtype)


def _gathered(part: Tensor, layout: Layout) -> Tensor:
    """Return all parts in a row; where the batch comes round several times, round by round."""
    outer = int(layout.outer)
    rows = part.movedim(layout.dim, 0).contiguous()
    split = rows.reshape(outer, -1, *rows.shape[1:]).contiguous()
    parts = [torch.empty_like(split) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, split)
    whole = torch.cat(parts, 1).reshape(-1, *rows.shape[1:]).movedim(0, layout.dim)
    return whole / dist.get_world_size() ** layout.scale if layout.scale else whole


def _joined(part: Tensor, layout: Layout) -> Tensor:
    """Return the parts of all processes joined."""
    if layout.is_split:
        return _gathered(part, layout)
    if layout.is_partial:
        return _summed(part, layout)
    return part / dist.get_world_size() ** layout.scale if layout.scale else part


def _error(part: object, whole: object, layout: Layout) -> str:
    """Return how far off the whole is what the parts make up; nothing if it is not."""
    if not isinstance(part, Tensor) or not isinstance(whole, Tensor):
        if isinstance(part, int | float) and isinstance(whole, int | float):
            same = part == whole * dist.get_world_size() ** layout.scale
            return "" if same else f"{part} of {whole}"
        return "" if (part is None) == (whole is None) else "one is missing"
    if layout.dim >= part.dim():
        return f"it has {part.dim()} dimensions"
    joined = _joined(part, layout)
    if joined.shape != whole.shape:
        return f"shape {tuple(joined.shape)}, not {tuple(whole.shape)}"
    if not whole.is_floating_point():
        return "" if bool((joined.to(whole.dtype) == whole).all()) else "other numbers"
    return _distance(joined, whole)


def _distance(joined: Tensor, whole: Tensor) -> str:
    finite = whole.isfinite()
    if not torch.equal(finite, joined.isfinite()):
        return "not finite where the whole is, or the reverse"
    off = (joined - whole)[finite].abs()
    most = whole[finite].abs()
    if off.numel() == 0 or off.max() <= 1e-6 + 1e-4 * most.max():
        return ""
    return f"off by {off.max():.3g} of {most.max():.3g}"


def _rows(answer: NodeBatchDim, part: object, whole: object) -> list[Compared]:
    parts, wholes = ([x] if not isinstance(x, list) else x for x in (part, whole))
    rows = []
    for index, layout in enumerate(answer.layouts):
        own_part = parts[index] if index < len(parts) else None
        all_of_it = wholes[index] if index < len(wholes) else None
        unwritten = answer.target.split(".")[-2:-1]
        why = layout.differs
        if unwritten and unwritten[0] in _UNWRITTEN:
            why = "is memory that nothing was written into"
        error = "" if why else _error(own_part, all_of_it, layout)
        verdict = "not comparable" if why else ("wrong" if error else "right")
        rows.append(
            Compared(
                answer.name if len(answer.layouts) == 1 else f"{answer.name}.{index}",
                answer.target,
                layout.dim,
                str(layout.outer),
                layout.scale,
                answer.by_size,
                " ".join(answer.all_reduced),
                verdict,
                why or error,
            )
        )
    return rows


def _work(rank: int, world: int, makes: Sequence[Callable[[], Case]], folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=TIMEOUT
    )
    try:
        for number, make in enumerate(makes):
            rows = _compared(make(), rank, world)
            if rank == 0:
                torch.save(rows, Path(folder) / f"{number}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _compared(case: Case, rank: int, world: int) -> Found:
    """Return a row for each value, the same on every process."""
    answers = {node.name: node for node in case.report.nodes}
    with torch.no_grad():
        whole = _Recorder(case.whole, None)
        whole.run(*_copy(case.inputs))
        local = _Recorder(case.local, answers)
        local.run(*_copy(case.part(rank, world)))
    rows = [
        row
        for name, answer in answers.items()
        if name in whole.seen and name in local.seen
        for row in _rows(answer, local.seen[name], whole.seen[name])
    ]
    # What is right must be so on every process.
    holds = torch.tensor([row.verdict != "wrong" for row in rows], dtype=torch.uint8)
    dist.all_reduce(holds, op=dist.ReduceOp.MIN)
    rows = [
        row if ok or row.verdict == "wrong" else replace(row, verdict="wrong", note="elsewhere")
        for row, ok in zip(rows, holds.tolist(), strict=True)
    ]
    names = {*whole.seen, *local.seen, *answers}
    alone = [n for n in names if not (n in whole.seen and n in local.seen and n in answers)]
    return rows, sorted(alone)


def compare(makes: Sequence[Callable[[], Case]], world: int = 2) -> list[Found]:
    """Return for each case a row for each value, and the names of nodes that have none.

    A node has none that is not in all of the whole's graph, a process's graph and the report.

    Args:
        makes: each returns a case, the same one in every process; functions that can be pickled.
        world: how many processes share the batch.

    """
    with tempfile.TemporaryDirectory() as folder:
        start: Any = start_processes
        start(_work, (world, makes, folder), world, start_method="spawn")
        return [
            torch.load(Path(folder) / f"{number}.pt", weights_only=False)
            for number in range(len(makes))
        ]
