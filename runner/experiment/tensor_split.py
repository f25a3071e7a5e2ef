"""Devices in tensor-parallel groups and replicas, and the cost of collectives within the model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.data_parallel import DataParallel, ring_links, split_topology
from fxpart.core.tensor_groups import TensorGroups, tensor_groups
from fxpart.core.topology import Link, Topology
from fxpart.cost.collective_times import CollectiveGroup, collective_bytes, collective_seconds
from fxpart.cost.collectives import CollectiveCurves
from fxpart.cost.problem import Problem
from fxpart.errors import NotApplicableError, SpecError, refuse_unfitting
from runner.config.schema import Config
from runner.experiment.mesh import replica_count, replica_degrees
from runner.experiment.operator_times import ring_curves
from runner.experiment.runtime import host_launch_s
from runner.experiment.serving import is_serving
from runner.experiment.topology import build_topology
from runner.experiment.training import is_training
from runner.output.terminal import counted
from runner.output.units import GIB, format_s, format_size

__all__ = [
    "Dealt",
    "TensorSplit",
    "check_async",
    "check_loss_parallel",
    "check_split",
    "dealt_out",
    "split_cost",
    "split_line",
    "split_metrics",
]


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """The collectives of tensor parallelism in a step, for the group that spends most on them."""

    size: int
    """Devices in a tensor-parallel group."""
    groups: int
    collectives: int
    collective_bytes: int
    """Bytes that they sum or gather."""
    collective_s: float
    """Time of the collectives."""
    exposed_s: float
    """The part of it that operators wait for: all, unless collectives run during products."""
    shared: tuple[str, ...] = ()
    """What else devices share, as text."""
    with_collectives: int = 1
    """Groups of a replica with collectives, of which only the busiest is counted."""
    microbatches: int = 1
    """Microbatches of a step, each with collectives."""


def check_split(config: Config) -> None:
    """Raise `SpecError` if tensor parallelism conflicts with the rest of `config`."""
    size = config.tensor_parallel
    if size < 1:
        raise SpecError(f"tensor_parallel={size} must be 1 or more")
    if config.sequence_parallel:
        _check_sequence(config)
    if config.async_tensor_parallel:
        check_async(config)
    if config.loss_parallel:
        check_loss_parallel(config)
    if size == 1:
        return
    conflicts = {
        f"execute={config.execute.name}": config.execute.name != "none",
        f"capture.level={config.capture.level}": config.capture.level != "operator",
        f"capture.symbolic={config.capture.symbolic}": config.capture.symbolic != "none",
        f"latency={config.latency.name}": not config.latency.is_computed
        and not config.latency.file,
    }
    for choice, is_chosen in conflicts.items():
        if is_chosen:
            raise NotApplicableError(
                f"tensor_parallel={size} is planned operator by operator at one size, and cannot "
                f"be run here; leave out {choice}, or tensor_parallel"
            )


def _check_sequence(config: Config) -> None:
    if config.tensor_parallel == 1:
        raise NotApplicableError(
            "sequence_parallel=true splits the operators between tensor-parallel layers, got "
            "tensor_parallel=1; add tensor_parallel=2 or more"
        )
    if is_serving(config):
        raise NotApplicableError(
            f"sequence_parallel=true splits whole sequences, got phase={config.phase.name}; use"
            " phase=training or phase=inference"
        )


def check_async(config: Config) -> None:
    """Raise `NotApplicableError` for plans in which torch does not split products into pieces."""
    fitting = {
        f"sequence_parallel={str(config.sequence_parallel).lower()}": (
            "sequence_parallel=true",
            config.sequence_parallel,
        ),
        f"runtime={config.runtime.name}": ("runtime=compiled", config.runtime.name == "compiled"),
        f"engine={config.engine}": ("engine=torch", config.engine == "torch"),
    }
    refuse_unfitting(
        "async_tensor_parallel=true exchanges sequences during compiled products",
        fitting,
        "async_tensor_parallel=false",
    )


def check_loss_parallel(config: Config) -> None:
    """Raise `NotApplicableError` for plans without a loss over a split vocabulary."""
    fitting = {
        f"tensor_parallel={config.tensor_parallel}": (
            "tensor_parallel=2 or more",
            config.tensor_parallel > 1,
        ),
        f"phase={config.phase.name}": ("phase=training", is_training(config)),
        f"engine={config.engine}": ("engine=torch", config.engine == "torch"),
        f"model.loss={config.model.loss}": ("model.loss=own", config.model.loss == "own"),
    }
    refuse_unfitting(
        "loss_parallel=true computes the model's own loss from shards of the logits",
        fitting,
        "loss_parallel=false",
    )


class Dealt(NamedTuple):
    """The devices in tensor-parallel groups, and the groups divided among replicas."""

    groups: TensorGroups
    parallel: DataParallel
    exchanges: dict[str, CollectiveGroup]
    """The devices that exchange values within the model, by mesh axis."""
    curves: CollectiveCurves | None
    """The curves of the links between replicas."""


def dealt_out(config: Config) -> Dealt:
    """Return the devices in tensor-parallel groups, and the groups divided among replicas."""
    topology = build_topology(config.devices, config.transfer_rate, config.reserve)
    topology = replace(topology, host_launch_s=host_launch_s(config))
    groups = tensor_groups(topology, config.tensor_parallel)
    parallel = split_topology(groups.topology, replica_count(config), replica_degrees(config))
    # Each device of a group forms a ring with those at the same position in other replicas.
    rings = groups.members[parallel.rings.T].swapaxes(1, 2).reshape(-1, parallel.n_replicas)
    exchanges = dict(_exchange_groups(config, topology, groups, parallel))
    return Dealt(groups, parallel, exchanges, ring_curves(config.latency, topology, rings))


def _exchange_groups(
    config: Config, topology: Topology, groups: TensorGroups, parallel: DataParallel
) -> Iterator[tuple[str, CollectiveGroup]]:
    """Yield the groups of devices that exchange values within the model, by mesh axis.

    Args:
        config: the degrees.
        topology: all devices.
        groups: the devices in tensor-parallel groups.
        parallel: the groups divided among replicas.

    """
    if groups.size > 1:
        links = tuple(groups.links[group] for group in parallel.rings[0].tolist())
        inside = ring_curves(config.latency, topology, groups.members)
        yield "tensor", CollectiveGroup(groups.size, links, inside)
    tensor, n = groups.size, parallel.rings.shape[1]
    degrees = {"expert": config.expert_parallel // tensor, "context": config.context_parallel}
    for axis, degree in degrees.items():
        # All devices of several groups; other axes have a ring per position in a group.
        spans = axis == "expert"
        if degree * (tensor if spans else 1) <= 1:
            continue
        # Shape (parts, degree, D, N): the devices of the groups at each position of each part.
        members = groups.members[parallel.rings.reshape(-1, degree, n)]
        if spans:
            members = members.swapaxes(2, 3).reshape(-1, degree * tensor, n, 1)
        rings = members.transpose(1, 0, 3, 2)
        size = rings.shape[0]
        device_links = ring_links(topology, rings.reshape(size, -1), exchanges=spans)
        links = tuple(_slowest(device_links[place::n]) for place in range(n))
        curves = ring_curves(config.latency, topology, rings.reshape(size, -1).T)
        yield axis, CollectiveGroup(size, links, curves)


def _slowest(links: Sequence[Link]) -> Link:
    return Link(min(link.bytes_per_s for link in links), max(link.latency_s for link in links))


def split_cost(
    problem: Problem,
    assignment: Assignment,
    groups: TensorGroups,
    exchanges: Mapping[str, CollectiveGroup],
    microbatches: int = 1,
    *,
    head_devices: int = 1,
) -> TensorSplit:
    """Return the collectives of a placement on `groups`, those among replicas included.

    They are of a whole step, in which each of `microbatches` runs those of the graph. Of a group,
    `head_devices` hold the same head of keys and values.
    """
    sizes = collective_bytes(problem.graph)
    ops = np.array(sorted(sizes), dtype=np.int64)
    home = assignment.device_of[ops]
    whole_s = collective_seconds(problem.graph, exchanges)
    seconds = np.array([whole_s[op][device] for op, device in zip(ops, home, strict=True)])
    n = problem.topology.n_devices
    busy_s = np.bincount(home, weights=seconds, minlength=n)
    exposed_s = np.bincount(home, weights=problem.costs.op_time_s[ops, home], minlength=n)
    busiest = int(busy_s.argmax())
    busiest_sizes = [sizes[op] for op in ops[home == busiest].tolist()]
    shared = tuple(
        f"{what} over {exchanges[axis].size} {peers}"
        for axis, what, peers in (
            ("expert", "experts", "devices" if groups.size > 1 else "replicas"),
            ("context", "each sequence", "replicas"),
        )
        if axis in exchanges
    )
    if head_devices > 1:
        shared = (f"each head of keys and values on {head_devices}", *shared)
    return TensorSplit(
        groups.size,
        len(groups.members),
        microbatches * len(busiest_sizes),
        microbatches * sum(busiest_sizes),
        microbatches * busy_s[busiest],
        microbatches * exposed_s[busiest],
        shared,
        int(np.count_nonzero(busy_s)),
        microbatches,
    )


def split_line(split: TensorSplit) -> str:
    """Return a line on the cost of tensor parallelism."""
    verb = "takes" if split.collectives == 1 else "take"
    groups = (f"{counted(split.groups, 'group')} of {split.size} devices",) * (split.size > 1)
    busiest = f" of the busiest {'group' if split.size > 1 else 'device'}"
    busiest *= split.with_collectives > 1
    within = f" in {split.microbatches} microbatches" if split.microbatches > 1 else ""
    waited = "all" if split.exposed_s == split.collective_s else format_s(split.exposed_s)
    return (
        f"{', '.join((*groups, *split.shared))};"
        f" {counted(split.collectives, 'collective')} of {format_size(split.collective_bytes)}"
        f"{busiest}{within} {verb} {format_s(split.collective_s)}, {waited} of it waited for"
    )


def split_metrics(split: TensorSplit) -> dict[str, float]:
    """Return the metrics of tensor parallelism by name."""
    return {
        **({"tensor_parallel": float(split.size)} if split.size > 1 else {}),
        "collectives": float(split.collectives),
        "collective_gib": split.collective_bytes / GIB,
        "collective_ms": split.collective_s * 1e3,
        "exposed_collective_ms": split.exposed_s * 1e3,
    }
