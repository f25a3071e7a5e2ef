"""Compile the inner loops of a mode in processes of their own, while a model is captured.

The first run after an installation compiles what it calls, which takes longer than all the rest.
Loops are compiled for the types of their arguments, so a chain of operators stands for most models;
what others call besides is compiled when it is called.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from subprocess import DEVNULL, PIPE, Popen
from threading import Thread
from typing import NamedTuple

import numpy as np

from fxpart.core.graph import OpGraph, csr
from fxpart.core.partitions import partition_by_device
from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.cost.caching_allocator import allocator_loop, run_allocator
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.roofline import LatencyModel
from fxpart.placement import make_mode
from fxpart.placement.search.refine import SMALL, neighbours
from fxpart.support.compiled import is_kept
from fxpart.support.garbage import collect_rarely
from fxpart.support.signals import held_back

__all__ = ["chain_problem", "compiled_ahead", "missing_parts", "serve"]

_LOG = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Sent to all processes of a terminal or a batch job. The one that captures handles them."""
_REFINING = ("kl_based", "cost_aware")
"""Modes whose search calls the same loops whatever its options."""
_OPERATORS = SMALL + 8
"""Above `SMALL`, since larger models skip the annealing of single operators."""
_IN_BLOCK = 16
"""Operators in each block of the chain."""


def missing_parts(mode: str) -> list[str]:
    """Return the parts used by `mode` that have no compiled version on disk, for `compiled_ahead`.

    A part is on disk once its last loop is.
    """
    parts = ("search", "cost") if mode in _REFINING else ("cost",)
    return [part for part in parts if not is_kept(_PARTS[part].last)]


@contextmanager
def compiled_ahead(parts: Sequence[str], mode: str, objective: str) -> Iterator[Callable[[], None]]:
    """Start compiling `parts` of what `mode` calls, and yield a function that waits for the end.

    Each part has a process, which ends with the block or with this process. The few loops that both
    compile have the same types in each, so it does not matter which one is stored last. What a
    process could not compile is compiled when it is called.
    """
    started: list[Popen[bytes]] = []

    def wait() -> None:
        for process in started:
            if code := process.wait():
                _LOG.debug("%s ended with exit code %d", process.args, code)

    imports = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve"
    try:
        with held_back(*_SIGNALS), suppress(OSError):  # such as too little memory for a process
            for part in parts:
                program = f"{imports}; serve({part!r}, {mode!r}, {objective!r})"
                command = [sys.executable, "-c", program]
                started.append(Popen(command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL))
        yield wait
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.communicate()


def serve(part: str, mode: str, objective: str) -> None:
    """Compile a part of the loops; end this process early if the other one closes stdin."""
    Thread(target=_end_with_stdin, daemon=True).start()
    collect_rarely()
    _PARTS[part].compile(mode, objective)


def _end_with_stdin() -> None:
    os.read(0, 1)  # not by `sys.stdin`, whose lock the exit of this process would wait for
    os._exit(0)


def _search(mode: str, objective: str) -> None:
    """Run `mode` where one device holds most of the chain, and not all."""
    sizes = (10 * _OPERATORS, _OPERATORS // 2)
    make_mode(mode)(chain_problem(_OPERATORS, sizes, objective))


def _cost(_mode: str, objective: str) -> None:
    """Evaluate a placement on devices of one and of two sizes, and simulate an allocator."""
    device_of = np.arange(_OPERATORS, dtype=np.int64) * 2 // _OPERATORS
    for sizes in ((10 * _OPERATORS, 10 * _OPERATORS), (10 * _OPERATORS, 5 * _OPERATORS)):
        problem = chain_problem(_OPERATORS, sizes, objective)
        evaluate(problem, partition_by_device(problem.graph, device_of))
    run_allocator(np.array([600, 700]), np.array([0, 1, -1, -2]))


class _Part(NamedTuple):
    """Loops that are compiled together."""

    last: Callable[..., object]
    """The loop that is compiled last."""
    compile: Callable[[str, str], None]
    """Compiles them for a mode and an objective."""


_PARTS = {"search": _Part(neighbours, _search), "cost": _Part(allocator_loop, _cost)}


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
