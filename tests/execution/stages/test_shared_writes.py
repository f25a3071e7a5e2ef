import pytest
import torch
from torch import Tensor, fx, nn

from fxpart.errors import CycleError, SpecError
from fxpart.execution.stages.chain import chain_stages
from fxpart.torch_compat.split_module import split_module
from tests.execution.stages.small_models import assert_same


def _cut(model: nn.Module, stages: dict[str, int]) -> fx.GraphModule:
    return split_module(fx.symbolic_trace(model), model, lambda n: stages[n.name])


class Adds(nn.Module):
    """Writes to `a` in place; the result also uses it under its older name."""

    def forward(self, x: Tensor) -> Tensor:
        a = torch.sin(x)
        b = a.add_(1)
        return torch.exp(b) * a


@pytest.mark.parametrize("write", [0, 1])
def test_a_tensor_under_one_name_is_written_and_passed_on(write: int) -> None:
    model, x = Adds(), torch.randn(3)
    chain = chain_stages(_cut(model, {"sin": 0, "add_": write, "exp": 1, "mul": 2}))
    assert_same(chain(x), model(x))


class Views(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a = torch.sin(x)
        view = a.view(-1)
        a.mul_(2)
        return torch.exp(view) + view.sum()


def test_a_write_that_another_process_would_miss_is_refused() -> None:
    model, x = Views(), torch.randn(2, 3)
    stages = {"sin": 0, "view": 0, "exp": 1, "sum_1": 1, "add": 1}
    message = "submod_1 writes into sin in place and takes it as sin and as view"
    with pytest.raises(SpecError, match=message):
        chain_stages(_cut(model, stages | {"mul_": 1}))
    assert_same(chain_stages(_cut(model, stages | {"mul_": 0}))(x), model(x))


class ReadsFirst(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = torch.exp(x)
        return before, x.neg_()


def test_a_later_stage_that_reads_before_the_write_is_refused() -> None:
    message = "submod_0 writes into x in place, and submod_1 uses what was there before"
    with pytest.raises(CycleError, match=message):
        chain_stages(_cut(ReadsFirst(), {"exp": 1, "neg_": 0}))
    chain = chain_stages(_cut(ReadsFirst(), {"exp": 0, "neg_": 1}))
    assert_same(chain(torch.ones(2)), ReadsFirst()(torch.ones(2)))


class ReadsLast(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.neg_(), torch.exp(x)


def test_an_earlier_stage_that_reads_after_the_write_is_refused() -> None:
    message = "submod_1 writes into x in place, and submod_0 uses what is there after"
    with pytest.raises(CycleError, match=message):
        chain_stages(_cut(ReadsLast(), {"neg_": 1, "exp": 0}))
    chain = chain_stages(_cut(ReadsLast(), {"neg_": 0, "exp": 1}))
    assert_same(chain(torch.ones(2)), ReadsLast()(torch.ones(2)))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        old = torch.exp(x) * self.count
        return torch.sin(old) + self.count.add_(1)


def test_a_shared_weight_written_by_one_stage_is_refused() -> None:
    message = "submod_1 writes into count.* in place, which submod_0 uses too"
    with pytest.raises(SpecError, match=message):
        chain_stages(_cut(Counts(), {"exp": 0, "mul": 0, "sin": 0, "add_": 1, "add": 1}))
    model, x = Counts(), torch.randn(2)
    chain = chain_stages(_cut(model, {"exp": 0, "mul": 1, "sin": 1, "add_": 1, "add": 1}))
    expected = model(x)
    with torch.no_grad():
        model.count.zero_()
    assert_same(chain(x), expected)
    assert int(model.count) == 1


def test_a_layer_that_writes_to_its_input_is_refused() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            a = torch.sin(x)
            row = a[0]
            return torch.exp(self.relu(a)) + row

    stages = {"sin": 0, "getitem": 0, "exp": 1, "add": 1}
    with pytest.raises(SpecError, match="move relu into the stage that makes it"):
        chain_stages(_cut(Layers(), stages | {"relu": 1}))
    x = torch.randn(2, 3)
    assert_same(chain_stages(_cut(Layers(), stages | {"relu": 0}))(x), Layers()(x))
