"""Published steps are valid runs of the command for the measured configuration."""

from pathlib import Path

import pytest

from benchmarks.truth import __main__ as command
from benchmarks.truth import planned_run, published_steps
from benchmarks.truth.__main__ import SETS
from runner.experiment.check import check_all
from tests.runner.composed import read


def test_each_step_is_a_run_on_the_measured_device() -> None:
    assert published_steps in SETS
    for label, measured_ms, _, overrides in published_steps._STEPS:
        config = read(*overrides, "mode=single")
        check_all(config)
        (pool,) = config.devices.pools
        assert {"v100_16gb": "V100", "a100_40gb": "A100"}[pool.name] in label
        assert config.runtime.name in label
        assert (config.phase.name in label) == (config.phase.name == "training")
        assert 10 < measured_ms < 300


def test_an_override_of_the_command_wins_over_those_of_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    also: list[str] = []
    monkeypatch.setattr(planned_run, "ALSO", also)
    monkeypatch.setattr(command, "ALSO", also)
    command.main(["--data", str(tmp_path), "--set", "vtrain", "--override", "latency=roofline"])
    assert planned_run.run_config(("model=gpt2", "latency=kernels")).latency.name == "roofline"
