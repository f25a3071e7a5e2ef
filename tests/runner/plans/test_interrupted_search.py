"""What a search says when it is interrupted."""

from pathlib import Path

import pytest

from runner.plans import search, tasks
from runner.plans.chosen import best_of
from runner.plans.evaluate import Candidate, Costed
from runner.plans.request import ONLY, Request, Space
from tests.runner.composed import TINY_LLAMA, read


def test_an_interrupt_names_the_best_plan_so_far(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    costed_plans = list[Costed]()

    def interrupted(candidate: Candidate, *, streams: bool) -> Costed:
        if costed_plans:
            raise KeyboardInterrupt
        costed_plans.append(tasks.cost(candidate, streams=streams))
        return costed_plans[0]

    monkeypatch.setattr(search, "cost", interrupted)
    base = read(*TINY_LLAMA, "devices=2x16gb")
    request = Request(space=Space(mode=["single"]))
    with pytest.raises(KeyboardInterrupt) as caught:
        best_of({ONLY: base}, request, {}, 1, prefix="recommend.")
    best = costed_plans[0]
    assert caught.value.__notes__ == [
        "1 plan costed, 0 do not fit, 0 left out by their bounds; best so far:"
        f" {' '.join(best.candidate.overrides)} ({best.examples_per_s:,.1f} examples/s)"
    ]
