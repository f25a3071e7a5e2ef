"""Weights created for a measurement: one tensor for each parameter, one for tied names."""

import torch
from torch import Tensor, nn

from fxpart.capture.inference.export import export_program
from fxpart.execution.profiling.tensors import placeholders_of

CPU = torch.device("cpu")


class Parameters(nn.Module):
    """Three names of one memory: a parameter, the same again, and the parameter transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.ones(3, 3))
        self.same = self.square
        self.turned = nn.Parameter(self.square.detach().t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.square @ self.turned @ self.same


def test_tied_names_are_one_tensor_and_a_transposed_view_is_another() -> None:
    program = export_program(Parameters(), (torch.ones(3, 3),))
    placeholders = placeholders_of(program, CPU)
    assert len(placeholders.key) >= 2
    assert len(set(placeholders.key.values())) == 2
    placeholders.make(placeholders.key)
    strides = {node.name: tuple(placeholders.value(node).stride()) for node in placeholders.key}
    expected = {node.name: tuple(placeholders.likes[node].stride()) for node in placeholders.key}
    assert strides == expected
    assert set(strides.values()) == {(3, 1), (1, 3)}
