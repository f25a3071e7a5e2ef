"""A job as a file: another process reads what the sweep decided."""

from dataclasses import replace
from pathlib import Path

import pytest

from fxpart.errors import SpecError
from runner.config.schema import TrackingConfig
from runner.job.identity import Choices, SweepIds
from runner.sweep.composition import Composed, make_job
from runner.sweep.launching import read_placed, write_placed
from runner.sweep.one_job import PlacedJob
from tests.runner.composed import read


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    tracking = TrackingConfig(uri="postgresql://me:secret@host/runs")
    choices = Choices("gpt2", "single", "2x16gb", "pcie4")
    config = replace(read("mode=single"), tracking=tracking)
    job = make_job(3, Composed(("mode=single",), config, choices, None))
    assert job.inputs is not None
    ids = SweepIds("a", "b", ("mode",))
    placed = PlacedJob(job, tmp_path / "job", tmp_path, ids, tracking, True)
    path = tmp_path / "job.json"
    write_placed(path, placed)
    assert "secret" not in path.read_text()
    again = read_placed(path, tracking)
    for name in PlacedJob.__slots__:
        if name != "job":
            assert getattr(again, name) == getattr(placed, name)
    for name in job.__slots__:
        assert getattr(again.job, name) == getattr(job, name)
    path.write_text(path.read_text().replace('"inputs"', '"other"'))
    with pytest.raises(SpecError, match=r"is damaged .*inputs.*; start the sweep again"):
        read_placed(path, tracking)
