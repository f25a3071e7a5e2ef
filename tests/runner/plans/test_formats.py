"""Recommendations that choose formats of weights and caches too."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fxpart.errors import SpecError
from runner.experiment.experiment import plan
from runner.experiment.headline import headline
from runner.experiment.model_spec import model_spec
from runner.job.identity import Choices, JobIdentity
from runner.plans.chosen import best_of
from runner.plans.request import ONLY, Request, Space, Variant, variants
from runner.recommend.record import logged
from runner.recommend.table import left_out_formats, untried
from runner.tracking.tracker import RunLog, Tracker
from tests.runner.composed import TINY_LLAMA, read

DECODE = (*TINY_LLAMA, "phase=decode", "context_len=64", "model.batch_size=4")
_SIMPLE = Space(mode=["single"], data_parallel=[1])


@pytest.fixture(autouse=True)
def _in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_the_best_is_that_of_all_formats() -> None:
    decode = (*DECODE, "devices=2x16gb", "runtime=graph")
    request = Request(weights=["none", "int8"], kv_cache=["auto", "fp8"], space=_SIMPLE)
    bases = {variant: read(*decode, *variant.overrides) for variant in variants(request)}
    assert len(bases) == 4
    outcome = best_of(bases, request, {}, 4, prefix="recommend.")
    costs = {}
    for degree in (1, 2):
        for base in bases.values():
            overrides = (f"weights={base.weights.name}", f"kv_cache={base.kv_cache}")
            run = read(*decode, *overrides, f"tensor_parallel={degree}", "mode=single")
            costs[*overrides, degree] = headline(plan(run, model_spec(run)))["examples_per_s"]
    found = {
        (*costed.candidate.overrides[:2], costed.candidate.plan.tensor_parallel): (
            costed.examples_per_s
        )
        for costed in outcome.ranking
    }
    assert found == costs
    assert len(set(found.values())) == len(found)
    assert outcome.ranking[0].examples_per_s == max(costs.values())
    assert "(recommend." not in untried(outcome)
    assert not list(left_out_formats(request, outcome))


def test_other_formats_are_named_where_they_are_not_tried() -> None:
    base = read(*DECODE, "devices=1x16gb")
    outcome = best_of({ONLY: base}, Request(space=_SIMPLE), {}, 4, prefix="recommend.")
    assert "other formats of weights (recommend.weights=[...])" in untried(outcome)
    assert "other dtypes of the cache (recommend.kv_cache=[...])" in untried(outcome)


def test_degrees_whose_shards_a_format_does_not_divide_are_left_out() -> None:
    """176 columns of a weight are 11 groups of 16, their half is not a whole number of groups."""
    base = read(*DECODE, "devices=2x16gb", "weights=int4", "weights.group_size=16")
    outcome = best_of({ONLY: base}, Request(space=_SIMPLE), {}, 4, prefix="recommend.")
    assert {costed.candidate.plan.tensor_parallel for costed in outcome.ranking} == {1}
    assert any("does not divide the 88" in str(e) for e in outcome.refusals.reasons.values())
    # That is known of this format alone.
    for other in ("weights=int8", "weights=none"):
        base = read(*DECODE, "devices=2x16gb", other)
        outcome = best_of({ONLY: base}, Request(space=_SIMPLE), {}, 4, prefix="recommend.")
        assert {costed.candidate.plan.tensor_parallel for costed in outcome.ranking} == {1, 2}


def test_a_format_that_the_model_does_not_take_is_left_out_where_there_are_others() -> None:
    request = Request(weights=["int4", "none"], space=_SIMPLE)
    options = (*DECODE, "devices=1x16gb")
    bases = {variant: read(*options, *variant.overrides) for variant in variants(request)}
    wrong = replace(bases[Variant(weights="int4")].weights, group_size=7)
    bases = {v: replace(c, weights=wrong) if v.weights == "int4" else c for v, c in bases.items()}
    outcome = best_of(bases, request, {}, 4, prefix="recommend.")
    assert {costed.candidate.plan.variant.weights for costed in outcome.ranking} == {"none"}
    (line,) = left_out_formats(request, outcome)
    assert line.startswith("weights=int4: weights.group_size=7 does not divide")
    with pytest.raises(SpecError, match="group_size=7 does not divide"):
        best_of(
            {ONLY: replace(bases[Variant(weights="none")], weights=wrong)},
            *(request, {}, 4),
            prefix="r.",
        )


def test_of_equal_plans_the_one_without_idle_devices_is_first() -> None:
    simple = Space(mode=["single"], data_parallel=[1], tensor_parallel=[1])
    request = Request(devices=["2x16gb", "1x16gb"], space=simple)
    bases = {variant: read(*DECODE, *variant.overrides) for variant in variants(request)}
    first, second = best_of(bases, request, {}, 4, prefix="recommend.").ranking
    assert first.examples_per_s == second.examples_per_s
    assert [plan.candidate.plan.variant.devices for plan in (first, second)] == ["1x16gb", "2x16gb"]


class _Names(Tracker):
    """Keeps the names of the runs that are started."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def start(self, run_name: str, *_: object, **__: object) -> Iterator[RunLog]:
        self.names.append(run_name)
        yield RunLog()


def test_names_of_logged_plans_begin_with_what_they_differ_in(folder: Path) -> None:
    request = Request(weights=["none", "int8"], space=replace(_SIMPLE, tensor_parallel=[1]))
    options = (*DECODE, "devices=1x16gb")
    bases = {variant: read(*options, *variant.overrides) for variant in variants(request)}
    outcome = best_of(bases, request, {}, 4, prefix="recommend.")
    choices = Choices("llama", "single", "1x16gb", "pcie4")
    tracker = _Names()
    identity = JobIdentity(choices, options, folder, folder)
    logged(tracker, options, request, outcome, identity, typed_texts=options)
    assert [name.split(" · ")[0] for name in tracker.names] == ["weights=int8", "weights=none"]
