"""Device maps of small graphs."""

from dataclasses import replace

import numpy as np
import pytest

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.errors import SpecError
from fxpart.plan_export import device_map
from tests.plan_export.scene import named, on_devices
from tests.sketch import Sketch, chain


def row(*modules: str) -> OpGraph:
    """Return a chain of operators, one per module, each with a weight of 10 bytes."""
    sketch = Sketch()
    value = sketch.input(1)
    for module in modules:
        value = sketch.op([value], 1, [sketch.weight(10)], 1, module=module)
    names = [f"{module}.weight" if module else "weight" for module in modules]
    return named(sketch.graph(value), *names)


def residual() -> OpGraph:
    """Return a stem, a block that adds its input to the result of its inner module, and a head."""
    sketch = Sketch()
    x = sketch.op([sketch.input(1)], 1, [sketch.weight(10)], module="stem")
    inner = sketch.op([x], 1, [sketch.weight(10)], module="block.inner")
    y = sketch.op([x, inner], 1, module="block")
    out = sketch.op([y], 1, [sketch.weight(10)], module="head")
    return named(sketch.graph(out), "stem.weight", "block.inner.weight", "head.weight")


def test_a_model_on_one_device_is_one_entry() -> None:
    graph = row("body.0", "body.1.up", "body.1.down", "head")
    mapped = device_map(graph, on_devices(graph, 0, 0, 0, 1))
    assert mapped.entries == {"body": 0, "head": 1}
    assert (mapped.main_device, mapped.moved, mapped.torn) == (0, (), ())
    assert mapped.weight_bytes == {0: 30, 1: 10}
    assert device_map(graph, on_devices(graph, 2, 2, 2, 2)).entries == {"": 2}


def test_entries_follow_the_order_of_the_model() -> None:
    graph = row("c", "a", "b")
    assert list(device_map(graph, on_devices(graph, 0, 1, 0)).entries) == ["c", "a", "b"]


def test_tied_weights_are_where_they_are_first_used() -> None:
    sketch = Sketch()
    table, body = sketch.weight(100), sketch.weight(10)
    x = sketch.op([sketch.input(1)], 1, [table], module="embed")
    y = sketch.op([x], 1, [body], module="body")
    graph = named(sketch.graph(sketch.op([y], 1, [table], module="head")), "embed.w", "body.w")
    for names in ((), ("embed.w", "body.w", "head.w")):
        mapped = device_map(graph, on_devices(graph, 0, 1, 1), names)
        assert mapped.entries == {"embed": 0, "body": 1, "head": 0}
        assert mapped.moved == ("op2",)
        assert mapped.device_of.tolist() == [0, 1, 0]
        assert mapped.weight_bytes == {0: 100, 1: 10}


def test_a_weight_used_on_two_devices_is_with_its_first_user() -> None:
    sketch = Sketch()
    weight = sketch.weight(10)
    x = sketch.op([sketch.input(1)], 1, [weight], module="shared")
    y = sketch.op([x], 1, [sketch.weight(10)], module="other")
    graph = sketch.graph(sketch.op([y], 1, [weight], module="shared"))
    mapped = device_map(named(graph, "shared.w", "other.w"), on_devices(graph, 1, 0, 0))
    assert mapped.entries == {"shared": 1, "other": 0}
    assert mapped.moved == ("op2",)


def test_a_module_is_where_most_of_its_bytes_are_planned() -> None:
    sketch = Sketch()
    x = sketch.op([sketch.input(1)], 1, [sketch.weight(10)], module="m")
    y = sketch.op([x], 1, [sketch.weight(11)], module="m")
    graph = sketch.graph(sketch.op([y], 1, [sketch.weight(1)], module="n"))
    graph = named(graph, "m.small", "m.large", "n.weight")
    mapped = device_map(graph, on_devices(graph, 0, 1, 2))
    assert mapped.entries == {"m": 1, "n": 2}
    assert mapped.moved == ("op0",)


def test_equal_bytes_go_to_the_device_used_first() -> None:
    sketch = Sketch()
    late, early = sketch.weight(10), sketch.weight(10)
    x = sketch.op([sketch.input(1)], 1, [early], module="m")
    y = sketch.op([x], 1, [late], module="m")
    graph = sketch.graph(sketch.op([y], 1, [sketch.weight(1)], module="n"))
    graph = named(graph, "m.late", "m.early", "n.weight")
    assert device_map(graph, on_devices(graph, 1, 0, 2)).entries == {"m": 1, "n": 2}


def test_unused_tensors_follow_their_neighbours() -> None:
    graph = row("stem", "body.a", "head")
    names = ["stem.weight", "body.a.weight", "body.idle.weight", "head.weight", "far.weight"]
    mapped = device_map(graph, on_devices(graph, 0, 1, 0), names)
    assert mapped.entries == {"stem": 0, "body": 1, "head": 0, "far": 0}


def test_unused_tensors_follow_the_operators_of_their_module() -> None:
    sketch = Sketch()
    x = sketch.op([sketch.input(1)], 1, [sketch.weight(10)], module="a")
    graph = named(sketch.graph(sketch.op([x], 1, module="norm")), "a.weight")
    mapped = device_map(graph, on_devices(graph, 0, 1), ["a.weight", "norm.counter"])
    assert mapped.entries == {"a": 0, "norm": 1}


def test_a_module_with_submodules_has_an_entry_for_its_own_tensors() -> None:
    graph = row("block", "block.deep.a", "block.deep.b", "head")
    mapped = device_map(graph, on_devices(graph, 0, 1, 1, 0))
    # Not block.deep: accelerate's hooks of block would also apply to its submodules.
    assert mapped.entries == {"block": 0, "block.deep.a": 1, "block.deep.b": 1, "head": 0}
    assert mapped.moved == ()


