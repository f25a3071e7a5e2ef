"""Published steps are runs that the command accepts, of what was measured."""

from benchmarks.truth import published_steps
from benchmarks.truth.__main__ import SETS
from runner.experiment.check import check_all
from tests.runner.composed import read


def test_each_step_is_a_run_on_the_device_that_was_measured() -> None:
    assert published_steps in SETS
    for label, measured_ms, _, overrides in published_steps._STEPS:
        config = read(*overrides, "mode=single", "latency=kernels")
        check_all(config)
        (pool,) = config.devices.pools
        assert {"v100_16gb": "V100", "a100_40gb": "A100"}[pool.name] in label
        assert config.runtime.name in label
        assert (config.phase.name in label) == (config.phase.name == "training")
        assert 10 < measured_ms < 300
