"""Predictions for sharded models against two processes of gloo that run torch's own on them."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.sharding.group import run_group
from benchmarks.sharding.predicted import predicted, predicted_zero
from benchmarks.sharding.tensor_run import tensor_run, whole_run
from benchmarks.sharding.zero_run import zero_run
from fxpart.capture.models.build import build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.execution.device import seeded
from fxpart.sharding.local_module import shard_module
from tests.sharding.test_local_module import llama

CPU = torch.device("cpu")


def parts_run(rank: int, size: int, spec: ModelSpec) -> dict[str, Any]:
    """Run this process's part as it is captured, and return its result, loss and gradients."""
    with seeded(0, CPU):
        built = build_model(replace(spec, sequence_parallel=False), CPU)
    module = shard_module(built.module, size, rank, sequence=spec.sequence_parallel)
    loss = module(**built.kwargs, labels=built.kwargs["input_ids"])[0]
    loss.backward()
    with torch.no_grad():
        result = module(**built.kwargs)[0]
    gradients = {
        name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None
    }
    return {"result": result.numpy(), "loss": loss.item(), **gradients}


def assert_parts_of(whole: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    """Compare what each process has with the whole: replicated, or its part of one dimension."""
    for rank, part in enumerate(parts):
        assert part.keys() == whole.keys()
        for name, value in part.items():
            expected, shape = np.asarray(whole[name]), np.shape(value)
            differs = [i for i, n in enumerate(expected.shape) if n != shape[i]]
            for dim in differs:
                expected = np.split(expected, len(parts), axis=dim)[rank]
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5, err_msg=name)


def both(rank: int, size: int, spec: ModelSpec) -> tuple[Any, ...]:
    """Run the model on `parallelize_module`, and on `fully_shard` as stages 2 and 3."""
    in_pieces = tensor_run(rank, size, replace(spec, sequence_parallel=True))
    return (
        [parts_run(rank, size, replace(spec, sequence_parallel=s)) for s in (False, True)],
        in_pieces,
        tensor_run(rank, size, spec),
        *[zero_run(rank, size, spec, stage, "adamw") for stage in (2, 3)],
    )


def test_llama_on_two_devices() -> None:
    spec = llama(1)
    forecast, whole = predicted(spec, tensor_parallel=2), whole_run(0, 1, spec)
    pieces = predicted(replace(spec, sequence_parallel=True), tensor_parallel=2)
    stages = [predicted_zero(spec, 2, stage, "adamw") for stage in (2, 3)]
    runs = run_group(2, both, spec)
    for parts in zip(*(run[0] for run in runs), strict=True):
        assert_parts_of(parts_run(0, 1, spec), list(parts))
    for _, in_pieces, split, *sharded in runs:
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
