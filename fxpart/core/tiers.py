"""`Tier`: memory outside the devices to which tensors may be offloaded: the host's, or a disk."""

from collections.abc import Sequence
from dataclasses import dataclass

from fxpart.core.device_spec import MAX_MEMORY_BYTES
from fxpart.core.topology import LEAST_RATE, DeviceSpec
from fxpart.errors import SpecError, nearest_names, show_bytes

__all__ = ["AMOUNTS", "DISK", "HOST", "OffloadOptions", "Tier", "Tiers", "tiers_of"]

HOST, DISK = "host", "disk"
AMOUNTS = ("auto", "none", "all")
"""How much is offloaded: only what does not fit, nothing, or everything."""


@dataclass(frozen=True, slots=True)
class Tier:
    """One memory outside the devices."""

    name: str
    """Name in the device spec, such as ``host64gb``."""
    kind: str
    """``host`` or ``disk``."""
    memory_bytes: int
    """Capacity available to tensors."""
    bytes_per_s: float | None = None
    """Read rate of a disk, or rate of a device's link to the host."""
    processor: DeviceSpec | None = None
    """The processor that computes on this memory, if any."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of one machine: its host, and optionally a disk that is read through the host."""

    host: Tier
    disk: Tier | None = None


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """What is offloaded, and how modules with offloaded weights run."""

    name: str = "auto"
    stream: bool = True
    """Whether weights may be copied to a device while their module runs."""
    overlap: bool = True
    """Whether the next block is prefetched while a device computes; otherwise the device stalls."""
    on_host: bool = True
    """Whether modules may run on the host, where their weights are."""
    host_bytes_per_s: float | None = None
    """Limit on the total rate at which devices read from the host, such as a shared PCIe root.
    None: each device has its own link."""
    pinned_bytes: int | None = None
    """How much host memory may be pinned; None for all of it."""
    pinned_share: float = 1.0
    """Share of a link's rate reached by copies from pinned memory."""
    pageable_share: float = 1.0
    """The same for pageable memory."""
    copy_latency_s: float = 0.0
    """Fixed cost of copying one unit, in addition to the link's latency."""
    cache: str = "auto"
    """Which KV caches are offloaded and copied to a device while their block runs, one of
    `AMOUNTS`."""
    optimizer: str = "auto"
    """Which weights have their optimizer state in host memory, and are updated there, one of
    `AMOUNTS`."""
    activations: str = "auto"
    """Whether saved activations of blocks are offloaded too, one of `AMOUNTS`; ``auto`` if
    offloading optimizer state does not free enough memory."""
    weights: str = "auto"
    """Whether the weights of a training step stay on the host, are updated there, and are copied to
    a device block by block, one of `AMOUNTS`; ``auto`` if offloading states and activations does
    not free enough memory."""

    def __post_init__(self) -> None:
        """Check the rates, sizes and amounts, and refuse options that exclude each other."""
        for name in ("pinned_share", "pageable_share"):
            share = getattr(self, name)
            if not LEAST_RATE <= share <= 1:
                raise SpecError(f"offload.{name}={share} must be above 0 and at most 1")
        rate = self.host_bytes_per_s
        if rate is not None and not rate >= 1:
            raise SpecError(f"offload.host_bytes_per_s={rate} must be positive, or null")
        if self.pinned_bytes is not None and self.pinned_bytes < 0:
            raise SpecError(f"offload.pinned_bytes={self.pinned_bytes} must be at least 0, or null")
        if not 0 <= self.copy_latency_s < 1:
            raise SpecError(f"offload.copy_latency_s={self.copy_latency_s} must be from 0 to 1")
        for name in ("cache", "optimizer", "activations", "weights"):
            if (amount := getattr(self, name)) not in AMOUNTS:
                near = nearest_names(amount, AMOUNTS)
                raise SpecError(f"offload.{name}={amount} does not exist; {near}")
        if self.cache == "all" and not self.stream:
            raise SpecError(
                f"offload.cache=all copies caches to devices, but offload={self.name} copies "
                "nothing; use offload=auto or offload.cache=none"
            )
        if self.weights == "all" and self.optimizer == "none":
            raise SpecError(
                "offload.weights=all keeps weights on the host, where they are updated; leave out "
                "offload.optimizer=none"
            )
        if not (self.stream or self.on_host):
            raise SpecError(f"offload={self.name} neither streams nor computes on the host")


def tiers_of(tiers: Sequence[Tier]) -> Tiers | None:
    """Return the tiers of a machine, or None if there are none.

    Raises:
        SpecError: if a kind is unknown or appears twice, a tier has no memory or more than
            `MAX_MEMORY_BYTES`, a disk has no host or no rate, or the host's rate is below 1.

    """
    if not tiers:
        return None
    by_kind: dict[str, Tier] = {}
    for tier in tiers:
        if tier.kind not in (HOST, DISK):
            raise SpecError(f"tier {tier.name} is of kind {tier.kind}; there are {HOST} and {DISK}")
        if tier.kind in by_kind:
            other = by_kind[tier.kind].name
            raise SpecError(
                f"tiers {other} and {tier.name} are both of kind {tier.kind}; join them"
            )
        if not 0 < tier.memory_bytes <= MAX_MEMORY_BYTES:
            raise SpecError(
                f"tier {tier.name} has {show_bytes(tier.memory_bytes)}; give 1 byte to "
                f"{show_bytes(MAX_MEMORY_BYTES)}"
            )
        by_kind[tier.kind] = tier
    host, disk = by_kind.get(HOST), by_kind.get(DISK)
    if host is None:
        assert disk is not None
        raise SpecError(
            f"tier {disk.name} has no link to a device: a disk is read through the host's memory;"
            " add it, such as +host16gb"
        )
    if host.bytes_per_s is not None and not host.bytes_per_s >= 1:
        raise SpecError(f"tier {host.name} has bytes_per_s={host.bytes_per_s}; give 1 or more")
    if disk is not None and not (disk.bytes_per_s and disk.bytes_per_s >= 1):
        raise SpecError(
            f"tier {disk.name} has no link: its bytes_per_s is {disk.bytes_per_s}; give the rate at"
            " which it is read"
        )
    return Tiers(host, disk)
