"""Bytes in use along small graphs, counted by hand: 4 float32 numbers are 16 bytes."""

import io
import operator
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxpart.capture.live_bytes import LiveBytes, storage_sizes
from fxpart.errors import CaptureError
from fxpart.torch_compat.memory import build_memory_profile
from tests.torch_compat.memory.scene import Drawing, always, aten, never, no_primal, random_drawing


def test_a_value_lives_from_its_operator_to_its_last_use() -> None:
    d = Drawing()
    x = d.input("x", 4)
    a = d.call(aten.relu.default, x)
    b = d.call(aten.cat.default, [a, x])
    c = d.call(aten.neg.default, b)
    graph = d.done(c)
    # x 16; + a 16; + b 32, then a and x are freed; + c 32, then b is freed.
    assert build_memory_profile(graph, always) == [16, 32, 32, 64, 32, 64, 32]
    assert build_memory_profile(graph, never) == [16, 32, 32, 64, 64, 96, 96]
    # b is no input: it may be freed, although x may not.
    with_input = build_memory_profile(graph, lambda node: node.name != "x")
    assert with_input == [16, 32, 32, 64, 48, 80, 48]


def test_a_view_holds_its_storage_and_allocates_nothing() -> None:
    d = Drawing()
    x = d.input("primals_1", 4)
    a = d.call(aten.relu.default, x)
    part = d.call(aten.slice.Tensor, a, 0, 0, 2)
    b = d.call(aten.neg.default, a)
    c = d.call(aten.add.Tensor, part, part)
    # The slice of a holds its storage until c is computed.
    assert build_memory_profile(d.done(b, c), no_primal) == [16, 32, 32, 32, 32, 48, 48, 56, 40]


def test_an_in_place_write_allocates_nothing() -> None:
    d = Drawing()
    buffer, x = d.input("primals_1", 4), d.input("x", 4)
    a = d.call(aten.neg.default, x)
    b = d.call(aten.relu_.default, a)
    d.call(aten.copy_.default, buffer, b)
    # x is freed with its reader, a with the copy: the written buffer stays.
    assert build_memory_profile(d.done(), no_primal) == [32, 48, 32, 32, 32, 32, 16]


def test_items_of_a_tuple_hold_their_own_storage() -> None:
    d = Drawing()
    x = d.input("primals_1", 2, 4)
    pair = d.call(aten.max.dim, x, 0)  # 16 bytes of values, 32 of indices
    first = d.call(operator.getitem, pair, 0)
    a = d.call(aten.neg.default, first)
    # Nothing reads the indices: they are freed once the tuple is unpacked.
    assert build_memory_profile(d.done(a), no_primal) == [32, 80, 80, 80, 48, 64, 48]


def test_an_unread_result_is_freed_at_once() -> None:
    d = Drawing()
    x = d.input("primals_1", 4)
    d.call(aten.max.dim, x, 0)  # 4 bytes of the value, 8 of the index
    d.call(aten.neg.default, x)
    a = d.call(aten.relu.default, x)
    assert build_memory_profile(d.done(a), no_primal) == [16, 28, 16, 32, 16, 32, 32]


def test_inputs_that_share_a_storage_count_once_and_are_freed_together() -> None:
    d = Drawing()
    x = d.input("x", 4)
    with d.mode:
        half = d.given("primals_1", x.meta["val"][:2])
    a = d.call(aten.neg.default, half)
    b = d.call(aten.neg.default, x)
    graph = d.done(a, b)
    assert build_memory_profile(graph, always) == [16, 24, 24, 40, 24]
    assert build_memory_profile(graph, no_primal) == [16, 24, 24, 40, 40]


def test_an_unread_input_stays() -> None:
    d = Drawing()
    d.input("x", 4)
    a = d.call(aten.neg.default, d.input("y", 4))
    assert build_memory_profile(d.done(a), always) == [32, 48, 32]


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(4))
        self.register_buffer("two", self.get_buffer("one"))


@pytest.mark.parametrize("with_metadata", [False, True])
def test_attributes_stay_and_two_names_of_one_tensor_count_once(with_metadata: bool) -> None:
    d = Drawing()
    nodes = [d.graph.get_attr(name) for name in ("one", "two", "one")]
    for node in nodes:
        if with_metadata:
            with d.mode:
                node.meta["val"] = torch.empty(4)
    with d.mode:
        a = d.graph.call_function(aten.cat.default, (nodes,))
        a.meta["val"] = torch.empty(12)
    graph = fx.GraphModule(_Tied(), d.done(a)).graph
    assert build_memory_profile(graph, always) == [16, 64, 64]


