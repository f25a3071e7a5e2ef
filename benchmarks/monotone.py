"""``python -m benchmarks.monotone [problems [first]]``: more hardware must not make a plan worse.

For each mode, on random problems (300 unless said otherwise, from seed 0 or `first`; 0 for none)
and on presets: a device more, a link twice as fast, and the same devices in another order.
``worse`` counts plans that got slower by more than 0.01 %, which is what searches take for nothing,
``by 1 %`` those that got much slower; of another order ``differs`` counts either way. What counts
is what a mode makes small: the latency of one input, of ``pipeline`` the time from one input to the
next. A model that no longer fits counts as worse.
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
from fxpart import DeviceSpec, InfeasibleError, LatencyModel, Link, evaluate, make_mode
from fxpart.core.graph import OpGraph
from fxpart.core.topology import uniform_topology
from fxpart.cost.problem import Problem, make_problem
from fxpart.cost.tables import LatencySource
from runner.experiment.experiment import problem_of
from runner.experiment.model_spec import model_spec
from runner.experiment.subject import shared_subject

MODES = ("single", "size_based", "kl_based", "cost_aware", "pipeline")
_LEAST_GAIN = 1e-4
"""The searches' own `min_gain`: a change that gains less is not made."""
_MUCH = 0.01
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
"""Models, devices, and what is added."""


@dataclass(frozen=True)
class Scene:
    """A model and the devices that it is placed on."""

    graph: OpGraph
    devices: tuple[DeviceSpec, ...]
    link: Link
    latency: LatencySource

    def cost_s(self, mode: str) -> float:
        """Return what the mode makes small; infinite where nothing fits."""
        problem = make_problem(self.graph, uniform_topology(self.devices, self.link), self.latency)
        return cost_s(problem, mode)


def cost_s(problem: Problem, mode: str) -> float:
    """Return what `mode` makes small, in seconds; infinite where nothing fits."""
    try:
        evaluation = evaluate(problem, make_mode(mode)(problem))
    except InfeasibleError:
        return math.inf
    return 1 / evaluation.throughput_per_s if mode == "pipeline" else evaluation.latency_s


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
    pick = [kinds[int(k)] for k in rng.integers(0, len(kinds), int(rng.integers(1, 6)))]
    link = Link(float(rng.choice([1.25e9, 12e9, 25e9, 300e9])), 1e-5)
    scene = Scene(graph, tuple(pick), link, LatencyModel())
    return scene, kinds[int(rng.integers(0, len(kinds)))]


def changes(scene: Scene, further: DeviceSpec) -> Iterator[tuple[str, Scene]]:
    """Yield the scene with more hardware, and with its devices in another order."""
    place = len(scene.devices) // 2
    devices = scene.devices
    yield "device", replace(scene, devices=(*devices[:place], further, *devices[place:]))
    faster = Link(2 * scene.link.bytes_per_s, scene.link.latency_s / 2)
    yield "link", replace(scene, link=faster)
    yield "order", replace(scene, devices=devices[::-1])


def judged(what: str, before_s: float, after_s: float) -> list[str]:
    """Return what a change counts as."""
    if math.isinf(before_s):
        return [] if what != "order" or math.isinf(after_s) else ["order", "order worse"]
    ratio = after_s / before_s
    ratio = max(ratio, 1 / ratio) if what == "order" else ratio
    counts = [what]
    counts += [f"{what} worse"] if ratio > 1 + _LEAST_GAIN else []
    return counts + ([f"{what} by 1 %"] if ratio > 1 + _MUCH else [])


def random_rows(seeds: Sequence[int], modes: Sequence[str] = MODES) -> dict[str, Counter[str]]:
    """Return the counts for each mode on random problems, and print what got worse as it is met."""
    counts = {mode: Counter[str]() for mode in modes}
    for seed in seeds:
        scene, further = random_scene(seed)
        for mode, counter in counts.items():
            before_s = scene.cost_s(mode)
            for what, changed in changes(scene, further):
                after_s = changed.cost_s(mode)
                _count(counter, f"problem {seed}: {mode}", what, before_s, after_s)
        print(f"problem {seed} done", flush=True)
    return counts


def _count(counter: Counter[str], case: str, what: str, before_s: float, after_s: float) -> None:
    verdict = judged(what, before_s, after_s)
    counter.update(verdict)
    if len(verdict) > 1:
        print(f"{case}: {what}: {before_s:.6g} -> {after_s:.6g} s", flush=True)


def preset_rows(modes: Sequence[str] = MODES) -> dict[str, Counter[str]]:
    """Return the counts for each mode on `PRESETS`; the graphs come from the cache."""
    counts = {mode: Counter[str]() for mode in modes}
    for model, devices, further in PRESETS:
        for mode, counter in counts.items():
            before_s = _of_command(model, mode, devices, "pcie4")
            changed = {
                "device": (f"{devices}+{further}", "pcie4"),
                "link": (devices, "pcie5"),
            }
            both = [_of_command(model, mode, *change) for change in changed.values()]
            case = f"{model} on {devices}: {mode}"
            for what, after_s in zip(changed, both, strict=True):
                _count(counter, case, what, before_s, after_s)
            turned_s = _of_command(model, mode, f"{further}+{devices}", "pcie4")
            _count(counter, case, "order", both[0], turned_s)
            print(f"{case} done", flush=True)
    return counts


def _of_command(model: str, mode: str, devices: str, link: str) -> float:
    """Return what the mode makes small in a run of that model."""
    overrides = (f"model={model}", f"mode={mode}", f"devices={devices}", f"transfer_rate={link}")
    job = composed(*overrides)
    spec = model_spec(job)
    problem, _, _ = problem_of(job, shared_subject(job, spec), spec)
    return cost_s(problem, mode)


def printed(counts: dict[str, Counter[str]]) -> str:
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
        print(printed(random_rows(range(first, first + problems))), flush=True)
    print(f"\n{len(PRESETS)} presets")
    print(printed(preset_rows()), flush=True)


if __name__ == "__main__":
    main()
