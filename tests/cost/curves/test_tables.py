"""Measured tables: exact at a row, the curve far from all rows; damaged tables are refused."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from fxpart.core.topology import DeviceSpec, Link, uniform_topology
from fxpart.cost.curves.attention import Attentions
from fxpart.cost.curves.family import CurveFamily, family_from
from fxpart.cost.curves.gemm import Products, Rates
from fxpart.cost.curves.model import KernelModel
from fxpart.cost.curves.tables import FolderTables, Residuals, measured_calls, rows_from_memory
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import SpecError
from tests.cost.curves.test_curves import GEMM, graph_of_a_product, settings

RATES = Rates(1e6, 1e6, 4)


def _table(path: Path, **columns: list[object]) -> Path:
    whole = {"gemm_dtype": ["bfloat16"], "m": [16], "n": [4], "k": [8], "latency": [5000.0]}
    pyarrow.parquet.write_table(pa.table({**whole, **columns}), path)
    return path


def _products(*rows: tuple[float, float, float]) -> Products:
    m, n, k = np.array(rows, dtype=np.float64).T
    ones = np.ones(len(rows))
    return Products(ones, m, n, k, 2 * ones, 2 * ones)


def test_a_row_is_reproduced_and_far_from_all_rows_the_curve_holds() -> None:
    calls = _products((64, 64, 64), (512, 64, 64))
    residuals = Residuals.of(calls, np.array([2.0, 3.0]), np.array([1.0, 1.0]))
    assert residuals.factor(calls) == pytest.approx([2, 3], rel=1e-3)
    between, distant = residuals.factor(_products((181, 64, 64), (64, 64, 2**40)))
    assert 2 < between < 3
    assert distant == pytest.approx(1, abs=0.02)
    assert residuals.is_near(_products((181, 64, 64), (64, 64, 2**40))).tolist() == [True, False]


def _family(**more: object) -> CurveFamily:
    rates = dict(zip(Rates._fields, RATES, strict=True))
    return family_from("f", {**settings(), "measured_on": rates, **more})


def _device(name: str, *, share: float = 1.0, curves: str = "f") -> DeviceSpec:
    rates = {"bfloat16": 1e6 * share, "float32": 1e6}
    return DeviceSpec(name, 10**9, rates, 1e6 * share, 0, 0, 4, curves)


def test_only_16_bit_products_use_the_tables_of_the_family(tmp_path: Path) -> None:
    _table(tmp_path / "f_sxm_gemm.parquet")
    # Whatever its name; a slow device is as far from its curve as the measured one.
    devices = (_device("f_80gb"), _device("another"), _device("f_slow", share=0.01))
    topology = uniform_topology(devices, Link(1e9))
    curves = KernelModel({"f": _family()}, LatencyModel())
    tables = KernelModel({"f": _family()}, LatencyModel(), FolderTables(tmp_path))
    in_16_bits, in_32_bits = graph_of_a_product("bfloat16"), graph_of_a_product("float32")
    plain = curves.op_time_s(in_16_bits, topology)
    measured = tables.op_time_s(in_16_bits, topology)
    assert measured[0, :2] == pytest.approx([5.0, 5.0], rel=1e-3)
    assert plain[0, 0] < 3
    assert plain[0, 2] > 2 * plain[0, 0]
    assert measured[0] / plain[0] == pytest.approx([5.0 / plain[0, 0]] * 3, rel=1e-3)
    assert measured[1].tolist() == plain[1].tolist()
    single = tables.op_time_s(in_32_bits, topology)
    assert single.tolist() == curves.op_time_s(in_32_bits, topology).tolist()
    assert tables.table_coverage(in_16_bits, "card", "f") == (1, 1)
    assert tables.table_coverage(in_32_bits, "card", "f") == (0, 1)


def test_a_table_is_read_again_only_if_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _table(tmp_path / "f_sxm_gemm.parquet")
    reads: list[Path] = []
    read_table = pyarrow.parquet.read_table

    def counted(file: Path) -> pa.Table:
        reads.append(file)
        return read_table(file)

    monkeypatch.setattr(pyarrow.parquet, "read_table", counted)
    first, second = (FolderTables(tmp_path).read("card", "f", _family())["gemm"] for _ in range(2))
    assert first is second
    assert len(reads) == 1
    _table(path, latency=[2500.0])
    os.utime(path, ns=(1, 1))
    other = FolderTables(tmp_path).read("card", "f", _family())["gemm"]
    assert other.log_ratio == pytest.approx(first.log_ratio - np.log(2))


def test_tables_of_unknown_devices_are_refused(tmp_path: Path) -> None:
    _table(tmp_path / "f_sxm_gemm.parquet")
    with pytest.raises(SpecError, match=r"state latency\.curves\.f\.measured_on"):
        FolderTables(tmp_path).read("card", "f", family_from("f", settings()))
    with pytest.raises(SpecError, match=r"f\.measured_on\.bytes_per_s must be more than 0"):
        _family(measured_on={"flops_per_s": 1, "bytes_per_s": 0, "multiprocessors": 1})


def test_rows_measured_in_a_cache_are_left_out() -> None:
    # Two bytes for each of 2^20 + 2 x 2^10 elements, read in 1 s: 2,101,248 bytes/s.
    row = (1024.0, 1024.0, 1.0)
    calls = _products(*[row] * 200)
    seconds = np.ones(200)
    assert len(rows_from_memory(calls, seconds, 2_101_248)) == 200
    # One of 200 is an accident.
    seconds[7] = 0.5
    slower = [place for place in range(200) if place != 7]
    assert rows_from_memory(calls, seconds, 2_101_248).tolist() == slower
    # So are nine, as in a small table.
    seconds[:9] = 0.5
    assert rows_from_memory(calls, seconds, 2_101_248).tolist() == list(range(9, 200))
    # With ten, all were in a cache: a row counts if it takes four times as long as reading.
    seconds[9] = 0.5
    seconds[10] = 4
    assert rows_from_memory(calls, seconds, 2_101_248).tolist() == [10]
    # No cache holds 2 x 64e6 bytes of keys and values.
    one = np.ones(2)
    sizes = np.array([32e6, 31e6])
    tokens = Attentions(one, one, sizes, one, one, one, 0 * one, one, 2 * one, 2 * one)
    warm = Attentions(*(np.concatenate([column, column[:1].repeat(10)]) for column in tokens))
    rows = rows_from_memory(warm, np.array([1.0, 1.0, *[0.5] * 10]), 4 * 32e6 + 4)
    assert rows.tolist() == [0]


def test_windows_and_prompts_limit_what_is_read() -> None:
    # 8 tokens of a prompt, 2 heads of 4 numbers each, of 2 bytes: queries, keys, values, results.
    one = np.ones(2)
    window = np.array([0.0, 0.0])
    calls = Attentions(one, 8 * one, 8 * one, 2 * one, 2 * one, 4 * one, window, one, 2 * one, one)
    kept_bytes, passed_bytes = 2 * 2 * 8 * 4 * 1, 2 * 2 * 8 * 4 * 2
    seconds = np.array([kept_bytes + passed_bytes, kept_bytes + passed_bytes - 1], dtype=float)
    assert rows_from_memory(calls, seconds, 1.0).tolist() == [0]
    # A token that sees the last 3 of its 8 keys.
    token = Attentions(one, one, 8 * one, 2 * one, 2 * one, 4 * one, 3 * one, one, 2 * one, one)
    seconds = np.array([2 * 2 * 3 * 4 * 1 + 2 * 2 * 4 * 2] * 2, dtype=float) - [0, 1]
    assert rows_from_memory(token, seconds, 1.0).tolist() == [0]


def test_rows_of_fallback_kernels_are_left_out(tmp_path: Path) -> None:
    family = _family()
    assert family.measured_on is not None
    calls = _products((16, 4, 8), (16, 8, 8))
    usual, slow = family.gemm.seconds(calls, family.measured_on) * [4.0, 11.0]
    _table(
        tmp_path / "f_gemm.parquet",
        gemm_dtype=["bfloat16", "bfloat16"],
        m=[16, 16],
        n=[4, 8],
        k=[8, 8],
        latency=[usual * 1e3, slow * 1e3],
    )
    residuals = FolderTables(tmp_path).read("card", "f", family)["gemm"]
    assert np.exp(residuals.log_ratio).tolist() == pytest.approx([4.0])


def test_rows_of_another_dtype_are_skipped(tmp_path: Path) -> None:
    path = _table(
        tmp_path / "f_gemm.parquet",
        gemm_dtype=["fp8", "bfloat16"],
        m=[1, 2],
        n=[4, 4],
        k=[8, 8],
        latency=[1.0, 2.0],
    )
    measured = measured_calls(path, "gemm", "bfloat16")
    assert measured.calls.m.tolist() == [2]
    assert measured.seconds.tolist() == [0.002]
    assert measured.sizes == {"m": [2], "n": [4], "k": [8]}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"latency": [0.0]}, "a latency is not a positive number of ms"),
        ({"latency": [float("nan")]}, "a latency is not a positive number of ms"),
        ({"m": ["many"]}, "a size or latency is not a number"),
        ({"m": [float("nan")]}, r"m is not a number from 1 in every row"),
        ({"k": [0]}, r"k is not a number from 1 in every row"),
        ({"n": [-4]}, r"n is not a number from 1 in every row"),
        ({"gemm_dtype": None}, r"has no column gemm_dtype; it has m, n, k, latency"),
    ],
)
def test_a_damaged_table_is_refused(
    tmp_path: Path, columns: dict[str, list[object] | None], message: str
) -> None:
    whole: dict[str, list[object]] = {
        "gemm_dtype": ["bfloat16"],
        "m": [16],
        "n": [4],
        "k": [8],
        "latency": [1.0],
    }
    for name, values in columns.items():
        if values is None:
            del whole[name]
        else:
            whole[name] = values
    path = tmp_path / "f_gemm.parquet"
    pyarrow.parquet.write_table(pa.table(whole), path)
    with pytest.raises(SpecError, match=message):
        FolderTables(tmp_path).read("card", "f", _family())


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    family = _family()
    with pytest.raises(SpecError, match=r"has no table of f; .* such as f_sxm_gemm\.parquet"):
        FolderTables(tmp_path).read("card", "f", family)
    (tmp_path / "f_gemm.parquet").mkdir()
    with pytest.raises(SpecError, match=r"f_gemm\.parquet cannot be read \(.*there is no table"):
        FolderTables(tmp_path).read("card", "f", family)
    (tmp_path / "f_gemm.parquet").rmdir()
    (tmp_path / "f_gemm.parquet").write_text("m,n,k")
    with pytest.raises(SpecError, match="is not a parquet table"):
        FolderTables(tmp_path).read("card", "f", family)
    assert family.gemm == GEMM
