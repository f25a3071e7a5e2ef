"""Presets on six topologies, by every mode and peer: ``python -m benchmarks.presets --topologies``.

Equal devices; unequal ones; two nodes over InfiniBand; memory 2 % above the minimum that
`size_based` needs; a host CPU beside two devices; NVLink pairs. For each objective: the value of
`mode=optimal` with the given steps, its gap to the bound, and by how much percent each mode and
peer is above it; ``-`` where one refuses. None may be below it.
"""

import itertools
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.composed import composed
from benchmarks.text_table import table
from fxpart.core.graph import OpGraph
from fxpart.core.topology import DeviceSpec, Link, Topology, uniform_topology, with_pair_links
from fxpart.cost.evaluate import evaluate
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.problem import OBJECTIVES, Problem, make_problem
from fxpart.cost.tables import LatencySource
from fxpart.errors import InfeasibleError
from fxpart.placement import Place, make_mode
from fxpart.placement.mtkahypar import is_installed
from runner.experiment.experiment import problem_of
from runner.experiment.model_spec import model_spec
from runner.experiment.objective import objective_metrics
from runner.experiment.subject import shared_subject
from runner.experiment.topology import build_topology
from runner.experiment.user_mode import chosen_mode

__all__ = ["print_topologies"]

UNITS = dict(zip(OBJECTIVES, ("ms", "ms", "GiB", "J"), strict=True))
NEAR, _ROUNDING = 1e-3, 1e-9
LARGE = (
    "dlrm",
    "gpt_oss_120b",
    "llama3_70b",
    "mixtral_8x7b",
    "qwen3_30b_a3b",
    "qwen3_32b",
)
PCIE, NVLINK, INFINIBAND = Link(32e9, 5e-6), Link(300e9, 5e-6), Link(50e9, 5e-6)
"""PCIe 4, NVLink 3 and one InfiniBand NDR port, as in conf/transfer_rate."""
HOST = DeviceSpec("host", 128 * 10**9, {"float32": 3e12, "bfloat16": 6.6e12}, 300e9, power_w=210.0)
"""32 cores as in conf/accelerator/cpu.yaml, so that the table does not depend on this machine. The
power is that of AMD's EPYC 9334."""
MODES = ("single", "size_based", "equal_layers", "pipeline", "kl_based", "cost_aware")


@dataclass(frozen=True)
class _Model:
    """A captured preset, and the peers that need the model itself."""

    name: str
    graph: OpGraph
    times: LatencySource
    host_launch_s: float
    peers: Mapping[str, Place]

    def on(self, topology: Topology, objective: str = "latency") -> Problem:
        topology = replace(topology, host_launch_s=self.host_launch_s)
        return make_problem(self.graph, topology, self.times, objective)


def _model(name: str) -> _Model:
    # The same shares of the peaks on all topologies, whatever their devices state.
    flat = ("latency.compute_efficiency=0.7", "latency.bandwidth_efficiency=0.8")
    config = composed(f"model={name}", *flat)
    spec = model_spec(config)
    problem, times, _ = problem_of(config, shared_subject(config, spec), spec)
    peers = {
        "accelerate": chosen_mode(composed(f"model={name}", "mode=accelerate")),
        "balanced": chosen_mode(composed(f"model={name}", "mode=accelerate", "mode.balanced=true")),
    }
    if is_installed():
        peers["mtkahypar"] = make_mode("mtkahypar")
    return _Model(name, problem.graph, times, problem.topology.host_launch_s, peers)


def _devices(spec: str) -> tuple[DeviceSpec, ...]:
    config = composed(f"devices={spec}")
    return build_topology(config.devices, config.transfer_rate, config.reserve).devices


