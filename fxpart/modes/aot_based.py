"""`aot_based`: a placement that was decided ahead of time, taken as it is and costed here.

It comes from the `assignment.json` of a run, perhaps on other devices, or from a device for each
module. Nothing is moved: what does not fit is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fxpart.assignment import Assignment
from fxpart.cost.holding import holding
from fxpart.errors import InfeasibleError, SpecError
from fxpart.modes.aot_file import placed_by_file
from fxpart.modes.aot_modules import placed_by_modules
from fxpart.modes.infeasible import describe_reserve
from fxpart.problem import Problem
from fxpart.saved_assignment import SavedAssignment, assignment_path, read_assignment
from fxpart.sizes import show_bytes

__all__ = ["AotBasedOptions", "aot_based"]


@dataclass(frozen=True)
class AotBasedOptions:
    """Where the placement comes from: one of `assignment` and `modules`."""

    assignment: str | None = None
    """An `assignment.json`, or the folder of the run that wrote it."""
    modules: Mapping[Any, Any] = field(default_factory=dict)
    """Module path to logical id. The longest path that an operator's module begins with decides;
    ``""`` or ``*`` is the rest."""
    devices: Mapping[Any, Any] = field(default_factory=dict)
    """Logical id in the file to logical id here; ids left out stay as they are."""

    def __post_init__(self) -> None:
        """Refuse options that say nothing, or two things, and a file that cannot be read."""
        for name in ("modules", "devices"):
            if not isinstance(getattr(self, name), Mapping):
                raise SpecError(f"mode.{name} must be a mapping, got {getattr(self, name)!r}")
        if self.assignment is not None and not isinstance(self.assignment, str):
            raise SpecError(f"mode.assignment must be a path, got {self.assignment!r}")
        if bool(self.assignment) == bool(self.modules):
            raise SpecError(
                f"mode=aot_based was given {'both' if self.modules else 'neither'} of"
                " mode.assignment=assignment.json and mode.modules={path: device}; give one"
            )
        if self.devices and not self.assignment:
            raise SpecError("mode.devices changes the devices of mode.assignment; give that too")
        ids = [("devices", device) for pair in self.devices.items() for device in pair]
        for name, device in [*ids, *(("modules", home) for home in self.modules.values())]:
            if type(device) is not int or device < 0:  # True is an int to Python
                raise SpecError(
                    f"mode.{name} must name devices by their logical ids 0, 1, 2, got {device!r}"
                )
        decimal = [path for path in self.modules if not isinstance(path, str | int)]
        if decimal:
            raise SpecError(
                f"mode.modules has the number {decimal[0]} for a path: 1.10 would be read as 1.1;"
                " put it in quotes, in a file such as conf/mode/mine.yaml"
            )
        # What is wrong with the file is said before the model is captured.
        _ = self.saved

    @cached_property
    def saved(self) -> SavedAssignment | None:
        """What the file says, as it was when the options were made; None without one."""
        return read_assignment(assignment_path(self.assignment)) if self.assignment else None


def aot_based(problem: Problem, options: AotBasedOptions) -> Assignment:
    """Return the placement that `options` give for this model.

    Partitions of a file keep their ids where they can be carried out by number, and always their
    replicas; where those of one device interleave, they are cut anew.

    Raises:
        SpecError: when the placement is of another model, names a device or module that is not
            there, leaves operators out, or separates operators that must share a device.
        CycleError: when partitions wait for each other.
        InfeasibleError: when a device has too little memory for what it is given.

    """
    if options.saved is not None:
        placed = placed_by_file(problem.graph, problem.topology, options.saved, options.devices)
    else:
        # A command line makes a number of the path of a child of a Sequential.
        modules = {str(path): int(device) for path, device in options.modules.items()}
        placed = placed_by_modules(problem.graph, modules, problem.topology.n_devices)
    _refuse_overfull(problem, placed)
    return placed


def _refuse_overfull(problem: Problem, placed: Assignment) -> None:
    sizes = problem.topology.memory_bytes
    needed = holding(problem.memory, placed, len(sizes)).peak_bytes
    over = np.flatnonzero(needed > sizes)
    if not len(over):
        return
    worst = int(over[np.argmax(needed[over] - sizes[over])])
    more = f", as have {len(over) - 1} others" if len(over) > 1 else ""
    need, have = int(needed[worst]), int(sizes[worst])
    raise InfeasibleError(
        f"aot_based: device {worst} ({problem.topology.devices[worst].name}) needs"
        f" {show_bytes(need)} ({need} bytes) for its partitions and has {show_bytes(have)} ({have}"
        f" bytes){describe_reserve([problem.topology.devices[worst]])}, too little{more}; move some"
        " of them, take larger devices, or let"
        " mode=size_based or mode=kl_based place the model",
        needed_bytes=need,
        available_bytes=have,
    )
