"""Published training steps of Megatron-LM are read by their names and fields."""

import json
import re
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.truth import megatron_b200, vtrain, vtrain_calibrated
from benchmarks.truth.finetune_time import rows as finetune_rows
from benchmarks.truth.megatron_b200 import FILE, cases
from benchmarks.truth.megatron_paper import MODELS
from benchmarks.truth.megatron_steps import Cluster, step_of_many_layers_s
from benchmarks.truth.row import Row
from benchmarks.truth.vtrain import plans
from benchmarks.truth.vtrain_calibrated import Sample, fitted
from benchmarks.truth.vtrain_parts import Coefficients, Parts, parts_of
from fxpart.core.graph import FloatArray
from runner.config.read import read_config
from tests.runner.composed import composed


def _point(case: str, parallel: str, **fields: object) -> dict[str, object]:
    ranks = {str(rank): {"max_allocated_mb": 100.0 + rank} for rank in (10, 2)}
    usual = {"model": "llama3-70b", "layer_num": 6, "mbc": 4, "vp_size": 1, "real_ms": 5.0}
    return {**usual, "case": case, "parallel": parallel, "peak_memory_by_rank_mb": ranks, **fields}


def test_a_case_has_its_degrees_and_overrides(tmp_path: Path) -> None:
    points = [
        _point("llama3_70b_l6_tp2_pp2_dp2_mbc4_seq8192_cef", "tp2pp2"),
        _point("mixtral", "tp1ep8pp1", model="mixtral_8x7b"),
        _point("qwen3", "tp1ep8pp1", model="qwen3"),
        _point("llama3_405b", "tp2cp4pp1", model="llama3-405b"),
        _point("deepseekv2_ep4_pp2_dp4", "tp1ep4pp2", model="deepseekv2"),
        _point("llama3_8b", "tp1pp2", model="llama3-8b", vp_size=2),
    ]
    (tmp_path / FILE).write_text(json.dumps(points))
    first, mixture, other, longer, experts, chunks = cases(tmp_path)
    assert first.left_out == ""
    assert first.allocated_mib == (102.0, 110.0)  # by rank, not as text
    config = read_config(composed(*first.overrides()))
    degrees = config.tensor_parallel, config.sequence_parallel, config.data_parallel, config.zero
    assert degrees == (2, True, 2, 1)
    assert (config.model.seq_len, config.model.batch_size, config.microbatches) == (8192, 2, 4)
    assert config.model.config["num_hidden_layers"] == 6
    assert sum(pool.count for pool in config.devices.pools) == 8
    assert other.left_out == "no sizes of qwen3"
    config = read_config(composed(*mixture.overrides()))
    assert config.model.architecture == "MixtralForCausalLM"
    assert (config.expert_parallel, config.data_parallel) == (8, 8)
    config = read_config(composed(*chunks.overrides()))
    assert (config.schedule.name, config.mode.options["interleave"]) == ("interleaved", 2)
    config = read_config(composed(*longer.overrides()))
    assert (config.tensor_parallel, config.context_parallel) == (2, 4)
    assert (config.data_parallel, config.zero) == (1, 1)
    config = read_config(composed(*experts.overrides()))
    assert (config.expert_parallel, config.data_parallel, config.model.batch_size) == (4, 4, 4)
    assert config.model.architecture == "DeepseekV3ForCausalLM"


def test_ranks_of_a_stage_and_more_microbatches_are_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = {str(rank): {"max_allocated_mb": 100.0 + (rank > 3)} for rank in range(8)}
    common: dict[str, Any] = {"parallel": "tp2pp2", "peak_memory_by_rank_mb": ranks}
    points = [_point("few", **common), _point("more", **common, mbc=32)]
    (tmp_path / FILE).write_text(json.dumps([*points, _point("one", **common, mbc=1)]))
    monkeypatch.setattr(megatron_b200, "planned_step", lambda _: None)
    monkeypatch.setattr(megatron_b200, "allocated_mib", lambda _: [100.0, 100.0])
    every = list(megatron_b200.rows(tmp_path))
    assert [row.measured for row in every] == [100.0, 101.0] * 2
    assert len({row.label for row in every}) == 4


