"""Parts of a pipeline run that need no processes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from fxpart.capture.training.loss import training_loss
from fxpart.errors import SpecError
from fxpart.execution.device import torch_threads
from fxpart.execution.stage_shell import mutated_inputs
from fxpart.execution.stages.chain import Chain
from fxpart.execution.unsplit_reference import reference
from tests.execution.pipeline_scene import Skips, cut_chain, skips, skips_inputs


def _exported(function: Callable[..., object], *inputs: Tensor) -> fx.GraphModule:
    class Model(nn.Module):
        def forward(self, *values: Tensor) -> object:
            return function(*values)

    module = torch.export.export(Model(), inputs, strict=False).module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    return module


def _in_a_region(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        z = x * 2
        z.add_(1)
    return z + y


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, y: x + y, ()),
        (lambda x, y: torch.relu_(x) + y, (0,)),
        (lambda x, y: x + y.transpose(0, 1)[0].mul_(2), (1,)),
        (lambda x, y: (x + y).add_(y), ()),
        (lambda x, y: y.split(1)[1].zero_() + x, (1,)),
        (lambda x, y: x.add_(y).mul_(x), (0,)),
        (lambda x, y: torch.relu_(x.clone()) + y, ()),
        # Regions that write are opaque: all inputs count as written.
        (_in_a_region, (0,)),
    ],
)
def test_inputs_that_are_written_to(
    function: Callable[..., object], expected: tuple[int, ...]
) -> None:
    module = _exported(function, torch.ones(2, 2), torch.ones(2, 2))
    assert mutated_inputs(module) == expected


def test_the_loss_is_the_first_real_number_or_mean() -> None:
    weight = torch.ones(3, requires_grad=True)
    whole = torch.arange(3)
    assert training_loss((whole, weight * 2, weight)).item() == 2.0
    number = (weight * 3).sum()
    assert training_loss((number,)) is number
    half = training_loss(((weight * 2).to(torch.float16),))
    assert (half.dtype, half.item()) == (torch.float32, 2.0)
    with pytest.raises(SpecError, match=r"no real-valued tensor .*\(phase=inference\)"):
        training_loss((whole,))
    with pytest.raises(SpecError, match=r"depends on no weight; .*\(phase=inference\)"):
        training_loss((torch.ones(3), weight))


def test_the_reference_is_autograd_of_the_uncut_model() -> None:
    chain, microbatches = skips(), skips_inputs(3)
    model = Skips()
    for stage in chain.stages:
        for name, parameter in stage.module.named_parameters():
            model.get_parameter(name).data.copy_(parameter.data)
    losses = []
    for inputs in microbatches:
        loss = model(*inputs)[0].mean()
        (loss / 3).backward()
        losses.append(loss.item())
    expected = reference(chain, microbatches, training=True, threads=1)
    assert expected.losses == tuple(losses)
    assert {name for _, name in expected.gradients} == {
        "embed.weight",
        "third.weight",
        "first.weight",
        "first.bias",
        "second.weight",
        "of_word",
    }
    for (_, name), gradient in expected.gradients.items():
        gradient_of_model = model.get_parameter(name).grad
        assert gradient_of_model is not None
        torch.testing.assert_close(gradient, gradient_of_model)


def _normalized() -> Chain:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    return cut_chain(model.train(), ("_0",))


@pytest.mark.parametrize("training", [False, True])
def test_the_reference_changes_nothing(*, training: bool) -> None:
    chain = _normalized()
    modules = [stage.module for stage in chain.stages]
    for parameter in modules[0].parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    before = [{k: v.clone() for k, v in module.state_dict().items()} for module in modules]
    inputs = torch.randn(4, 3)
    copy, chance = inputs.clone(), torch.get_rng_state()
    with torch_threads(3):
        reference(chain, [(inputs,)], training=training, threads=1)
        assert torch.get_num_threads() == 3
    for module, old in zip(modules, before, strict=True):
        for name, value in module.state_dict().items():
            assert torch.equal(value, old[name]), name
    assert all(p.grad is not None and p.grad.eq(7.0).all() for p in modules[0].parameters())
    assert torch.equal(inputs, copy)
    assert torch.equal(torch.get_rng_state(), chance)
