"""`model=workload`: the devices and links of a published problem, as its file has them."""

from dataclasses import replace
from pathlib import Path

from runner.config.sections import Config, DevicesConfig, LinkConfig, PoolConfig

__all__ = ["with_published_devices"]


def with_published_devices(config: Config) -> Config:
    """Return `config` with the devices of the problem in `config.model.path`.

    Raises:
        FxpartError: when that is no such problem.

    """
    from fxpart.capture.models.workload import read_workload
    from fxpart.core.workload import workload_topology

    path = Path(config.model.path or "")
    topology = workload_topology(read_workload(path))
    pools: list[PoolConfig] = []
    for device in topology.devices:
        if pools and pools[-1].name == device.name:
            pools[-1].count += 1
            continue
        pools.append(
            PoolConfig(
                count=1,
                name=device.name,
                memory_bytes=device.memory_bytes,
                flops_per_s=dict(device.flops_per_s),
                memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
                on_host=True,  # of whose memory nothing is reserved
                source=path.name,
            )
        )
    spec = "+".join(f"{pool.count}x{pool.name}" for pool in pools)
    name = path.stem if config.model.name == "workload" else config.model.name
    return replace(
        config,
        model=replace(config.model, name=name, depends_on=[str(path)]),
        devices=DevicesConfig(spec=spec, pools=pools),
        transfer_rate=LinkConfig(name="published", bytes_per_s=float(topology.bytes_per_s[0, -1]))
        if topology.n_devices > 1
        else config.transfer_rate,
    )