HEAD = "gpus,global batch,micro batch,hidden,heads,layers,sequence,tp,dp,pp,ms\n"


def _parts(stages: int, seed: int) -> Parts:
    """Return a step whose host and device are each the slower one for some seeds."""
    random = np.random.default_rng(seed)

    def some(largest: float) -> FloatArray:
        return random.uniform(0, largest, (stages, 2))

    return Parts(
        products_s=some(20e-3),
        elementwise_s=some(20e-3),
        loss_s=some(4e-3),
        launches=some(1000),
        softmaxes=np.full(stages, 12.0 * (seed % 2)),
        transfers_s=np.array([1e-3, 2e-3]),
        end_s=random.uniform(0, 5e-3, stages),
    )


def test_a_step_follows_from_its_parts() -> None:
    one = Parts(
        products_s=np.array([[3.0, 5.0], [3.0, 5.0]]),
        elementwise_s=np.array([[10.0, 10.0], [10.0, 10.0]]),
        loss_s=np.array([[0.0, 0.0], [1.0, 1.0]]),
        launches=np.array([[1.0, 40.0], [1.0, 1.0]]),
        softmaxes=np.array([5.0, 0.0]),
        transfers_s=np.array([0.25, 0.5]),
        end_s=np.array([100.0, 7.0]),
    )
    numbers = Coefficients(
        launch_s=0.5, elementwise=0.2, loss=3.0, softmax_launches=2.0, transfer_s=0.25
    )
    # Forwards take 5.5 (launches: 1 and 5 times 2) and 3 + 2 + 3, backwards 30 (launches: 40 and
    # 5 times 4) and 5 + 2 + 3.
    assert one.step_s(numbers, 1) == pytest.approx(5.5 + 0.5 + 8 + 10 + 0.75 + 30 + 100)


def test_parts_of_a_plan_take_as_long_as_the_plan() -> None:
    plan = vtrain.Plan(2, 6, 1, 64, 2, 2, 32, 1, 1, 2, iteration_ms=1.0)
    as_planned = Coefficients(29e-6, elementwise=1, loss=1, softmax_launches=0, transfer_s=0)
    parts = parts_of(plan)
    assert parts.step_s(as_planned, plan.microbatches) == pytest.approx(plan.step_s())
    assert parts.softmaxes.tolist() == [1, 1]  # two heads of one sequence are not fused


def test_known_coefficients_of_made_up_steps_are_found() -> None:
    truth = Coefficients(
        launch_s=40e-6, elementwise=0.3, loss=5.0, softmax_launches=20.0, transfer_s=2e-3
    )
    samples = []
    for seed in range(24):
        parts, microbatches = _parts(1 + seed % 3, seed), 1 + seed % 5
        samples.append(Sample(parts, microbatches, parts.step_s(truth, microbatches)))
    assert astuple(fitted(samples)) == pytest.approx(astuple(truth), rel=0.02)


def test_a_fit_to_a_tenth_of_vtrain_predicts_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = Coefficients(40e-6, 0.3, 5.0, 20.0, 2e-3)

    def parts_of(plan: vtrain.Plan) -> Parts:
        return _parts(plan.pipeline, plan.layers)

    lines = []
    for layers in range(4, 34):
        for stages in (1, 2, 4, 8):
            step_s = _parts(stages, layers).step_s(truth, 8)
            lines.append(f"8,64,4,1024,16,{layers},1024,2,2,{stages},{1e3 * step_s}\n")
    (tmp_path / "vtrain_single.csv").write_text(HEAD + "".join(lines))
    monkeypatch.setattr(vtrain_calibrated, "parts_of", parts_of)
    monkeypatch.setattr(vtrain.Plan, "step_s", lambda plan: plan.layers / plan.pipeline)
    vtrain_calibrated.main(["--data", str(tmp_path), "--workloads", "20"])
    printed = capsys.readouterr().out
    drawn = plans(tmp_path, 20)
    assert len(drawn) == 20 * 4  # all plans of each workload
    fitted_to = [plan for plan in drawn if not plan.is_held_out]
    assert f"{len(fitted_to)} rows ask for launches of 40.0 us" in printed
    held_out = re.search(rf"^held out +{80 - len(fitted_to)} +([\d.]+)", printed, re.MULTILINE)
    assert held_out
    assert float(held_out[1]) <= 0.5
    assert re.search(r"^tables alone +80 ", printed, re.MULTILINE)


