"""``latency.tables``: a folder or the installed package, and what is said where it lacks either."""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf

from fxpart.capture.captured import CapturedGraph
from fxpart.cost.curves.gemm import Rates
from fxpart.cost.curves.installed_tables import MeasuredDevice
from fxpart.errors import SpecError
from runner.config.schema import Config
from runner.config.specs import accelerator_files
from runner.experiment.measured_tables import package_tables
from runner.experiment.operator_times import check_latency, operator_times, source_note
from runner.experiment.subject import Subject
from runner.experiment.topology import build_topology
from runner.job.identity import inputs_key
from tests.cost.curves.test_curves import graph_of_a_product
from tests.runner.composed import read

GRAPH = graph_of_a_product("bfloat16")


def _unneeded() -> object:
    raise AssertionError("captured")


def _subject() -> Subject:
    return Subject(CapturedGraph(GRAPH, 0.0, from_cache=False), _unneeded)  # type: ignore[arg-type]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the tables of an empty package, which takes the place of any other."""
    folder = tmp_path / "aiconfigurator_core" / "systems" / "data"
    folder.mkdir(parents=True)
    (tmp_path / "aiconfigurator_core" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def _write_gemm(package: Path, system: str, latency_ms: float) -> None:
    """Write a table of one product with the sizes of `GRAPH`'s."""
    path = package / system / "gemm" / "vllm" / "0.24.0" / "gemm_perf.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = {"m": [16], "n": [4], "k": [8]}
    columns = {"gemm_dtype": ["bfloat16"], **sizes, "latency": [latency_ms]}
    pyarrow.parquet.write_table(pa.table(columns), path)


def _config(*overrides: str) -> Config:
    config = read("latency=kernels", "latency.tables=aiconfigurator", *overrides)
    check_latency(config)
    return config


def test_devices_take_the_tables_of_the_package_that_their_files_name(package: Path) -> None:
    _write_gemm(package, "h200_sxm", 4e-3)
    config = _config("devices=1xh200+1xt4")
    times = operator_times(config, _subject(), {})
    topology = build_topology(config.devices, config.transfer_rate)
    seconds = times.op_time_s(GRAPH, topology)
    assert seconds[0, 0] == pytest.approx(4e-6, rel=1e-3)
    assert seconds[0, 1] > 5e-6
    assert source_note(config, times, GRAPH) == (
        "of aiconfigurator (h200_sxm, vllm 0.24.0) for 1 of 1 products and attention calls, of"
        " curves for the others, of curves of t4, of which aiconfigurator has no tables"
    )


def test_the_peaks_of_a_table_are_those_of_the_accelerator_that_was_measured(
    package: Path,
) -> None:
    devices = package_tables().devices
    measured = MeasuredDevice("a100_sxm", Rates(312e12, 2039e9, 108))
    assert devices["a100_80gb"] == devices["a100_40gb"] == measured
    assert devices["l40s"] == MeasuredDevice("l40s", Rates(362e12, 864e9, 142))
    assert "t4" not in devices


def test_a_run_that_the_package_has_no_tables_for_is_refused(package: Path) -> None:
    with pytest.raises(SpecError, match=r"has no tables of t4, only of a100_40gb, a100_80gb, b200"):
        _config("devices=2xt4")
    with pytest.raises(SpecError, match=r"has no table of h100_sxm \(h100\)"):
        _config("devices=2xh100")
    with pytest.raises(SpecError, match=r"is not a folder; .* or aiconfigurator for the installed"):
        check_latency(read("latency=kernels", "latency.tables=/no/tables", "devices=1xh100"))


def test_without_the_package_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read("devices=1xh100")  # imports what reading a configuration needs
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(SpecError, match=r"needs aiconfigurator-core; pip install 'fxpart\[aiconf"):
        _config("devices=1xh100")


def test_the_key_of_a_job_covers_the_tables_that_it_reads(package: Path) -> None:
    _write_gemm(package, "h100_sxm", 5.0)
    config = _config("devices=1xh100")
    before = inputs_key(config, {})
    _write_gemm(package, "h200_sxm", 5.0)
    assert inputs_key(config, {}) == before
    _write_gemm(package, "h100_sxm", 6.0)
    assert inputs_key(config, {}) != before
    both = read("devices=1xh200+1xh100", "latency=kernels", "latency.tables=aiconfigurator")
    before = inputs_key(both, {})
    # The same numbers and files, of other devices.
    first, second = both.devices.pools
    first.name, second.name = second.name, first.name
    assert inputs_key(both, {}) != before


def _accelerator(folder: Path, name: str, **changes: object) -> None:
    """Write a user's own accelerator file: an H100 with `changes`; None leaves a key out."""
    entry = {**OmegaConf.load(accelerator_files()["h100"]), **changes}
    path = folder / "conf" / "accelerator" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save({key: value for key, value in entry.items() if value is not None}, path)


def test_the_key_covers_the_peaks_of_the_accelerator_that_was_measured(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _write_gemm(package, "h100_sxm", 5.0)
    _accelerator(tmp_path, "mine", measured_system=None, measured_as="base")
    keys = []
    for bandwidth in (3e12, 2e12):
        _accelerator(tmp_path, "base", memory_bandwidth_bytes_per_s=bandwidth)
        keys.append(inputs_key(_config("devices=1xmine"), {}))
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"curves": None}, "corrects curves, and mine has none; state curves in the accelerator"),
        ({"flops_per_s": {"float16": 1e15}}, "measured_system needs flops_per_s.bfloat16 and"),
        ({"multiprocessors": None}, "measured_system needs flops_per_s.bfloat16 and multiproces"),
        ({"measured_as": "a100_40gb"}, "measured_as=a100_40gb is no accelerator with a measured_"),
        ({"measured_as": "t4000"}, "mine.yaml: measured_as=t4000 is no accelerator with a"),
    ],
)
def test_an_accelerator_file_that_tables_cannot_be_read_for_is_refused(
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    _write_gemm(package, "h100_sxm", 5.0)
    _accelerator(tmp_path, "mine", **changes)
    with pytest.raises(SpecError, match=message):
        _config("devices=1xmine")
