"""Times from traces of torch.profiler: real ones of this process, and planted ones of a GPU."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fxpart.capture import capture
from fxpart.core.topology import DeviceSpec, Link, Topology, uniform_topology
from fxpart.cost import trace as trace_module
from fxpart.cost.roofline import LatencyModel
from fxpart.cost.trace import TraceTimes, read_trace
from fxpart.errors import SpecError
from tests.sketch import Sketch

ROOFLINE = LatencyModel(op_overhead_s=7.0)


def _topology() -> Topology:
    return uniform_topology((DeviceSpec("d", 10**9, {"float32": 1e9}, 1e9),) * 2, Link(1e9))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 8))


@pytest.fixture(scope="module")
def file(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as traced:
        for _ in range(3):
            model(torch.zeros(16, 24))
    traced.export_chrome_trace(str(path))
    return path


def test_operators_of_the_traced_model_have_the_traced_times(model: nn.Module, file: Path) -> None:
    graph = capture(model, (torch.zeros(16, 24),)).graph
    times = TraceTimes(read_trace(file), ROOFLINE)
    coverage = times.coverage(graph)
    assert (coverage.exact, coverage.interpolated, coverage.missing) == (4, {}, {})
    events = json.loads(file.read_text())["traceEvents"]
    durations: dict[str, list[float]] = {}
    for event in events:
        dims = (event.get("args") or {}).get("Input Dims")
        durations.setdefault(f"{event['name']} {dims and dims[0]}", []).append(event.get("dur", 0))
    expected_us = [
        median(durations[f"aten::{name}"])
        for name in ("linear [16, 24]", "gelu [16, 48]", "layer_norm [16, 48]", "linear [16, 48]")
    ]
    seconds = times.op_time_s(graph, _topology())
    assert seconds[:, 0] == pytest.approx(np.array(expected_us) * 1e-6)
    assert seconds[:, 1].tolist() == seconds[:, 0].tolist()


def test_other_sizes_are_interpolated_and_unknown_operators_use_the_roofline(
    model: nn.Module, file: Path
) -> None:
    other = nn.Sequential(model, nn.Softplus())
    graph = capture(other, (torch.zeros(32, 24),)).graph
    times = TraceTimes(read_trace(file), ROOFLINE)
    coverage = times.coverage(graph)
    assert coverage.exact == 0
    assert coverage.interpolated == {
        "aten.linear.default": 2,
        "aten.gelu.default": 1,
        "aten.layer_norm.default": 1,
    }
    assert coverage.missing == {"aten.softplus.default": 1}
    assert coverage.sentence() == (
        "0 of 5 operators at their exact sizes, 4 interpolated (2 aten.linear.default, "
        "1 aten.gelu.default, 1 aten.layer_norm.default), 1 by the roofline (1 "
        "aten.softplus.default)"
    )
    seconds = times.op_time_s(graph, _topology())[:, 0]
    assert seconds[4] > 7
    assert (seconds[:4] < 7).all()


class _Numbers(nn.Module):
    """In-place arithmetic with numbers, of floats and of integers, and writes at indices."""

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x.clone().mul_(2).add_(0.5)
        h[:, ::2] *= 0.9
        h[h < 0] = 0.0
        h[places] = h[places] * 2
        return h, places * 0.5, h[0, :1] * 3


def test_numbers_and_indices_do_not_prevent_an_exact_match(tmp_path: Path) -> None:
    inputs = (torch.randn(16, 24), torch.arange(5))
    path = tmp_path / "trace.json"
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as traced:
        _Numbers()(*inputs)
    traced.export_chrome_trace(str(path))
    coverage = TraceTimes(read_trace(path), ROOFLINE).coverage(capture(_Numbers(), inputs).graph)
    # How many rows `index` reads is not in a trace.
    assert coverage.interpolated == {"aten.index.Tensor": 1}
    # Only the captured graph has an operator that makes the number written at a mask.
    assert set(coverage.missing) <= {"aten.lift_fresh_copy.default", "aten.scalar_tensor.default"}


def _event(name: str, cat: str, ts: float, dur: float, **args: object) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": 1} | {
        "args": args
    }


def _add(ts: float, elements: int) -> dict[str, Any]:
    event = _event("aten::add", "cpu_op", ts, 10)
    event["args"] = {
        "Input Dims": [[elements], [], []],
        "Input type": ["float", "Scalar", "Scalar"],
    }
    return event


def _gpu_trace() -> dict[str, Any]:
    """Return two additions whose kernels take 3 and 5 us, and 40 us, on the device."""
    return {
        "traceEvents": [
            _add(0, 100),
            _event("cudaLaunchKernel", "cuda_runtime", 2, 1, correlation=1),
            _event("cudaLaunchKernel", "cuda_runtime", 4, 1, correlation=2),
            _add(20, 1600),
            _event("cudaLaunchKernel", "cuda_runtime", 22, 1, correlation=3),
            _event("first", "kernel", 50, 3, correlation=1),
            _event("second", "kernel", 60, 5, correlation=2),
            _event("third", "kernel", 70, 40, correlation=3),
        ]
    }


def _seconds_of_additions(path: Path, *sizes: int) -> list[float]:
    sketch = Sketch()
    values = [sketch.input(size) for size in sizes]
    results = [sketch.op([value], 4) for value in values]
    graph = sketch.graph(*results)
    n = graph.n_ops
    graph = replace(graph, targets=("aten.add.Tensor",) * n, dtypes=("float32",) * n)
    graph = replace(graph, moved_bytes=np.ones(n, dtype=np.int64))
    times = TraceTimes(read_trace(path), ROOFLINE).op_time_s(graph, _topology())
    return [float(second) for second in times[:, 0]]


@pytest.mark.parametrize("name", ["gpu.json", "gpu.json.gz"])
def test_kernels_count_for_the_operator_that_launched_them(tmp_path: Path, name: str) -> None:
    text = json.dumps(_gpu_trace()).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    # At 400 and 6400 bytes; between them the root; beyond, proportional to bytes.
    seconds = _seconds_of_additions(path, 400, 6400, 1600, 12800, 4)
    root = (8e-6 * 40e-6) ** 0.5
    assert seconds == pytest.approx([8e-6, 40e-6, root, 80e-6, 8e-6])


def test_a_smaller_operator_takes_no_less_than_the_shortest_traced(tmp_path: Path) -> None:
    trace, path = _gpu_trace(), tmp_path / "gpu.json"
    trace["traceEvents"] += [
        {**_add(40, 0), "name": "aten::neg"},
        _event("cudaLaunchKernel", "cuda_runtime", 42, 1, correlation=4),
        _event("fourth", "kernel", 120, 3, correlation=4),
    ]
    path.write_text(json.dumps(trace))
    # Proportional below 400 bytes, which took 8 us.
    assert _seconds_of_additions(path, 200, 100) == pytest.approx([4e-6, 3e-6])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a trace of torch.profiler, or is damaged"),
        ("[1, 2]", "has no list of events"),
        (json.dumps({"traceEvents": [_add(0, 100) | {"dur": 0}]}), "has no operator that takes"),
        (json.dumps({"traceEvents": [_add(0, 100) | {"dur": 1e300}]}), "dur is 1e.300"),
        ('{"traceEvents": 5}', "has no list of events"),
        ('{"events": []}', "is not a trace of torch.profiler, or is damaged"),
        ('{"traceEvents": []}', "has no operators with shapes; export one with torch.profiler"),
        (json.dumps({"traceEvents": [_event("aten::add", "cpu_op", 0, 1)]}), "no operators with"),
        (json.dumps({"traceEvents": [_add(0, 100) | {"dur": float("nan")}]}), "dur is nan"),
        (json.dumps({"traceEvents": [_add(0, 100) | {"dur": "x"}]}), "or is damaged"),
    ],
)
def test_an_invalid_trace_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=message) as refused:
        read_trace(path)
    assert "\n" not in str(refused.value)
    assert str(refused.value).count("export one with") == 1


def test_a_missing_or_endless_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match=r"none\.json: there is no such file"):
        read_trace(tmp_path / "none.json")
    monkeypatch.setattr(trace_module, "_MOST_BYTES", 2**20)
    packed = tmp_path / "zeros.json.gz"
    packed.write_bytes(gzip.compress(bytes(2**21)))
    with pytest.raises(SpecError, match="more than 1 MiB unpacked"):
        read_trace(packed)
    packed.write_bytes(b"no gzip")
    with pytest.raises(SpecError, match="cannot read"):
        read_trace(packed)
