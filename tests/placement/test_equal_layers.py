"""`mode=equal_layers`: the same number of layers on each device, in order."""

import pytest

from fxpart.core.topology import Link
from fxpart.errors import InfeasibleError, NotApplicableError
from fxpart.placement import make_mode
from fxpart.placement.equal_layers import equal_layers
from fxpart.placement.optimal.model_search import ModelSearch
from fxpart.placement.size_based import size_based
from tests.sketch import Sketch, devices, problem, random_graph


def _stack(layers: int) -> Sketch:
    sketch = Sketch()
    value = sketch.op([sketch.input(1)], 1, module="embed")
    for layer in range(layers):
        value = sketch.op([value], 1, module=f"model.layers.{layer}.attention")
        value = sketch.op([value], 1, [sketch.weight(10)], module=f"model.layers.{layer}.mlp.0")
    sketch.op([value], 1, module="head")
    return sketch


def test_layers_are_divided_evenly_with_the_operators_around_them() -> None:
    graph = _stack(5).graph()
    placed = make_mode("equal_layers")(problem(graph, devices(1000, 1000, link=Link(1.0))))
    assert placed.device_of.tolist() == [0] + [0] * 6 + [1] * 4 + [1]


def test_a_model_without_layers_is_divided_by_operators() -> None:
    graph = random_graph(3, 8)
    placed = make_mode("equal_layers")(problem(graph, devices(10**6, 10**6)))
    expected = [int(op >= 4) for op in graph.group.tolist()]
    assert placed.device_of.tolist() == expected


def test_equal_numbers_that_do_not_fit_are_refused() -> None:
    this = problem(_stack(5).graph(), devices(25, 1000, link=Link(1.0)))
    with pytest.raises(InfeasibleError, match="equal_layers: device 0") as refused:
        make_mode("equal_layers")(this)
    assert refused.value.needed_bytes > refused.value.available_bytes == 25
    search = ModelSearch(this, (size_based, equal_layers), seed=0)
    for _ in range(2):  # the first step may use branch and bound instead
        search.round()
    assert search.elite[0].tolist() == size_based(this).device_of.tolist()


def test_interleaved_stages_cycle_through_the_devices() -> None:
    graph = _stack(5).graph()
    mode = make_mode("equal_layers", {"interleave": 2})
    placed = mode(problem(graph, devices(1000, 1000, link=Link(1.0))))
    # Four stages of 2, 1, 1 and 1 layers, of two operators each.
    assert placed.device_of.tolist() == [0, *[0] * 4, *[1] * 2, *[0] * 2, *[1] * 2, 1]
    # Of 6 layers each device has three, in two stages.
    six = mode(problem(_stack(6).graph(), devices(1000, 1000, link=Link(1.0))))
    assert six.device_of.tolist() == [0, *[0] * 4, *[1] * 4, *[0] * 2, *[1] * 2, 1]
    with pytest.raises(NotApplicableError, match=r"5 layers; use mode\.interleave=2"):
        make_mode("equal_layers", {"interleave": 3})(problem(graph, devices(1000, 1000)))
    with pytest.raises(InfeasibleError, match="equal_layers: device 0"):
        mode(problem(graph, devices(25, 1000, link=Link(1.0))))
