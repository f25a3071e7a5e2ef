"""The devices in the configuration of a run: their pools, links and memory tiers.

As in `runner.config.schema`, Hydra checks every file and override against these types.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from fxpart.errors import SpecError

__all__ = ["DevicesConfig", "LinkConfig", "PairConfig", "PoolConfig", "TierConfig"]


@dataclass  # not frozen: OmegaConf would refuse overrides of it
class PoolConfig:
    """A number of identical devices."""

    count: int = MISSING
    name: str = MISSING
    """Name of the accelerator."""
    memory_bytes: int = MISSING
    """Memory of one device."""
    flops_per_s: dict[str, float] = field(default_factory=dict)
    """Dense peak by dtype name."""
    memory_bandwidth_bytes_per_s: float = MISSING
    # Booleans are Any here: OmegaConf accepts any number for a bool inside a list.
    on_host: Any = False
    """Whether it is the host itself, which has no reserve."""
    multiprocessors: int = 100
    """Streaming multiprocessors, each running one thread block at a time."""
    curves: str = ""
    """The family in ``latency.curves`` whose kernels it runs."""
    own_curves: Any = False
    """Whether the curves were measured on such devices; otherwise they are scaled by its peaks."""
    host_launch_s: float = 0.0
    """Time that its usual host takes to launch an operator."""
    power_w: float = 0.0
    """Rated power of one board; 0 if unknown."""
    nvlink_bytes_per_s: float | None = None
    """Rate of its NVLink in one direction, for ``transfer_rate=nvlink``; None without one."""
    price_per_hour: float | None = None
    """Price of one device in USD; None if unknown."""
    source: str = ""
    sustained_flops_per_s: dict[str, float] = field(default_factory=dict)
    """Rate by dtype that long runs of products sustain, if a power limit lowers the clock."""
    efficiency: dict[str, Any] = field(default_factory=dict)
    """Shares of the peaks that operators reach: `fxpart.core.efficiency.efficiency_from`."""

    def __post_init__(self) -> None:
        """Check that booleans are true or false."""
        for switch in ("on_host", "own_curves"):
            if not isinstance(value := getattr(self, switch), bool):
                raise SpecError(
                    f"devices.pools: {switch} of {self.name} must be true or false, got {value!r}"
                )


@dataclass
class LinkConfig:
    """The link between any two devices, in one direction."""

    name: str = ""
    bytes_per_s: float = MISSING
    latency_s: float = 0.0
    source: str = ""


@dataclass
class PairConfig(LinkConfig):
    """A link between two particular devices, in both directions, such as an NVLink bridge."""

    devices: list[int] = field(default_factory=list)
    """The logical ids of the two devices."""


@dataclass
class TierConfig:
    """Memory outside of the devices that can hold tensors."""

    name: str = MISSING
    kind: str = MISSING
    """``host`` or ``disk``."""
    memory_bytes: int = MISSING
    bytes_per_s: float | None = None
    """Read rate of a disk. For the host, the rate of each device's link to it if `transfer_rate` is
    faster and not a PCIe link; null if it is the same."""
    latency_s: float | None = None
    """Fixed cost of a copy over that link."""
    flops_per_s: dict[str, float] = field(default_factory=dict)
    """Peak of its processor by dtype name; empty without one."""
    memory_bandwidth_bytes_per_s: float | None = None
    """Memory bandwidth of its processor."""
    source: str = ""


@dataclass
class DevicesConfig:
    """The devices, their machines and links."""

    spec: str = MISSING
    """The name as typed."""
    pools: list[PoolConfig] = field(default_factory=list)
    nodes: list[int] | None = None
    """The machine of each pool; by default all in one."""
    between_nodes: LinkConfig | None = None
    """The link of one network adapter between machines; `transfer_rate` by default."""
    adapters_per_node: int | None = None
    """Adapters of each machine; one for each device by default."""
    pairs: list[PairConfig] = field(default_factory=list)
    """Links between particular devices, replacing those above."""
    tiers: list[TierConfig] = field(default_factory=list)
    """Memory of the host, and a disk."""
    saturate_host: bool = False
    """Whether to copy the placement onto idle devices, as often as it fits."""
