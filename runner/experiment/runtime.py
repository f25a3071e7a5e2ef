"""What runs the model: its own Python, the captured graph, or kernels that a compiler makes."""

from functools import lru_cache

from fxpart.core.assignment import Assignment
from fxpart.core.fusion import blocks_of, fused
from fxpart.core.graph import OpGraph
from fxpart.errors import NotApplicableError, SpecError, nearest_names
from runner.config.sections import Config
from runner.output.units import format_s

__all__ = [
    "RUNTIMES",
    "as_kernels",
    "check_runtime",
    "devices_compiled_for",
    "host_launch_s",
    "host_line",
]

RUNTIMES = ("eager", "graph", "compiled")
"""The values of ``runtime.name``."""
_MOST_KEPT = 8
"""Graphs of kernels that are kept: searches of a run, and jobs of a sweep, take the same few."""


def check_runtime(config: Config) -> None:
    """Raise `SpecError` for a runtime that does not exist."""
    name = config.runtime.name
    if name not in RUNTIMES:
        raise SpecError(f"runtime={name} does not exist; {nearest_names(name, RUNTIMES)}")
    if name != "compiled":
        return
    latency = config.latency
    against = {
        f"execute={config.execute.name}": config.execute.name != "none",
        f"capture.level={config.capture.level}": config.capture.level != "operator",
        f"capture.symbolic={config.capture.symbolic}": config.capture.symbolic != "none",
        f"latency={latency.name}": latency.source not in ("roofline", "kernels"),
        f"model={config.model.name}": config.model.path is not None,
    }
    for choice in (choice for choice, is_chosen in against.items() if is_chosen):
        raise NotApplicableError(
            "runtime=compiled predicts kernels that a compiler fuses, of operators that are"
            f" captured at one size and not run here; leave out {choice}, or use runtime=graph"
        )


def as_kernels(config: Config, graph: OpGraph, devices: int, *, is_kept: bool = True) -> OpGraph:
    """Return `graph` as ``runtime=compiled`` runs it on so many devices, else as it is.

    `is_kept` says whether to remember it: not of a graph that is made for one use.

    One device compiles the whole model. Of several each compiles what it has block by block, and
    so do plans of whole modules module by module: a model may be cut between them.
    """
    if config.runtime.name != "compiled":
        return graph
    make = _kept_kernels if is_kept else _kernels
    return make(graph, config.granularity if devices > 1 else "")


def devices_compiled_for(assignment: Assignment) -> int:
    """Return over how many devices a plan divides the model; copies of all of it are one."""
    return len(set(assignment.devices_of_partition))


def _kernels(graph: OpGraph, granularity: str) -> OpGraph:
    if not granularity:
        return fused(graph)
    is_whole = granularity != "operator"
    return fused(graph, graph.group.tolist() if is_whole else blocks_of(graph))


_kept_kernels = lru_cache(maxsize=_MOST_KEPT)(_kernels)


def host_launch_s(config: Config) -> float:
    """Return the time of the host to start an operator.

    Without one in the configuration it is that of the slowest host of the accelerators; nothing
    where operators run on the host itself, or where their measured times have it in them.
    """
    if config.latency.source in ("profiled", "calibrated"):
        return 0.0
    if config.runtime.host_launch_s is not None:
        return config.runtime.host_launch_s
    return max((pool.host_launch_s for pool in config.devices.pools), default=0.0)


def host_line(issued_s: float, latency_s: float, operators: int) -> str:
    """Return that the host decides how long a pass takes, where starting its operators does.

    `issued_s` is when the host has started the last of them.
    """
    if issued_s < latency_s / 2:
        return ""
    return (
        f"takes {format_s(issued_s)} to start {operators:,} operators one by one; runtime=graph has"
        " them started at once"
    )
