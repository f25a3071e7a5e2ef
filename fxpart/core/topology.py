"""`Topology`: the devices on which a model is placed, and the links between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral

import numpy as np
import numpy.typing as npt

from fxpart.core.device_spec import MAX_MEMORY_BYTES
from fxpart.core.efficiency import KINDS, MEMORY, Efficiency
from fxpart.errors import SpecError, nearest_names, show_bytes

__all__ = ["LEAST_RATE", "DeviceSpec", "Link", "Topology", "uniform_topology", "with_pair_links"]


LEAST_RATE, _MOST = 1e-6, 1e24
"""Limits of rates in bytes/s or FLOP/s, within which times stay finite."""
_MOST_S, _MOST_W = 1e9, 1e9
_MOST_MULTIPROCESSORS = 2**16
_USABLE = f"positive and finite ({LEAST_RATE:.0e} to {_MOST:.0e})"


def _usable(rate: float) -> bool:
    """Return whether times at this rate are finite: it is not zero, infinite, nan or absurd."""
    return LEAST_RATE <= rate <= _MOST


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator."""

    name: str
    """What the device is, such as ``a100_80gb``."""
    memory_bytes: int
    """Bytes available to weights and tensors; the limit for every mode and check."""
    flops_per_s: Mapping[str, float]
    """Peak dense rate by dtype name (``bfloat16``), in FLOP/s."""
    memory_bandwidth_bytes_per_s: float
    """Rate at which the device reads and writes its own memory."""
    node: int = 0
    """The machine of the device; links within a node and between nodes may differ."""
    reserved_bytes: int = 0
    """Bytes in addition to `memory_bytes` that are not available to tensors; see
    `fxpart.core.reserve`."""
    multiprocessors: int = 100
    """Number of multiprocessors, each of which runs one block of a kernel at a time."""
    curves: str = ""
    """Family of measured kernel curves, such as ``h100``, in the latency settings. Empty if
    unknown."""
    own_curves: bool = False
    """Whether the curves were measured on this kind of device; otherwise they are scaled by its
    peaks."""
    power_w: float = 0.0
    """Rated power of the board in W; 0 if unknown."""
    sustained_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Rate by dtype name sustained by long runs of large products under a power limit."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    """Shares of the peaks that operators reach; see `fxpart.cost.roofline`."""
    on_host: bool = False
    """Whether this is the host itself, whose memory has no reserve."""
    is_tier: bool = False
    """Whether it is the processor of a memory tier, which runs only what is moved there."""
    adapters: float = 1.0
    """Network adapters of the device, each with the rate of a link between nodes; a share of one if
    devices of a machine have fewer among them."""

    def __post_init__(self) -> None:
        """Check memory, power, multiprocessors and rates."""
        for name in ("memory_bytes", "reserved_bytes"):
            size = getattr(self, name)
            if not isinstance(size, Integral):
                raise SpecError(
                    f"device {self.name}: {name} must be a whole number of bytes, got {size!r}"
                )
        if self.memory_bytes <= 0:
            raise SpecError(f"device {self.name}: memory must be positive, got {self.memory_bytes}")
        if self.total_bytes > MAX_MEMORY_BYTES:
            raise SpecError(
                f"device {self.name}: memory must be at most {show_bytes(MAX_MEMORY_BYTES)}, the"
                f" most that is counted, got {show_bytes(self.total_bytes)}"
            )
        if self.reserved_bytes < 0:
            raise SpecError(
                f"device {self.name}: reserved_bytes must be at least 0, got {self.reserved_bytes}"
            )
        if not 0 <= self.power_w < _MOST_W:
            raise SpecError(
                f"device {self.name}: power_w must be at least 0 and below {_MOST_W:.0e}, got"
                f" {self.power_w}"
            )
        if not 1 <= self.multiprocessors <= _MOST_MULTIPROCESSORS:
            raise SpecError(
                f"device {self.name}: multiprocessors must be from 1 to {_MOST_MULTIPROCESSORS},"
                f" got {self.multiprocessors}"
            )
        if not 0 < self.adapters <= 1:
            raise SpecError(
                f"device {self.name}: adapters must be above 0 and at most 1, got {self.adapters}"
            )
        if not _usable(self.memory_bandwidth_bytes_per_s):
            rate = self.memory_bandwidth_bytes_per_s
            raise SpecError(f"device {self.name}: memory bandwidth must be {_USABLE}, got {rate}")
        if not self.flops_per_s:
            raise SpecError(f"device {self.name}: flops_per_s is empty, give at least float32")
        self._check_rates()

    def _check_rates(self) -> None:
        """Check that rates are usable, and that shares are of rates that are stated."""
        for rates in ("flops_per_s", "sustained_flops_per_s"):
            for dtype, rate in getattr(self, rates).items():
                if not _usable(rate):
                    raise SpecError(
                        f"device {self.name}: {rates}.{dtype} must be {_USABLE}, got {rate}"
                    )
        for kind in KINDS:
            for rate_name in getattr(self.efficiency, kind):
                if rate_name != MEMORY and rate_name not in self.flops_per_s:
                    near = nearest_names(rate_name, [*self.flops_per_s, MEMORY])
                    raise SpecError(
                        f"device {self.name}: efficiency.{kind}.{rate_name} is the share of a rate"
                        f" that flops_per_s does not state; {near}"
                    )

    @property
    def total_bytes(self) -> int:
        """Total memory in bytes, including the reserve."""
        return self.memory_bytes + self.reserved_bytes

    def rate_for(self, dtype: str) -> float:
        """Return FLOP/s for `dtype`; unlisted dtypes run at the rate of float32.

        Raises:
            SpecError: if neither is listed.

        """
        rate = self.flops_per_s.get(dtype) or self.flops_per_s.get("float32")
        if rate is None:
            near = nearest_names(dtype, self.flops_per_s)
            wanted = " or ".join(dict.fromkeys((dtype, "float32")))
            raise SpecError(f"device {self.name} states no FLOP/s for {wanted}; {near}")
        return rate

    def reached_rate_for(self, dtype: str, share: float, kernel_share: float = 1.0) -> float:
        """Return `share` of `rate_for`, limited so that kernels stay within the sustained rate.

        Kernels reach `kernel_share` of the returned rate.
        """
        sustained = self.sustained_flops_per_s.get(self._rate_name(dtype))
        rate = self.rate_for(dtype) * share
        return rate if sustained is None else min(rate, sustained / kernel_share)

    def stated_share(self, kind: str, dtype: str) -> float | None:
        """Return the share of `rate_for` that operators of a kind reach; None if not stated.

        `kind` is a field of `Efficiency`, and `dtype` may be ``memory`` for memory bandwidth.
        """
        shares: Mapping[str, float] = getattr(self.efficiency, kind)
        return shares.get(MEMORY if dtype == MEMORY else self._rate_name(dtype))

    def _rate_name(self, dtype: str) -> str:
        """Return the dtype at whose rate `dtype` runs."""
        return dtype if dtype in self.flops_per_s else "float32"


@dataclass(frozen=True, slots=True)
class Link:
    """A one-way connection between two devices."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        """Check the rate and the latency."""
        if not _usable(self.bytes_per_s):
            raise SpecError(
                f"transfer rate (transfer_rate.bytes_per_s) must be {_USABLE},"
                f" got {self.bytes_per_s}"
            )
        if not 0 <= self.latency_s < _MOST_S:
            raise SpecError(
                f"transfer_rate.latency_s must be at least 0 and below {_MOST_S:.0e} s,"
                f" got {self.latency_s}"
            )


@dataclass(frozen=True, eq=False, slots=True)
class Topology:
    """Devices, numbered by position (the logical id), and a link for each ordered pair."""

    devices: tuple[DeviceSpec, ...]
    bytes_per_s: npt.NDArray[np.float64] = field(repr=False)
    """Rate from row to column, shape (D, D); infinite on the diagonal."""
    latency_s: npt.NDArray[np.float64] = field(repr=False)
    """Fixed cost of one transfer from row to column, shape (D, D); 0 on the diagonal."""
    host_launch_s: float = 0.0
    """Host time to launch one operator on any device. One process launches all of them in order,
    asynchronously."""

    def __post_init__(self) -> None:
        """Check the launch time."""
        if not 0 <= self.host_launch_s < _MOST_S:
            raise SpecError(
                f"runtime.host_launch_s must be at least 0 and below {_MOST_S:.0e} s,"
                f" got {self.host_launch_s}"
            )

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def memory_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes available to weights and tensors on each device, shape (D,)."""
        return np.array([device.memory_bytes for device in self.devices], dtype=np.int64)

    def first(self, count: int) -> "Topology":
        """Return the topology of the first `count` devices."""
        return Topology(
            self.devices[:count],
            self.bytes_per_s[:count, :count],
            self.latency_s[:count, :count],
            self.host_launch_s,
        )


