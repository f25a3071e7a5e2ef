"""Where an exported model creates its tensors: beside its parameters, buffers or inputs."""

import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.inference.export import export_program


class Shifted(nn.Module):
    """Adds a tensor that it creates to its input; it may have a buffer, and no parameters."""

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
def test_without_parameters_tensors_are_created_where_the_inputs_are(device: str) -> None:
    x = torch.zeros(4, device=device)
    assert devices(Shifted(), x) == {device}
    assert devices(Shifted(), x=x, scale=x) == {device}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_parameters_a_buffer_says_where(device: str) -> None:
    x = torch.zeros(4, device=device)
    assert devices(Shifted(torch.zeros(4, device=device)), x) == {device}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_come_first(device: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), Shifted(torch.zeros(4))).to(device)
    assert devices(module, torch.zeros(4, device=device)) == {device}
