"""Measurements on a GPU: their cases, and how they are compared."""

import json
import sys
from pathlib import Path

import pytest
import torch

import benchmarks.gpu
from benchmarks.gpu import measure
from benchmarks.gpu.cases import CASES
from benchmarks.truth import single_gpu, single_gpu_time

MEASURED = json.loads(Path(benchmarks.gpu.__file__).with_name("h100.json").read_text())


def test_each_measurement_is_of_a_case() -> None:
    labels = [case.label for case in CASES]
    assert len(set(labels)) == len(labels)
    compared = [case.label for case, _ in single_gpu.measured_cases()]
    measured = [label for label in labels if label in MEASURED["cases"]]
    assert len(measured) == len(MEASURED["cases"]) == 37
    assert compared == [label for label in measured if not label.startswith("t5_large ")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "measured.json"
    monkeypatch.setattr(sys, "argv", ["measure", "--output", str(output)])
    with pytest.raises(SystemExit) as ended:
        measure.main()
    assert ended.value.code == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not output.exists()


def test_a_forward_is_as_large_and_as_long_as_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ResNet-50, whose convolutions in float32 run in TF32, beside what an H100 needed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (case,) = (case for case in CASES if case.label == "resnet50 forward, batch 64")
    monkeypatch.setattr(single_gpu, "CASES", (case,))
    allocated, device = single_gpu.rows(tmp_path)
    (latency,) = single_gpu_time.rows(tmp_path)
    assert allocated.measured == pytest.approx(0.8335, abs=1e-4)
    assert abs(allocated.error) < 0.05
    assert abs(device.error) < 0.2
    assert abs(latency.error) < 0.05
