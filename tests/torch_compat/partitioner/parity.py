"""The same graph through torch's partitioner and ours, in a comparable form."""

import contextlib
import io
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental import accelerator_partitioner as theirs
from torch.fx.experimental import partitioner_utils as theirs_config

from fxpart.torch_compat.partitioner import Device, Partitioner, PartitionerConfig, PartitionMode


@dataclass(frozen=True)
class Outcome:
    """The decision of a partitioner, or its refusal."""

    error: type[Exception] | None
    partitions: list[tuple[int, frozenset[str], int, tuple[int, ...]]]
    """Id, node names, used bytes and logical ids of each partition."""
    dag: list[tuple[str, list[str], list[str], tuple[int, ...], int]]
    family: list[tuple[frozenset[int], frozenset[int]]]
    """Ids of the parents and children of each partition."""
    code: str = ""
    module: GraphModule | None = None

    @property
    def whole(self) -> bool:
        """Whether each partition has devices, each once."""
        return self.error is None and all(
            devices and len(devices) == len(set(devices)) for *_, devices in self.partitions
        )


def total_bytes(graph_module: GraphModule) -> int:
    """Return the bytes of the graph on one device."""
    return sum(n.size_bytes.total_size for n in graph_module.graph.nodes if n.op != "output")


def _outputs(module: GraphModule, dag_node: Any) -> list[str]:  # noqa: ANN401 - theirs or ours
    """Return the outputs of a DAG node; torch names the users of a single output instead."""
    submodule = module.get_submodule(str(dag_node.submodule_node.target))
    assert isinstance(submodule, GraphModule)
    single = isinstance(submodule.graph.output_node().args[0], Node)
    return [dag_node.submodule_node.name] if single else [n.name for n in dag_node.output_nodes]


def _outcome(partitioner: Any, result: Any) -> Outcome:  # noqa: ANN401 - theirs or ours
    module = result.module_with_submodules
    return Outcome(
        None,
        [
            (
                p.partition_id,
                frozenset(n.name for n in p.nodes),
                p.used_mem_bytes,
                tuple(p.logical_device_ids),
            )
            for p in partitioner.partitions
        ],
        [
            (
                str(node),
                [n.name for n in node.input_nodes],
                _outputs(module, node),
                tuple(node.logical_device_ids),
                node.size_bytes,
            )
            for node in result.dag.nodes
        ],
        [
            (
                frozenset(q.partition_id for q in p.parents),
                frozenset(q.partition_id for q in p.children),
            )
            for p in partitioner.partitions
        ],
        module.code,
        module,
    )


def torch_config(config: PartitionerConfig) -> Any:  # noqa: ANN401 - torch takes its own types
    """Return the same configuration in torch's types."""
    devices = [theirs_config.Device(*device) for device in config.devices]
    rest: Any = config[2:]
    return theirs_config.PartitionerConfig(
        devices, theirs_config.PartitionMode[config.mode.name], *rest
    )


def ask_torch(graph_module: GraphModule, model: nn.Module, config: PartitionerConfig) -> Outcome:
    """Return the outcome of torch's partitioner."""
    translated = torch_config(config)
    partitioner = theirs.Partitioner()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            result = partitioner.partition_graph(graph_module, model, translated)
    except Exception as error:
        return Outcome(type(error), [], [], [])
    return _outcome(partitioner, result)


def ask_fxpart(graph_module: GraphModule, model: nn.Module, config: PartitionerConfig) -> Outcome:
    """Return the outcome of our partitioner."""
    partitioner = Partitioner()
    try:
        result = partitioner.partition_graph(graph_module, model, config)
    except RuntimeError as error:
        return Outcome(type(error), [], [], [])
    return _outcome(partitioner, result)


def config_for(
    memory: list[int],
    mode: PartitionMode = PartitionMode.size_based,
    **more: Any,  # noqa: ANN401 - whatever the configuration has
) -> PartitionerConfig:
    """Return a configuration with one device for each number of bytes; logical ids from 10."""
    devices = [Device(f"device_{i}", size, 10 + i) for i, size in enumerate(memory)]
    return PartitionerConfig(devices, mode, **more)
