"""`profile_operators`: a captured program in, the measured time of each of its operators out."""

import time
from pathlib import Path
from statistics import median

import numpy as np
from torch.export import ExportedProgram

from fxpart.cost.profile import OperatorProfile
from fxpart.errors import SpecError
from fxpart.execution.device_name import checked_device
from fxpart.graph import OpGraph
from fxpart.profiling.device import measured_on
from fxpart.profiling.passes import measure
from fxpart.profiling.signature import shapes_of
from fxpart.profiling.steps import Step, steps_of
from fxpart.profiling.time_store import OperatorTime, read_times, times_path, write_times
from fxpart.profiling.weights import given_to

__all__ = ["profile_operators"]


def profile_operators(
    program: ExportedProgram,
    graph: OpGraph,
    *,
    device: str = "cpu",
    cache_dir: Path | None = None,
    repeats: int = 5,
    budget_s: float = 120.0,
) -> OperatorProfile:
    """Return the time of each operator of `program`, measured on this machine's `device`.

    `graph` is that of `program`: ``op_graph(program)``, or both of one `joint_capture`. The program
    may have been captured on the meta device: weights and inputs are made (random), each when it is
    first needed, and dropped after its last use where they would take much of the memory.

    Operators are run in the order of the graph, as in a real run: caches hold what they would hold
    then, and one operator again and again would find its data there. Calls of one signature
    (target, shapes, strides, dtypes, other arguments) have one time: the median of `repeats` runs
    after a first one, which sets things up and does not count. The median, since a run that was
    interrupted says nothing about the operator, and the fastest of a few is luckier than the usual
    one. Passes over the graph are repeated until every signature has its runs; an operator whose
    signature has them is not run, so forty equal layers take the time of a few. After `budget_s`
    seconds only signatures without any run are still run: `OperatorProfile.samples` says how many
    each time comes from.

    With `cache_dir`, times are kept there by device, version of torch and signature, and those of
    at least `repeats` samples are not measured again.

    Raises:
        SpecError: for a device that is not here, no repeats, a graph of another program, or sizes
            that are symbols.
        CaptureError: for an operator that cannot be run on the device.
        CacheError: when the cache cannot be written.

    """
    deadline_s = time.perf_counter() + budget_s
    if repeats < 1:
        raise SpecError(f"repeats={repeats} measures nothing; give 1 or more")
    where = checked_device(device)
    steps, name = steps_of(program, graph, where), measured_on(where)
    path = times_path(cache_dir, name) if cache_dir else None
    stored = read_times(path) if path else {}
    known = frozenset(key for key, entry in stored.items() if entry.samples >= repeats)
    executed, fresh = 0, dict[str, OperatorTime]()
    if any(step.signature not in known for step in steps):
        measured = measure(steps, given_to(program, where), repeats + 1, known, deadline_s)
        executed, fresh = measured.executed, _entries(steps, measured.seconds)
    if path and fresh:
        write_times(path, fresh)
    times = {**stored, **fresh}
    return OperatorProfile(
        np.array([times[step.signature].seconds for step in steps], dtype=np.float64),
        np.array([times[step.signature].samples for step in steps], dtype=np.int64),
        name,
        executed,
    )


def _entries(steps: list[Step], seconds: dict[str, list[float]]) -> dict[str, OperatorTime]:
    """Return the median of each signature's runs; the first does not count where there are more."""
    found: dict[str, OperatorTime] = {}
    for step in steps:
        runs = seconds.get(step.signature)
        if runs and step.signature not in found:
            counted = runs[1:] or runs
            found[step.signature] = OperatorTime(
                str(step.node.target),
                tuple(tuple(shape) for shape in shapes_of(step.node)),
                median(counted),
                len(counted),
            )
    return found
