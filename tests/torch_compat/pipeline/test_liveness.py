import operator

import pytest
import torch
from torch import Tensor, fx, nn

from fxpart.errors import SpecError
from fxpart.torch_compat.pipeline.cut_points import generate_pipeline_partition
from fxpart.torch_compat.pipeline.liveness import analyze_pipeline_module
from fxpart.torch_compat.split_module import split_module
from tests.execution.stages.small_models import encoder_decoder


def _split(model: nn.Module, stages: dict[str, int]) -> fx.GraphModule:
    """Return `model` split by the names of its nodes."""
    traced = fx.symbolic_trace(model)
    return split_module(traced, model, lambda n: stages[n.name], keep_original_order=True)


class Skip(nn.Module):
    """Stage 0 computes a and b, stage 1 computes c from a, stage 2 uses b and c, and x again."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.sin(x)
        b = torch.cos(y)
        c = torch.exp(a)
        d = b + c
        return d * x, a


SKIP = {"sin": 0, "cos": 0, "exp": 1, "add": 2, "mul": 2}


def test_values_used_by_and_live_before_each_stage() -> None:
    split = _split(Skip(), SKIP)
    args, names, live = analyze_pipeline_module(split)
    assert names == {0: "submod_0", 1: "submod_1", 2: "submod_2"}
    # Items are numbered by first use: of the results of stage 0, a is used before b.
    assert args == {0: ["x", "y"], 1: ["submod_0.0"], 2: ["submod_0.1", "submod_1", "x"]}
    assert live == {
        -1: ["x", "y"],
        0: ["x", "y"],
        # b and x are for stage 2, and a is part of the result.
        1: ["submod_0.0", "submod_0.1", "x"],
        2: ["submod_0.1", "submod_1", "x", "submod_0.0"],
    }


def test_the_first_stage_keeps_the_order_of_the_inputs_if_it_uses_all() -> None:
    class Swapped(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.exp(torch.sub(y, x))

    args, _, live = analyze_pipeline_module(_split(Swapped(), {"sub": 0, "exp": 1}))
    assert args[0] == ["y", "x"]
    assert live[0] == live[-1] == ["x", "y"]


def test_an_input_used_only_by_a_later_stage_is_live_from_the_start() -> None:
    model, _ = encoder_decoder()
    split = generate_pipeline_partition(model, ["enc.block.0", "dec.block.0"])
    args, _, live = analyze_pipeline_module(split)
    assert args == {0: ["ids"], 1: ["submod_0", "target"], 2: ["submod_1.0", "submod_1.1"]}
    assert live == {
        -1: ["ids", "target"],
        0: ["ids", "target"],
        1: ["submod_0", "target"],
        2: ["submod_1.0", "submod_1.1"],
    }


def test_stages_with_two_digits_are_distinguished() -> None:
    class Long(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(12):
                x = torch.sin(x)
            return x

    traced = fx.symbolic_trace(Long())
    order = {node: i for i, node in enumerate(traced.graph.nodes)}
    split = split_module(traced, Long(), lambda n: order[n] - 1)
    args, names, live = analyze_pipeline_module(split)
    assert names[11] == "submod_11"
    # A name that begins with another is not confused with it.
    assert args[2] == live[2] == ["submod_1"]
    assert args[11] == live[11] == ["submod_10"]


def test_an_item_of_an_item_has_both_numbers() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    pair = graph.call_module("submod_0", (x,))
    first = graph.call_function(operator.getitem, (pair, 1))
    item = graph.call_function(operator.getitem, (first, 0))
    graph.output(graph.call_module("submod_1", (item,)))
    top = fx.GraphModule({"submod_0": nn.Identity(), "submod_1": nn.Identity()}, graph)
    assert analyze_pipeline_module(top)[0][1] == ["submod_0.1.0"]


def test_a_module_without_stages_is_refused() -> None:
    traced = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(SpecError, match=r"calls children submod_0, submod_1, .*; this one has 0"):
        analyze_pipeline_module(traced)


def test_operators_outside_the_stages_are_refused() -> None:
    split = _split(Skip(), SKIP)
    output = split.graph.output_node()
    with split.graph.inserting_before(output):
        beside = split.graph.call_function(torch.neg, (output.args[0][0],))  # type: ignore[index]
    output.args = (beside,)
    with pytest.raises(
        SpecError, match=r"neg .* is computed beside the stages submod_0 to submod_2"
    ):
        analyze_pipeline_module(split)
