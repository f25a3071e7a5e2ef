"""The topology of the execution benchmarks: cores of this machine linked by its loopback."""

from omegaconf import OmegaConf

from fxpart.core.topology import DeviceSpec, Link, Topology, uniform_topology
from runner.config.paths import conf_dir
from runner.config.specs import read_accelerator

__all__ = ["machine_topology"]


def machine_topology(count: int) -> Topology:
    """Return `count` devices of ``devices=cpu``, whose operator times come from measurements."""
    core = read_accelerator(conf_dir() / "accelerator" / "cpu.yaml")
    link = OmegaConf.load(conf_dir() / "transfer_rate" / "loopback.yaml")
    device = DeviceSpec(
        "cpu",
        core["memory_bytes"],
        core["flops_per_s"],
        core["memory_bandwidth_bytes_per_s"],
    )
    return uniform_topology((device,) * count, Link(link.bytes_per_s, link.latency_s))
