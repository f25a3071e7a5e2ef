"""`Tier`: memory beside the devices, in which tensors may lie: that of the host, and disks."""

from collections.abc import Sequence
from dataclasses import dataclass

from fxpart.core.device_spec import MAX_MEMORY_BYTES
from fxpart.core.topology import LEAST_RATE, DeviceSpec
from fxpart.errors import SpecError, nearest_names, show_bytes

__all__ = ["AMOUNTS", "DISK", "HOST", "OffloadOptions", "Tier", "Tiers", "tiers_of"]

HOST, DISK = "host", "disk"
AMOUNTS = ("auto", "none", "all")
"""How much of something lies in tiers: what must, nothing, or everything."""


@dataclass(frozen=True, slots=True)
class Tier:
    """One memory that the devices do not have themselves."""

    name: str
    """As in the spec of the devices, such as ``host64gb``."""
    kind: str
    """``host`` or ``disk``."""
    memory_bytes: int
    """What may be kept there."""
    bytes_per_s: float | None = None
    """Rate at which a disk is read, or of a device's link to the host."""
    processor: DeviceSpec | None = None
    """What computes beside it; None where nothing does."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of one machine: its host, and perhaps a disk that is read through the host."""

    host: Tier
    disk: Tier | None = None


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """What lies in a tier, and how modules run whose weights do."""

    name: str = "auto"
    stream: bool = True
    """Whether weights may be copied to a device for as long as their module runs."""
    overlap: bool = True
    """Whether the next block is copied while a device computes; else the device waits."""
    on_host: bool = True
    """Whether modules may run on the host, where their weights lie."""
    host_bytes_per_s: float | None = None
    """What all devices together read from the host at most: a PCIe root that they share. None:
    each has a link of its own."""
    pinned_bytes: int | None = None
    """What of the host's memory may be pinned; None for all of it."""
    pinned_share: float = 1.0
    """Share of a link's rate that copies from pinned memory reach."""
    pageable_share: float = 1.0
    """The same of other memory."""
    copy_latency_s: float = 0.0
    """Fixed cost of the copy of one unit beside the link's latency."""
    cache: str = "auto"
    """Which caches lie in a tier and are copied to a device for as long as their block runs, one of
    `AMOUNTS`."""
    optimizer: str = "auto"
    """Of which weights the optimizer's state lies in the host's memory, where they are then
    updated, one of `AMOUNTS`."""
    activations: str = "auto"
    """Whether what the blocks of a training step save for the backward goes there too: ``auto``
    where states do not make room, one of `AMOUNTS`."""
    weights: str = "auto"
    """Whether the weights of a training step lie there, updated there and copied to a device block
    by block: ``auto`` where neither states nor activations make room, one of `AMOUNTS`."""

    def __post_init__(self) -> None:
        """Refuse rates that never deliver."""
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
                f"offload.cache=all copies caches to devices, offload={self.name} copies nothing;"
                " use offload=auto or offload.cache=none"
            )
        if self.weights == "all" and self.optimizer == "none":
            raise SpecError(
                "offload.weights=all leaves weights with the host, where they are updated; leave"
                " out offload.optimizer=none"
            )
        if not (self.stream or self.on_host):
            raise SpecError(f"offload={self.name} neither streams nor computes on the host")


def tiers_of(tiers: Sequence[Tier]) -> Tiers | None:
    """Return the tiers of a machine; None without any.

    Raises:
        SpecError: for a second one of a kind, one without room, or one that no device can read.

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
                f"tier {tier.name} has {show_bytes(tier.memory_bytes)}, from 1 byte to"
                f" {show_bytes(MAX_MEMORY_BYTES)} are counted"
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
