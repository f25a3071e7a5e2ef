"""Published training steps of Megatron-LM are read by the names and fields that they have."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.truth import megatron_b200, vtrain
from benchmarks.truth.megatron_b200 import FILE, cases
from benchmarks.truth.vtrain import plans
from runner.config.read import read_config
from tests.runner.composed import composed


def _point(case: str, parallel: str, **fields: object) -> dict[str, object]:
    ranks = {str(rank): {"max_allocated_mb": 100.0 + rank} for rank in (10, 2)}
    usual = {"model": "llama3-70b", "layer_num": 6, "mbc": 4, "vp_size": 1, "real_ms": 5.0}
    return {**usual, "case": case, "parallel": parallel, "peak_memory_by_rank_mb": ranks, **fields}


def test_a_case_says_its_degrees_and_what_plans_it(tmp_path: Path) -> None:
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
    assert first.allocated_mib == (102.0, 110.0)  # by rank, not by text
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


def test_a_sample_of_vtrain_says_of_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head = "gpus,global batch,micro batch,hidden,heads,layers,sequence,tp,dp,pp,ms\n"
    lines = [f"8,64,4,1024,16,{layers},1024,2,2,2,200" for layers in range(8, 28, 2)]
    (tmp_path / "vtrain_single.csv").write_text(head + "\n".join(lines) + "\n")
    # A step of 5,000 launches of the host beside 30 ms on the device.
    monkeypatch.setattr(vtrain.Plan, "step_s", lambda _, launch_s=36e-6: 0.03 + 5000 * launch_s)
    asked = "1 of 1 rows that are not held out ask for launches of 34 us (34 to 34), 36 are taken"
    assert vtrain.asked_for(tmp_path, []) == asked
    vtrain.main(["--data", str(tmp_path), "--sample", "6"])
    told = capsys.readouterr().out
    assert "6 of 10 rows, drawn by chance" in told
    assert re.search(r"^held out +[1-6] ", told, re.MULTILINE)


def test_a_plan_of_vtrain_has_its_microbatches(tmp_path: Path) -> None:
    head = "gpus,global batch,micro batch,hidden,heads,layers,sequence,tp,dp,pp,ms\n"
    (tmp_path / "vtrain_single.csv").write_text(head + "8,64,4,1024,16,24,1024,2,2,2,219.7\n")
    (plan,) = plans(tmp_path)
    assert plan.microbatches == 8
    assert plan.label == "h1024 l24 b64/4 tp2 dp2 pp2"
    assert plan.iteration_ms == pytest.approx(219.7)