def uniform_topology(
    devices: tuple[DeviceSpec, ...], within_node: Link, between_nodes: Link | None = None
) -> Topology:
    """Return a topology with one kind of link within nodes and another between nodes.

    Without `between_nodes`, all pairs are joined by `within_node`.
    """
    if not devices:
        raise SpecError("no devices: give at least one, such as devices=1x16gb")
    inter_node = between_nodes or within_node
    node = np.array([device.node for device in devices])
    same_node = node[:, None] == node[None, :]
    rate = np.where(same_node, float(within_node.bytes_per_s), float(inter_node.bytes_per_s))
    latency = np.where(same_node, float(within_node.latency_s), float(inter_node.latency_s))
    np.fill_diagonal(rate, np.inf)
    np.fill_diagonal(latency, 0.0)
    return Topology(devices, rate, latency)


def with_pair_links(topology: Topology, links: Mapping[tuple[int, int], Link]) -> Topology:
    """Return the topology with the given links, in both directions, between pairs of devices.

    Raises:
        SpecError: if a device does not exist, or a pair joins a device with itself.

    """
    rate, latency = topology.bytes_per_s.copy(), topology.latency_s.copy()
    for (first, second), link in links.items():
        for device in (first, second):
            if not 0 <= device < topology.n_devices:
                raise SpecError(
                    f"a link joins device {device}, there are {topology.n_devices}, numbered from"
                    " 0; name one of them"
                )
        if first == second:
            raise SpecError(f"a link joins device {first} with itself; name two devices")
        rate[[first, second], [second, first]] = link.bytes_per_s
        latency[[first, second], [second, first]] = link.latency_s
    return replace(topology, bytes_per_s=rate, latency_s=latency)
