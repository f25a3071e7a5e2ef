"""``python -m benchmarks.monotone [problems [first]]``: more hardware must not make a plan worse.

For each mode, on random problems (300 by default, from seed 0 or `first`; 0 for none) and on
presets: one more device, a link twice as fast, and the same devices in another order. ``worse``
counts plans that got slower by more than 0.01 %, the smallest gain that searches accept, ``by 1 %``
those that got much slower; for another order, ``differs`` counts both directions. The criterion is
what a mode minimizes: the latency of one input, for ``pipeline`` the time between two inputs, which
its default `boundary_gain` lets it miss by 1 %. A model that no longer fits counts as worse.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.composed import composed
from benchmarks.synthetic import synthetic_graph
from benchmarks.text_table import table
from fxpart import DeviceSpec, InfeasibleError, LatencyModel, Link, make_mode
from fxpart.core.graph import OpGraph
from fxpart.core.topology import uniform_topology
from fxpart.cost.evaluate import evaluate_unbounded
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.tables import LatencySource
from runner.experiment.experiment import problem_of
from runner.experiment.model_spec import model_spec
from runner.experiment.subject import shared_subject

_ANYWHERE = "pipeline boundary_gain=0"
MODES = ("single", "size_based", "kl_based", "cost_aware", "pipeline", _ANYWHERE)
_MIN_GAIN = 1e-4
"""The default `min_gain` of the searches: they reject changes that gain less."""
_LARGE_LOSS = 0.01
PRESETS = (
    ("gpt2", "4x16gb", "1xv100_32gb"),
    ("resnet50", "4x16gb", "1xt4"),
    ("bert_large", "2x16gb", "1xa100_80gb"),
    ("t5_large", "4x16gb", "1xv100_32gb"),
    ("whisper_small", "4x16gb", "1x16gb"),
    ("llama2_7b", "2x24gb", "1xv100_32gb"),
    ("llama2_13b", "2xa10", "1xv100_32gb"),
    ("llama2_13b", "4x16gb", "1x16gb"),
    ("mixtral_8x7b", "2x80gb", "4x24gb"),
    ("dlrm", "4x80gb", "1x80gb"),
)
"""Models, devices, and the device to add."""


@dataclass(frozen=True)
class Scene:
    """A model and the devices on which it is placed."""

    graph: OpGraph
    devices: tuple[DeviceSpec, ...]
    link: Link
    latency: LatencySource

    def cost_s(self, mode: str) -> float:
        """Return what `mode` minimizes in seconds; infinite if nothing fits."""
        problem = make_problem(self.graph, uniform_topology(self.devices, self.link), self.latency)
        return cost_s(problem, mode)


def cost_s(problem: Problem, mode: str) -> float:
    """Return what `mode` minimizes in seconds; infinite if nothing fits."""
    name = mode.split(maxsplit=1)[0]
    try:
        place = make_mode(name, {"boundary_gain": 0.0} if mode == _ANYWHERE else None)
        evaluation = evaluate_unbounded(problem, place(problem))
    except InfeasibleError:
        return math.inf
    return 1 / evaluation.throughput_per_s if name == "pipeline" else evaluation.latency_s


def random_scene(seed: int) -> tuple[Scene, DeviceSpec]:
    """Return a random model on one to five devices of one to three kinds, and a device to add."""
    rng = np.random.default_rng(seed)
    graph = synthetic_graph(int(rng.integers(20, 120)), seed)
    weights = int(graph.weight_bytes.sum())
    kinds = [
        DeviceSpec(
            f"kind{kind}",
            int(weights * rng.choice([0.3, 0.6, 1.1, 2.0])) + 200_000_000,
            {"float32": 2e13, "bfloat16": float(rng.choice([2e13, 6e13, 1.2e14]))},
            float(rng.choice([3e11, 9e11, 2e12])),
        )
        for kind in range(int(rng.integers(1, 4)))
    ]
    devices = [kinds[int(k)] for k in rng.integers(0, len(kinds), int(rng.integers(1, 6)))]
    link = Link(float(rng.choice([1.25e9, 12e9, 25e9, 300e9])), 1e-5)
    scene = Scene(graph, tuple(devices), link, LatencyModel())
    return scene, kinds[int(rng.integers(0, len(kinds)))]


def changes(scene: Scene, added: DeviceSpec) -> Iterator[tuple[str, Scene]]:
    """Yield the scene with more hardware, and with its devices in another order."""
    middle = len(scene.devices) // 2
    devices = scene.devices
    yield "device", replace(scene, devices=(*devices[:middle], added, *devices[middle:]))
    faster = Link(2 * scene.link.bytes_per_s, scene.link.latency_s / 2)
    yield "link", replace(scene, link=faster)
    yield "order", replace(scene, devices=devices[::-1])


def verdicts(change: str, before_s: float, after_s: float) -> list[str]:
    """Return the labels under which a change counts, such as ``device`` and ``device worse``."""
    if math.isinf(before_s):
        return [] if change != "order" or math.isinf(after_s) else ["order", "order worse"]
    ratio = after_s / before_s
    ratio = max(ratio, 1 / ratio) if change == "order" else ratio
    counts = [change]
    counts += [f"{change} worse"] if ratio > 1 + _MIN_GAIN else []
    return counts + ([f"{change} by 1 %"] if ratio > 1 + _LARGE_LOSS else [])


def random_rows(seeds: Sequence[int], modes: Sequence[str] = MODES) -> dict[str, Counter[str]]:
    """Return the counts for each mode on random problems; print each change for the worse."""
    counts = {mode: Counter[str]() for mode in modes}
    for seed in seeds:
        scene, added = random_scene(seed)
        for mode, counter in counts.items():
            before_s = scene.cost_s(mode)
            for change, changed in changes(scene, added):
                after_s = changed.cost_s(mode)
                _count(counter, f"problem {seed}: {mode}", change, before_s, after_s)
        print(f"problem {seed} done", flush=True)
    return counts


def _count(counter: Counter[str], case: str, change: str, before_s: float, after_s: float) -> None:
    labels = verdicts(change, before_s, after_s)
    counter.update(labels)
    if len(labels) > 1:
        print(f"{case}: {change}: {before_s:.6g} -> {after_s:.6g} s", flush=True)


def preset_rows(modes: Sequence[str] = MODES) -> dict[str, Counter[str]]:
    """Return the counts for each mode on `PRESETS`, with cached graphs."""
    counts = {mode: Counter[str]() for mode in modes}
    for model, devices, added in PRESETS:
        for mode, counter in counts.items():
            before_s = _preset_cost_s(model, mode, devices, "pcie4")
            changed = {
                "device": (f"{devices}+{added}", "pcie4"),
                "link": (devices, "pcie5"),
            }
            changed_s = [_preset_cost_s(model, mode, *change) for change in changed.values()]
            case = f"{model} on {devices}: {mode}"
            for what, after_s in zip(changed, changed_s, strict=True):
                _count(counter, case, what, before_s, after_s)
            reordered_s = _preset_cost_s(model, mode, f"{added}+{devices}", "pcie4")
            _count(counter, case, "order", changed_s[0], reordered_s)
            print(f"{case} done", flush=True)
    return counts


def _preset_cost_s(model: str, mode: str, devices: str, link: str) -> float:
    """Return what `mode` minimizes in a run of the preset `model`."""
    mode_override = f"mode={mode.split(maxsplit=1)[0]}"
    job = composed(f"model={model}", mode_override, f"devices={devices}", f"transfer_rate={link}")
    spec = model_spec(job)
    problem, _, _ = problem_of(job, shared_subject(job, spec), spec)
    return cost_s(problem, mode)


def counts_table(counts: dict[str, Counter[str]]) -> str:
    """Return the counts as a table."""
    kinds = ("device", "link", "order")
    heads = ["mode"]
    for kind in kinds:
        heads += [f"{kind} cases", "differs" if kind == "order" else "worse", "by 1 %"]
    rows = [
        [mode, *(str(c[f"{kind}{end}"]) for kind in kinds for end in ("", " worse", " by 1 %"))]
        for mode, c in counts.items()
    ]
    return table(heads, rows)


def main() -> None:
    """Print one row for each mode."""
    problems, first = (*map(int, sys.argv[1:]), *(300, 0)[len(sys.argv) - 1 :])
    if problems:
        print(f"{problems} random problems")
        print(counts_table(random_rows(range(first, first + problems))), flush=True)
    print(f"\n{len(PRESETS)} presets")
    print(counts_table(preset_rows()), flush=True)


if __name__ == "__main__":
    main()
