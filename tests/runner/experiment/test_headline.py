"""Every metric that a job logs is a row of the table, and vice versa."""

from dataclasses import replace
from pathlib import Path

import pytest

from fxpart.cost.prefetch import ShardedStep
from runner.experiment.experiment import plan
from runner.experiment.generation import Generation, Limits, generation_metrics
from runner.experiment.headline import INFEASIBLE, device_columns, headline, memory_series
from runner.experiment.measurement import measured_metrics
from runner.experiment.model_spec import model_spec
from runner.experiment.result import Result
from runner.experiment.tensor_split import TensorSplit, split_metrics
from runner.experiment.zero import zero_metrics
from runner.output.metrics import DEVICE_METRICS, METRICS
from tests.runner.command import OWN
from tests.runner.composed import read
from tests.runner.experiment.test_measurement import PIPELINE


def _planned(*overrides: str) -> Result:
    config = read(*OWN, "+model.factory_args.layers=2", *overrides)
    return plan(config, model_spec(config))


def _served(*overrides: str) -> Result:
    """Plan a step with a cache for a small model of transformers."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = read(
        "model=transformers",
        "model.architecture=LlamaForCausalLM",
        *(f"+model.config.{key}={value}" for key, value in (sizes | heads).items()),
        "model.batch_size=4",
        "model.seq_len=8",
        "devices=1x16gb",
        "mode=single",
        *overrides,
    )
    return plan(config, model_spec(config))


def test_a_decode_makes_one_token_of_each_text_in_its_latency(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    metrics = headline(_served("phase=decode", "context_len=8"))
    assert metrics["tpot_ms"] == metrics["latency_ms"]
    assert metrics["tokens_per_s"] == pytest.approx(4 / (metrics["latency_ms"] / 1e3))
    # Keys and values of a head of 8 numbers in bfloat16, for 8 tokens of 4 texts.
    assert metrics["kv_cache_gib"] == 2 * 8 * 2 * 8 * 4 / 2**30


def test_a_scheduled_decode_makes_one_token_of_each_text_of_all_microbatches(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    options = ("phase=decode", "context_len=8", "devices=2x16gb")
    one = headline(_served(*options))
    schedule = ("mode=pipeline", "schedule=gpipe", "microbatches=3")
    result = _served(*options, *schedule)
    metrics = headline(result)
    assert result.schedule is not None
    assert metrics["tokens_per_s"] == pytest.approx(3 * 4 / result.schedule.step_s)
    assert metrics["tokens_per_s"] == pytest.approx(metrics["examples_per_s"])
    assert metrics["tpot_ms"] == pytest.approx(result.schedule.step_s * 1e3)
    assert metrics["kv_cache_gib"] == pytest.approx(3 * one["kv_cache_gib"])


def test_the_cache_is_that_of_all_replicas_and_groups(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    prefill = ("phase=prefill", "model.config.num_key_value_heads=2")
    whole = headline(_served(*prefill))["kv_cache_gib"]
    assert whole == 2 * 2 * 8 * 2 * 8 * 4 / 2**30
    replicas = _served(*prefill, "data_parallel=2", "devices=2x16gb")
    assert headline(replicas)["kv_cache_gib"] == whole
    result = _served(*prefill)
    split = replace(result, split=TensorSplit(2, 1, 0, 0, 0.0, 0.0))
    assert headline(split)["kv_cache_gib"] == 2 * whole


def test_all_metrics_are_in_the_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    plain = _planned("devices=2x16gb", "mode=size_based")
    always = set(headline(plain)) - {"optimality_gap_pct"}
    in_table = {metric.name for metric in METRICS if not metric.jobs}
    assert always == in_table, "one of runner/output/metrics.py and headline.py lacks a metric"
    assert set(INFEASIBLE) <= always
    assert list(memory_series(plain)) == ["memory_gib"]
    jobs = {
        "schedule": _planned("devices=2x16gb", "mode=pipeline", "schedule=gpipe", "microbatches=2"),
        "phase=training": _planned(
            "devices=2x16gb", "mode=size_based", "phase=training", "reserve=cuda"
        ),
        "data_parallel": _planned("devices=2x16gb", "model.batch_size=2", "data_parallel=2"),
        "capture.symbolic": _planned(
            "devices=2x16gb", "mode=size_based", "capture.symbolic=batch", "model.batch_size=2"
        ),
        "a search of operators": _planned("devices=2x16gb"),
        "a tier, such as `+host64gb`": _planned(
            "devices=1x0.03mb+host1mb", "mode=size_based", "offload=accelerate"
        ),
        "phase=prefill": _served("phase=prefill"),
        "phase=decode": _served("phase=decode", "context_len=8"),
        "objective=throughput": _planned(
            "devices=2x16gb", "mode=size_based", "objective=throughput"
        ),
        "objective=memory": _planned("devices=2x16gb", "objective=memory"),
        "objective=energy": _planned("devices=2x16gb", "objective=energy"),
        "price_per_hour": _planned(
            "devices=2x16gb", "mode=size_based", "price_per_hour={rtx_a4000: 1}"
        ),
    }
    logged = {needs: set(headline(result)) - set(headline(plain)) for needs, result in jobs.items()}
    measured = replace(PIPELINE, unsplit_s=0.01, allocator_peak_bytes=(1,))
    logged["neither `schedule` nor replicas"] = set(headline(plain)) - always
    serving = logged["phase=prefill"] & logged["phase=decode"]
    logged["phase=prefill, decode or generate"] = serving - {"tokens_per_s"}
    logged["model.seq_len"] = serving & {"tokens_per_s"}
    priced = set(headline(_served("phase=decode", "price_per_hour={rtx_a4000: 1}")))
    logged["price_per_hour, model.seq_len"] = (
        priced - set(headline(jobs["phase=decode"])) - logged["price_per_hour"]
    )
    steps = logged.pop("phase=prefill") | logged.pop("phase=decode")
    limits = Limits(1, 1)
    generated = set(generation_metrics(Generation(1, 1, 2, 0.1, 0.1, 0.0, limits)))
    tiered = set(generation_metrics(Generation(1, 1, 2, 0.1, 0.1, 0.0, limits, limits)))
    logged["phase=generate with a tier"] = tiered - generated
    logged["phase=prefill or generate"] = {"ttft_ms"} & steps & generated
    logged["phase=decode or generate"] = {"tpot_ms"} & steps & generated
    logged["phase=generate"] = generated - steps
    of_zero = zero_metrics(ShardedStep(0.0, 0, 0, 0.0, 0.0))
    logged["degrees or zero"] = set(of_zero)
    logged["tensor_parallel"] = set(split_metrics(TensorSplit(2, 1, 0, 0, 0.0, 0.0))) - set(of_zero)
    logged["execute"] = set(measured_metrics(measured))
    assert logged == {
        needs: {metric.name for metric in METRICS if metric.jobs == needs}
        for needs in {metric.jobs for metric in METRICS} - {""}
    }
    special = ("phase=training", "phase=decode")
    columns = set(device_columns(plain)).union(*(device_columns(jobs[key]) for key in special))
    assert columns == {metric.name for metric in DEVICE_METRICS}


def test_no_gap_is_logged_where_latency_is_not_the_objective(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    several = [
        _planned("devices=2x16gb", "mode=pipeline", "schedule=1f1b", "microbatches=2"),
        _planned("devices=2x16gb", "model.batch_size=2", "data_parallel=2"),
        _planned("devices=2x16gb", "mode=single", "devices.saturate_host=true"),
    ]
    assert [result.has_gap for result in several] == [False] * 3
    for result in several:
        assert "optimality_gap_pct" not in headline(result)
        assert headline(result)["lower_bound_ms"] > 0
    alone = headline(_planned("devices=2x16gb", "mode=single"))
    gap_pct = (alone["latency_ms"] / alone["lower_bound_ms"] - 1) * 100
    assert alone["optimality_gap_pct"] == pytest.approx(gap_pct)


def test_a_column_of_zeros_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    plain = _planned("devices=2x16gb")
    columns = device_columns(plain)
    assert "optimizer_state_gib" not in columns
    assert columns["device"] == [0, 1]
    uses = plain.evaluation.devices
    assert columns["partitions"] == [len(use.partitions) for use in uses]
    assert columns["memory_gib"] == [use.total_bytes / 2**30 for use in uses]
    assert columns["load_ms"] == [use.load_s * 1e3 for use in uses]
