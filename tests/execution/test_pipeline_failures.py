"""A failure in a stage on torch's engine keeps its own message, and leaves no process.

Other ends of processes are tested in ``test_supervise.py``, with stages that need no engine.
"""

import tempfile
from pathlib import Path

import pytest
import torch

from fxpart.errors import ExecutionError
from fxpart.execution.pipeline_run import run_pipeline
from tests.execution.pipeline_scene import cut_chain
from tests.execution.trouble import Troubled, known_to_workers


def test_a_failing_operator_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in known_to_workers(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    inputs = [(torch.ones(2, 4),), (torch.ones(2, 4),)]
    message = (
        "^stage 1 of 2 failed with ValueError: bucket 7 is not there, .* all stages were ended$"
    )
    with pytest.raises(ExecutionError, match=message) as raised:
        run_pipeline(cut_chain(Troubled(), ("tanh",)), inputs, training=False)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.glob("fxpart-pipeline-*")) == []
