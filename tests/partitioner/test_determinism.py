"""The same answer in every process, whatever the hash seed and wherever nodes lie in memory."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

from fxpart import FxpartError, NodeLatency, PartitionMode
from tests.partitioner.models import random_graph
from tests.partitioner.parity import ask_fxpart, config_for, total_bytes

ROOT = Path(__file__).resolve().parent.parent.parent


def answers() -> str:
    """Return a digest of what all modes decide on a few graphs."""
    # Nodes at other addresses in each process: what a set of nodes would be ordered by.
    ballast = [object() for _ in range(random.Random(os.environ["PYTHONHASHSEED"]).randrange(9999))]
    said = [str(len(ballast) >= 0)]
    for seed in range(4):
        for mode in (m for m in PartitionMode if m is not PartitionMode.aot_based):
            sparse = mode is PartitionMode.sparse_nn
            model, graph_module, _ = random_graph(seed, 10, sparse)
            latencies = {n: NodeLatency(0.1, 0.3) for n in graph_module.graph.nodes}
            config = config_for(
                [int(0.7 * total_bytes(graph_module))] * 4,
                mode,
                transfer_rate_bytes_per_sec=1000.0,
                node_to_latency_mapping=latencies,
                saturate_host=True,
            )
            found = ask_fxpart(graph_module, model, config)
            if found.error is not None:
                assert issubclass(found.error, FxpartError)
                said.append(found.error.__name__)
            partitions = [(p, sorted(nodes), *rest) for p, nodes, *rest in found.partitions]
            said += [repr(partitions), repr(found.dag), found.code]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def test_every_process_gives_the_same_answer() -> None:
    code = "from tests.partitioner.test_determinism import answers; print(answers())"
    found = set()
    for seed in ("0", "1", "77"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert len(found.pop().strip()) == 64
