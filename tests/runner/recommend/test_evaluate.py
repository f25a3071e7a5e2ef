"""What plans of a space are ranked by."""

from pathlib import Path

import pytest

from runner.job.identity import Choices
from runner.recommend.evaluate import Candidate, Outcome, evaluated
from runner.recommend.request import Request
from runner.recommend.space import Plan, Refusals
from tests.runner.composed import read
from tests.runner.recommend.test_command import TINY

CHOICES = Choices("llama2_7b", "", "2x16gb", "pcie4")


def _evaluated(request: Request, *overrides: str) -> Outcome:
    """Cost one device of two, and a pipeline over both."""
    candidates = []
    for mode in ("single", "pipeline"):
        config = read(*TINY, "model.config.num_hidden_layers=2", *overrides, f"mode={mode}")
        plan = Plan(1, 1, 2, mode, "none", 1, 1, 0, "none")
        candidates.append(Candidate(plan, (f"mode={mode}",), config, CHOICES))
    return evaluated(candidates, request, Refusals({}))


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_a_generation_is_ranked_by_its_whole_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    monkeypatch.chdir(folder)
    generate = ("phase=generate", "prompt_len=4", "output_len=5", "devices=2x16gb", "runtime=graph")
    # Stages would decode two batches in turn, with a cache for each.
    outcome = _evaluated(Request(objective, rows=1), *generate)
    first, second = outcome.ranking
    assert not outcome.bounded
    assert first.candidate.plan.mode == "single"
    for costed in (first, second):
        seconds = (costed.metrics["ttft_ms"] + 4 * costed.metrics["tpot_ms"]) / 1e3
        assert costed.latency_s == pytest.approx(seconds)
        assert costed.examples_per_s == pytest.approx(1 / seconds)
        assert costed.tokens_per_s == pytest.approx(5 / seconds)
