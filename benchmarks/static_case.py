"""`Case`: one traced module with sizes, latencies and devices, the same for both sides."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from benchmarks.plain_models import LARGER, SMALL
from benchmarks.torch_families import Built, random_module, random_sparse

__all__ = [
    "NAME",
    "Case",
    "architecture_cases",
    "equal_shares",
    "fresh_copy",
    "make_case",
    "random_case",
    "sparse_case",
]

FLOP_PER_S = 1e10
MEMORY_BYTES_PER_S = 1e10
NAME = "name in the case"
SOURCES = ("placeholder", "get_attr", "output")


@dataclass(frozen=True, eq=False, slots=True)
class Case:
    """A problem for both sides. Node names are those of `traced`."""

    name: str
    module: nn.Module
    traced: fx.GraphModule
    """With ``meta["tensor_meta"]`` on every node. Partition only copies: see `fresh_copy`."""
    inputs: tuple[Tensor, ...]
    operators: tuple[str, ...]
    """Names of the call nodes in graph order."""
    latency_s: dict[str, tuple[float, float]]
    """Memory and compute seconds of each call node."""
    total_bytes: int
    """Static size of the whole graph: weights and outputs of all nodes, as torch counts."""
    memory_bytes: tuple[int, ...]
    """Memory of each device; its logical id is its position."""
    bytes_per_s: float
    """Rate of transfers between devices."""


def equal_shares(devices: int, slack: float = 1.8) -> tuple[float, ...]:
    """Return the share of the whole static size that each of `devices` equal devices holds.

    Together they hold `slack` times the model.
    """
    return (slack / devices,) * devices


def _output_bytes(node: fx.Node) -> int:
    meta = node.meta["tensor_meta"]
    return int(meta.shape.numel()) * int(meta.dtype.itemsize)


def _weight_bytes(node: fx.Node, modules: dict[str, nn.Module]) -> int:
    """Return the bytes of the parameters of a called module."""
    if node.op != "call_module":
        return 0
    return sum(p.numel() * p.element_size() for p in modules[str(node.target)].parameters())


def _flop(node: fx.Node, modules: dict[str, nn.Module]) -> int:
    """Return the FLOPs of a node: two per weight and position for a layer, else one per element."""
    elements = int(node.meta["tensor_meta"].shape.numel())
    if node.op == "call_module":
        weight = getattr(modules[str(node.target)], "weight", None)
        if isinstance(weight, Tensor) and weight.dim() > 1:
            return 2 * weight.numel() * (elements // weight.shape[0] or 1)
    if node.target is torch.matmul:
        inner = node.all_input_nodes[0].meta["tensor_meta"].shape[-1]
        return 2 * elements * int(inner)
    return elements


def make_case(name: str, built: Built, shares: Sequence[float], transfer_ratio: float) -> Case:
    """Return the case of placing a module on devices of `shares` of its static size.

    With `transfer_ratio` 1, the transfer of an output of mean size takes as long as an operator of
    mean latency; with 10, ten times as long.
    """
    module, inputs = built
    module.eval()
    traced = fx.symbolic_trace(module)
    with torch.no_grad():
        ShapeProp(traced).propagate(*inputs)
    modules = dict(traced.named_modules())
    nodes = [node for node in traced.graph.nodes if node.op != "output"]
    called = [node for node in nodes if node.op not in SOURCES]
    total = sum(_weight_bytes(node, modules) + _output_bytes(node) for node in nodes)
    latency: dict[str, tuple[float, float]] = {}
    for node in called:
        accessed = _weight_bytes(node, modules) + _output_bytes(node)
        accessed += sum(_output_bytes(read) for read in node.all_input_nodes)
        latency[node.name] = accessed / MEMORY_BYTES_PER_S, _flop(node, modules) / FLOP_PER_S
    mean_s = sum(max(pair) for pair in latency.values()) / len(called)
    mean_bytes = sum(map(_output_bytes, called)) / len(called)
    return Case(
        name=name,
        module=module,
        traced=traced,
        inputs=inputs,
        operators=tuple(node.name for node in called),
        latency_s=latency,
        total_bytes=total,
        memory_bytes=tuple(int(total * share) for share in shares),
        bytes_per_s=mean_bytes / (mean_s * transfer_ratio),
    )


def random_shares(rng: random.Random) -> tuple[float, ...]:
    """Return the shares of 2 to 5 devices, equal or not, each 0.3 to 0.9 of the model."""
    count = rng.randint(2, 5)
    if rng.random() < 0.5:
        return (rng.uniform(0.3, 0.9),) * count
    return tuple(rng.uniform(0.3, 0.9) for _ in range(count))


def random_case(seed: int, min_operators: int = 8, max_operators: int = 40) -> Case:
    """Return a random module of `min_operators` to `max_operators` on random devices."""
    rng = random.Random(seed)
    ops = rng.randint(min_operators, max_operators)
    ratio = 10 ** rng.uniform(-1.5, 1.5)
    return make_case(f"random {seed}", random_module(seed, ops), random_shares(rng), ratio)


def sparse_case(seed: int) -> Case:
    """Return a random module with embedding tables, on equal devices.

    Usually each device has memory for some tables and the dense layers, else for a random share.
    """
    rng = random.Random(seed)
    built = random_sparse(seed)
    tables = sum(isinstance(module, nn.EmbeddingBag) for module in built[0].modules())
    tables_each = rng.randint(1, max(1, tables // 2))
    if rng.random() < 0.8:
        shares = ((tables_each + rng.uniform(0.0, 0.6)) / tables,) * (
            -(-tables // tables_each) + rng.randint(0, 1)
        )
    else:
        shares = (rng.uniform(0.3, 0.9),) * rng.randint(2, 5)
    return make_case(f"sparse {seed}", built, shares, 1.0)


def architecture_cases(small_only: bool) -> Iterator[Case]:
    """Yield each known architecture on 2 and 4 equal devices, or only the small ones on 4."""
    for devices in (4,) if small_only else (2, 4):
        for name, build in (SMALL if small_only else SMALL | LARGER).items():
            torch.manual_seed(0)
            yield make_case(f"{name}, {devices} devices", build(), equal_shares(devices), 1.0)


def fresh_copy(case: Case) -> fx.GraphModule:
    """Return a copy of the traced graph with the same weights and node names.

    Attributes that one side sets on its nodes are not visible to the other.
    """
    graph = fx.Graph()
    output = graph.graph_copy(case.traced.graph, {})
    graph.output(output)
    for node in graph.nodes:
        # Submodules rename their nodes; the entry in meta is copied with a node.
        node.meta[NAME] = node.name
    return fx.GraphModule(case.traced, graph)
