"""The ranking of plans in a space."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fxpart.errors import FxpartError, InfeasibleError, NotApplicableError, SpecError
from runner.config.schema import Config
from runner.experiment.experiment import plan
from runner.experiment.headline import headline
from runner.experiment.mesh import GATHERING
from runner.experiment.model_spec import model_spec
from runner.experiment.subject import Subject, shared_subject
from runner.plans import search, tasks
from runner.plans.ahead import Ahead, Task
from runner.plans.bounds import Bounds, bounds_of, least_time_s, refuse_too_large
from runner.plans.chosen import best_of
from runner.plans.evaluate import Candidate, Costed, Outcome
from runner.plans.request import ONLY, Request, Space
from runner.plans.search import evaluated
from runner.plans.space import Plan, Refusals, plans
from runner.plans.tasks import captured_subject
from runner.recommend.files import document, plot
from runner.recommend.table import habit_lines, proof, safe_line
from tests.runner.composed import TINY_LLAMA, read

SINGLE, PIPELINE = (Plan(1, 1, 2, m, "none", 1, 1, 0, "none") for m in ("single", "pipeline"))
SPLIT, REPLICAS = replace(SINGLE, tensor_parallel=2), replace(SINGLE, data_parallel=2)


def _evaluated(
    request: Request,
    *overrides: str,
    space: Sequence[Plan] = (SINGLE, PIPELINE),
    refusals: Refusals | None = None,
) -> Outcome:
    base = read(*TINY_LLAMA, "model.config.num_hidden_layers=2", *overrides)
    candidates = []
    for point in space:
        changed = point.overrides(base, has_mode=False)
        config = read(*TINY_LLAMA, "model.config.num_hidden_layers=2", *overrides, *changed)
        candidates.append(Candidate(point, changed, config))
    return evaluated(candidates, request, refusals or Refusals({}))


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


def test_plans_with_idle_devices_come_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    replicas, slow = replace(REPLICAS, groups=1), ("devices=2x16gb", "transfer_rate=1e6")
    split = replace(SPLIT, groups=1)
    outcome = _evaluated(Request(), *slow, space=(SINGLE, split, replicas))
    best, sharing, alone = outcome.ranking
    assert [p.candidate.plan for p in outcome.ranking] == [replicas, split, SINGLE]
    assert [plan.devices_idle for plan in outcome.ranking] == [0, 0, 1]
    assert best.examples_per_s > alone.examples_per_s > sharing.examples_per_s
    # Nor do they prevent others from being costed, or rank behind slower ones if all are slower.
    assert len(_evaluated(Request(rows=1), *slow, space=(SINGLE, split)).ranking) == 2
    assert _evaluated(Request(), *slow, space=(SINGLE, split)).ranking[0].devices_idle == 1
    quick = _evaluated(Request("latency"), *slow, space=(SINGLE, split, replicas)).ranking
    assert [plan.latency_s for plan in quick] == sorted(plan.latency_s for plan in quick)


def test_the_first_plan_that_is_sure_to_fit_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    request = Request("latency")
    outcome = _evaluated(request, "devices=2x16gb", space=(SINGLE, SPLIT))

    def with_tight(*are_tight: bool) -> Outcome:
        metrics = [
            {"latency_ms": 1e3 * (rank + 1), "peak_memory_gib": 3, "memory_is_tight": is_tight}
            for rank, is_tight in enumerate(are_tight)
        ]
        ranking = zip(outcome.ranking, metrics, strict=True)
        return replace(outcome, ranking=tuple(replace(c, metrics=m) for c, m in ranking))

    line = safe_line(["devices=2x16gb"], request, with_tight(True, False))
    second = " ".join(outcome.ranking[1].candidate.overrides)
    assert line == (f"python -m runner devices=2x16gb {second}  # 2000 ms (+100.0%), 3.00 GiB")
    assert safe_line([], request, with_tight(True, True)).startswith("no plan that was costed")


def _space(request: Request, *overrides: str, **typed: object) -> list[Candidate]:
    base = read(*overrides)
    space = plans(base, 1, request, typed, Refusals({}), prefix="recommend.")
    return [
        Candidate(point, point.overrides(base, has_mode=False), point.configuration(base))
        for point in space
    ]


def _check_as_run(costed: Costed, *overrides: str) -> None:
    """Check that a run of its overrides has exactly the numbers of a plan."""
    config = read(*overrides, *costed.candidate.overrides)
    values = headline(plan(config, model_spec(config), advises=False))
    for name in values.keys() - {"capture_s", "partition_s"}:
        assert costed.metrics[name] == values[name]


def test_plans_left_out_by_bounds_are_no_better(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    step = (*TINY_LLAMA, "phase=training", "devices=2x16gb", "runtime.host_launch_s=0")
    request = Request(rows=1, space=Space(context_parallel=[1, 2]))
    candidates = _space(request, *step, checkpointing="none")
    known = evaluated(candidates, request, Refusals({}))
    everything = evaluated(candidates, request, Refusals({}), prunes=False)
    assert known.bounded
    assert known.total == everything.total
    assert known.ranking[0].candidate.plan == everything.ranking[0].candidate.plan
    bounds = {candidate.plan: bound for candidate, bound in known.bounded}
    for costed in everything.ranking:
        assert costed.examples_per_s <= bounds.get(costed.candidate.plan, float("inf"))
    for name, usual in {"sequence_parallel": False, "context_parallel": 1}.items():
        sharing = (c for c in everything.ranking if getattr(c.candidate.plan, name) != usual)
        _check_as_run(next(sharing), *step)


def test_two_processes_find_what_one_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    step = (*TINY_LLAMA, "model.config.num_hidden_layers=2", "phase=training", "devices=4x0.6mb")
    cache = f"capture.cache_dir={folder / 'graphs'}"
    request = Request(
        rows=1, space=Space(tensor_parallel=[1], context_parallel=[1], checkpointing=["none"])
    )
    candidates = _space(request, *step, cache, "runtime.host_launch_s=0")
    found_elsewhere = set[str]()

    class Waiting(Ahead):
        """Leaves all that is asked to the other process, which would else begin too late."""

        def ask(self, tasks: Iterable[Task[Any]]) -> None:
            super().ask(tasks)
            with self._changed:
                done = self._changed.wait_for(lambda: not (self._asked or self._begun), 120)
                keys: Iterable[Any] = self._results
                found_elsewhere.update(kind for kind, *_ in keys)
            assert done

    refusals = [Refusals({}) for _ in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(search, "Ahead", Waiting)
        together = evaluated(candidates, request, refusals[1], processes=2)
    alone = evaluated(candidates, request, refusals[0])
    assert found_elsewhere == {"bounds", "cost"}
    assert alone.bounded
    assert alone.unfit
    assert len(alone.ranking) > 1
    assert document((), request, together) == document((), request, alone)


def test_plans_without_sequence_parallelism_ignore_asynchronous_collectives(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    step = ("phase=training", "devices=2x16gb", "runtime=compiled", "async_tensor_parallel=true")
    base = read(*TINY_LLAMA, "model.config.num_hidden_layers=2", *step)
    request = Request(space=Space(checkpointing=["none"], schedule=["none"]))
    outcome = best_of({ONLY: base}, request, {}, 1, prefix="recommend.")
    shares = {costed.candidate.plan.sequence_parallel for costed in outcome.ranking}
    assert shares == {False, True}
    for costed in outcome.ranking:
        shared = costed.candidate.plan.sequence_parallel
        assert costed.candidate.config.async_tensor_parallel == shared
        assert ("async_tensor_parallel=false" in costed.candidate.overrides) != shared
        if shared:
            assert costed.metrics["exposed_collective_ms"] < costed.metrics["collective_ms"]
    with pytest.raises(NotApplicableError, match="got runtime=eager; use runtime=compiled"):
        best_of(
            {ONLY: read(*TINY_LLAMA, *step, "runtime=eager")},
            request,
            {},
            1,
            prefix="recommend.",
        )


def test_recomputation_counts_before_a_plan_is_costed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    step = (*TINY_LLAMA, "model.config.num_hidden_layers=2", "phase=training", "devices=1x16gb")
    request = Request(rows=1)
    candidates = _space(request, *step, "runtime.host_launch_s=0", schedule="none")
    outcome = evaluated(candidates, request, Refusals({}))
    assert outcome.ranking[0].candidate.plan.checkpointing == "none"
    ((recomputing, most),) = outcome.bounded
    assert recomputing.plan.checkpointing == "block"
    (costed, _) = evaluated(candidates, request, Refusals({}), prunes=False).ranking[::-1]
    assert costed.examples_per_s <= most < outcome.ranking[0].examples_per_s


def test_fewer_microbatches_rule_out_more_where_nothing_fits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    placed = list[int]()

    def unfit(candidate: Candidate, *, streams: bool) -> Costed:
        placed.append(candidate.plan.microbatches)
        raise InfeasibleError(f"too large, {streams}", needed_bytes=2, available_bytes=1)

    monkeypatch.setattr("runner.plans.tasks.costed", unfit)
    step = (*TINY_LLAMA, "model.config.num_hidden_layers=2", "phase=training", "devices=2x16gb")
    request = Request(space=Space(microbatches=[8, 32], schedule=["1f1b"]))
    candidates = _space(request, *step, checkpointing="none")
    outcome = evaluated(candidates, request, Refusals({}))
    assert [candidate.plan.microbatches for candidate in candidates].count(32) > 1
    # The first that does not fit may be any.
    assert placed.count(32) <= 1
    assert placed.count(8) == len(candidates) // 2
    assert len({candidate.plan for candidate, _ in outcome.unfit}) == len(candidates)
    derived = [str(e) for c, e in outcome.unfit if c.plan.microbatches == 32][1:]
    assert set(derived) == {"already with 8 microbatches too large, False"}


def test_a_step_of_sharded_updates_takes_as_long_as_its_longest_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    step = (*TINY_LLAMA, "model.config.num_hidden_layers=2", "phase=training", "devices=4x16gb")
    typed = {"zero": 1, "schedule": "none", "checkpointing": "none", "tensor_parallel": 1}
    candidates = _space(Request(), *step, "runtime.host_launch_s=0", **typed)
    outcome = evaluated(candidates, Request(), Refusals({}), prunes=False)
    assert {costed.candidate.plan.mode for costed in outcome.ranking} >= {"pipeline"}
    for costed in outcome.ranking:
        bare = replace(costed.candidate.config, zero=0)
        subject = shared_subject(bare, model_spec(bare))
        bounds = bounds_of(bare, subject, checkpointing="none")
        least_s = least_time_s(costed.candidate.plan, bounds, streams=False)
        assert bounds.path_s <= least_s <= costed.latency_s * (1 + 1e-9)


def test_replicas_that_shard_updates_need_no_more_than_their_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    # The temporaries of updates in float32 are twice the weights, and sharded too.
    weights = ("model.dtype=bfloat16", "optimizer.master_weights=true")
    step = (*TINY_LLAMA, "phase=training", "model.batch_size=8", *weights)
    typed = {"data_parallel": 8, "zero": 1, "schedule": "none", "checkpointing": "none"}
    config = read(*step, "devices=8x1gb", "data_parallel=8", "zero=1", "mode=single")
    needed = plan(config, model_spec(config), advises=False).device_memory[0].needed.expected
    fitting = (*step, f"devices=8x{needed / 1e6}mb")
    outcome = evaluated(_space(Request(), *fitting, **typed), Request(), Refusals({}))
    assert [costed.candidate.plan.mode for costed in outcome.ranking] == ["single"]


@pytest.mark.parametrize("experts", [False, True])
def test_no_plan_needs_less_memory_than_its_bound(
    folder: Path, monkeypatch: pytest.MonkeyPatch, experts: bool
) -> None:
    monkeypatch.chdir(folder)
    model = ("model=mixtral_8x7b", *TINY_LLAMA[1:], "model.config.num_local_experts=4")
    step = (*(model if experts else TINY_LLAMA), "phase=training", "devices=4x16gb")
    degrees = [2] if experts else [2, 4]
    space = Space(data_parallel=degrees, microbatches=[8], schedule=["1f1b"], tensor_parallel=[1])
    request = Request(space=replace(space, expert_parallel=[2] if experts else None))
    two_layers = ("model.config.num_hidden_layers=2",)
    tried = set()
    for candidate in _space(request, *step, *two_layers, checkpointing="none"):
        config, point = candidate.config, candidate.plan
        result = plan(config, model_spec(config), advises=False)
        expected_bytes = [need.parts["tensors"].expected for need in result.device_memory]
        bare = replace(config, zero=0)
        bounds = bounds_of(bare, shared_subject(bare, model_spec(bare)), checkpointing="none")
        refuse_too_large(point, _with_memory(bounds, expected_bytes))
        tried.add((point.zero, point.groups > 1))
        if point.groups == 1 and point.zero != GATHERING:
            continue
        # The bound is not loose: weights, states and gradients are most of a small step.
        with pytest.raises(InfeasibleError, match="a replica holds"):
            refuse_too_large(point, _with_memory(bounds, [size // 2 for size in expected_bytes]))
    assert tried >= {(0, True), (1, True), (2, True), (2, experts)}


def _with_memory(bounds: Bounds, sizes: Sequence[int]) -> Bounds:
    """Return `bounds` on devices of these sizes, with hardly any memory on further ones."""
    padded = [*sizes, *[1] * (len(bounds.memory_bytes) - len(sizes))]
    return replace(bounds, memory_bytes=tuple(padded))


def test_a_refused_capture_is_not_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = ("tensor_parallel=2", "sequence_parallel=true", "model.seq_len=15")
    cache = f"capture.cache_dir={folder / 'graphs'}"
    config = read(*TINY_LLAMA, "phase=training", "devices=2x16gb", *split, cache)
    with pytest.raises(NotApplicableError, match="splits 15 positions") as refusal:
        captured_subject(config)
    monkeypatch.setattr(tasks, "shared_subject", lambda *_: pytest.fail("built again"))
    with pytest.raises(NotApplicableError) as again:
        captured_subject(config)
    assert str(again.value) == str(refusal.value)


def test_what_torch_cannot_capture_is_tried_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
import torch
from torch import nn


class Fixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x):
        return torch.stack([self.first(row) for row in x])


def build(batch_size, dtype):
    return Fixed(), (torch.zeros(batch_size, 8),)
"""
    (folder / "fixed_rows.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    failed = []

    def watched(config: Config) -> Subject:
        try:
            return captured_subject(config)
        except FxpartError:
            failed.append((config.data_parallel, config.checkpointing))
            raise

    monkeypatch.setattr(tasks, "captured_subject", watched)
    step = ("model=custom", "model.factory=fixed_rows:build", "model.batch_size=2")
    cache = f"capture.cache_dir={folder / 'graphs'}"
    config = ("phase=training", "devices=4x16gb", "reserve=none", cache)
    candidates = _space(Request(), *step, *config, tensor_parallel=1)
    assert len({c.plan.data_parallel for c in candidates}) == 3
    evaluated(candidates, Request(), Refusals({}))
    assert sum(replicas > 1 and checkpointing == "none" for replicas, checkpointing in failed) == 1


def test_experts_are_spread_over_replicas(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    experts = ("model=mixtral_8x7b", *TINY_LLAMA[1:], "model.config.num_local_experts=4")
    overrides = (*experts, "devices=2x16gb", "expert_imbalance=1.5")
    candidates = _space(Request(), *overrides, tensor_parallel=1)
    degrees = [(c.plan.data_parallel, c.plan.expert_parallel) for c in candidates]
    assert sorted(set(degrees)) == [(1, 1), (2, 1), (2, 2)]
    ranking = evaluated(candidates, Request(), Refusals({})).ranking
    for costed in ranking:
        _check_as_run(costed, *overrides)
    (shared,) = (c for c in ranking if c.candidate.plan.expert_parallel == 2)
    (alone,) = (c for c in ranking if c.candidate.plan.data_parallel == 2 and c is not shared)
    assert shared.memory_bytes < alone.memory_bytes


def test_long_sequences_are_split_and_given_settings_kept() -> None:
    step = (*TINY_LLAMA[:-2], "reserve=none", "phase=training", "devices=4x16gb")
    for tokens, degrees in {8192: {1}, 16384: {1, 2, 4}}.items():
        space = _space(Request(), *step, f"model.seq_len={tokens}")
        assert {c.plan.context_parallel for c in space} == degrees
        splits = {(c.plan.tensor_parallel > 1, c.plan.sequence_parallel) for c in space}
        assert splits == {(False, False), (True, False), (True, True)}
    costed_plans = _space(
        Request(), *step, "model.seq_len=8", sequence_parallel=True, context_parallel=2
    )
    assert {c.plan.context_parallel for c in costed_plans} == {2}
    for candidate in costed_plans:
        assert candidate.plan.sequence_parallel == (candidate.plan.tensor_parallel > 1)
        # Two pieces of a sequence are two replicas that may shard the step.
        assert candidate.plan.batch_size == candidate.plan.data_parallel
    assert any(c.plan.zero == 3 and c.plan.data_parallel == 1 for c in costed_plans)


def test_steps_take_as_long_as_their_bound() -> None:
    chosen = replace(PIPELINE, schedule="1f1b", microbatches=4, groups=2)
    step_s = least_time_s(chosen, SimpleNamespace(repeated_s=1.0, alone_s=2.0), streams=False)  # type: ignore[arg-type]
    # Stages of w and 2 - w for a microbatch: 4 w and w + 4 (2 - w) are equal at w = 8 / 7.
    assert step_s == pytest.approx(4 * 8 / 7)


def test_an_impossible_habit_has_a_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    space, refusals = (SINGLE, SPLIT, replace(REPLICAS, groups=1)), Refusals({})
    refusals.add(PIPELINE, NotApplicableError("it has one layer; take another"))
    # The reason for a pipeline with fewer stages is not that of all.
    refusals.add(replace(PIPELINE, groups=1), NotApplicableError("another reason"))
    # Nor is that of replicas of groups, which need more devices.
    refusals.reasons["data_parallel", 2] = NotApplicableError("there are too few devices")
    tiers = ("phase=training", "devices=2x16gb+host1gb")
    outcome = _evaluated(Request(), *tiers, space=space, refusals=refusals)
    lines = list(habit_lines(Request(), outcome))
    why = "not possible: tier host1gb is supported for"
    assert [line.partition(": ")[0] for line in lines] == [
        "all tensor parallel (tensor_parallel=2)",
        "all replicas (data_parallel=2)",
        "all stages (mode=pipeline on 2)",
    ]
    assert f"{why} a pass or a serving step of tensor-parallel groups" in lines[0]
    assert f"{why} weights and caches of a pass or a serving step" in lines[1]
    assert lines[2].endswith("on 2): not possible: it has one layer")


def test_the_plot_counts_used_stages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    outcome = _evaluated(Request(), "devices=2x16gb")
    drawn = plot(outcome)
    assert "1 x 1 x 1<" in drawn
    assert "1 x 1 x 2<" in drawn


@pytest.mark.parametrize(
    ("objective", "name"),
    [
        ("throughput", "bound_examples_per_s"),
        ("latency", "bound_latency_s"),
        ("cost", "bound_usd_per_example"),
    ],
)
def test_a_bound_is_written_with_its_unit(objective: str, name: str) -> None:
    candidate = Candidate(replace(SINGLE, groups=1), (), read(*TINY_LLAMA))
    metrics = {"devices_used": 1.0, "examples_per_s": 4.0, "latency_ms": 250.0}
    best = Costed(candidate, metrics, "", {"compute": 1.0})
    outcome = Outcome((best,), bounded=((candidate, 0.125),))
    rows = document((), Request(objective), outcome)["bounded"]
    assert isinstance(rows, list)
    assert [{key: row[key] for key in row if "bound" in key} for row in rows] == [{name: 0.125}]


def test_the_proof_says_that_interleaved_stages_are_placed_by_a_search() -> None:
    request, best = Request(), Costed(Candidate(SINGLE, (), read(*TINY_LLAMA)), {}, "", {})
    error = InfeasibleError("", needed_bytes=2, available_bytes=1)
    for interleave, says in ((1, False), (2, True)):
        unfit = Candidate(replace(PIPELINE, interleave=interleave), (), best.candidate.config)
        sentence = proof(request, Outcome((best,), unfit=((unfit, error),)))
        assert sentence.startswith("all 2 plans of the space were costed, of which 1 does not fit")
        assert sentence.endswith("may miss faster or fitting cuts") is says
    assert proof(request, Outcome((best,))).startswith("the only plan was costed; ")


def test_plans_without_scatters_ignore_the_dtype_of_sums(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    base = read(*TINY_LLAMA, "phase=training", "devices=2x16gb", "reduce_dtype=float32")
    space = Space(checkpointing=["none"], schedule=["none"], tensor_parallel=[1])
    outcome = best_of({ONLY: base}, Request(space=space), {}, 1, prefix="recommend.")
    assert {costed.candidate.plan.zero for costed in outcome.ranking} >= {0, 3}
    for costed in outcome.ranking:
        scatters = costed.candidate.plan.zero >= 2
        assert costed.candidate.config.reduce_dtype == ("float32" if scatters else None)
        assert ("reduce_dtype=null" in costed.candidate.overrides) != scatters
    with pytest.raises(SpecError, match="reduce_dtype=fp32 is not known"):
        best_of(
            {ONLY: replace(base, reduce_dtype="fp32")},
            Request(space=space),
            {},
            1,
            prefix="x.",
        )


def test_plans_without_tensor_parallelism_ignore_losses_of_shards(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    step = ("phase=training", "devices=2x16gb", "loss_parallel=true")
    base = read(*TINY_LLAMA, "model.config.num_hidden_layers=2", *step)
    request = Request(space=Space(checkpointing=["none"], schedule=["none"]))
    outcome = best_of({ONLY: base}, request, {}, 1, prefix="recommend.")
    degrees = {costed.candidate.plan.tensor_parallel for costed in outcome.ranking}
    assert degrees == {1, 2}
    for costed in outcome.ranking:
        splits = costed.candidate.plan.tensor_parallel > 1
        assert costed.candidate.config.loss_parallel == splits
        assert ("loss_parallel=false" in costed.candidate.overrides) != splits
    with pytest.raises(NotApplicableError, match="got engine=megatron; use engine=torch"):
        best_of({ONLY: replace(base, engine="megatron")}, request, {}, 1, prefix="recommend.")
