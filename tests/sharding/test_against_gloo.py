"""Predictions for sharded models against two processes of gloo that run torch's own on them."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.sharding.group import run_group
from benchmarks.sharding.predicted import predicted, predicted_zero
from benchmarks.sharding.tensor_run import Counted, tensor_run, whole_run
from benchmarks.sharding.zero_run import zero_run
from fxpart.capture.models.spec import ModelSpec
from tests.sharding.test_local_module import llama


def both(rank: int, size: int, spec: ModelSpec) -> tuple[Counted, ...]:
    """Run the model on `parallelize_module`, and on `fully_shard` as stages 2 and 3."""
    in_pieces = tensor_run(rank, size, replace(spec, sequence_parallel=True))
    return (
        in_pieces,
        tensor_run(rank, size, spec),
        *[zero_run(rank, size, spec, stage, "adamw") for stage in (2, 3)],
    )


def test_llama_on_two_devices() -> None:
    spec = llama(1)
    forecast, whole = predicted(spec, tensor_parallel=2), whole_run(0, 1, spec)
    pieces = predicted(replace(spec, sequence_parallel=True), tensor_parallel=2)
    stages = [predicted_zero(spec, 2, stage, "adamw") for stage in (2, 3)]
    for in_pieces, split, *sharded in run_group(2, both, spec):
        for counted, said in ((in_pieces, pieces), (split, forecast)):
            assert counted.weight_bytes == said.parameter_bytes
            assert counted.forward_bytes == pytest.approx(said.forward_bytes, rel=0.02)
            assert counted.step_bytes == pytest.approx(said.step_bytes, rel=0.02)
            assert Counter(counted.forward_collectives) == said.forward_collectives
            assert Counter(counted.step_collectives) == said.step_collectives
            np.testing.assert_allclose(counted.result, whole.result, atol=1e-5)
            assert counted.loss == pytest.approx(whole.loss, rel=1e-5)
        for run, expected in zip(sharded, stages, strict=True):
            assert run.weight_bytes == expected.parameter_bytes
            assert run.step_bytes == pytest.approx(expected.step_bytes, rel=0.02)
            assert Counter(run.step_collectives) == expected.step_collectives
            # Before its first update; all replicas have the same examples here.
            assert run.loss == pytest.approx(whole.loss, rel=1e-5)
