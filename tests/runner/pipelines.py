"""Two pipelines of two stages with all numbers known by hand; 1 FLOP and 1 byte take 1 s."""

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.cost.problem import Problem
from fxpart.schedule import ScheduleResult, simulate_schedule, stage_costs
from tests.sketch import Sketch, chain, devices, problem

HALVES = Assignment(np.array([0, 0, 1, 1]), ((0,), (1,)))
"""Of `forward`."""
THERE_AND_BACK = Assignment(np.array([0, 1, 1, 2]), ((0,), (1,), (0,)))
"""Of `training_step`."""


def forward(*memory_bytes: int) -> Problem:
    """Return four operators in a row, each with a weight of 10 bytes, that make 1 byte in 1 s.

    In halves, with three microbatches::

        0: 0 0 1 1 2 2
        1:       0 0 1 1 2 2

    So 9 s. Device 0 holds two weights and two values, device 1 two results of before as well.
    """
    return problem(chain(4), devices(*(memory_bytes or (100, 100))))


def training_graph() -> OpGraph:
    """Return two operators forward and their two backward; each makes 1 byte in 1 s."""
    sketch = Sketch()
    first = sketch.op([sketch.input(0)], 1, flops=1, module="first")
    second = sketch.op([first], 1, flops=1, module="second")
    back = sketch.op([second], 1, flops=1, module="second", backward_of=1)
    last = sketch.op([first, back], 1, flops=1, module="first", backward_of=0)
    return sketch.graph(last)


def training_step(*memory_bytes: int) -> Problem:
    """Return the problem of `training_graph`. There and back, with two microbatches::

    0: F0 F1          B0 B1
    1:    F0 F1 B0 B1

    with a second for each transfer (F0 ends at 1, and is on device 1 at 2; B0 there ends at 5, and
    is on device 0 at 6). So 8 s.
    """
    return problem(training_graph(), devices(*(memory_bytes or (100, 100))))


def step_forward() -> ScheduleResult:
    costs = stage_costs(forward(), HALVES)
    return simulate_schedule("gpipe", costs, 3)


def step_of_training() -> ScheduleResult:
    costs = stage_costs(training_step(), THERE_AND_BACK)
    return simulate_schedule("gpipe", costs, 2)
