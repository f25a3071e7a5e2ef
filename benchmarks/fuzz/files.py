"""Files that a user names, or in place of our own: with wrong parts, or damaged."""

import io
import json
import math
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fuzz.judge import Tally
from benchmarks.fuzz.odd import changed_document, damaged_bytes, odd_number
from benchmarks.synthetic import chain_graph
from fxpart.capture.cache import read_graph, write_graph
from fxpart.core.assignment import Assignment
from fxpart.core.device_spec import MAX_MEMORY_BYTES
from fxpart.core.graph import OpGraph
from fxpart.core.saved_assignment import assignment_document, assignment_for, read_assignment
from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.cost.calibration import Calibration, read_calibration, write_calibration
from fxpart.cost.evaluate import evaluate
from fxpart.cost.problem import make_problem
from fxpart.cost.profile import OperatorProfile, read_profile, write_profile
from fxpart.cost.roofline import LatencyModel
from fxpart.execution.profiling.api import OperatorTime, read_times, write_times
from runner.config.schema import Config, TrackingConfig
from runner.config.specs import read_accelerator
from runner.config.tags import config_from_document
from runner.job.identity import Choices, SweepIds
from runner.output.result_files import read_result, write_result
from runner.sweep.launching import read_placed, write_placed
from runner.sweep.one_job import PlacedJob
from runner.sweep.swept_job import Job
from runner.tracking.tracker import UnsentRun
from runner.tracking.unsent import OUTCOME, read_unsent, write_unsent

__all__ = ["fuzz_files"]

_GRAPH = chain_graph(6)
_TOPOLOGY = uniform_topology(
    tuple(DeviceSpec(f"d{i}", 2**40, {"float32": 1e12, "bfloat16": 1e12}, 1e12) for i in range(2)),
    Link(1e10),
)


@dataclass(frozen=True)
class _Kind:
    """One kind of file, with its reader and a check of what was read."""

    name: str
    read: Callable[[Path], Any]
    """Returns the content of a file, or None if a damaged file is ignored."""
    unsound: Callable[[Any], str | None]


def _accept(_: object) -> str | None:
    return None


def _check_figures(numbers: Any) -> str | None:  # noqa: ANN401 - whatever numpy takes
    array = np.asarray(numbers, dtype=np.float64)
    return None if np.isfinite(array).all() and (array >= 0).all() else f"figures {numbers}"


def _check_placement(graph: OpGraph, assignment: Assignment) -> str | None:
    latency = LatencyModel()
    result = evaluate(make_problem(graph, _TOPOLOGY, latency), assignment, search_bounds=False)
    peaks = [device.peak_bytes for device in result.devices]
    return _check_figures([result.latency_s, result.throughput_per_s, *peaks])


def _check_graph(graph: OpGraph | None) -> str | None:
    if graph is None:
        return None
    assignment = Assignment(np.zeros(graph.n_ops, dtype=np.int64), ((0,),))
    return _check_placement(graph, assignment)


def _check_run(run: UnsentRun) -> str | None:
    if run.status not in ("FINISHED", "FAILED", "KILLED") or not run.tags.get(OUTCOME):
        return f"status {run.status}, tags {run.tags}"
    return None if all(map(math.isfinite, run.metrics.values())) else f"metrics {run.metrics}"


_KINDS = (
    _Kind(
        "assignment.json",
        read_assignment,
        lambda saved: _check_placement(_GRAPH, assignment_for(saved, _GRAPH)),
    ),
    _Kind("calibration", read_calibration, lambda fit: _check_figures(fit.seconds(_GRAPH))),
    _Kind(
        "profile",
        lambda path: read_profile(path, _GRAPH),
        lambda profile: _check_figures(profile.seconds) if profile else None,
    ),
    _Kind(
        "operator times",
        read_times,
        lambda times: _check_figures([time.seconds for time in times.values()]),
    ),
    _Kind("unsent.json", read_unsent, _check_run),
    _Kind("job.json", lambda path: read_placed(path, TrackingConfig()), _accept),
    _Kind("result.json", read_result, _accept),
    _Kind(
        "accelerator",
        read_accelerator,
        lambda entry: None if 0 < entry["memory_bytes"] <= MAX_MEMORY_BYTES else f"{entry}",
    ),
    _Kind(
        "configuration",
        lambda path: config_from_document(json.loads(path.read_text())),
        _accept,
    ),
)


