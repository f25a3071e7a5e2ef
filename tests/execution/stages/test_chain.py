import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from fxpart.errors import CycleError, SpecError
from fxpart.execution.stages.chain import Chain, chain_stages
from fxpart.torch_compat.pipeline.cut_points import generate_pipeline_partition
from fxpart.torch_compat.split_module import split_module
from tests.execution.stages.small_models import (
    WIDTH,
    assert_same,
    assert_same_gradients,
    encoder_decoder,
)


def assert_links(chain: Chain) -> None:
    """Assert that each stage takes the results of the one before, and that all are used."""
    for before, after in zip(chain.stages, chain.stages[1:], strict=False):
        assert before.outputs == after.inputs
    for number, stage in enumerate(chain.stages):
        assert stage.index == number
        holders = stage.module.graph.find_nodes(op="placeholder")
        assert tuple(node.name for node in holders) == stage.inputs
        assert all(node.users for node in holders)
        assert len(set(stage.outputs)) == len(stage.outputs)


def cut(model: nn.Module, stages: Mapping[str, int]) -> fx.GraphModule:
    """Return `model` traced, and split by the names of its nodes."""
    traced = fx.symbolic_trace(model)
    return split_module(traced, model, lambda n: stages[n.name], keep_original_order=True)


def checked(model: nn.Module, stages: Mapping[str, int], *args: Any, **kwargs: Any) -> Chain:  # noqa: ANN401
    """Return the chain of `model`, after checking that it computes the same."""
    chain = chain_stages(cut(model, stages))
    assert_links(chain)
    assert_same(chain(*args, **kwargs), model(*args, **kwargs))
    return chain


class Skip(nn.Module):
    def forward(self, x: Tensor, unused: Tensor, y: Tensor) -> dict[str, Any]:
        a = torch.sin(x)
        b = torch.exp(a)
        c = b * a
        return {"c": c, "again": [c, a], "input": y, "none": None, "number": 3}


def test_values_of_later_stages_are_passed_on() -> None:
    x, y = torch.randn(3), torch.randn(2)
    chain = checked(Skip(), {"sin": 0, "exp": 1, "mul": 2}, x, torch.ones(1), y)
    first, second, third = chain.stages
    assert first.inputs == ("x", "y")  # no stage uses the other
    assert first.outputs == ("y", "sin")
    assert second.outputs == ("y", "sin", "exp")
    assert third.outputs == ("mul", "sin", "y")  # each once, in the order of the result
    assert chain.results(tuple(torch.full((1,), float(i)) for i in range(3))) == {
        "c": torch.tensor([0.0]),
        "again": [torch.tensor([0.0]), torch.tensor([1.0])],
        "input": torch.tensor([2.0]),
        "none": None,
        "number": 3,
    }


def test_one_stage_and_an_input_that_is_the_result() -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x + 1

    chain = checked(Same(), {"add": 0}, torch.randn(2))
    assert chain.stages[0].inputs == ("x",)
    assert chain.stages[0].outputs == ("x", "add")


def test_the_split_module_is_unchanged() -> None:
    model, inputs = encoder_decoder()
    split = generate_pipeline_partition(model, ["enc.block.0", "dec.block.0"])
    codes = [m.code for m in split.modules() if isinstance(m, fx.GraphModule)]
    before = split(*inputs)
    first, second = chain_stages(split), chain_stages(split)
    assert [m.code for m in split.modules() if isinstance(m, fx.GraphModule)] == codes
    assert_same(first(*inputs), before)
    assert [s.outputs for s in first.stages] == [s.outputs for s in second.stages]
    assert [s.module.code for s in first.stages] == [s.module.code for s in second.stages]


def test_weights_are_the_same_objects_under_their_own_names_and_train_alike() -> None:
    model, inputs = encoder_decoder()
    chain = chain_stages(generate_pipeline_partition(model, ["enc.block.0", "enc", "dec.block.0"]))
    assert_links(chain)
    original = dict(model.named_parameters(remove_duplicate=False))
    for stage in chain.stages:
        for name, parameter in stage.module.named_parameters(remove_duplicate=False):
            assert original[name] is parameter
    assert_same_gradients(model, chain(*inputs), model(*inputs))


