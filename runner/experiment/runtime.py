"""What runs the model: its own Python (``eager``), or the captured graph (``graph``)."""

from fxpart.errors import SpecError, nearest_names
from runner.config.sections import Config
from runner.output.units import format_s

__all__ = ["RUNTIMES", "check_runtime", "host_launch_s", "host_line"]

RUNTIMES = ("eager", "graph")
"""The values of ``runtime.name``."""


def check_runtime(config: Config) -> None:
    """Raise `SpecError` for a runtime that does not exist."""
    name = config.runtime.name
    if name not in RUNTIMES:
        raise SpecError(f"runtime={name} does not exist; {nearest_names(name, RUNTIMES)}")


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
