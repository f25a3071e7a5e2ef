"""The files of a recommendation: `recommend.json` and a plot of throughput against memory."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fxpart.support.text_files import write_json, write_text
from runner.output.plot import TEXT, Panel, frame, legend, mark, scale_of
from runner.output.svg import Drawing
from runner.output.units import GIB
from runner.plans.evaluate import Costed, Outcome
from runner.plans.request import Request
from runner.plans.space import Plan
from runner.recommend.table import habit_lines, proof, run_command, untried

__all__ = ["JSON_FILE", "PLOT_FILE", "document", "plot", "write_files"]

JSON_FILE, PLOT_FILE = "recommend.json", "recommend.svg"
_SCHEMA, _VERSION = "fxpart.recommend", 1
_BOUNDS = {
    "throughput": "bound_examples_per_s",
    "latency": "bound_latency_s",
    "cost": "bound_usd_per_example",
}
"""JSON key of the bound of a pruned plan, by objective."""
_WIDTH, _HEIGHT, _LEFT, _TOP, _LEGEND, _BELOW = 680.0, 400.0, 66.0, 34.0, 150.0, 48.0
_KINDS = 7
"""Number of distinct marks for kinds of plans; further kinds share the last."""


def write_files(folder: Path, command: Sequence[str], request: Request, outcome: Outcome) -> None:
    """Write both files to `folder`. Raises `CacheError` if it cannot be written."""
    write_json(folder / JSON_FILE, document(command, request, outcome))
    write_text(folder / PLOT_FILE, plot(outcome))


def document(command: Sequence[str], request: Request, outcome: Outcome) -> dict[str, object]:
    """Return all plans of the space: costed (best first), beyond limits, unfit and pruned."""
    return {
        "schema": _SCHEMA,
        "version": _VERSION,
        "request": asdict(request),
        "proved": proof(request, outcome),
        "not_tried": untried(outcome),
        "habits": list(habit_lines(request, outcome)),
        "plans": [_entry(command, costed) for costed in outcome.ranking],
        "beyond": [
            {**_entry(command, costed), "beyond": costed.beyond(request.limits)}
            for costed in outcome.beyond
        ],
        "unfit": [
            {
                "command": run_command(command, candidate),
                "overrides": candidate.overrides,
                **_of_plan(candidate.plan),
                "error": str(error),
            }
            for candidate, error in outcome.unfit
        ],
        "bounded": [
            {
                "command": run_command(command, candidate),
                "overrides": candidate.overrides,
                **_of_plan(candidate.plan),
                _BOUNDS[request.objective]: bound,
            }
            for candidate, bound in outcome.bounded
        ],
    }


def _of_plan(plan: Plan) -> dict[str, object]:
    """Return the settings of a plan, and the choices of its configuration, by name."""
    settings = asdict(plan)
    del settings["variant"]
    return {**settings, **plan.variant._asdict()}


def _entry(command: Sequence[str], costed: Costed) -> dict[str, object]:
    return {
        "command": run_command(command, costed.candidate),
        "overrides": costed.candidate.overrides,
        **_of_plan(costed.candidate.plan),
        "metrics": _reproduced(costed),
        "time_shares": costed.shares,
        "limit": costed.limit,
        "devices_used": costed.devices_used,
        "devices_idle": costed.devices_idle,
        "tokens_per_s": costed.tokens_per_s,
    }


def _reproduced(costed: Costed) -> dict[str, float]:
    """Return the reproducible metrics of a plan: all but the times spent on capture and search."""
    return {k: v for k, v in costed.metrics.items() if k not in ("capture_s", "partition_s")}


def plot(outcome: Outcome) -> str:
    """Return throughput against memory of the fullest device as SVG, the Pareto front solid."""
    ranking = outcome.ranking
    drawing = Drawing("throughput against memory")
    panel = Panel(
        _LEFT,
        _TOP,
        _WIDTH - _LEFT - _LEGEND,
        _HEIGHT - _TOP - _BELOW,
        scale_of([costed.memory_bytes / GIB for costed in ranking]),
        scale_of([costed.examples_per_s for costed in ranking]),
    )
    frame(drawing, panel, "memory of the fullest device, GiB", "examples/s")
    kinds = list(dict.fromkeys(_kind(costed) for costed in ranking))
    for costed in reversed(ranking):
        point = panel.place(costed.memory_bytes / GIB, costed.examples_per_s)
        index = min(kinds.index(_kind(costed)), _KINDS - 1)
        tip = (
            f"{' '.join(costed.candidate.overrides)}\n{costed.examples_per_s:,.2f} examples/s,"
            f" {costed.memory_bytes / GIB:.1f} GiB, {costed.limit}"
        )
        size = 6.5 if costed is ranking[0] else 4.5
        mark(drawing, point, index, tip, solid=_on_frontier(costed, ranking), size=size)
    side = panel.right + 16
    names = kinds if len(kinds) <= _KINDS else [*kinds[: _KINDS - 1], "others"]
    drawing.text(side, _TOP + 8, "tensor x replicas x stages", size=TEXT)
    legend(drawing, side, _TOP + 28, names)
    return drawing.svg(_WIDTH, _HEIGHT)


def _kind(costed: Costed) -> str:
    plan = costed.candidate.plan
    return f"{plan.tensor_parallel} x {plan.replicas} x {costed.stages}"


def _on_frontier(costed: Costed, ranking: Sequence[Costed]) -> bool:
    """Return whether no other plan dominates this one in throughput and memory."""
    return not any(
        other.examples_per_s >= costed.examples_per_s
        and other.memory_bytes <= costed.memory_bytes
        and (
            other.examples_per_s > costed.examples_per_s or other.memory_bytes < costed.memory_bytes
        )
        for other in ranking
    )