def test_a_parameter_of_the_model_itself_is_on_the_main_device() -> None:
    graph = row("", "body")
    mapped = device_map(graph, on_devices(graph, 1, 0))
    assert mapped.entries == {"weight": 1, "body": 0}
    assert mapped.main_device == 1
    # A buffer that is not saved has no entry.
    assert device_map(graph, on_devices(graph, 1, 0), ["body.weight"]).entries == {"body": 0}


def test_a_constant_of_the_trace_has_no_entry() -> None:
    graph = replace(row("", "body"), weight_names=("lifted_tensor_0", "body.weight"))
    assert device_map(graph, on_devices(graph, 1, 0)).entries == {"body": 0}


def test_a_model_without_weights_is_on_the_device_of_its_first_operator() -> None:
    sketch = Sketch()
    x = sketch.op([sketch.input(1)], 1)
    graph = sketch.graph(sketch.op([x], 1))
    mapped = device_map(graph, on_devices(graph, 3, 1))
    assert mapped.entries == {"": 3}
    assert mapped.moved == ("op1",)


def test_an_operator_without_weights_runs_where_its_inputs_are() -> None:
    sketch = Sketch()
    x = sketch.op([sketch.input(1)], 1, [sketch.weight(10)], module="a")
    y = sketch.op([x], 1)
    graph = sketch.graph(sketch.op([y], 1, [sketch.weight(10)], module="b"))
    mapped = device_map(named(graph, "a.w", "b.w"), on_devices(graph, 0, 1, 1))
    assert mapped.device_of.tolist() == [0, 0, 1]
    assert mapped.moved == ("op1",)


def test_a_divided_residual_block_is_torn() -> None:
    graph = residual()
    mapped = device_map(graph, on_devices(graph, 0, 1, 1, 1))
    # Only the inner module of the block has tensors: one entry, which moves the block's input.
    assert mapped.entries == {"stem": 0, "block": 1, "head": 1}
    assert mapped.torn == ()
    sketch = Sketch()
    x = sketch.op([sketch.input(1)], 1, [sketch.weight(10)], module="block.a")
    y = sketch.op([x], 1, [sketch.weight(30)], module="block.b")
    z = sketch.op([x, y], 1, module="block")
    graph = sketch.graph(sketch.op([z], 1, [sketch.weight(10)], module="head"))
    graph = named(graph, "block.a.w", "block.b.w", "head.w")
    plan = on_devices(graph, 0, 1, 1, 2)
    assert device_map(graph, plan).torn == ("block",)
    mapped_whole = device_map(graph, plan, whole=["block"])
    assert mapped_whole.torn == ()
    assert mapped_whole.entries == {"block": 1, "head": 2}
    assert mapped_whole.moved == ("op0",)


def test_an_identity_operator_returns_the_value_on_the_caller_device() -> None:
    sketch = Sketch()
    x = sketch.op([sketch.input(1)], 1, [sketch.weight(10)], module="block.a")
    same = sketch.op([x], 1, view_of=x, module="block.norm")
    y = sketch.op([same], 1, [sketch.weight(10)], module="block.norm")
    graph = sketch.graph(sketch.op([same, y], 1, module="block"))
    graph = named(graph, "block.a.w", "block.norm.w")
    plan = on_devices(graph, 0, 1, 1, 1)
    assert device_map(graph, plan).torn == ()
    as_traced = replace(graph, targets=("op", "aten.to.dtype", "op", "op"))
    assert device_map(as_traced, plan).torn == ("block",)


def test_a_tensor_moved_by_the_model_is_where_it_is_read() -> None:
    sketch = Sketch()
    x = sketch.op([sketch.input(1)], 1, [sketch.weight(10)], module="block.a")
    y = sketch.op([x], 1, [sketch.weight(10)], module="block.b")
    moved = sketch.op([x], 1, module="block")
    graph = named(sketch.graph(sketch.op([y, moved], 1, module="block")), "block.a.w", "block.b.w")
    plan = on_devices(graph, 0, 1, 0, 1)
    assert device_map(graph, plan).torn == ("block",)
    moving = replace(graph, targets=("op", "op", "aten.to.device", "op"))
    mapped = device_map(moving, plan)
    assert mapped.torn == ()
    assert mapped.device_of.tolist() == [0, 1, 0, 1]


def test_a_module_to_keep_whole_must_exist() -> None:
    graph = row("body.first", "head")
    with pytest.raises(SpecError, match=r"keep boby whole.*nearest: body"):
        device_map(graph, on_devices(graph, 0, 1), whole=["boby"])


def test_replicas_are_refused() -> None:
    graph = chain(2)
    plan = Assignment(np.array([0, 1]), ((0,), (1, 2)))
    with pytest.raises(SpecError, match="partition 1 is on devices 1, 2"):
        device_map(graph, plan)


def test_processors_are_one_device_without_a_number() -> None:
    """Accelerate counts only GPUs, and copies what is on the CPU to the first that it uses."""
    graph = row("a", "b", "c")
    alone = device_map(graph, on_devices(graph, 0, 1, 1), hosts=[0, 1])
    assert (alone.entries, alone.main_device, alone.moved) == ({"": "cpu"}, "cpu", ())
    mixed = device_map(graph, on_devices(graph, 0, 1, 2), hosts=[0])
    assert mixed.entries == {"a": "cpu", "b": 0, "c": 1}
    assert (mixed.main_device, mixed.moved) == (0, (graph.names[0],))
    assert mixed.weight_bytes.keys() == {"cpu", 0, 1}
