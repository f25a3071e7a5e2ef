"""Curves carried to other devices, against planted tables of a package."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from benchmarks.truth import carried_curves
from benchmarks.truth.kernel_tables import FAMILIES, INSTALLED_DEVICES, read_installed
from benchmarks.truth.nccl_tables import INSTALLED_LINK_BYTES_PER_S
from benchmarks.truth.nccl_tables import KINDS as COLLECTIVES
from fxpart.core.topology import Link
from fxpart.cost.collectives import collective_time_s
from fxpart.cost.curves.tables import KINDS

_SIZES = {
    "gemm": ("m", "n", "k"),
    "context_attention": ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim"),
}
_SIZES["generation_attention"] = (*_SIZES["context_attention"], "step")


def _plant(folder: Path, system: str, accelerator: str, error: float) -> None:
    """Write tables in which the curve of the device's family is too high by that share."""
    for kind, curve in KINDS.items():
        group = "gemm" if kind == "gemm" else "attention"
        path = folder / system / group / "vllm" / "1.0" / f"{kind}_perf.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        of_dtype = "gemm_dtype" if kind == "gemm" else "kv_cache_dtype"
        draw = np.random.default_rng(0)
        columns = {name: 2 ** draw.integers(4, 8, 60) for name in _SIZES[kind]}
        if kind != "gemm":
            columns["num_key_value_heads"] = columns["num_heads"]
        table = pa.table({of_dtype: ["bfloat16"] * 60, **columns, "latency": [1e6] * 60})
        pyarrow.parquet.write_table(table, path)
        kernels = read_installed(accelerator, kind)
        family = FAMILIES[carried_curves._CARRIED[accelerator]]
        seconds = getattr(family, curve).seconds(kernels.calls, kernels.rates) / (1 + error)
        place = table.column_names.index("latency")
        planted = table.set_column(place, "latency", pa.array(seconds * 1e3))
        pyarrow.parquet.write_table(planted, path)
    _plant_collectives(folder / system / "comm" / "nccl" / "2.0", accelerator, error)


def _plant_collectives(folder: Path, accelerator: str, error: float) -> None:
    """Write collectives for which the carried curves, or a ring, are too slow by that share."""
    folder.mkdir(parents=True)
    link = Link(INSTALLED_LINK_BYTES_PER_S[accelerator], carried_curves._PCIE_LATENCY_S)
    curves = FAMILIES["h100"].collectives if accelerator != "l40s" else None
    rows = [
        (name, dtype, ranks, elements, collective_time_s(kind, size, ranks, link, curves))
        for name, kind in COLLECTIVES.items()
        for dtype, element_bytes in (("half", 2), ("int8", 1))
        for ranks in (2, 8)
        for elements in 2 ** np.arange(8, 16)
        for size in (float(elements * element_bytes),)
    ]
    names = ("op_name", "nccl_dtype", "num_gpus", "message_size")
    columns = dict(zip((*names, "latency"), zip(*rows, strict=True), strict=True))
    columns["latency"] = tuple(1e3 * seconds / (1 + error) for seconds in columns["latency"])
    pyarrow.parquet.write_table(pa.table(columns), folder / "nccl_perf.parquet")


def test_errors_of_carried_curves_are_by_device_and_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "aiconfigurator_core"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    errors = {"h200": 0.1, "b200": 0.2, "l40s": 0.3}
    systems = {"h200": "h200_sxm", "b200": "b200_sxm", "l40s": "l40s"}
    for accelerator, error in errors.items():
        _plant(package / "systems" / "data", systems[accelerator], accelerator, error)
    rows = list(carried_curves.rows(tmp_path))
    for accelerator, error in errors.items():
        of_device = [row for row in rows if row.label.startswith(systems[accelerator])]
        assert len(of_device) == 3 * 60
        assert [row.error for row in of_device] == pytest.approx([error] * 180)
    assert all(row.held_out for row in rows)
    carried_curves.main([])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    medians = [line[5] for line in lines if line[0] == "b200" and line[3] == "carried"]
    assert medians == ["20.0"] * (3 + 4)
    # The planted errors are those of the H100's curves at every size, so tables correct them.
    corrected = [line for line in lines if line[0] == "h200" and line[3] == "with"]
    assert [line[1] for line in corrected] == list(KINDS)
    assert all(float(line[6]) < 2 for line in corrected)
    held_out = [int(line[4]) for line in lines if "fitted" in line]
    assert len(held_out) == 6 + 4
    assert all(8 < count < 50 for count in held_out)
    of_kind = [line for line in lines if line[1] == "all_reduce"]
    assert [" ".join(line[:4]).rstrip(" 0123456789") for line in of_kind] == [
        "h200 all_reduce h100, carried",
        "b200 all_reduce h100, carried",
        "b200 all_reduce b200, fitted",
        "l40s all_reduce rings",
    ]
    assert [line[-5] for line in of_kind if "fitted" not in line] == ["10.0", "20.0", "30.0"]


def test_every_device_has_an_accelerator_file_that_names_its_system() -> None:
    assert set(INSTALLED_DEVICES) == set(carried_curves._CARRIED)


def test_without_the_package_the_set_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    carried_curves.main([])
    assert capsys.readouterr().out == (
        "carried_curves is skipped: there is no aiconfigurator-core"
        " (pip install 'fxpart[aiconfigurator]')\n"
    )
