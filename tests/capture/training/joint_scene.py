"""Shared parts of the tests of training steps: small models, their weights, inputs of a step."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.capture.training.joint import JointCapture, JointProgram


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def on_cpu(spec: ModelSpec) -> tuple[nn.Module, dict[str, Tensor]]:
    built = build_model(spec)
    module = built.module.to_empty(device="cpu")
    chance = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter, -0.1, 0.1, generator=chance)
    for buffer in module.buffers():
        # Variances are positive.
        if buffer.is_floating_point():
            torch.nn.init.uniform_(buffer, 0.5, 1.0, generator=chance)
        else:
            buffer.zero_()
    module.tie_weights()  # type: ignore[operator]
    inputs = {
        name: torch.randn(t.shape, generator=chance)
        if t.is_floating_point()
        else torch.randint(0, 100, t.shape, generator=chance)
        for name, t in built.kwargs.items()
    }
    return module, inputs


def flat_inputs(
    captured: JointCapture | JointProgram, module: nn.Module, inputs: Mapping[str, Tensor]
) -> list[Tensor]:
    """Return the inputs of the captured step: weights of `module`, constants and `inputs`."""
    program = captured.program
    known = {
        **module.state_dict(keep_vars=True),
        **program.constants,
        **dict(module.named_buffers()),
    }
    return [
        inputs[spec.arg.name] if spec.kind == InputKind.USER_INPUT else known[str(spec.target)]
        for spec in program.graph_signature.input_specs
    ]
