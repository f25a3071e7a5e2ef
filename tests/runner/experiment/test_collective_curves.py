"""Collectives with ``latency=kernels``: in one machine, the times measured with NCCL."""

import numpy as np
import pytest

from fxpart.cost.collective_times import collective_bytes, collective_kinds
from fxpart.cost.collectives import CollectiveCurve
from runner.experiment.experiment import plan
from runner.experiment.model_spec import model_spec
from runner.experiment.operator_times import ring_curves
from runner.experiment.result import Result
from runner.experiment.topology import build_topology
from tests.runner.composed import TINY_LLAMA, read


def _planned(*overrides: str) -> Result:
    config = read(*TINY_LLAMA, *overrides)
    return plan(config, model_spec(config))


_NVLINK = ("devices=4xa100_80gb", "transfer_rate=nvlink3", "mode=single")
_ALL_REDUCE = CollectiveCurve(8.029e-6, 1.829e-6, 3.925e-5, 0.7852)
"""Measured on A100s, as in `conf/latency/kernels.yaml`."""
_LOSS_BYTES = 4


def _sum_s(size_bytes: float, ranks: int) -> float:
    wire = 2 * (ranks - 1) / ranks * size_bytes / (_ALL_REDUCE.share * 300e9)
    hops_s = _ALL_REDUCE.launch_s + _ALL_REDUCE.hop_s * (ranks - 1)
    return hops_s + wire + float((_ALL_REDUCE.ramp_s * wire) ** 0.5)


def test_collectives_of_kernels_take_the_measured_times() -> None:
    split = _planned(*_NVLINK, "tensor_parallel=4", "latency=kernels")
    kinds = collective_kinds(split.captured.graph)
    times = split.problem.costs.op_time_s[:, 0]
    summed = [times[op] for op, kind in kinds.items() if kind == "all_reduce"]
    assert len(summed) == 3
    assert summed == pytest.approx([_sum_s(2048, 4)] * 3)
    gathered = [times[op] for op, kind in kinds.items() if kind == "all_gather"]
    # For 8 KiB, little more than the kernel's own time and three hops.
    assert gathered == pytest.approx([9.509e-6 + 3 * 4.523e-7], rel=0.1)


def test_sums_and_shards_of_kernels_take_the_measured_times() -> None:
    step = ("phase=training", "model.batch_size=4", "data_parallel=4")
    options = (*step, "latency=kernels")
    plain = _planned(*_NVLINK, *options, "optimizer=none")
    assert plain.replicas is not None
    cost = plain.replicas.cost
    # The loss alone, and all gradients in one bucket.
    sums_s = _sum_s(_LOSS_BYTES, 4) + _sum_s(cost.reduced_bytes[0] - _LOSS_BYTES, 4)
    assert cost.busy_s[0] == pytest.approx(sums_s)
    shipped, slowed = (
        _planned(*_NVLINK, *options, "zero=3", *curves)
        for curves in ((), ("latency.curves.a100.collectives.all_gather.launch_s=1",))
    )
    assert shipped.shards is not None
    assert slowed.shards is not None
    # One gather of the root, two of the block.
    assert slowed.shards.collective_s == pytest.approx(shipped.shards.collective_s + 3, rel=1e-3)
    first, last = (
        _planned(*_NVLINK, *options, "zero=1", *curves)
        for curves in ((), ("latency.curves.a100.collectives.all_gather.launch_s=1",))
    )
    assert last.evaluation.latency_s == pytest.approx(first.evaluation.latency_s + 1, rel=1e-3)


@pytest.mark.parametrize(
    "devices",
    [
        ("devices=2xa100_80gb+2xh100",),
        ("devices=4xcpu",),
        ("devices=2xa100_80gb+2xa100_80gb", "devices.nodes=[0,1]"),
        ("devices=4xa100_80gb", "transfer_rate=pcie4"),
        ("devices=4xrtx_4090", "transfer_rate=pcie4"),
        (
            "devices=4xa100_80gb",
            "+devices.pairs=[{devices: [0, 1], bytes_per_s: 25e9, latency_s: 1e-5}]",
        ),
    ],
)
def test_unmeasured_rings_take_the_rates_of_their_links(devices: tuple[str, ...]) -> None:
    config = read(*TINY_LLAMA, "latency=kernels", "transfer_rate=nvlink3", *devices)
    topology = build_topology(config.devices, config.transfer_rate)
    whole = np.arange(4)[None, :]
    assert ring_curves(config.latency, topology, whole) is None
    linked = ("devices=4xa100_80gb", "transfer_rate=nvlink3")
    roofline = read(*TINY_LLAMA, *linked, "latency=roofline")
    alike = build_topology(roofline.devices, roofline.transfer_rate)
    assert ring_curves(roofline.latency, alike, whole) is None
    # Those of latency=kernels, the default on devices with curves of their own.
    for latency in (config.latency, read(*TINY_LLAMA, *linked).latency):
        known = ring_curves(latency, alike, whole)
        assert known is not None
        assert known["all_reduce"] == _ALL_REDUCE


def test_groups_in_one_machine_and_replicas_in_two_have_their_own_times() -> None:
    two = ("devices=2xa100_80gb+2xa100_80gb", "devices.nodes=[0,1]", "transfer_rate=nvlink3")
    options = ("phase=training", "model.batch_size=2", "optimizer=none")
    result = _planned(
        *two, *options, "mode=single", "data_parallel=2", "tensor_parallel=2", "latency=kernels"
    )
    kinds = collective_kinds(result.captured.graph)
    times = result.problem.costs.op_time_s[:, 0]
    sizes = collective_bytes(result.captured.graph)
    summed = {op: times[op] for op, kind in kinds.items() if kind == "all_reduce"}
    assert summed
    assert summed == pytest.approx({op: _sum_s(sizes[op], 2) for op in summed})
    assert result.replicas is not None
    cost = result.replicas.cost
    link = read(*TINY_LLAMA, *two).transfer_rate
    # The loss alone, and all gradients in one bucket.
    ring_s = 2 * (cost.reduced_bytes[0] / 2 / link.bytes_per_s + 2 * link.latency_s)
    assert cost.busy_s[0] == pytest.approx(ring_s)
