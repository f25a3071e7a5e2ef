"""The plan in the words of other tools: `device_map.json` and `split_points.json`."""

from contextlib import suppress
from pathlib import Path

import numpy as np

from fxpart.assignment import Assignment
from fxpart.errors import SpecError
from fxpart.graph import OpGraph
from fxpart.leaving import device_map, split_points
from runner.writing import write_json

__all__ = ["write_plan_files"]


def write_plan_files(folder: Path, graph: OpGraph, assignment: Assignment) -> None:
    """Write what other tools can carry out of the plan; what they cannot is left out.

    ``device_map.json`` is for Hugging Face accelerate; ``device_map_notes.json`` says how far it is
    the plan. ``split_points.json`` is for ``torch.distributed.pipelining``, and only for stages
    that begin where a module begins or ends. Neither is there for a plan with replicas, nor the
    second for a training step, whose forward torch cuts by itself.

    Raises `CacheError` when the place cannot be written.
    """
    if assignment.replicas > 1:
        return
    found = device_map(graph, assignment)
    computing = int((~graph.is_check).sum())
    # As it is: what reads it takes paths and devices alone.
    write_json(folder / "device_map.json", found.entries)
    notes = {
        "main_device": found.main_device,
        "weight_bytes": {str(device): size for device, size in found.weight_bytes.items()},
        "operators": computing,
        "operators_elsewhere": len(found.moved),
        "divided_modules": found.torn,
    }
    write_json(folder / "device_map_notes.json", notes)
    if assignment.n_partitions < 2 or bool(np.any(graph.is_backward)):
        return
    with suppress(SpecError):  # most plans cut inside of modules: then there are no such points
        write_json(folder / "split_points.json", split_points(graph, assignment))
