"""Optimizer states, activations and weights of a training step in host memory: known answers."""

from dataclasses import replace

import numpy as np
import pytest

from fxpart.core.graph import OpGraph
from fxpart.core.optimizer import Optimizer, with_optimizer
from fxpart.core.tiers import OffloadOptions, Tier, Tiers
from fxpart.core.topology import DeviceSpec
from fxpart.cost.evaluate import evaluate
from fxpart.errors import InfeasibleError, SpecError
from fxpart.placement import make_mode
from fxpart.placement.offload.machine import Machine
from fxpart.placement.offload.plan import Offloaded
from fxpart.placement.offload.units import RESIDENT
from fxpart.placement.offload.updates import offload_updates
from fxpart.placement.size_based import size_based
from tests.placement.test_offload import host, times
from tests.sketch import Sketch, devices, problem


def step(layers: int, weight: int = 8) -> OpGraph:
    """Layers of 1 s, and 2 s for their weight gradient; momentum has the size of the weight."""
    sketch, gradients = Sketch(), list[int]()
    value = sketch.input(0)
    for i in range(layers):
        value = sketch.op([value], 0, [sketch.weight(weight)], 1, module=f"layers.{i}")
    for i in reversed(range(layers)):
        module = f"layers.{i}"
        value = sketch.op([value], weight, [i], 2, module=module, backward_of=i)
        gradients.insert(0, value)
    return with_optimizer(
        replace(
            sketch.graph(*gradients),
            weight_names=tuple(f"layers.{i}.weight" for i in range(layers)),
            gradient_values=np.array(gradients),
            gradient_weights=np.arange(layers),
        ),
        Optimizer("momentum"),
    )


def updated_on_host(
    graph: OpGraph, memory: int, optimizer: str, host_bytes: int, weights: str = "none"
) -> Offloaded:
    # An update reads or writes eight times the bytes of its weight.
    processor = DeviceSpec("host", host_bytes, {"float32": 1e9}, 16.0)
    tiers = Tiers(Tier("host", "host", host_bytes, processor=processor))
    options = OffloadOptions(optimizer=optimizer, weights=weights)
    task = problem(graph, devices(memory))
    return offload_updates(Machine(task, tiers, options, (1.0, 0.0), times), size_based)


def test_states_are_on_the_host_which_updates_the_weights() -> None:
    graph = step(3)
    assert graph.moved_bytes[-3:].tolist() == [64] * 3
    plan = updated_on_host(graph, 1000, "all", 1000)
    # Gradients exist at 5, 7 and 15, since there is space for two: the first goes from 5 to 13,
    # then to 21 and 29. Updates of 4 s then follow each other, and weights return from 33 on.
    finish_s = plan.evaluation.op_finish_s
    assert finish_s[3:6].tolist() == [5, 7, 15]
    assert finish_s[6:].tolist() == [33, 37, 41]
    assert plan.evaluation.latency_s == 33 + 3 * 8
    device, on_host = plan.evaluation.devices
    assert (device.weight_bytes, device.state_bytes) == (24, 0)
    assert device.peak_bytes == 24 + 2 * 8
    # Weights, their gradients and their momentum.
    assert (on_host.weight_bytes, on_host.state_bytes, plan.hosted_bytes) == (48, 24, 72)
    assert plan.evaluation.lower_bound_s <= plan.evaluation.latency_s
    assert sum(push.size_bytes for push in plan.pushes) == 2 * 24


def test_as_few_states_as_necessary_go_to_the_host() -> None:
    graph = step(3)
    whole = evaluate(
        problem(graph, devices(1000)), make_mode("single")(problem(graph, devices(1000)))
    )
    assert whole.devices[0].peak_bytes == 72  # weights, momentum and gradients
    # Without the momentum of the last layer, and its gradient once it exists.
    plan = updated_on_host(graph, 64, "auto", 1000)
    assert [u.path for u, choice in zip(plan.units, plan.ways, strict=True) if choice] == [
        "layers.2"
    ]
    assert plan.evaluation.devices[0].peak_bytes <= 64
    with pytest.raises(InfeasibleError, match="optimizer states, with their weights and gradients"):
        updated_on_host(graph, 64, "auto", 20)
    with pytest.raises(
        InfeasibleError, match=r"with states of 3 modules .*do not fit the devices, 1 x 20 B"
    ):
        updated_on_host(graph, 20, "auto", 1000)


