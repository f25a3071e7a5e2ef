"""Two processes run a graph on their halves of a batch; every value is compared with the whole's.

Each process runs the graph on the whole batch too. Values meet by gloo: split ones are gathered,
partial ones all-reduced. Where the report says that an operator needs a partial value as a whole,
the processes all-reduce it before they go on.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.multiprocessing.spawn import start_processes

from fxpart.batch_dim import Layout, NodeBatchDim

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


class _Recorder(fx.Interpreter):
    """Runs a graph, keeps every value as it was made, and all-reduces where it is told to."""

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


def _copy(made: object) -> object:
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


def _judged(part: object, whole: object, layout: Layout) -> tuple[bool, str]:
    """Return whether the parts make up the whole, and how far off they are."""
    if not isinstance(part, Tensor) or not isinstance(whole, Tensor):
        if not isinstance(part, int | float) or not isinstance(whole, int | float):
            return (part is None) == (whole is None), ""
        return part == whole * dist.get_world_size() ** layout.scale, f"{part} of {whole}"
    if layout.dim >= part.dim():
        return False, "it has no such dimension"
    if layout.dim >= 0:
        found = _gathered(part, layout)
    elif layout.is_partial:
        found = _summed(part, layout)
    else:
        found = part / dist.get_world_size() ** layout.scale if layout.scale else part
    if found.shape != whole.shape:
        return False, f"shape {tuple(found.shape)}, not {tuple(whole.shape)}"
    if not whole.is_floating_point():
        return bool((found.to(whole.dtype) == whole).all()), "other numbers"
    finite = whole.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return False, "not finite"
    off = (found - whole)[finite].abs().max().item() if finite.any() else 0.0
    most = whole[finite].abs().max().item() if finite.any() else 0.0
    return off <= 1e-5 + 1e-4 * most, f"off by {off:.3g} of {most:.3g}"


def _rows(answer: NodeBatchDim, part: object, whole: object) -> list[Compared]:
    parts, wholes = ([x] if not isinstance(x, list) else x for x in (part, whole))
    found = []
    for index, layout in enumerate(answer.layouts):
        mine = parts[index] if index < len(parts) else None
        all_of_it = wholes[index] if index < len(wholes) else None
        unwritten = answer.target.split(".")[-2:-1]
        why = layout.differs
        if unwritten and unwritten[0] in _UNWRITTEN:
            why = "is memory that nothing was written into"
        right, note = (False, "") if why else _judged(mine, all_of_it, layout)
        verdict = "not comparable" if why else ("right" if right else "wrong")
        found.append(
            Compared(
                answer.name if len(answer.layouts) == 1 else f"{answer.name}.{index}",
                answer.target,
                layout.dim,
                str(layout.outer),
                layout.scale,
                answer.by_size,
                " ".join(answer.all_reduced),
                verdict,
                why or ("" if right else note),
            )
        )
    return found


def _work(rank: int, world: int, make: Callable[[], Any], folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=TIMEOUT
    )
    try:
        case = make()
        answers = {node.name: node for node in case.report.nodes}
        with torch.no_grad():
            whole = _Recorder(case.whole, None)
            whole.run(*(x.clone() if isinstance(x, Tensor) else x for x in case.inputs))
            local = _Recorder(case.local, answers)
            local.run(*case.part(rank, world))
        rows = [
            row
            for name, answer in answers.items()
            if name in whole.seen and name in local.seen
            for row in _rows(answer, local.seen[name], whole.seen[name])
        ]
        missing = [name for name in whole.seen if name not in local.seen or name not in answers]
        # What is right must be so on every process.
        right = torch.tensor([row.verdict != "wrong" for row in rows], dtype=torch.uint8)
        dist.all_reduce(right, op=dist.ReduceOp.MIN)
        if rank == 0:
            torch.save((rows, right.tolist(), missing), Path(folder) / "found.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def compare(make: Callable[[], Any], world: int = 2) -> tuple[list[Compared], list[str]]:
    """Return a row for each value of a case, and the names of nodes of one graph alone.

    Args:
        make: returns a `benchmarks.batch_dim_cases.Case`, the same in every process; a function
            that can be pickled.
        world: how many processes share the batch.

    """
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_work, args=(world, make, folder), nprocs=world, start_method="spawn")
        rows, right, missing = torch.load(Path(folder) / "found.pt", weights_only=False)
    found = []
    for row, holds in zip(rows, right, strict=True):
        wrong_elsewhere = not holds and row.verdict == "right"
        found.append(
            Compared(**{**_fields(row), "verdict": "wrong", "note": "on another process"})
            if wrong_elsewhere
            else row
        )
    return found, missing


def _fields(row: Compared) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Compared.__dataclass_fields__}
