"""Accelerate's own loader executes a map with tiers, here with the CPU as the device."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from accelerate.utils import check_device_map

from fxpart.core.module_paths import covering
from fxpart.core.tiers import OffloadOptions, Tier, Tiers
from fxpart.cost.roofline import LatencyModel
from fxpart.execution.real_model import RealModel, real_model
from fxpart.placement.offload.machine import Machine
from fxpart.placement.offload.plan import Offloaded, offload
from fxpart.placement.offload.units import RESIDENT
from fxpart.placement.size_based import size_based
from fxpart.plan_export import tiered_device_map
from tests.capture.small_specs import LLAMA
from tests.plan_export.scene import named, on_devices
from tests.sketch import Sketch, devices, problem

SERIAL = OffloadOptions("accelerate", overlap=False, on_host=False)


def planned(real: RealModel) -> Offloaded:
    """Return a plan for a device with too little memory, a small host and a disk."""
    size = real.graph.total_weight_bytes
    values = int(real.graph.value_alloc_bytes[real.graph.value_producer >= 0].max())
    machine = Machine(
        problem(real.graph, devices(size // 2 + 8 * values)),
        Tiers(Tier("host", "host", size), Tier("disk", "disk", size, bytes_per_s=1.0)),
        SERIAL,
        link=(1e9, 0.0),
        host_times=LatencyModel().op_time_s,
    )
    return offload(machine, size_based)


def test_accelerate_runs_a_model_whose_streamed_blocks_are_on_disk(tmp_path: Path) -> None:
    real = real_model(LLAMA)
    plan = planned(real)
    streamed = [u for u, choice in zip(plan.units, plan.ways, strict=True) if choice != RESIDENT]
    assert 0 < len(streamed) < len(plan.units)
    words = {op: "disk" for unit in streamed for op in unit.ops.tolist()}
    entries = tiered_device_map(
        real.graph, plan.assignment.device_of, words, list(real.module.state_dict())
    ).entries
    names = real.graph.weight_names
    away = {names[weight] for unit in streamed for weight in unit.weights.tolist()}
    assert {name for name in names if entries[covering(name, entries) or ""] == "disk"} == away
    assert json.loads(json.dumps(entries)) == entries
    check_device_map(real.module, dict(entries))
    with torch.no_grad():
        expected = real.module(*real.args, **real.kwargs).logits
    # The CPU stands for the accelerator, as there is no other device here.
    here = {path: "cpu" if place == 0 else place for path, place in entries.items()}
    model = dispatch_model(real.module, here, main_device="cpu", offload_dir=str(tmp_path))
    kept = json.loads((tmp_path / "index.json").read_text())
    assert kept
    for name, tensor in model.named_parameters():
        is_away = here[covering(name, here) or ""] == "disk"
        assert (tensor.device.type == "meta") == is_away
        assert (name in kept) == is_away
    with torch.no_grad():
        assert torch.equal(model(*real.args, **real.kwargs).logits, expected)


def test_each_module_is_named_by_its_tier() -> None:
    sketch = Sketch()
    value = sketch.input(1)
    for module in ("embed", "layers.0", "layers.1", "head"):
        value = sketch.op([value], 1, [sketch.weight(1)], module=module)
    weights = ("embed.w", "layers.0.w", "layers.1.w", "head.w")
    graph = named(sketch.graph(value), *weights)
    device_of = on_devices(graph, 1, 0, 0, 1).device_of
    mapped = tiered_device_map(graph, device_of, {1: "cpu", 2: "disk"})
    assert mapped.entries == {"embed": 1, "layers.0": "cpu", "layers.1": "disk", "head": 1}
    assert mapped.weight_bytes == {1: 2, "cpu": 1, "disk": 1}
    # Copied modules run on the main device, which is that of most of them.
    assert (mapped.main_device, mapped.moved) == (0, ())
    assert mapped.device_of.tolist() == [1, 0, 0, 1]
    apart = tiered_device_map(graph, np.array([1, 1, 0, 1]), {1: "cpu", 2: "disk", 3: "cpu"})
    assert (apart.main_device, apart.moved) == (1, (graph.names[2],))
    assert tiered_device_map(graph, np.zeros(4, dtype=np.int64), {}).entries == {"": 0}


def test_operators_planned_on_the_host_are_not_misplaced() -> None:
    sketch = Sketch()
    value = sketch.op([sketch.input(1)], 1, [sketch.weight(1)], module="embed")
    graph = sketch.graph(sketch.op([value], 1, [sketch.weight(1)], module="head"))
    graph = named(graph, "embed.w", "head.w")
    mapped = tiered_device_map(graph, np.array([-1, 0]), {0: "cpu"})
    assert mapped.entries == {"embed": "cpu", "head": 0}
    assert (mapped.main_device, mapped.moved) == (0, ())


@pytest.mark.parametrize(("k_device", "torn"), [(0, ()), (1, ("attention",))])
def test_a_module_is_divided_by_devices_but_not_by_a_tier(
    k_device: int, torn: tuple[str, ...]
) -> None:
    """The products of queries and keys are an operator of the attention itself."""
    sketch = Sketch()
    x = sketch.op([sketch.input(1)], 1, [sketch.weight(1)], module="attention.v")
    q = sketch.op([x], 1, [sketch.weight(1)], module="attention.q")
    k = sketch.op([x], 1, [sketch.weight(1)], module="attention.k")
    graph = sketch.graph(sketch.op([q, k], 1, module="attention"))
    graph = named(graph, "attention.v.w", "attention.q.w", "attention.k.w")
    device_of = np.array([0, 0, k_device, 0])
    mapped = tiered_device_map(graph, device_of, {1: "cpu"})
    assert mapped.entries["attention.q"] == "cpu"
    assert mapped.torn == torn
