"""The list of metrics agrees with what is logged."""

from dataclasses import replace
from pathlib import Path

import pytest

from runner.experiment.experiment import model_spec, plan
from runner.experiment.headline import headline
from runner.experiment.measured import measured_metrics
from runner.experiment.metric_names import ALWAYS, OF_SOME_JOBS
from tests.runner.command import OWN
from tests.runner.composed import read
from tests.runner.experiment.test_measured import PIPELINE


def _logged(*overrides: str) -> set[str]:
    config = read(*OWN, "+model.factory_args.layers=2", *overrides)
    return set(headline(plan(config, model_spec(config))))


def test_all_metrics_are_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    plain = _logged("devices=2x16gb")
    assert plain == set(ALWAYS)
    found = _logged("devices=2x16gb", "mode=pipeline", "schedule=gpipe", "microbatches=2")
    found |= _logged("devices=2x16gb", "phase=training", "model.batch_size=2", "data_parallel=2")
    found |= _logged("devices=2x16gb", "capture.symbolic=batch", "model.batch_size=2")
    measured = replace(PIPELINE, unsplit_s=0.01, allocator_peak_bytes=(1,))
    assert found - plain | set(measured_metrics(measured)) == set(OF_SOME_JOBS)
    assert len(set(ALWAYS + OF_SOME_JOBS)) == len(ALWAYS) + len(OF_SOME_JOBS)
