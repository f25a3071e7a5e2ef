"""Live bytes in real forwards and training steps, counted by hand; and the phases of a step."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxpart.core.optimizer import IMPLEMENTATIONS, OPTIMIZERS
from fxpart.errors import SpecError
from fxpart.execution.real_step import (
    REAL_OPTIMIZERS,
    StepPeak,
    forward_peak_bytes,
    real_optimizer,
    step_peak_bytes,
    training_step,
)


class Product(nn.Module):
    """A weight of 16 bytes, times an input of 16 bytes, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return y * y


class Keeps(Product):
    """The same, with a local variable that outlives its use."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        z = y * 2
        return z * 2


class Drops(Product):
    """The same, with each result freed after its use."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * 2 * 2


def test_a_forward_holds_weights_inputs_and_results() -> None:
    # Weight, input, y and y * y.
    assert forward_peak_bytes(Product(), (torch.ones(4),)) == 64
    assert forward_peak_bytes(Product(), (), {"x": torch.ones(4)}) == 64


def test_local_variables_of_python_count() -> None:
    x = (torch.ones(4),)
    assert forward_peak_bytes(Keeps(), x) == forward_peak_bytes(Drops(), x) + 16


class Caches(nn.Module):
    """Keeps a result of 32 bytes from its first call, made after the peak of that call."""

    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = (x.repeat(3) * 2).sum()
        if self.kept is None:
            self.kept = x.repeat(2)
        return y


def test_what_a_module_keeps_from_its_first_call_counts_in_the_second() -> None:
    # The input, three copies of it, twice these, and what was kept.
    assert forward_peak_bytes(Caches(), (torch.ones(4),)) == 16 + 48 + 48 + 32


def test_a_forward_keeps_nothing_for_a_backward() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Product() for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    # 8 weights and the input; per layer its input, y and y * y.
    assert forward_peak_bytes(Chain(), (torch.ones(4),)) == 9 * 16 + 3 * 16


def test_the_parts_of_a_step_by_hand() -> None:
    peak = step_peak_bytes(Product(), (torch.ones(4),))
    # Weight and input are 32 bytes. The forward adds y, y * y and its mean, which is 4.
    assert (peak.resident_bytes, peak.forward_bytes) == (32, 32 + 32 + 4)
    # In the backward y lives until its gradient is computed; at the end the gradient remains.
    assert peak.phase == "backward"
    assert peak.backward_bytes > peak.forward_bytes
    assert peak.update_bytes == 32 + 16 + 4


@pytest.mark.parametrize(("name", "copies"), [("sgd", 0), ("momentum", 1), ("adam", 2)])
def test_an_optimizer_keeps_its_state(name: str, copies: int) -> None:
    module = Product()
    optimizer = real_optimizer(name, module.parameters())
    peak = step_peak_bytes(module, (torch.ones(4),), {}, optimizer)
    count = 4 if name == "adam" else 0
    assert peak.resident_bytes == 32 + 16 * copies + count
    # The gradient and the loss are live as well.
    assert peak.update_bytes >= peak.resident_bytes + 20


def test_the_largest_phase_is_the_peak() -> None:
    for parts, phase in (((3, 2, 1), "forward"), ((1, 3, 2), "backward"), ((1, 2, 3), "update")):
        peak = StepPeak(*parts, resident_bytes=1)
        assert (peak.peak_bytes, peak.phase) == (3, phase)
    assert StepPeak(2, 2, 2, 2).phase == "forward"


def test_an_update_can_be_the_peak() -> None:
    module = nn.Linear(64, 64, bias=False)
    optimizer = real_optimizer("adam", module.parameters(), "foreach")
    assert step_peak_bytes(module, (torch.ones(1, 64),), {}, optimizer).phase == "update"


def test_the_phases_of_a_step_run_in_order() -> None:
    module = Product()
    optimizer = real_optimizer("sgd", module.parameters())
    seen: list[tuple[bool, float]] = []

    def look() -> None:
        seen.append((module.weight.grad is not None, float(module.weight[0].detach())))

    training_step(module, (torch.ones(4),), {}, optimizer, look)
    assert [gradient for gradient, _ in seen] == [False, True, True]
    weights = [weight for _, weight in seen]
    assert weights[0] == weights[1] == 1.0
    # The mean of 4 squares has gradient 2 / 4 at 1; the rate is 1e-3.
    assert weights[2] == pytest.approx(1.0 - 1e-3 * 0.5)


def test_peaks_do_not_accumulate_over_steps() -> None:
    module, x = Product(), (torch.ones(4),)
    optimizer = real_optimizer("adamw", module.parameters())
    assert step_peak_bytes(module, x, {}, optimizer) == step_peak_bytes(module, x, {}, optimizer)


def test_every_optimizer_that_can_be_planned_for_can_be_run() -> None:
    assert {*REAL_OPTIMIZERS, "none"} == {*OPTIMIZERS}
    for name in OPTIMIZERS:
        for implementation in IMPLEMENTATIONS:
            optimizer = real_optimizer(name, Product().parameters(), implementation)
            assert (optimizer is None) == (name == "none")
            if optimizer is not None and implementation != "for_loop":
                assert optimizer.defaults[implementation] is True


def test_a_frozen_weight_is_not_trained() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].requires_grad_(False)
    optimizer = real_optimizer("sgd", module.parameters())
    assert optimizer is not None
    assert len(optimizer.param_groups[0]["params"]) == 2


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: real_optimizer("adm", []), r"optimizer=adm is not known; nearest: adam"),
        (
            lambda: real_optimizer("sgd", [], "forech"),
            r"implementation=forech of an optimizer is not known; nearest: foreach",
        ),
    ],
)
def test_names_that_do_not_exist_are_refused(work: Callable[[], object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        work()


def test_a_step_without_a_loss_is_refused() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.int64)

    with pytest.raises(SpecError, match="no real-valued tensor"):
        step_peak_bytes(Counts(), (torch.ones(4),))
