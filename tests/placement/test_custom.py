"""A placement by a user's function: used unchanged, or refused with the reason."""

import numpy as np
import pytest

from fxpart.core.assignment import Assignment
from fxpart.cost.problem import Problem
from fxpart.errors import FxpartError, InfeasibleError, SpecError
from fxpart.placement import make_mode
from tests.sketch import Sketch, devices, problem


def three_in_a_row(*sizes: int) -> Problem:
    """Return operators 0, 1 and 2, the last two in one group, with 10 bytes each."""
    sketch = Sketch()
    value = sketch.input(4)
    for group in (0, 1, 1):
        value = sketch.op([value], makes=4, uses=[sketch.weight(10)], group=group)
    sketch.outputs.add(value)
    return problem(sketch.graph(), devices(*sizes))


@pytest.mark.parametrize("returned", [[1, 0, 0], (1, 0, 0), np.array([1, 0, 0], dtype=np.int32)])
def test_a_device_for_each_operator_is_accepted(returned: object) -> None:
    placed = make_mode("custom", {"function": lambda problem: returned})(three_in_a_row(100, 100))
    assert placed.device_of.tolist() == [1, 0, 0]
    assert placed.n_partitions == 2


def test_an_assignment_is_accepted_and_arguments_are_passed() -> None:
    def function(problem: Problem, first: int) -> Assignment:
        assert problem.topology.n_devices == 2
        return Assignment(np.array([0, 1, 1]), ((first,), (1 - first,)))

    options = {"function": function, "args": {"first": 1}}
    placed = make_mode("custom", options)(three_in_a_row(100, 100))
    assert placed.device_of.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([0, 0], "placed 2 operators, the model has 3"),
        ([0] * 4, "placed 4 operators, the model has 3"),
        ([0, 0, 2], "uses device 2, there are 2, numbered from 0"),
        ([0, 0, -1], "uses device -1, there are 2"),
        ([0, 0, 1], "must share a device"),
        ([0.0, 1.0, 1.0], "returned a list that begins with float; return an Assignment"),
        ([[0], [0, 1]], "returned a list that begins with list"),
        (None, "returned NoneType"),
        (np.zeros((3, 1)), "returned ndarray of float64"),
        (Assignment(np.array([0, 0]), ((0,),)), "placed 2 operators, the model has 3"),
        (Assignment(np.array([0, 0, 0]), ((5,),)), "uses device 5, there are 2"),
        (Assignment(np.array([0, 0, 1]), ((0,), (1,))), "must share a device"),
    ],
)
def test_an_invalid_result_is_refused(returned: object, message: str) -> None:
    place = make_mode("custom", {"function": lambda problem: returned})
    with pytest.raises(SpecError, match=message) as caught:
        place(three_in_a_row(100, 100))
    assert "\n" not in str(caught.value)


def test_a_result_that_does_not_fit_is_infeasible() -> None:
    place = make_mode("custom", {"function": lambda problem: [0, 1, 1]})
    with pytest.raises(InfeasibleError, match=r"custom: device 1 .* too little"):
        place(three_in_a_row(100, 12))


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "needs a function"), ({"function": "a:b", "args": {}}, "got mode.function='a:b'")],
)
def test_a_function_that_cannot_be_called_is_refused(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        make_mode("custom", options)


def test_an_error_of_the_function_is_passed_on() -> None:
    def refuses(problem: Problem) -> list[int]:
        raise InfeasibleError("no room for three")

    with pytest.raises(FxpartError, match="no room for three"):
        make_mode("custom", {"function": refuses})(three_in_a_row(100, 100))
