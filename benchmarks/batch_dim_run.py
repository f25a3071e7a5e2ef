"""Run a graph on halves of a batch in two processes and compare every value with the whole run.

Each process also runs the graph on the whole batch. Values are combined over gloo: split ones are
gathered, partial ones all-reduced. Where the report says that an operator needs the total of a
partial value, the processes all-reduce it before they continue.
"""

import multiprocessing
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
_UNINITIALIZED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")


@dataclass(frozen=True, slots=True)
class Compared:
    """The verdict on one value."""

    name: str
    target: str
    dim: int
    outer: str
    scale: int
    by_size: bool
    all_reduced: str
    """Partial operands that were all-reduced first."""
    verdict: str
    """``right``, ``wrong``, or ``not comparable``."""
    note: str
    """Why it is not comparable, or its error."""


Results: TypeAlias = tuple[list[Compared], list[str]]


class _Recorder(fx.Interpreter):
    """Run a graph, keep a copy of every value, and all-reduce operands where the report says so."""

    def __init__(self, graph: fx.GraphModule, layouts: dict[str, NodeBatchDim] | None) -> None:
        super().__init__(graph)
        self.layouts = layouts
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401 - a node may return anything
        """Run one node and keep a copy of its result."""
        answer = None if self.layouts is None else self.layouts.get(n.name)
        for operand in n.all_input_nodes if answer is not None and answer.all_reduced else ():
            if self.layouts is not None and operand.name in answer.all_reduced:  # type: ignore[union-attr]
                layout = self.layouts[operand.name].layouts[0]
                self.env[operand] = _all_reduce(self.env[operand], layout)
        result = super().run_node(n)
        if n.op in {"placeholder", "call_function"}:
            self.values[n.name] = _copy(result)
        return result


def _copy(value: Any) -> Any:  # noqa: ANN401 - a node may return anything
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    return value.detach().clone() if isinstance(value, Tensor) else value


def _all_reduce(part: Tensor, layout: Layout) -> Tensor:
    whole = part.detach().clone()
    if whole.dtype == torch.bool:
        whole = whole.to(torch.uint8)
    dist.all_reduce(whole, op=_OPS[layout.reduction])
    if layout.scale:
        whole = whole / dist.get_world_size() ** layout.scale
    return whole.to(part.dtype)


def _gather(part: Tensor, layout: Layout) -> Tensor:
    """Return the parts concatenated; if the batch repeats along the dimension, repeat by repeat."""
    outer = int(layout.outer)
    rows = part.movedim(layout.dim, 0).contiguous()
    split = rows.reshape(outer, -1, *rows.shape[1:]).contiguous()
    parts = [torch.empty_like(split) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, split)
    whole = torch.cat(parts, 1).reshape(-1, *rows.shape[1:]).movedim(0, layout.dim)
    return whole / dist.get_world_size() ** layout.scale if layout.scale else whole


def _combine(part: Tensor, layout: Layout) -> Tensor:
    """Return the parts of all processes combined."""
    if layout.is_split:
        return _gather(part, layout)
    if layout.is_partial:
        return _all_reduce(part, layout)
    return part / dist.get_world_size() ** layout.scale if layout.scale else part


def _error(part: object, whole: object, layout: Layout) -> str:
    """Return how the combined parts differ from the whole value, or an empty string."""
    if not isinstance(part, Tensor) or not isinstance(whole, Tensor):
        if isinstance(part, int | float) and isinstance(whole, int | float):
            same = part == whole * dist.get_world_size() ** layout.scale
            return "" if same else f"{part} of {whole}"
        return "" if (part is None) == (whole is None) else "one of them is missing"
    if layout.dim >= part.dim():
        return f"it has {part.dim()} dimensions"
    joined = _combine(part, layout)
    if joined.shape != whole.shape:
        return f"shape {tuple(joined.shape)}, not {tuple(whole.shape)}"
    if not whole.is_floating_point():
        return "" if bool((joined.to(whole.dtype) == whole).all()) else "different values"
    return _distance(joined, whole)


def _distance(joined: Tensor, whole: Tensor) -> str:
    finite = whole.isfinite()
    if not torch.equal(finite, joined.isfinite()):
        return "finite in only one of the two"
    difference = (joined - whole)[finite].abs()
    magnitude = whole[finite].abs()
    if difference.numel() == 0 or difference.max() <= 1e-6 + 1e-4 * magnitude.max():
        return ""
    return f"error {difference.max():.3g} of {magnitude.max():.3g}"


def _rows(answer: NodeBatchDim, part: object, whole: object) -> list[Compared]:
    parts, wholes = ([x] if not isinstance(x, list) else x for x in (part, whole))
    rows = []
    for index, layout in enumerate(answer.layouts):
        part_value = parts[index] if index < len(parts) else None
        whole_value = wholes[index] if index < len(wholes) else None
        operator = answer.target.split(".")[-2:-1]
        reason = layout.differs
        if operator and operator[0] in _UNINITIALIZED:
            reason = "is uninitialized memory"
        error = "" if reason else _error(part_value, whole_value, layout)
        verdict = "not comparable" if reason else ("wrong" if error else "right")
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
                reason or error,
            )
        )
    return rows


def _run_rank(rank: int, world: int, make_cases: Sequence[Callable[[], Case]], folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=TIMEOUT
    )
    try:
        for number, make_case in enumerate(make_cases):
            rows = _compare_case(make_case(), rank, world)
            if rank == 0:
                torch.save(rows, Path(folder) / f"{number}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _compare_case(case: Case, rank: int, world: int) -> Results:
    """Return a row for each value, identical on all processes."""
    answers = {node.name: node for node in case.report.nodes}
    with torch.no_grad():
        whole = _Recorder(case.whole, None)
        whole.run(*_copy(case.inputs))
        local = _Recorder(case.local, answers)
        local.run(*_copy(case.part(rank, world)))
    rows = [
        row
        for name, answer in answers.items()
        if name in whole.values and name in local.values
        for row in _rows(answer, local.values[name], whole.values[name])
    ]
    # A value is right only if it is right on every process.
    is_right = torch.tensor([row.verdict != "wrong" for row in rows], dtype=torch.uint8)
    dist.all_reduce(is_right, op=dist.ReduceOp.MIN)
    rows = [
        row
        if right or row.verdict == "wrong"
        else replace(row, verdict="wrong", note="on another process")
        for row, right in zip(rows, is_right.tolist(), strict=True)
    ]
    names = {*whole.values, *local.values, *answers}
    unmatched = [n for n in names if not (n in whole.values and n in local.values and n in answers)]
    return rows, sorted(unmatched)


def compare(make_cases: Sequence[Callable[[], Case]], world: int = 2) -> list[Results]:
    """Return for each case a row for each value, and the names of unmatched nodes.

    A node is unmatched if it is missing in the whole graph, a process's graph or the report.

    Args:
        make_cases: picklable functions, each returning the same case in every process.
        world: number of processes that share the batch.

    """
    with tempfile.TemporaryDirectory() as folder:
        # Each process exports, which would import this.
        preloaded = ["torch._dynamo", __name__]
        multiprocessing.get_context("forkserver").set_forkserver_preload(preloaded)
        start: Any = start_processes
        start(_run_rank, (world, make_cases, folder), world, start_method="forkserver")
        return [
            torch.load(Path(folder) / f"{number}.pt", weights_only=False)
            for number in range(len(make_cases))
        ]
