"""Compile the inner loops of a mode in processes of their own, while a model is captured.

The first run after an installation compiles what it calls, which takes longer than all the rest.
Loops are compiled for the types of their arguments, so a chain of operators stands for any model.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from subprocess import DEVNULL, PIPE, Popen
from threading import Thread

import numpy as np

from fxpart.core.graph import OpGraph, csr
from fxpart.core.partitions import partition_by_device
from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.cost.caching_allocator import run_allocator
from fxpart.cost.evaluate import evaluate
from fxpart.cost.kernels import schedule
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import FxpartError
from fxpart.placement import make_mode
from fxpart.placement.search.refine import SMALL
from fxpart.support.compiled import is_kept
from fxpart.support.signals import held_back

__all__ = ["chain_problem", "compiled_ahead", "serve"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""They go to all processes of a terminal. This one handles them, and ends the others."""
_OPERATORS = SMALL + 8
"""More than in models for which single operators are perturbed and annealed."""
_IN_BLOCK = 16
"""Operators of a block of the chain."""


@contextmanager
def compiled_ahead(mode: str, objective: str) -> Iterator[Callable[[], None]]:
    """Start compiling what `mode` calls, if nothing is compiled yet; yield a function that waits.

    One process compiles the search and another the cost. They end with the block, or with this
    process. What they did not compile is compiled when it is called.
    """
    if is_kept(schedule):
        yield lambda: None
        return
    imports = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve"
    commands = [
        [sys.executable, "-c", f"{imports}; serve({part!r}, {mode!r}, {objective!r})"]
        for part in _PARTS
    ]
    started: list[Popen[bytes]] = []
    try:
        with held_back(*_SIGNALS):
            started += [
                Popen(command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL) for command in commands
            ]
        yield lambda: _wait_for(started)
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _wait_for(processes: Sequence["Popen[bytes]"]) -> None:
    for process in processes:
        process.wait()


def serve(part: str, mode: str, objective: str) -> None:
    """Compile a part of the loops in this process, until the other one closes stdin."""
    Thread(target=_end_with_stdin, daemon=True).start()
    with suppress(FxpartError):
        _PARTS[part](mode, objective)


def _end_with_stdin() -> None:
    os.read(0, 1)  # not Python's reader, whose lock the exit of this process would want
    os.read(0, 1)  # at its end, not by Python's reader, whose lock an exit would wait for
    os._exit(0)


def _search(mode: str, objective: str) -> None:
    """Run `mode` where one device holds most of the chain, and not all."""
    options = {"steps": 6} if mode == "optimal" else None
    sizes = (10 * _OPERATORS, _OPERATORS // 2)
    make_mode(mode, options)(chain_problem(_OPERATORS, sizes, objective))


def _cost(_mode: str, objective: str) -> None:
    """Evaluate a placement on devices of one and of two sizes, and an allocator's memory."""
    device_of = np.arange(_OPERATORS, dtype=np.int64) * 2 // _OPERATORS
    for sizes in ((10 * _OPERATORS, 10 * _OPERATORS), (10 * _OPERATORS, 5 * _OPERATORS)):
        problem = chain_problem(_OPERATORS, sizes, objective)
        evaluate(problem, partition_by_device(problem.graph, device_of))
    run_allocator(np.array([600, 700]), np.array([0, 1, -1, -2]))


_PARTS: dict[str, Callable[[str, str], None]] = {"search": _search, "cost": _cost}


def chain_problem(
    operators: int, memory_bytes: Sequence[int], objective: str = "latency"
) -> Problem:
    """Return a chain of operators on devices of those sizes, the first as slow as it is large."""
    devices = tuple(
        DeviceSpec(f"of {size}", size, {"float32": 1 / size}, 1.0, power_w=1.0)
        for size in memory_bytes
    )
    topology = uniform_topology(devices, Link(1.0))
    return make_problem(_chain(operators), topology, LatencyModel(), objective)


def _chain(count: int) -> OpGraph:
    """Return a chain of operators, each with a weight, in blocks."""
    read_start, reads = csr([[], *([op] for op in range(count - 1))])
    use_start, uses = csr([[op] for op in range(count)])
    names = tuple(f"op{op}" for op in range(count))
    blocks = tuple(f"blocks.{op // _IN_BLOCK}" for op in range(count))
    each = np.ones(count, dtype=np.int64)
    return OpGraph(
        names=names,
        modules=blocks,
        targets=names,
        dtypes=("float32",) * count,
        flops=each,
        moved_bytes=each,
        group=np.arange(count, dtype=np.int64),
        value_names=names,
        value_producer=np.arange(count, dtype=np.int64),
        value_bytes=each,
        value_alloc_bytes=each,
        value_base=-each,
        value_is_output=np.arange(count) == count - 1,
        read_start=read_start,
        reads=reads,
        weight_names=names,
        weight_bytes=each,
        weight_state_bytes=np.zeros(count, dtype=np.int64),
        use_start=use_start,
        uses=uses,
        forward_of=np.arange(count, dtype=np.int64),
        gradient_values=np.empty(0, dtype=np.int64),
        gradient_weights=np.empty(0, dtype=np.int64),
    )
