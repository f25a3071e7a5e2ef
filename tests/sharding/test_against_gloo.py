"""Predictions for a split model against two processes of gloo that run torch's own styles on it."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.sharding.group import run_group
from benchmarks.sharding.predicted import predicted
from benchmarks.sharding.tensor_run import tensor_run, whole_run
from tests.sharding.test_local_module import llama


def test_llama_on_two_devices() -> None:
    spec = llama(1)
    forecast, whole = predicted(spec, tensor_parallel=2), whole_run(0, 1, spec)
    for counted in run_group(2, tensor_run, spec):
        assert counted.weight_bytes == forecast.parameter_bytes
        assert counted.forward_bytes == pytest.approx(forecast.forward_bytes, rel=0.02)
        assert counted.step_bytes == pytest.approx(forecast.step_bytes, rel=0.02)
        assert Counter(counted.forward_collectives) == forecast.forward_collectives
        assert Counter(counted.step_collectives) == forecast.step_collectives
        np.testing.assert_allclose(counted.result, whole.result, atol=1e-5)
        assert counted.loss == pytest.approx(whole.loss, rel=1e-5)