def test_activations_of_blocks_go_to_the_host_and_return() -> None:
    sketch, saved, gradients = Sketch(), [sketch_input := 0], list[int]()
    assert sketch.input(0) == sketch_input
    for i in range(4):
        saved.append(sketch.op([saved[-1]], 8, [sketch.weight(4)], 1, module=f"layers.{i}"))
    for i in reversed(range(4)):
        reads = [gradients[0] if gradients else saved[-1], saved[i + 1]]
        value = sketch.op(reads, 4, [i], 2, module=f"layers.{i}", backward_of=i)
        gradients.insert(0, value)
    graph = with_optimizer(
        replace(
            sketch.graph(*gradients),
            weight_names=tuple(f"layers.{i}.weight" for i in range(4)),
            gradient_values=np.array(gradients),
            gradient_weights=np.arange(4),
        ),
        Optimizer("sgd"),
    )
    task, plain = problem(graph, devices(100)), OffloadOptions(optimizer="none")
    offloading = replace(plain, activations="all")
    machine = Machine(task, Tiers(host(speed=1.0)), offloading, (1.0, 0.0), times)
    plan = offload_updates(machine, size_based)
    # The first two go from 1 to 9 and to 17; the third and fourth layer wait for space.
    # They return when the gradients of the fourth and third are done: from 20 to 28 and to 36.
    assert plan.evaluation.op_finish_s[:8].tolist() == [1, 2, 10, 18, 20, 22, 30, 38]
    whole = evaluate(task, make_mode("single")(task))
    # Weights, activations of four layers, a gradient; then space for two layers and four gradients.
    assert whole.devices[0].peak_bytes == 16 + 4 * 8 + 4
    assert plan.evaluation.devices[0].peak_bytes == 16 + 2 * 8 + 4 * 4
    assert plan.stored_bytes() == 16
    assert (plan.ways == RESIDENT).all()
    # The last two stay even if the device waits for the others.
    waiting = replace(machine, options=replace(offloading, overlap=False))
    assert offload_updates(waiting, size_based).evaluation.devices[0].peak_bytes == 48
    # If states are not enough they are moved alone, as here, where there are none.
    by_itself = replace(machine, problem=problem(graph, devices(50)), options=OffloadOptions())
    assert offload_updates(by_itself, size_based).stored_bytes() == 16
    small = Tiers(host(10, speed=1.0), Tier("nvme1tb", "disk", 10**12, bytes_per_s=1.0))
    with pytest.raises(InfeasibleError, match=r"activations of 16 B do not fit host.* on nvme1tb"):
        offload_updates(replace(machine, tiers=small), size_based)
    # A host that only stores is enough for them, but not for states.
    stores = replace(machine, tiers=Tiers(host()), host_times=None)
    assert offload_updates(stores, size_based).stored_bytes() == 16
    updating = replace(machine, tiers=Tiers(host()), options=OffloadOptions())
    with pytest.raises(SpecError, match=r"optimizer=auto updates .* host has no processor; "):
        offload_updates(updating, size_based)
    with pytest.raises(SpecError, match=r"optimizer=auto updates .* host has no times of its op"):
        offload_updates(replace(by_itself, host_times=None), size_based)


def test_weights_on_the_host_are_copied_for_forward_and_backward() -> None:
    plan = updated_on_host(step(3), 1000, "auto", 1000, weights="all")
    # Copies of 8 s to 8, 16, 24 (last layer, also for its backward), 32 and, as there is space
    # when that is done at 27, 40. So the forward ends at 25, and gradients exist at 27, 34, 42.
    finish_s = plan.evaluation.op_finish_s
    assert finish_s[:6].tolist() == [9, 17, 25, 27, 34, 42]
    # They are on the host at 35, 43 and 51; updates follow, and no weight returns.
    assert finish_s[6:].tolist() == [55, 59, 63]
    assert plan.evaluation.latency_s == 63
    device, on_host = plan.evaluation.devices
    # Space for two weights and two gradients.
    assert (device.weight_bytes, device.state_bytes, device.peak_bytes) == (0, 0, 2 * 8 + 2 * 8)
    assert (on_host.weight_bytes, on_host.state_bytes) == (48, 24)
    assert plan.gathered_bytes == 5 * 8
    assert plan.evaluation.lower_bound_s <= 63


def test_weights_go_to_the_host_if_moving_states_is_not_enough() -> None:
    # Weights of 48 bytes and two gradients of 8 are 64 without any state.
    plan = updated_on_host(step(6), 60, "auto", 1000, weights="auto")
    assert plan.gathered_bytes > 0
    assert plan.evaluation.devices[0].peak_bytes <= 60
    assert not updated_on_host(step(6), 70, "auto", 1000, weights="auto").gathered_bytes
    with pytest.raises(InfeasibleError, match="on the host, tensors of"):
        updated_on_host(step(6), 60, "auto", 1000)
    # Weights on the host are updated there, so without its updates they stay.
    with pytest.raises(InfeasibleError, match=r"states of 0 modules .*on the host, tensors of"):
        updated_on_host(step(6), 60, "none", 1000, weights="auto")
