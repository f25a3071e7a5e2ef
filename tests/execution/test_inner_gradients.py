"""Models that take gradients inside their forward: memory and gradients equal those of eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from fxpart.capture.api import capture_graph
from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.training.joint import joint_capture
from fxpart.core.partitions import partition_by_device
from fxpart.core.phases import StepOptions
from fxpart.cost.evaluate import peak_bytes
from fxpart.cost.tables import memory_tables
from fxpart.errors import CaptureError
from fxpart.execution.forward_devices import forward_devices
from fxpart.execution.local import run_local
from fxpart.execution.real_model import RealModel
from fxpart.execution.real_step import forward_peak_bytes, step_peak_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

_CPU = StepOptions(fused_attention=False, fused_dropout=False)


class Forces(nn.Module):
    """Returns an energy of distances, and its gradient by the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(
            nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1)
        )

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            distances = (positions.unsqueeze(1) - positions).pow(2).sum(-1, keepdim=True)
            energy = self.energy(distances).sum()
            (forces,) = torch.autograd.grad(energy, positions, create_graph=self.training)
        return (forces.pow(2).mean() + energy if self.training else energy), forces


class Penalty(nn.Module):
    """The gradient penalty of a critic, whose activation is kept by its result."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach()
            x.requires_grad = True
            (slope,) = torch.autograd.grad(self.critic(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).pow(2).mean()  # type: ignore[no-any-return]


class Laplacian(nn.Module):
    """Second derivatives, one input dimension at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(
            nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.field(x).sum(), x, create_graph=True)
            columns = [
                torch.autograd.grad(slope[:, dim].sum(), x, create_graph=True)[0][:, dim]
                for dim in range(3)
            ]
        return torch.stack(columns).sum(0)


class Saliency(nn.Module):
    """Uses a gradient that is not differentiated any further."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.head = nn.Linear(8, 32), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            probe = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.score(probe)).sum(), probe)
        return self.head(slope * x)  # type: ignore[no-any-return]


class InnerStep(nn.Module):
    """Takes a step of gradient descent on its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = tuple(self.layer.parameters())
        with torch.enable_grad():
            loss = self.head(torch.relu(self.layer(x))).pow(2).mean()
            slopes = torch.autograd.grad(loss, weights, create_graph=True)
        weight, bias = (w - 0.1 * slope for w, slope in zip(weights, slopes, strict=True))
        return self.head(nn.functional.linear(x, weight, bias))  # type: ignore[no-any-return]


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "forces": lambda: (Forces(), torch.randn(12, 3)),
    "penalty": lambda: (Penalty(), torch.randn(5, 16)),
    "laplacian": lambda: (Laplacian(), torch.randn(40, 3)),
    "saliency": lambda: (Saliency(), torch.randn(30, 8)),
    "inner step": lambda: (InnerStep(), torch.randn(24, 16)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_forward_equals_that_of_the_module(name: str) -> None:
    torch.manual_seed(0)
    module, x = CASES[name]()
    graph = capture_graph(module.eval(), (x,))
    predicted = int(peak_bytes(memory_tables(graph), graph.group * 0, 1)[0])
    assert predicted == forward_peak_bytes(module, (x,))


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_step_equals_that_of_the_module(name: str) -> None:
    torch.manual_seed(0)
    module, x = CASES[name]()
    graph = joint_capture(module.train(), (x,), options=_CPU).graph
    predicted = int(peak_bytes(memory_tables(graph), graph.group * 0, 1)[0])
    real = step_peak_bytes(module, (x,))
    # The caller's variable holds the loss, of 4 bytes.
    assert real.peak_bytes - 4 <= predicted <= real.peak_bytes


@pytest.mark.parametrize("name", CASES)
def test_the_captured_step_computes_the_gradients_of_the_module(name: str) -> None:
    torch.manual_seed(0)
    module, x = CASES[name]()
    step = joint_capture(module.train(), (x,), options=_CPU)
    weights = dict(module.named_parameters())
    inputs = [weights.get(str(s.target), x) for s in step.program.graph_signature.input_specs]
    loss, *gradients = step.program.graph_module(*(value.detach() for value in inputs))
    result = module(x)
    expected = (result[0] if isinstance(result, tuple) else result).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert list(step.gradients) == [key for key, w in weights.items() if w.grad is not None]
    for key, gradient in zip(step.gradients, gradients, strict=True):
        torch.testing.assert_close(gradient, weights[key].grad)


@pytest.mark.parametrize("name", ["penalty", "laplacian", "saliency", "inner step"])
def test_a_split_step_computes_the_gradients_of_the_module(name: str) -> None:
    torch.manual_seed(0)
    module, x = CASES[name]()
    step = joint_capture(module.eval(), (x,))
    forward = op_graph(step.forward)
    real = RealModel(module, (x,), {}, step.forward, forward)
    half = (torch.arange(step.graph.n_ops) >= len(step.exported_names) // 4).long().numpy()
    placed = partition_by_device(forward, forward_devices(half, step.exported_names, forward))
    run = run_local(real, placed, 2, repeats=1, training=True)
    assert run.max_difference == 0.0
    assert run.gradient_difference is not None
    assert run.gradient_difference < 1e-6


class _Cubed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(x)
        return x.pow(3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient  # type: ignore[no-any-return]


class _Descent(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        with torch.enable_grad():
            probe = x.detach().requires_grad_()
            return x - torch.autograd.grad(torch.tanh(probe).exp().sum(), probe)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        return gradient


class Refused(nn.Module):
    """Takes its gradient in a way that no capture traces."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(4, 4), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "torch.func":
            return torch.func.grad(lambda t: self.layer(t).pow(2).sum())(x)  # type: ignore[no-any-return]
        x = x.detach().requires_grad_()
        if self.way == "in a function":
            return _Descent.apply(self.layer(x))  # type: ignore[no-any-return,no-untyped-call]
        if self.way == "backward":
            self.layer(x).sum().backward()
            return x
        if self.way == "checkpoint":
            y = checkpoint(torch.tanh, self.layer(x), use_reentrant=False)
        else:
            y = _Cubed.apply(self.layer(x))  # type: ignore[no-untyped-call]
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("torch.func", r"\(.*test_inner_gradients.py:\d+\): it calls torch.func.grad.*autograd.gr"),
        ("backward", r"\(.*test_inner_gradients.py:\d+\): .*backward\(\) is.*autograd.grad\("),
        ("checkpoint", "checkpoint and takes gradients"),
        (
            "in a function",
            r"inside that of a torch.autograd.Function; .*in the forward of a module",
        ),
        ("function", "through _Cubed, a torch.autograd.Function"),
    ],
)
def test_other_ways_are_refused_with_what_to_change(way: str, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        joint_capture(Refused(way), (torch.randn(2, 4),))
