"""Exported models: devices of created tensors, function transforms, and forwards that raise."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.inference.export import export_program
from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.training.joint import joint_capture
from fxpart.errors import CaptureError


class Shifted(nn.Module):
    """Adds a created tensor to its input; it may have a buffer, and has no parameters."""

    offset: Tensor | None

    def __init__(self, offset: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("offset", offset)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        created = torch.arange(4) + (0 if self.offset is None else self.offset)
        return x * (1 if scale is None else scale) + created


def devices(module: nn.Module, *args: Tensor, **kwargs: Tensor) -> set[str]:
    """Return the devices of all values of the exported program."""
    values = [n.meta.get("val") for n in export_program(module, args, kwargs).graph.nodes]
    return {value.device.type for value in values if isinstance(value, Tensor)}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_parameters_tensors_are_created_on_the_device_of_the_inputs(device: str) -> None:
    x = torch.zeros(4, device=device)
    assert devices(Shifted(), x) == {device}
    assert devices(Shifted(), x=x, scale=x) == {device}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_parameters_a_buffer_determines_the_device(device: str) -> None:
    x = torch.zeros(4, device=device)
    assert devices(Shifted(torch.zeros(4, device=device)), x) == {device}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_determine_the_device_first(device: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), Shifted(torch.zeros(4))).to(device)
    assert devices(module, torch.zeros(4, device=device)) == {device}


class Doing(nn.Module):
    """Applies a function to the result of a layer."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x))


def _doubled_by_row(x: Tensor) -> Tensor:
    doubled: Tensor = torch.vmap(lambda row: row * 2)(x)
    return doubled


def test_a_transform_is_captured_as_its_operators() -> None:
    module, x = Doing(_doubled_by_row), torch.randn(2, 4)
    program = export_program(module, (x,))
    assert op_graph(program).names == ("linear", "mul")
    assert torch.equal(program.module()(x), module(x))
    # No state of it remains for the next model.
    assert op_graph(export_program(Doing(torch.relu), (x,))).names == ("linear", "relu")


def test_a_step_through_a_transform_has_gradients() -> None:
    step = joint_capture(Doing(_doubled_by_row), (torch.randn(2, 4),))
    assert set(step.gradients) == {"layer.weight", "layer.bias"}


class OddError(BaseException):
    """Not an `Exception`."""


def _ends(_: Tensor) -> Tensor:
    raise SystemExit(0)


def _raises(_: Tensor) -> Tensor:
    raise OddError("odd")


@pytest.mark.parametrize(("act", "message"), [(_ends, "SystemExit: 0"), (_raises, "OddError: odd")])
def test_anything_that_a_forward_raises_is_reported_in_one_line(
    act: Callable[[Tensor], Tensor], message: str
) -> None:
    x = (torch.zeros(1, 4),)
    with pytest.raises(CaptureError, match=message):
        export_program(Doing(act), x)
    with pytest.raises(CaptureError, match=message):
        joint_capture(Doing(act), x)


def test_an_interrupt_is_passed_on() -> None:
    def interrupted(_: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_program(Doing(interrupted), (torch.zeros(1, 4),))


class _Casts(nn.Module):
    """A linear layer that casts its weight to the dtype that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))


def test_a_weight_is_used_by_the_operators_of_its_module_alone() -> None:
    module = nn.Sequential(_Casts(), _Casts())
    graph = op_graph(export_program(module.to("meta"), (torch.ones(2, 8, device="meta"),)))
    assert graph.modules == ("0", "0", "1", "1")
    assert [graph.modules[op] for op in graph.users] == ["0", "1"]