def test_plans_are_ranked_within_their_workload_and_over_all() -> None:
    def of(layers: int, degree: int) -> vtrain.Plan:
        return vtrain.Plan(8, 8, 1, 1024, 16, layers, 1024, degree, 1, 1, 1.0)

    every = [of(layers, degree) for layers in (2, 4) for degree in (1, 2, 3, 4)]
    # In one workload all plans rank alike, in the other the last two are swapped.
    measured = (1, 2, 3, 4, 10, 20, 40, 35)
    rows = [
        Row(plan.label, plan.tensor, time, "ms", held_out=True)
        for plan, time in zip(every, measured, strict=True)
    ]
    printed = vtrain_calibrated.ranked({plan.label: plan for plan in every}, rows)
    assert printed.startswith(
        "rank correlation of the plans of a workload 0.90 in the median, 0.80"
    )
    assert printed.endswith("of the 4 kinds of plan over all workloads 1.00")


def test_a_plan_of_vtrain_has_its_microbatches(tmp_path: Path) -> None:
    (tmp_path / "vtrain_single.csv").write_text(HEAD + "8,64,4,1024,16,24,1024,2,2,2,219.7\n")
    (plan,) = plans(tmp_path)
    assert plan.microbatches == 8
    assert plan.label == "h1024 l24 b64/4 tp2 dp2 pp2"
    assert plan.iteration_ms == pytest.approx(219.7)


def test_a_step_of_many_layers_is_extrapolated_from_few() -> None:
    planned: list[tuple[int, int]] = []

    def step_s(stages: int, layers_each: int) -> float:
        planned.append((stages, layers_each))
        return 3 + 2 * stages + 5 * layers_each + 0.5 * stages * layers_each

    for stages, layers_each in ((1, 10), (2, 1), (4, 3), (64, 12), (8, 1)):
        expected = 3 + 2 * stages + 5 * layers_each + 0.5 * stages * layers_each
        assert step_of_many_layers_s(step_s, stages, layers_each) == pytest.approx(expected)
    assert max(stages for stages, _ in planned) == 4
    assert (1, 1) not in planned  # a single layer is no repeated block


def test_machines_of_a_cluster_have_eight_devices() -> None:
    cluster = Cluster("a100_80gb", 25e9)
    assert cluster.overrides(8) == ("devices=8xa100_80gb",)
    assert cluster.overrides(16) == ("devices=8xa100_80gb+8xa100_80gb", "devices.nodes=[0,1]")


def test_layers_of_the_models_are_divided_evenly() -> None:
    for gpt in MODELS.values():
        assert gpt.layers_each * gpt.stages * gpt.chunks == gpt.layers
    # 12 l h^2 (1 + 13 / 12 h + (v + s) / 12 l h): parameters of table 3, in billions.
    sizes = [
        12 * g.layers * g.hidden**2 * (1 + (51200 + 2048) / (12 * g.layers * g.hidden)) / 1e9
        for g in MODELS.values()
    ]
    assert sizes == pytest.approx([22, 175, 530, 1008], rel=0.005)


def test_rates_without_a_run_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = {"source": "pytorch/torchtune", "n_devices": 1, "unit": "tok/s", "value": 1.0}
    row = {**usual, "model": "Llama-3.2-3B", "metric": "tokens_per_s"}
    points = [
        {**row, "phase": "train-full +8-bit AdamW"},
        {**row, "phase": "train-full", "n_devices": 8},
        {**row, "phase": "decode", "model": "Other"},
        {**row, "phase": "train-LoRA r8", "metric": "time_per_1k_iterations"},
        {**row, "phase": "train-full", "metric": "peak_memory"},
    ]
    (tmp_path / "measured.json").write_text(json.dumps(points))
    assert list(finetune_rows(tmp_path)) == []
    printed = capsys.readouterr().out
    for reason in ("updates in 8 bits", "several devices", "no configuration", "different lengths"):
        assert reason in printed
    assert "4 rows are left out" in printed