def _valid_files(folder: Path) -> dict[str, bytes]:
    """Return a valid file of each kind."""
    path = folder / "unsent.json"  # a fixed name
    valid: dict[str, bytes] = {}

    def keep(name: str) -> None:
        valid[name] = path.read_bytes()

    halves = Assignment(np.arange(_GRAPH.n_ops) // ((_GRAPH.n_ops + 1) // 2), ((0,), (1,)))
    saved = assignment_document(_GRAPH, _TOPOLOGY, halves, {"name": "chain"})
    path.write_text(json.dumps(saved))
    keep("assignment.json")
    rates = {f"{kind} {dtype}": 1e12 for kind in ("gemm",) for dtype in set(_GRAPH.dtypes)}
    write_calibration(path, Calibration(1e-6, 1e-7, 1e10, rates, "cpu", 1e-10, (0.1,), 0.1, 0.9))
    keep("calibration")
    seconds, samples = np.full(_GRAPH.n_ops, 1e-5), np.full(_GRAPH.n_ops, 5)
    write_profile(path, _GRAPH, OperatorProfile(seconds, samples, "cpu"))
    keep("profile")
    path.unlink()
    write_times(path, {"linear": OperatorTime("aten.linear", ((2, 3),), 1e-5, 5)})
    keep("operator times")
    unsent = UnsentRun(
        "1", "run", "sqlite:///a.db", "fxpart", "FINISHED", 1, 2, tags={OUTCOME: "finished"}
    )
    metrics, series = {"latency_ms": 1.0}, {"memory": [(0, 1.0), (1, 2.0)]}
    run = {
        **asdict(unsent),
        "metrics": metrics,
        "series": series,
        "tables": {"devices": {"id": [0]}},
    }
    write_unsent(folder, UnsentRun(**run))
    keep("unsent.json")
    config = Config()
    config.model.name = config.devices.spec = config.latency.name = config.capture.cache_dir = "a"
    config.transfer_rate.bytes_per_s = 1e9
    job = Job(0, ("mode=single",), Choices("m", "single", "d", "t"), config, None, "0" * 16)
    ids = SweepIds("s", None, ("mode",))
    write_placed(path, PlacedJob(job, folder, folder, ids, TrackingConfig(), resume=True))
    keep("job.json")
    document = json.loads(path.read_bytes())
    valid["configuration"] = json.dumps(document["config"]).encode()
    write_result(path, status="finished", config={"choices": {}, "overrides": []}, metrics=metrics)
    keep("result.json")
    rates_text = {"float32": 1e12, "bfloat16": 2e12}
    accelerator = {
        "memory": "16gb",
        "flops_per_s": rates_text,
        "memory_bandwidth_bytes_per_s": 1e12,
    }
    valid["accelerator"] = json.dumps(
        {**accelerator, "source": "a test"}
    ).encode()  # valid YAML too
    return valid


def _changed_arrays(rnd: Random, content: bytes) -> tuple[bytes, str]:
    """Return a cache entry with one member changed, removed, compressed or marked as encrypted."""
    with np.load(io.BytesIO(content)) as stored:
        arrays = dict(stored)
    name = rnd.choice(list(arrays))
    action = rnd.choice(("number", "shorter", "type", "without", "packed", "encrypted", "text"))
    array = arrays[name]
    if action == "number" and array.size and array.dtype == np.int64:
        number = odd_number(rnd)
        usable = -(2**63) <= number < 2**63  # and not NaN
        array.flat[rnd.randrange(array.size)] = int(number) if usable else -1
    elif action == "shorter":
        arrays[name] = array[: rnd.randrange(len(array) + 1)]
    elif action == "type":
        arrays[name] = array.astype(rnd.choice((np.float64, np.int32, np.complex128, np.uint8)))
        if arrays[name].dtype == np.float64 and array.size:
            arrays[name].flat[0] = math.nan
    elif action == "without":
        del arrays[name]
    elif action == "text":
        document, _ = changed_document(rnd, json.loads(arrays["text"].tobytes()))
        text = json.dumps(document) if rnd.random() < 0.8 else "[" * 100_000
        arrays["text"] = np.frombuffer(text.encode(errors="replace"), dtype=np.uint8)
    buffer = io.BytesIO()
    (np.savez_compressed if action == "packed" else np.savez)(buffer, **arrays)
    archive_bytes = bytearray(buffer.getvalue())
    if action == "encrypted":
        with zipfile.ZipFile(io.BytesIO(archive_bytes)) as archive:
            offset = archive.infolist()[0].header_offset
        archive_bytes[offset + 6] |= 1
        archive_bytes[archive_bytes.index(b"PK\x01\x02") + 8] |= 1
    return bytes(archive_bytes), f"{name} {action}"


def _cache_entry(folder: Path) -> bytes:
    path = folder / "entry.npz"
    write_graph(path, _GRAPH)
    return path.read_bytes()


def fuzz_files(run: Callable[[Any, int], None], cases: int, folder: Path) -> Tally:
    """Try `cases` files, a third of them cache entries; `run` as in `fuzz_specs`."""
    tally = Tally("files")
    valid, entry = _valid_files(folder), _cache_entry(folder)
    path = folder / "unsent.json"

    @given(st.randoms(use_true_random=False), st.sampled_from(_KINDS), st.booleans())
    def documents(rnd: Random, kind: _Kind, changed: bool) -> None:
        change, content = "damaged", valid[kind.name]
        if changed or kind.name == "configuration":
            document, change = changed_document(rnd, json.loads(content))
            path.write_text(json.dumps(document))
        else:
            path.write_bytes(damaged_bytes(rnd, content))
        case = f"{kind.name}, {change}"
        tally.attempt(case, lambda: kind.read(path), kind.unsound)

    @given(st.randoms(use_true_random=False), st.booleans())
    def entries(rnd: Random, changed: bool) -> None:
        change, content = "damaged", b""
        if changed:
            content, change = _changed_arrays(rnd, entry)
        else:
            content = damaged_bytes(rnd, entry)
        path.write_bytes(content)
        # Reading refuses an impossible structure; anything else must be a graph that can be placed.
        tally.attempt(f"cache entry, {change}", lambda: read_graph(path), _check_graph)

    run(documents, cases * 2 // 3)
    run(entries, cases // 3)
    return tally
