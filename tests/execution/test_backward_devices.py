"""Devices of gradients and of their sums: small models whose calls are counted by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.live_bytes import LiveBytes
from fxpart.capture.training.joint import joint_capture
from fxpart.core.partitions import partition_by_device
from fxpart.execution.backward_devices import BackwardDevices
from fxpart.execution.outcome import Outcome, step_outcome, trained_parameters
from fxpart.execution.split.placement import split_by_assignment
from fxpart.execution.split_run import split_run

CPU = torch.device("cpu")
INPUT = torch.tensor([1.0, 2.0])


class _Log(LiveBytes):  # type: ignore[no-untyped-call]
    """Records the device of each call of the backward."""

    def __init__(self, devices: int) -> None:
        super().__init__([{}] * devices)
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        self.calls.append((str(func).split(".")[1], self._device))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def on_devices(self, name: str) -> list[int]:
        """Return the devices of the backward calls with that name."""
        begin = [call for call, _ in self.calls].index("ones_like")
        return [device for call, device in self.calls[begin:] if call == name]


def _run(module: nn.Module, *device_of: int) -> tuple[Outcome, Outcome, _Log]:
    """Return a counted step with that placement, the same step unsplit, and the calls."""
    step = joint_capture(module, (INPUT,))
    whole, graph = step.forward.module(), op_graph(step.forward)
    assert graph.n_ops == len(device_of), graph.targets
    placed = partition_by_device(graph, np.array(device_of, dtype=np.int64))
    split, devices = split_by_assignment(whole, graph, placed), max(device_of) + 1
    homes = [home for (home,) in placed.devices_of_partition]
    run, parameters = split_run(split, homes, (CPU,) * devices), trained_parameters(whole)
    with _Log(devices) as log:
        backward = BackwardDevices(log)
        outcome = step_outcome(
            lambda: run.run([INPUT], log, backward), parameters, loss_of=backward.loss
        )
    return outcome, step_outcome(lambda: whole(INPUT), parameters), log


def _same(outcome: Outcome, whole: Outcome) -> bool:
    assert outcome.gradients is not None
    assert whole.gradients is not None
    assert outcome.gradients.keys() == whole.gradients.keys() != set()
    return all(torch.equal(outcome.gradients[name], g) for name, g in whole.gradients.items())


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0, 5.0]))


class Readers(Weighted):
    """A value with four readers."""

    def forward(self, x: Tensor) -> Tensor:
        v = x * self.weight
        a, b, c, d = v * 2, v * 3, v * 5, v * 7
        return a + b + c + d


def test_each_reader_adds_its_part_on_its_device() -> None:
    # v, a, b, c, d, and the sums.
    outcome, whole, log = _run(Readers(), 0, 0, 1, 1, 2, 2, 2, 2)
    assert _same(outcome, whole)
    # b and c on 1, where that of d arrives; a on 0, where theirs arrives.
    assert log.on_devices("add") == [1, 1, 0]
    # The one gradient of the sums is sent once to 1 and 0; the part of d to 1; that sum to 0.
    assert log.on_devices("clone") == [1, 0, 1, 0]
    assert log.on_devices("mul") == [2, 1, 1, 0, 0]


def test_a_value_also_read_at_home_is_summed_there() -> None:
    outcome, whole, log = _run(Readers(), 0, 0, 1, 0, 1, 1, 1, 1)
    assert _same(outcome, whole)
    assert sorted(log.on_devices("add")) == [0, 0, 1]


class Tied(Weighted):
    """A weight read by every operator."""

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.weight) * self.weight) * self.weight


@pytest.mark.parametrize(
    ("homes", "adds"), [((0, 0, 0), [0, 0]), ((0, 1, 2), [1, 0]), ((1, 0, 0), [0, 1])]
)
def test_the_gradient_of_a_tied_weight_is_summed_from_reader_to_reader(
    homes: tuple[int, ...], adds: list[int]
) -> None:
    outcome, whole, log = _run(Tied(), *homes)
    assert _same(outcome, whole)
    assert log.on_devices("add") == adds


class InPlace(Weighted):
    """Writes to its own values in place."""

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.weight).add_(x * x)
        return (y * y).relu_()


@pytest.mark.parametrize("homes", [(0, 0, 1, 1, 1), (0, 1, 1, 2, 0)])
def test_an_operator_may_write_to_a_received_value(homes: tuple[int, ...]) -> None:
    outcome, whole, _ = _run(InPlace(), *homes)
    assert _same(outcome, whole)


class Pieces(Weighted):
    """Passes on a tuple with one unread and one integer item."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = torch.sort(x * self.weight)
        return values * 2, places + 1


def test_values_without_a_gradient_are_passed_unchanged() -> None:
    outcome, whole, log = _run(Pieces(), 0, 0, 0, 0, 1, 1)
    assert _same(outcome, whole)
    assert log.on_devices("clone") == [0]


def test_no_bytes_are_live_after_a_step() -> None:
    outcome, whole, log = _run(Readers(), 0, 0, 1, 1, 2, 2, 2, 2)
    del whole
    # The gradient, on the device of the first reader, and the loss.
    assert log._live == [8, 0, 4]
    del outcome
    assert log._live == [0, 0, 0]
