"""``python -m benchmarks.same_answer [processes]``: check that every mode is deterministic.

Every mode runs in fresh processes with different hash seeds and object addresses. The modes of the
runner place a synthetic graph of 2,000 operators, those of the drop-in partitioner a traced module.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.synthetic import synthetic_graph
from fxpart import DeviceSpec, LatencyModel, Link, make_mode, make_problem, uniform_topology
from fxpart.core.graph import OpGraph
from fxpart.core.topology import Topology

PROCESSES = 20
_CHILD = "--child"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _with_embeddings(graph: OpGraph) -> OpGraph:
    """Return the graph with three quarters of its operators as lookups, for `sparse_nn`."""
    count = graph.n_ops * 3 // 4
    return replace(graph, targets=("aten.embedding.default",) * count + graph.targets[count:])


def _devices(gigabytes: int) -> Topology:
    rates = {"float32": 1e13, "bfloat16": 1e14}
    device = DeviceSpec("any", gigabytes * 10**9, rates, 1e12)
    return uniform_topology((device,) * 4, Link(25e9, 1e-5))


def _runner_modes() -> Iterator[tuple[str, str]]:
    """Yield each mode of the runner, and a digest of its placement."""
    topology, middle, large = (_devices(gigabytes) for gigabytes in (16, 40, 60))
    graph = synthetic_graph(2000, 0)
    roots = sorted({path.partition(".")[0] for path in graph.modules})
    for name, options, where in (
        ("single", {}, large),
        ("size_based", {}, topology),
        ("sparse_nn", {}, middle),
        ("cost_aware", {}, topology),
        ("kl_based", {}, topology),
        ("aot_based", {"modules": dict.fromkeys(["", *roots], 0)}, large),
    ):
        problem = make_problem(_with_embeddings(graph), where, LatencyModel())
        placed = make_mode(name, options)(problem)
        text = f"{placed.partition_of.tolist()} {placed.devices_of_partition}"
        yield f"runner {name}", _digest(text)


def _facade_modes() -> Iterator[tuple[str, str]]:
    """Yield each mode of the drop-in partitioner, and a digest of its partitions."""
    import torch

    from benchmarks.torch_families import inception, random_sparse
    from fxpart import (
        Device,
        NodeLatency,
        Partitioner,
        PartitionerConfig,
        PartitionMode,
        get_size_of_all_nodes,
    )

    for mode in PartitionMode:
        module, inputs = random_sparse(3) if mode is PartitionMode.sparse_nn else inception(9)
        traced = torch.fx.symbolic_trace(module)
        get_size_of_all_nodes(traced, list(inputs))
        nodes = list(traced.graph.nodes)
        total = sum(node.size_bytes.total_size for node in nodes if node.op != "output")
        share = 1.05 if mode is PartitionMode.sparse_nn else 0.45
        calls = [node for node in nodes if node.op.startswith("call")]
        config = PartitionerConfig(
            [Device(f"d{i}", int(total * share), i) for i in range(4)],
            mode,
            1e6,
            {node: NodeLatency(1e-6, 2e-6) for node in calls},
            {node: i // 16 for i, node in enumerate(calls)},
            {i: [i] for i in range(len(calls) // 16 + 1)},
            saturate_host=True,
        )
        partitioner = Partitioner()
        cut = partitioner.partition_graph(traced, module, config)
        lines = [
            f"{p.partition_id} {[n.name for n in p.nodes]} {p.logical_device_ids}"
            for p in partitioner.partitions
        ]
        yield f"facade {mode.name}", _digest("\n".join([*lines, cut.module_with_submodules.code]))


def _child() -> None:
    # Shifts object addresses, by which sets of objects would be ordered.
    ballast = [
        object() for _ in range(random.Random(os.environ["PYTHONHASHSEED"]).randrange(99999))
    ]
    answers = dict([*_runner_modes(), *_facade_modes()])
    del ballast
    print(json.dumps(answers))


def main() -> None:
    """Print how many answers each mode gave; exit with 1 if any gave more than one."""
    if sys.argv[1:] == [_CHILD]:
        _child()
        return
    processes = int(sys.argv[1]) if sys.argv[1:] else PROCESSES
    answers: dict[str, set[str]] = defaultdict(set)
    for seed in range(processes):
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks.same_answer", _CHILD],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            cwd=Path(__file__).resolve().parent.parent,
            capture_output=True,
            text=True,
            check=True,
        )
        for mode, digest in json.loads(process.stdout.splitlines()[-1]).items():
            answers[mode].add(digest)
    print(f"{'mode':<20} processes answers")
    for mode, digests in answers.items():
        print(f"{mode:<20} {processes:>9} {len(digests):>7}")
    sys.exit(any(len(digests) > 1 for digests in answers.values()))


if __name__ == "__main__":
    main()
