"""Values held by Python count on the device that computed them, in every memory count."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.eager_memory import counted_by_device, placed, predicted_by_device
from fxpart.capture.api import capture_graph
from fxpart.capture.models.build import BuiltModel, build_model
from fxpart.core.graph import without_python
from fxpart.core.partitions import partition_by_device
from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.cost.evaluate import evaluate
from fxpart.cost.peak_tensors import device_peaks
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.roofline import LatencyModel
from fxpart.placement.stages.line import stage_line
from fxpart.placement.stages.stretch_bytes import ONE, stretch_needs
from fxpart.schedule import stage_costs
from tests.execution.small_presets import SMALL_PRESETS


class Block(nn.Module):
    """A block whose local variables outlive their readers."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.repeat(1, 4)
        narrow = wide.reshape(-1, 4, 100).sum(1)
        result: Tensor = (x + narrow).to(x.dtype)
        return result.exp()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = block(x)
        return x


def _problem(devices: int) -> Problem:
    spec = DeviceSpec("d", 2**40, {"float32": 1e12}, 1e12)
    graph = capture_graph(Blocks(), (torch.ones(10, 100),))
    return make_problem(graph, uniform_topology((spec,) * devices, Link(1e9)), LatencyModel())


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_devices_hold_the_local_variables_of_their_blocks(devices: int) -> None:
    module, x = Blocks(), torch.ones(10, 100)
    graph = capture_graph(module, (x,))
    device_of_path = placed(module, devices)
    counted = counted_by_device(BuiltModel(module, (x,), {}), device_of_path, devices)
    assert predicted_by_device(graph, device_of_path, devices) == counted
    # A local variable of 16,000 bytes is read once, two operators before its block returns.
    freed = predicted_by_device(without_python(graph), device_of_path, devices)
    assert max(freed) <= max(counted) - 4000


class _Attends(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, mask)


class _Masked(nn.Module):
    """Attention, by several kernels of which the first alone reads a mask from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.attends = _Attends()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attends(x, x[0] > 0)
        return result


def test_a_received_argument_is_held_until_its_call_returns() -> None:
    built = BuiltModel(_Masked(), (torch.ones(1, 8, 8),), {})
    with sdpa_kernel(SDPBackend.MATH):
        here, there = (counted_by_device(built, {"attends": device}, 2) for device in (0, 1))
    assert here[1] == 0
    # The mask has 64 bytes, on both devices if it is read on the other.
    assert there == [64, here[0]]


def test_a_published_architecture_on_three_devices() -> None:
    spec = SMALL_PRESETS["llama2_7b"]
    planned, real = build_model(spec), build_model(spec, torch.device("cpu"))
    graph = capture_graph(planned.module, planned.args, planned.kwargs)
    device_of_path = placed(real.module, 3)
    counted = counted_by_device(real, device_of_path, 3)
    assert predicted_by_device(graph, device_of_path, 3) == pytest.approx(counted, rel=0.01)
    freed = predicted_by_device(without_python(graph), device_of_path, 3)
    assert max(freed) < 0.97 * max(counted)


def test_all_memory_counts_agree() -> None:
    problem = _problem(2)
    graph = problem.graph
    device_of = np.array([0 if path < "inner.2" else 1 for path in graph.modules])
    assignment = partition_by_device(graph, device_of)
    evaluation = evaluate(problem, assignment)
    peaks = [device.peak_bytes for device in evaluation.devices]
    assert [peak.bytes for peak in device_peaks(problem, assignment)] == peaks
    line = stage_line(problem)
    units, scratch = line.stretches.units, line.stretches.scratch
    cut = int(line.unit_of[np.flatnonzero(device_of)[0]])
    stretches = ((0, cut), (cut, line.n_units))
    needs = [stretch_needs(problem.memory, units, scratch, *ends, ONE) for ends in stretches]
    assert needs == peaks
    stages = stage_costs(problem, assignment).stages
    assert [s.forward_peak_bytes + s.input_bytes + s.weight_bytes for s in stages] == peaks
    plain = make_problem(without_python(graph), problem.topology, LatencyModel())
    assert max(peaks) > max(d.peak_bytes for d in evaluate(plain, assignment).devices)
