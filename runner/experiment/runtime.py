"""The runtime of the model: eager Python, the captured graph, or compiled kernels."""

from functools import lru_cache

from fxpart.core.assignment import Assignment
from fxpart.core.fusion import blocks_of, fused
from fxpart.core.graph import OpGraph, without_python
from fxpart.errors import NotApplicableError, SpecError, nearest_names
from runner.config.schema import Config
from runner.experiment.training import is_training
from runner.output.units import format_s

__all__ = [
    "RUNTIMES",
    "as_kernels",
    "check_runtime",
    "devices_compiled_for",
    "held_as_run",
    "host_launch_s",
    "host_line",
]

RUNTIMES = ("eager", "graph", "compiled")
"""The values of ``runtime.name``."""
_MOST_KEPT = 8
"""Number of cached kernel graphs: searches of a run and jobs of a sweep reuse a few."""


def check_runtime(config: Config) -> None:
    """Raise `SpecError` if the runtime is unknown or conflicts with other settings."""
    name = config.runtime.name
    if name not in RUNTIMES:
        raise SpecError(f"runtime={name} does not exist; {nearest_names(name, RUNTIMES)}")
    if config.runtime.regional and name != "compiled":
        raise NotApplicableError(
            f"runtime.regional=true compiles the blocks of a model, got runtime={name}; use "
            "runtime=compiled, or runtime.regional=false"
        )
    if config.runtime.compiled_loss and not (config.runtime.regional and is_training(config)):
        raise NotApplicableError(
            "runtime.compiled_loss=true compiles the loss of a training step beside its blocks; use"
            " phase=training runtime=compiled runtime.regional=true, or"
            " runtime.compiled_loss=false"
        )
    if name != "compiled":
        return
    latency = config.latency
    against = {
        f"execute={config.execute.name}": config.execute.name != "none",
        f"capture.level={config.capture.level}": config.capture.level != "operator",
        f"capture.symbolic={config.capture.symbolic}": config.capture.symbolic != "none",
        f"latency={latency.name}": not latency.is_computed,
        f"model={config.model.name}": config.model.path is not None,
    }
    for choice in (choice for choice, is_chosen in against.items() if is_chosen):
        raise NotApplicableError(
            "runtime=compiled predicts the fused kernels of operators captured at one size, and "
            f"cannot be run here; leave out {choice}, or use runtime=graph"
        )


def as_kernels(config: Config, graph: OpGraph, devices: int, *, is_kept: bool = True) -> OpGraph:
    """Return `graph` fused into kernels for ``runtime=compiled``, and unchanged otherwise.

    A single device compiles the whole model. Several compile it block by block, or module by module
    at a coarser granularity, since a model may be cut between blocks or modules. With
    ``runtime.regional``, only blocks are compiled, and the loss if asked for. `is_kept` caches the
    result; leave that out for a graph that is used once.
    """
    if config.runtime.name != "compiled":
        return graph
    make = _kept_kernels if is_kept else _kernels
    granularity = config.granularity if devices > 1 else ""
    runtime = config.runtime
    return make(graph, granularity, regional=runtime.regional, with_loss=runtime.compiled_loss)


def held_as_run(config: Config, graph: OpGraph) -> OpGraph:
    """Return `graph` with the values that Python holds under ``runtime``."""
    if config.runtime.name == "eager":
        return graph
    if config.runtime.regional:
        return without_python(graph, blocks_of(graph, with_loss=config.runtime.compiled_loss))
    return without_python(graph)


def devices_compiled_for(assignment: Assignment) -> int:
    """Return the number of devices that share one copy of the model."""
    return len(set(assignment.devices_of_partition))


def _kernels(graph: OpGraph, granularity: str, *, regional: bool, with_loss: bool) -> OpGraph:
    if not granularity and not regional:
        return fused(graph)
    blocks = blocks_of(graph, with_loss=with_loss)
    whole = granularity not in ("", "operator")
    parts: list[object] = graph.group.tolist() if whole else list(blocks)
    if regional:
        parts = [
            (block, part) if block else None for part, block in zip(parts, blocks, strict=True)
        ]
    return fused(graph, parts)


_kept_kernels = lru_cache(maxsize=_MOST_KEPT)(_kernels)


def host_launch_s(config: Config) -> float:
    """Return the host's time to launch an operator.

    The default is that of the fastest host among the accelerators, since they share one, and a
    further accelerator does not slow it down. It is 0 if operators run on the host itself, or if
    measured operator times include it.
    """
    if config.latency.source in ("profiled", "calibrated"):
        return 0.0
    if config.runtime.host_launch_s is not None:
        return config.runtime.host_launch_s
    launches_s = [pool.host_launch_s for pool in config.devices.pools if pool.host_launch_s]
    return min(launches_s, default=0.0)


def host_line(issued_s: float, latency_s: float, operators: int, *, microbatch: bool) -> str:
    """Return a line saying that launches limit the latency of a pass; empty if they do not.

    `issued_s` is the time at which the host has launched the last operator, and `microbatch`
    whether the pass is of one of several microbatches.
    """
    if issued_s < latency_s / 2:
        return ""
    of_what = " of a microbatch" if microbatch else ""
    return (
        f"takes {format_s(issued_s)} to start {operators:,} operators{of_what} one by one;"
        " runtime=graph has them started at once"
    )