def _topologies(model: _Model) -> Iterator[tuple[str, Topology]]:
    """Yield the names of six topologies that hold the model, and the topologies."""
    size, unequal, beside_host = "4x16gb", "1xv100_32gb+2x16gb+1xt4", 2
    if model.name in LARGE:
        size, unequal = "4x80gb", "1xh100+3x80gb"
    elif model.name == "deepseek_v3":  # 1.34 TB
        size, unequal, beside_host = "8xb200", "6xb200+2xh200+2xh100", 8
    equal = _devices(size)
    half = len(equal) // 2
    nodes = tuple(replace(device, node=i // half) for i, device in enumerate(equal))
    pairs = {(i, i + 1): NVLINK for i in range(0, len(equal), 2)}
    nvlink_pairs = with_pair_links(uniform_topology(equal, PCIE), pairs)
    yield "equal", uniform_topology(equal, PCIE)
    yield "unlike", uniform_topology(_devices(unequal), PCIE)
    yield "two nodes", uniform_topology(nodes, NVLINK, INFINIBAND)
    yield "tight memory", uniform_topology(_tight_devices(model, equal), PCIE)
    yield "with a CPU", uniform_topology((*equal[:beside_host], HOST), PCIE)
    yield "NVLink pairs", nvlink_pairs


def _tight_devices(model: _Model, devices: tuple[DeviceSpec, ...]) -> tuple[DeviceSpec, ...]:
    """Return the devices with 2 % more memory than the minimum that `size_based` needs."""

    def with_memory(memory_bytes: int) -> tuple[DeviceSpec, ...]:
        return tuple(replace(device, memory_bytes=memory_bytes) for device in devices)

    low, high = 1, devices[0].memory_bytes
    while high - low > high // 200:
        middle = (low + high) // 2
        try:
            make_mode("size_based")(model.on(uniform_topology(with_memory(middle), PCIE)))
            high = middle
        except InfeasibleError:
            low = middle
    return with_memory(high * 102 // 100)


def _value(problem: Problem, evaluation: Evaluation) -> float:
    """Return the value of the objective, in its unit of `UNITS`."""
    if problem.objective == "latency":
        return evaluation.latency_s * 1e3
    if problem.objective == "throughput":
        return evaluation.load_s * 1e3
    if problem.objective == "memory":
        return evaluation.peak_bytes / 2**30
    return objective_metrics(problem, evaluation, problem.topology.n_devices)["energy_j"]


def _gap(problem: Problem, evaluation: Evaluation) -> float:
    """Return the gap between the value and its bound, as a share."""
    if problem.objective == "latency":
        return evaluation.optimality_gap
    metrics = objective_metrics(problem, evaluation, problem.topology.n_devices)
    key = "load" if problem.objective == "throughput" else problem.objective
    return metrics[f"{key}_gap_pct"] / 100


def _values(model: _Model, problem: Problem) -> dict[str, float]:
    """Return the value of every mode and peer, infinite where one refuses."""
    places = {**{mode: make_mode(mode) for mode in MODES}, **model.peers}
    values = {}
    for mode, place in places.items():
        try:
            values[mode] = _value(problem, evaluate(problem, place(problem)))
        except InfeasibleError:
            values[mode] = math.inf
    return values


def _above(value: float, best: float) -> str:
    percent = round((value / best - 1) * 100, 2)
    return "-" if math.isinf(value) else f"{percent + 0.0:.2f}"  # no -0.00


def print_topologies(
    names: Sequence[str], steps: int, objectives: Sequence[str], places: Sequence[str]
) -> bool:
    """Print a table for each objective and the closest peers; return whether optimal is unbeaten.

    Only for the topologies named in `places`, or for all if it is empty.
    """
    rows: dict[str, list[list[str]]] = {objective: [] for objective in objectives}
    near: list[str] = []
    beaten: list[str] = []
    peers: list[str] = []
    for name in names:
        model = _model(name)
        chosen = [(p, t) for p, t in _topologies(model) if p in places or not places]
        for (place, topology), objective in itertools.product(chosen, objectives):
            begin = time.process_time()
            problem = model.on(topology, objective)
            evaluation = evaluate(problem, make_mode("optimal", {"steps": steps})(problem))
            seconds = time.process_time() - begin
            best, gap = _value(problem, evaluation), _gap(problem, evaluation)
            values = _values(model, problem)
            peers = list(values)
            case = f"{name}, {place}, {objective}"
            above = {mode: value / best - 1 for mode, value in values.items()}
            beaten += [f"{case}: {m} {a:.4%}" for m, a in above.items() if a < -_ROUNDING]
            close = [m for m in model.peers if above[m] < NEAR]
            if close:
                near.append(f"{case}: {', '.join(close)}; optimal is {gap:.2%} above the bound")
            rows[objective].append(
                [name, place, f"{best:.3f}", f"{gap * 100:.1f}", f"{seconds:.0f}"]
                + [_above(value, best) for value in values.values()]
            )
            print(*rows[objective][-1], objective, file=sys.stderr, flush=True)
    for objective in objectives:
        print(f"\n{objective}; percent above mode=optimal, {steps} steps\n")
        heads = ["", "topology", f"optimal {UNITS[objective]}", "gap %", "CPU s", *peers]
        print(table(heads, rows[objective]))
    print(f"\npeers within {NEAR:.1%}: {len(near)}", *near, sep="\n  ")
    print(f"\noptimal beaten: {len(beaten)}", *beaten, sep="\n  ")
    return not beaten
