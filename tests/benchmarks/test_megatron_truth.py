"""Published training steps of Megatron-LM are read by their names and fields."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.truth import megatron_b200, vtrain, vtrain_calibrated
from benchmarks.truth.finetune_time import rows as finetune_rows
from benchmarks.truth.megatron_b200 import FILE, cases
from benchmarks.truth.megatron_paper import MODELS
from benchmarks.truth.megatron_steps import Cluster, step_of_many_layers_s
from benchmarks.truth.row import Row
from benchmarks.truth.vtrain import plans
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


def _step_s(plan: vtrain.Plan, launch_s: float | None = None) -> float:
    """Return a step of 5,000 launches by the host besides 10 ms per layer, divided over devices."""
    return 0.01 * plan.layers / plan.tensor + 5000 * (25e-6 if launch_s is None else launch_s)


def test_two_numbers_are_fitted_to_a_tenth_of_vtrain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The host takes 40 us per launch there, and devices reach 0.8 of the rates.
    steps = [(layers, tp) for layers in range(4, 44) for tp in (1, 2, 4, 8)]
    lines = [
        f"8,64,4,1024,16,{layers},1024,{tp},2,2,{1e3 * (0.01 * layers / tp / 0.8 + 0.2)}\n"
        for layers, tp in steps
    ]
    (tmp_path / "vtrain_single.csv").write_text(HEAD + "".join(lines))
    monkeypatch.setattr(vtrain.Plan, "step_s", _step_s)
    vtrain_calibrated.main(["--data", str(tmp_path), "--workloads", "30"])
    printed = capsys.readouterr().out
    drawn = plans(tmp_path, 30)
    assert len(drawn) == 30 * 4  # all plans of each workload
    fitted_to = [plan for plan in drawn if not plan.is_held_out]
    assert f"{len(fitted_to)} rows ask for launches of 40 us and 0.80 of the" in printed
    alone = re.search(r"^tables alone +120 +([\d.]+)", printed, re.MULTILINE)
    held_out = re.search(rf"^held out +{120 - len(fitted_to)} +([\d.]+)", printed, re.MULTILINE)
    assert alone
    assert held_out
    assert float(held_out[1]) <= 0.2
    assert float(alone[1]) > 20


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