def test_modes_and_buffers_stay() -> None:
    norm, drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
    model = nn.Sequential(OrderedDict(a=nn.Linear(4, 4), norm=norm, drop=drop))
    model.train()
    drop.eval()
    chain = chain_stages(generate_pipeline_partition(model, ["a"]))
    assert [stage.module.training for stage in chain.stages] == [True, True]
    x = torch.randn(5, 4)
    chain(x)
    assert norm.num_batches_tracked is not None
    assert int(norm.num_batches_tracked) == 1
    assert not drop.training
    model.eval()
    assert_same(chain(x), model(x))


class Numbers(nn.Module):
    """Uses shapes, a dtype and numbers computed from them two stages later."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        rows = x.shape[0]
        double = rows * 2
        kind = y.dtype
        a = torch.sin(x)
        b = a.reshape(double, -1).to(kind)
        return torch.exp(b), a.size(0)


def test_numbers_are_recomputed_where_they_are_used() -> None:
    x, y = torch.randn(4, 6), torch.randn(1, dtype=torch.float64)
    traced = fx.symbolic_trace(Numbers())
    names = [n.name for n in traced.graph.nodes if n.op.startswith("call")]
    stages = dict.fromkeys(names, 0) | {"reshape": 1, "to": 1, "exp": 2}
    chain = checked(Numbers(), stages, x, y)
    # Only shape and dtype of x and y are used later, so the tensors are passed on.
    assert chain.stages[1].inputs == ("x", "y", "sin")
    assert chain.stages[1].outputs == ("sin", "to")
    assert chain(torch.randn(2, 2), y)[1] == 2


class Tuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, cell) = self.rnn(x)
        result: Tensor = torch.exp(out) + hidden[0].unsqueeze(1) * cell.sum()
        return result


def test_items_of_tuples_cross_even_if_nested() -> None:
    traced = fx.symbolic_trace(Tuples())
    names = [n.name for n in traced.graph.nodes if n.op.startswith("call")]
    for edge in range(1, len(names)):
        stages = {name: int(i >= edge) for i, name in enumerate(names)}
        torch.manual_seed(1)
        model = Tuples()
        chain = checked(model, stages, torch.randn(2, 3, WIDTH))
        output = chain.stages[0].module(*chain.flat_inputs((torch.randn(2, 3, WIDTH),)))
        assert output
        assert all(isinstance(value, Tensor) for value in output)


def test_a_captured_tuple_used_as_a_whole_crosses_item_by_item() -> None:
    class Joined(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            parts = torch.split(x, 2)
            return torch.cat(parts), parts[1]

    x = torch.randn(5, 3)
    exported = torch.export.export(Joined(), (x,)).module()
    assert isinstance(exported, fx.GraphModule)
    stages = {"split": 0, "_guards_fn": 0}
    split = split_module(exported, exported, lambda n: stages.get(n.name, 1))
    chain = chain_stages(split)
    assert_links(chain)
    assert len(chain.stages[0].outputs) == 3
    assert_same(tuple(chain(x)), Joined()(x))


@pytest.mark.parametrize("method", [True, False])
def test_a_tuple_of_unknown_length_used_as_a_whole_is_refused(method: bool) -> None:
    class Joined(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat(x.chunk(2) if method else torch.chunk(x, 2))

    with pytest.raises(SpecError, match="chunk is a tuple that cat of a later stage uses"):
        chain_stages(cut(Joined(), {"chunk": 0, "cat": 1}))


def test_the_tuple_of_a_recurrent_layer_as_the_result_is_refused() -> None:
    split = generate_pipeline_partition(nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2)), ["0"])
    with pytest.raises(SpecError, match="is a tuple that output of a later stage uses as a whole"):
        chain_stages(split)


def test_inputs_may_be_nested_and_defaults_are_kept() -> None:
    class Nested(nn.Module):
        def forward(
            self, pair: tuple[Tensor, Tensor], named: dict[str, Tensor], factor: float = 2.0
        ) -> Tensor:
            return torch.exp(pair[0] * factor) + pair[1] * named["z"]

    pair, named = (torch.randn(2), torch.randn(2)), {"z": torch.randn(2), "more": torch.ones(1)}
    traced = fx.symbolic_trace(Nested())
    names = [n.name for n in traced.graph.nodes if n.op.startswith("call")]
    stages = {name: int(i >= 4) for i, name in enumerate(names)}
    chain = checked(Nested(), stages, pair, named)
    assert len(chain.flat_inputs((pair, named))) == 3
    assert_same(chain(pair, named=named, factor=2.0), Nested()(pair, named))
    with pytest.raises(SpecError, match=r"input factor=3.0 was fixed to 2.0"):
        chain(pair, named, 3.0)
    for value in (torch.ones(2), torch.tensor(2.0), np.ones(2), (2.0, torch.ones(2))):
        with pytest.raises(SpecError, match=r"input factor=\S+ .*was fixed to 2.0 .*leave it out"):
            chain(pair, named, value)


@pytest.mark.parametrize("count", [0, 2])
def test_results_have_as_many_tensors_as_the_last_stage_returns(count: int) -> None:
    chain = checked(nn.ReLU(), {"relu": 0}, torch.randn(2))
    with pytest.raises(SpecError, match=rf"{count} tensors are no result .*returns 1 \(relu\)"):
        chain.results([torch.ones(2)] * count)


def test_inputs_that_are_no_tensors_are_refused() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor, mask: Any = None) -> Any:  # noqa: ANN401
            return torch.exp(x) * mask

    chain = checked(Plain(), {"exp": 0, "mul": 1}, torch.randn(2), mask=torch.ones(2))
    with pytest.raises(SpecError, match="input mask is NoneType, and stages take tensors only"):
        chain(torch.randn(2))
    with pytest.raises(SpecError, match=r"cut for other inputs than these: TypeError: .*missing 1"):
        chain(mask=torch.ones(2))


def test_a_weight_returned_as_the_result_comes_from_the_last_stage() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.weight, torch.exp(torch.sin(x * self.weight))

    model = Returns()
    chain = checked(model, {"mul": 0, "sin": 0, "exp": 1}, torch.randn(2))
    assert chain.stages[1].module(torch.ones(2))[0] is model.weight


def _backwards() -> fx.GraphModule:
    return cut(Skip(), {"sin": 1, "exp": 0, "mul": 0})


def _called_twice() -> fx.GraphModule:
    graph = fx.Graph()
    once = graph.call_module("submod_0", (graph.placeholder("x"),))
    graph.output(graph.call_module("submod_0", (once,)))
    return fx.GraphModule({"submod_0": nn.ReLU()}, graph)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (_backwards, CycleError, "submod_0 uses sin, which submod_1 makes after it"),
        (_called_twice, SpecError, "submod_0 is called 2 times"),
        (lambda: fx.symbolic_trace(nn.ReLU()), SpecError, "calls children submod_0"),
    ],
)
def test_modules_that_are_no_chain_are_refused(
    make: Callable[[], fx.GraphModule], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        chain_stages(make())


def test_stages_need_not_be_graphs_and_single_results_are_unpacked() -> None:
    graph = fx.Graph()
    called = graph.call_module("submod_0", (graph.placeholder("x"),))
    row = graph.call_function(operator.getitem, (called, 1))
    graph.output(graph.call_module("submod_3", (row,)))
    split = fx.GraphModule({"submod_0": nn.Linear(2, 2), "submod_3": nn.ReLU()}, graph)
    chain = chain_stages(split)
    assert_links(chain)
    assert [stage.index for stage in chain.stages] == [0, 1]
    x = torch.randn(3, 2)
    assert_same(chain(x), split(x))
