import pytest
import torch
from torch import Tensor, fx, nn

from fxpart.errors import SpecError
from fxpart.execution.stages.chain import chain_stages
from fxpart.torch_compat.pipeline.cut_points import generate_pipeline_partition
from fxpart.torch_compat.pipeline.tied_weights import analyze_tie_weights, tied_gradient_stages
from fxpart.torch_compat.split_module import split_module
from tests.execution.stages.small_models import encoder_decoder


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(10, 10)
        self.linear = nn.Linear(10, 10, bias=False)
        self.extra = nn.Linear(10, 10, bias=False)
        self.extra.weight = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.extra(self.linear(self.wte(x)))
        return out


class Later(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stage0, self.stage1, self.stage2 = First(), Later(), Later()
        self.stage1.linear.weight = self.stage0.wte.weight
        self.stage2.linear.weight = self.stage0.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.stage2(self.stage1(self.stage0(x)))
        return out


def test_children_of_a_plain_module_are_stages() -> None:
    model = Model()
    tied = analyze_tie_weights(model, is_pipeline_partitioned=True)
    # linear and extra of stage 0 are tied within it: not counted.
    assert tied == {
        model.stage0.wte.weight: {("wte.weight", 0), ("linear.weight", 1), ("linear.weight", 2)}
    }
    assert [t.stages for t in tied_gradient_stages(model)] == [(0, 1, 2)]


def test_without_partitions_all_names_count_in_stage_zero() -> None:
    model = Model()
    assert analyze_tie_weights(model, is_pipeline_partitioned=False) == {
        model.stage0.wte.weight: {
            ("stage0.wte.weight", 0),
            ("stage1.linear.weight", 0),
            ("stage2.linear.weight", 0),
        },
        model.stage0.linear.weight: {("stage0.linear.weight", 0), ("stage0.extra.weight", 0)},
    }


def test_tied_weights_of_a_partitioned_model_with_one_embedding() -> None:
    model, _ = encoder_decoder()
    split = generate_pipeline_partition(model, ["enc.block.0", "enc", "dec.block.0"])
    assert analyze_tie_weights(split, is_pipeline_partitioned=True) == {
        model.shared.weight: {("shared.weight", 0), ("dec.embed.weight", 2), ("head.weight", 3)}
    }
    for stages in (split, chain_stages(split)):
        (tied,) = tied_gradient_stages(stages)
        assert tied.parameter is model.shared.weight
        assert tied.names == ((0, "shared.weight"), (2, "dec.embed.weight"), (3, "head.weight"))
        assert tied.stages == (0, 2, 3)


def test_a_weight_passed_by_the_root_to_two_stages_is_tied_under_one_name() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(x * self.scale) + self.scale

    model = Direct()
    stages = {"mul": 0, "exp": 0, "add": 1}
    split = split_module(fx.symbolic_trace(model), model, lambda n: stages[n.name])
    assert analyze_tie_weights(split, True) == {model.scale: {("scale", 0), ("scale", 1)}}
    assert [t.names for t in tied_gradient_stages(chain_stages(split))] == [
        ((0, "scale"), (1, "scale"))
    ]


def test_a_frozen_weight_has_no_gradient_to_exchange() -> None:
    model, _ = encoder_decoder()
    model.shared.weight.requires_grad_(False)
    split = generate_pipeline_partition(model, ["enc"])
    assert len(analyze_tie_weights(split, True)) == 1
    assert tied_gradient_stages(split) == ()


def test_a_module_without_children_is_refused() -> None:
    with pytest.raises(SpecError, match="Linear has no children that could be stages"):
        analyze_tie_weights(nn.Linear(2, 2), is_pipeline_partitioned=True)


def test_gradient_parts_of_the_stages_sum_to_the_gradient() -> None:
    model, inputs = encoder_decoder()
    model(*inputs)["logits"].sum().backward()
    assert model.shared.weight.grad is not None
    whole = model.shared.weight.grad.clone()
    chain = chain_stages(generate_pipeline_partition(model, ["enc", "dec.block.0"]))
    (tied,) = tied_gradient_stages(chain)
    parts = []
    for stage, name in tied.names:
        # The weight of one stage is separate: the gradient that its process would compute.
        model.zero_grad()
        values = chain.flat_inputs(inputs)
        for other in chain.stages:
            weight = model.shared.weight.detach().clone().requires_grad_()
            partial = (
                {tied.names[[s for s, _ in tied.names].index(other.index)][1]: weight}
                if (other.index in tied.stages)
                else {}
            )
            values = torch.func.functional_call(other.module, partial, values)
            if other.index == stage:
                assert name in partial
                copied = weight
        chain.results(values)["logits"].sum().backward()
        assert copied.grad is not None
        parts.append(copied.grad)
    assert all(part.abs().sum() > 0 for part in parts)
    torch.testing.assert_close(sum(parts), whole)


def test_two_objects_of_one_memory_are_one_weight() -> None:
    stages = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    first, second = stages[0], stages[1]
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    second.weight = nn.Parameter(first.weight.detach())
    assert second.weight is not first.weight
    (tied,) = tied_gradient_stages(stages)
    assert tied.parameter is first.weight
    assert tied.names == ((0, "weight"), (1, "weight"))
    # A part of the same memory is another weight.
    second.weight = nn.Parameter(first.weight.detach().t())
    assert tied_gradient_stages(stages) == ()
