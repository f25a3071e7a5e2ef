"""Replicas in a run: their cost in the evaluation, in a line and as metrics."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fxpart.core.data_parallel import split_topology
from fxpart.core.topology import Link
from fxpart.cost.all_reduce import BUCKET_BYTES
from fxpart.cost.evaluate import evaluate
from fxpart.cost.evaluation import Evaluation
from fxpart.errors import SpecError
from runner.experiment.model_spec import model_spec
from runner.experiment.replicas import (
    Replicas,
    check_replicas,
    replica_metrics,
    replicas_line,
    with_sums,
)
from runner.experiment.subject import shared_subject
from tests.runner.composed import read
from tests.runner.pipelines import THERE_AND_BACK, training_graph
from tests.sketch import devices, problem


def _summed(*overrides: str) -> tuple[Evaluation, Evaluation, Replicas]:
    """Return the step alone, and with the sums of two replicas; a byte takes two seconds.

    The graph is F0, F1, B1, B0 on devices 0, 1, 1, 0, each a second and a byte, with two seconds
    for each transfer: B1 ends at 5, B0 at 8.
    """
    parts = split_topology(devices(*[100] * 4, link=Link(0.5)), 2)
    task = problem(training_graph(), parts.replica)
    alone = evaluate(task, THERE_AND_BACK)
    whole, replicas = with_sums(
        read("data_parallel=2", *overrides),
        task,
        THERE_AND_BACK,
        evaluation=alone,
        parallel=parts,
        partial=np.array([3, 4], dtype=np.int64),
    )
    return alone, whole, replicas


def test_sums_are_in_latency_and_throughput() -> None:
    alone, whole, replicas = _summed()
    assert alone.latency_s == 8.0
    # B0 reads what B1 makes: its sum is inside the model, and all wait 2 s for it. What B0 makes is
    # a result, summed at the end.
    assert whole.latency_s == replicas.cost.latency_s == 8.0 + 2.0 + 2.0
    assert replicas.cost.within_s.tolist() == [0.0, 2.0]
    assert replicas.cost.busy_s.tolist() == [2.0, 2.0]
    assert replicas.cost.exposed_s.tolist() == [2.0, 2.0]
    # Each device computes for 2 s and waits for 2.
    assert (alone.throughput_per_s, whole.throughput_per_s) == (1 / 2, 1 / 4)
    assert whole.devices == alone.devices


def test_a_line_and_metrics_by_hand() -> None:
    _, _, replicas = _summed()
    parallel = split_topology(devices(*[100] * 4, link=Link(0.5)), 4)
    assert "4 replicas of 1 device; " in replicas_line(replace(replicas, parallel=parallel))
    in_groups = replicas_line(replace(replicas, parallel=parallel), group=2)
    assert in_groups.startswith("4 replicas of 2 devices; ")
    assert replicas_line(replicas) == (
        "2 replicas of 2 devices; all-reduce of 1 B on device 0 takes 2000 ms, of which 2000 ms"
        " are waited for"
    )
    nothing = replace(replicas.cost, reduced_bytes=np.zeros(2, dtype=np.int64))
    assert replicas_line(Replicas(replicas.parallel, nothing)) == (
        "2 replicas of 2 devices, which all-reduce nothing"
    )
    assert replica_metrics(replicas) == {
        "data_parallel": 2.0,
        "all_reduce_gib": 1 / 2**30,
        "all_reduce_ms": 2000.0,
        "exposed_all_reduce_ms": 2000.0,
    }


def test_buckets_have_the_size_of_the_library_by_default() -> None:
    assert read().all_reduce.bucket_bytes == BUCKET_BYTES


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data_parallel=0"], "data_parallel=0 must be 1 or more"),
        (["all_reduce.bucket_bytes=0"], "all_reduce.bucket_bytes=0 must be 1 or more"),
        (
            ["data_parallel=2", "devices.saturate_host=true"],
            "data_parallel=2 copies the placement, and so does devices.saturate_host=true",
        ),
        (
            ["context_parallel=2", "devices.saturate_host=true"],
            "context_parallel=2 copies the placement, and so does devices.saturate_host=true",
        ),
        (["data_parallel=2", "execute=local"], "leave out execute=local, or data_parallel"),
        (["data_parallel=2", "capture.level=module"], "got capture.level=module; use"),
    ],
)
def test_meaningless_combinations_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_replicas(read(*overrides))
    assert message in str(refused.value)


def test_meaningful_combinations_are_accepted() -> None:
    check_replicas(read())
    check_replicas(read("data_parallel=2"))
    check_replicas(read("devices.saturate_host=true"))


def test_shards_of_experts_read_no_more_experts_than_tokens_choose(tmp_path: Path) -> None:
    sizes = ("hidden_size=16", "intermediate_size=16", "num_hidden_layers=1", "vocab_size=32")
    heads = ("num_attention_heads=2", "num_key_value_heads=1", "num_local_experts=32")
    model = (
        *("model=mixtral_8x7b", "phase=training", "mode=single", "model.seq_len=4"),
        *(f"++model.config.{setting}" for setting in (*sizes, *heads)),
        f"capture.cache_dir={tmp_path}",
    )

    def moved(*overrides: str) -> list[int]:
        config = read(*model, *overrides)
        graph = shared_subject(config, model_spec(config)).captured.graph
        products = [op for op, target in enumerate(graph.targets) if "grouped_mm" in target]
        sizes: list[int] = graph.moved_bytes[products].tolist()
        return sizes

    alone = moved("model.batch_size=1", "devices=1x1gb")
    assert alone
    for zero in (0, 1, 3):
        both = ("model.batch_size=2", "devices=2x1gb", "data_parallel=2", f"zero={zero}")
        assert moved(*both) == alone
