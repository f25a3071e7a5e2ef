"""What a job has read by the time that it has a result."""

import sys
from pathlib import Path

import pytest

from fxpart.errors import SpecError
from runner.job.identity import Choices
from runner.job.job_identity import JobIdentity, identified, refuse_changed
from tests.runner.command import OWN, SMALL
from tests.runner.composed import read

CHOICES = Choices("tiny", "size_based", "2x0.06mb", "pcie4")


def test_a_source_that_changed_since_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "tiny", raising=False)  # another test's
    config = read(*OWN, SMALL, "mode=size_based", "tracking=none")
    identity = identified(config, JobIdentity(CHOICES, (), folder, folder))
    assert identified(config, identity) is identity
    refuse_changed(config, identity)
    source = folder / "tiny.py"
    before = source.read_text()
    source.write_text(f"{before}\n# edited\n")
    with pytest.raises(SpecError, match="was changed after this began: a source file"):
        refuse_changed(config, identity)
    source.write_text(before)
    refuse_changed(config, identity)


def test_a_model_that_does_not_exist_is_refused_where_it_is_built(tmp_path: Path) -> None:
    config = read("model=custom", "model.factory=nowhere_at_all:f", "model.name=mine")
    identity = JobIdentity(CHOICES, (), tmp_path, tmp_path)
    assert identified(config, identity) == identity
