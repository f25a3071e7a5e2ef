"""Tables of an installed package: which are read, times equal to measured ones, clear refusals."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.cost.curves.family import family_from
from fxpart.cost.curves.gemm import Rates
from fxpart.cost.curves.installed_tables import (
    InstalledTables,
    MeasuredDevice,
    installed_folder,
)
from fxpart.cost.curves.model import KernelModel
from fxpart.cost.curves.tables import KINDS, measured_calls
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import SpecError
from tests.cost.curves.test_curves import graph_of_a_product, settings

RATES = Rates(1e6, 1e6, 4)
CARD = DeviceSpec("card", 10**9, {"bfloat16": 1e6, "float32": 1e6}, 1e6, 0, 0, 4, "f")
CURVES = family_from("f", settings())
needs_package = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None,
    reason="aiconfigurator-core is not installed; pip install 'fxpart[aiconfigurator]'",
)


def _write_gemm(folder: Path, system: str, backend: str, version: str, **columns: object) -> Path:
    """Write a table of one product of 16 x 4 x 8 in 5 s, and return its path."""
    path = folder / system / "gemm" / backend / version / "gemm_perf.parquet"
    path.parent.mkdir(parents=True)
    whole = {"gemm_dtype": ["bfloat16"], "m": [16], "n": [4], "k": [8], "latency": [5000.0]}
    pyarrow.parquet.write_table(pa.table({**whole, **columns}), path)
    return path


def _tables(folder: Path) -> InstalledTables:
    return InstalledTables(folder, {"card": MeasuredDevice("card_sxm", RATES)})


def test_a_device_takes_its_own_table_at_the_peaks_that_were_measured(tmp_path: Path) -> None:
    _write_gemm(tmp_path, "card_sxm", "vllm", "0.24.0")
    tables = KernelModel({"f": CURVES}, LatencyModel(), _tables(tmp_path))
    curves = KernelModel({"f": CURVES}, LatencyModel())
    # Of the same family: one that no table is of, and the measured one at a tenth of its rates.
    slow = replace(
        CARD, flops_per_s={"bfloat16": 1e5, "float32": 1e5}, memory_bandwidth_bytes_per_s=1e5
    )
    topology = uniform_topology((CARD, replace(CARD, name="other"), slow), Link(1e9))
    graph = graph_of_a_product("bfloat16")
    plain, measured = curves.op_time_s(graph, topology), tables.op_time_s(graph, topology)
    assert measured[0, 0] == pytest.approx(5.0, rel=1e-3)
    assert measured[0, 1] == plain[0, 1] < 3
    assert plain[0, 2] > 5 * plain[0, 0]
    assert measured[0, 2] / plain[0, 2] == pytest.approx(5.0 / plain[0, 0], rel=1e-3)
    assert tables.table_coverage(graph, "CARD", "f") == (1, 1)
    assert tables.table_coverage(graph, "other", "f") == (0, 1)


def test_the_preferred_backend_and_its_newest_version_are_taken(tmp_path: Path) -> None:
    tables = _tables(tmp_path)
    _write_gemm(tmp_path, "card_sxm", "trtllm", "9.0.0")
    assert tables.label("card", "f") == "card_sxm, trtllm 9.0.0"
    # A final version is newer than its candidates, and 0.10 than 0.9.
    for version in ("0.9.0", "0.10.0rc2", "0.10.0", "latest"):
        _write_gemm(tmp_path, "card_sxm", "vllm", version)
    assert tables.label("card", "f") == "card_sxm, vllm 0.10.0"
    path = tables.files("card")["gemm"].path
    assert path.relative_to(tmp_path).as_posix() == "card_sxm/gemm/vllm/0.10.0/gemm_perf.parquet"
    assert tables.files("other") == {}
    assert tables.label("other", "f") == ""
    assert str(tables) == "aiconfigurator"


def test_the_newest_table_of_collectives_is_taken(tmp_path: Path) -> None:
    tables = _tables(tmp_path)
    with pytest.raises(SpecError, match=r"has no table of NCCL on card_sxm \(card\)"):
        tables.collectives("card")
    for version in ("2.9.1", "2.27.3"):
        path = tmp_path / "card_sxm" / "comm" / "nccl" / version / "nccl_perf.parquet"
        path.parent.mkdir(parents=True)
        path.touch()
    assert tables.collectives("card") == (path, "nccl 2.27.3")


def test_the_package_is_found_but_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(SpecError) as refused:
        installed_folder()
    assert str(refused.value) == (
        "latency.tables=aiconfigurator needs aiconfigurator-core;"
        " pip install 'fxpart[aiconfigurator]', or write ./aiconfigurator for a folder of that name"
    )
    package = tmp_path / "aiconfigurator_core"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    with pytest.raises(SpecError, match=r"has no folder systems/data .*aiconfigurator_core"):
        installed_folder()
    (package / "systems" / "data").mkdir(parents=True)
    assert installed_folder() == package / "systems" / "data"


def test_missing_and_damaged_tables_are_refused_in_one_line(tmp_path: Path) -> None:
    tables = _tables(tmp_path)
    with pytest.raises(
        SpecError, match=r"has no table of card_sxm \(card\) in .*; correct measured_system"
    ):
        tables.files("card")
    path = _write_gemm(tmp_path, "card_sxm", "vllm", "1.0", latency=["fast"])
    with pytest.raises(SpecError, match=r"gemm_perf\.parquet: a size or latency is not a number"):
        tables.read("card", "f", CURVES)
    path.write_text("m,n,k")
    with pytest.raises(SpecError, match=r"gemm_perf\.parquet is not a parquet table"):
        tables.read("card", "f", CURVES)


@needs_package
@pytest.mark.parametrize("system", ["a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "l40s"])
def test_the_real_package_has_tables_of_all_kinds(system: str) -> None:
    tables = InstalledTables(installed_folder(), {"card": MeasuredDevice(system, RATES)})
    files = tables.files("card")
    assert list(files) == list(KINDS)
    assert {table.backend.split()[0] for table in files.values()} == {"vllm"}
    for kind, table in files.items():
        measured = measured_calls(table.path, kind, "bfloat16")
        assert len(measured.seconds) > 5000
