"""What the benchmarks of execution run on: some cores of this machine, joined by its loopback."""

from fxpart.topology import DeviceSpec, Link, Topology, uniform_topology

__all__ = ["machine_topology"]

_CORE = DeviceSpec("cpu", 8 * 10**9, {"float32": 120e9, "float64": 60e9, "bfloat16": 120e9}, 10e9)
_LOOPBACK = Link(1e9, 200e-6)
"""As ``conf/accelerator/cpu.yaml`` and ``conf/transfer_rate/loopback.yaml`` have them."""


def machine_topology(count: int) -> Topology:
    """Return `count` cores; how long operators take there comes from measurements."""
    return uniform_topology((_CORE,) * count, _LOOPBACK)