def test_metadata_copied_from_another_node_is_no_alias() -> None:
    d = Drawing()
    x = d.input("x", 4)
    a = d.call(aten.neg.default, x)
    b = d.call(aten.relu.default, x)
    b.meta["val"] = a.meta["val"]
    assert build_memory_profile(d.done(a, b), always) == [16, 32, 32, 48, 32]


class _Views(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.neg().view(-1).relu_()
        first, second = torch.split(y, 6)
        values, _ = torch.stack([first, second]).max(dim=0)
        return torch.add(values.t(), second)


def test_a_graph_read_from_a_file_uses_operator_schemas() -> None:
    program = torch.export.export(_Views(), (torch.ones(3, 4),))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).graph
    storages = {
        n.meta["val"].untyped_storage()._cdata
        for n in loaded.nodes
        if isinstance(n.meta.get("val"), Tensor)
    }
    assert len(storages) > 6, "each node has a storage of its own"
    expected = build_memory_profile(program.graph, always)
    assert build_memory_profile(loaded, always) == expected
    # x and its negative; both halves in one; the larger ones and their indices; the sum.
    assert max(expected) == 48 + 48 + 24 + 48


def test_a_sparse_tensor_consists_of_indices_and_values() -> None:
    d = Drawing()
    with d.mode:
        places, values = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(3, 2)
        x = d.given("x", torch.sparse_coo_tensor(places, values, (10, 2), check_invariants=False))
    a = d.call(aten.neg.default, d.input("y", 4))
    graph = d.done(a)
    assert x.meta["val"].layout is torch.sparse_coo
    assert build_memory_profile(graph, always) == [24 + 24 + 16, 80, 64]


def _symbolic() -> fx.Graph:
    d = Drawing()
    d.mode = FakeTensorMode(shape_env=ShapeEnv())
    size = d.mode.shape_env.create_unbacked_symint()  # type: ignore[union-attr]
    with d.mode:
        x = d.given("x", torch.empty(4))
        a = d.graph.call_function(aten.neg.default, (x,))
        a.meta["val"] = torch.empty(size)
    return d.done(a)


def test_symbolic_sizes_use_the_example_or_a_given_function() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x])

    batch = torch.export.Dim("batch", min=2, max=64)
    graph = torch.export.export(
        Double(), (torch.ones(3, 4),), dynamic_shapes={"x": {0: batch}}
    ).graph
    assert build_memory_profile(graph, always) == [48, 144, 96]

    def at_ten(size: int | torch.SymInt) -> int:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        return int(expression.subs(dict.fromkeys(expression.free_symbols, 10)))

    assert build_memory_profile(graph, always, at_ten) == [160, 480, 320]
    assert build_memory_profile(_symbolic(), always, lambda s: s if isinstance(s, int) else 7) == [
        16,
        23,
        7,
    ]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_the_peak_is_that_of_a_run(seed: int) -> None:
    graph = random_drawing(seed)
    module = fx.GraphModule(nn.Module(), graph)
    inputs = [torch.randn(4, 3) for _ in range(3)]
    counter = LiveBytes([storage_sizes(inputs)])
    with counter:
        module(*inputs)
    inputs_stay = build_memory_profile(graph, lambda node: node.op != "placeholder")
    assert counter.peak_bytes == (max(inputs_stay),)


def _without_metadata() -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.call_function(aten.neg.default, (graph.placeholder("x"),)))
    return graph


def _out_of_order() -> fx.Graph:
    d = Drawing()
    x = d.input("x", 4)
    a = d.call(aten.neg.default, x)
    b = d.call(aten.relu.default, a)
    graph = d.done(b)
    a.append(x)
    b.append(a)
    return graph


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_without_metadata, r"node x carries no meta\['val'\].*FakeTensorProp"),
        (_out_of_order, "node relu_default reads neg_default, which comes after it"),
        (_symbolic, r"bytes has a size that depends on values of tensors; pass size_of"),
    ],
)
def test_refusals(make: Callable[[], fx.Graph], message: str) -> None:
    with pytest.raises(CaptureError, match=message) as error:
        build_memory_profile(make(), always)
    assert "\n" not in str(error.value)
