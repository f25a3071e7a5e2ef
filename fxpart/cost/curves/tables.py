"""Tables of measured kernels: read from parquet files and interpolated.

Files are named ``<device>_<kind>.parquet``, such as ``h100_sxm_gemm.parquet``, in the format of
ai-dynamo/aiconfigurator: kinds `gemm`, `context_attention` and `generation_attention`, latencies in
ms. The logarithm of measured over predicted time is interpolated between the nearest rows in log
sizes; it decays to 0, and so to the curve, far from every row. Rows measured with operands in the
device's cache, where a run does not find them, are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from errno import ENOENT
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray
from fxpart.cost.curves.attention import AttentionCurve, Attentions, DecodeCurve
from fxpart.cost.curves.family import CurveFamily
from fxpart.cost.curves.gemm import GemmCurve, Products, Rates
from fxpart.errors import SpecError, one_line

if TYPE_CHECKING:
    from scipy.spatial import cKDTree

__all__ = [
    "KINDS",
    "FolderTables",
    "MeasuredCalls",
    "MeasuredTables",
    "Residuals",
    "measured_calls",
    "read_columns",
    "residuals_of_files",
    "rows_from_memory",
]

KINDS = {"gemm": "gemm", "context_attention": "attention", "generation_attention": "decode"}
"""Curve of each kind of table."""
_SIZES = {
    "gemm": ("m", "n", "k"),
    "context_attention": (
        "batch_size",
        "isl",
        "num_heads",
        "num_key_value_heads",
        "head_dim",
        "window_size",
    ),
}
_SIZES["generation_attention"] = (*_SIZES["context_attention"], "step")
_DTYPE = {"gemm": "gemm_dtype"}
_NEIGHBOURS = 8
_FAR = 2.0
"""Distance in octaves at which a row has the same weight as the prior of no correction."""
_NEAR = 1e-6
_WARM_SHARE, _WARM_ROWS = 0.01, 10
"""Least share and number of rows faster than memory in a table measured with a warm cache. In
aiconfigurator's tables of an L40S the shares are 1.5, 8 and 14 % for prompts, tokens and products;
in those of other devices they are below 0.2 %."""
_MOST_CACHE_BYTES = 128e6
"""More than the last-level cache of any device (B200: 126 MB)."""
_READING = 0.25
"""Largest share of the time for reading from memory in a row that hardly depends on the cache."""
_FALLBACK = 10.0
"""Least ratio of measured to predicted time in a row of a fallback kernel, which is no measure of
its neighbours: attention with heads of 512, say, took 70 times as long as its curve on an H200."""
_MAY_BE_0 = ("window_size", "step")
_Calls = TypeVar("_Calls", Products, Attentions)


class MeasuredCalls(NamedTuple, Generic[_Calls]):
    """Rows of a table."""

    calls: _Calls
    seconds: FloatArray
    sizes: dict[str, list[float]]
    """The columns that identify the measured call."""


def read_columns(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Read the columns of a parquet file; `latency` is in ms.

    Raises:
        FileNotFoundError: if there is no such file.
        SpecError: if it is damaged, or pyarrow is not installed.

    """
    if not path.is_file():
        raise FileNotFoundError(ENOENT, "there is no table", str(path))
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError as error:
        raise SpecError(f"reading {path} needs pyarrow; install it") from error
    try:
        read = pyarrow.parquet.read_table(path)
        return {name: read[name].to_numpy() for name in read.column_names}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SpecError(f"{path} is not a parquet table ({one_line(error)})") from error


def measured_calls(path: Path, kind: str, dtype: str) -> MeasuredCalls[Any]:
    """Return the rows of a file for products, or cached keys and values, in `dtype`.

    Raises:
        FileNotFoundError: if there is no such file.
        SpecError: if it is damaged, lacks a column, or has an invalid size or latency.

    """
    columns = read_columns(path)
    of_dtype = _DTYPE.get(kind, "kv_cache_dtype")
    needed = {of_dtype, *_SIZES[kind], "latency"} - {"window_size"}
    if missing := sorted(needed - columns.keys()):
        raise SpecError(f"{path} has no column {', '.join(missing)}; it has {', '.join(columns)}")
    columns.setdefault("window_size", np.zeros(len(columns[of_dtype])))
    chosen = columns[of_dtype] == dtype
    try:
        sizes = {name: columns[name][chosen].astype(np.float64) for name in _SIZES[kind]}
        seconds = columns["latency"][chosen].astype(np.float64) * 1e-3
    except (TypeError, ValueError) as error:
        raise SpecError(f"{path}: a size or latency is not a number ({one_line(error)})") from error
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        raise SpecError(f"{path}: a latency is not a positive number of ms")
    for name, column in sizes.items():
        least = 0 if name in _MAY_BE_0 else 1
        if not (np.isfinite(column) & (column >= least)).all():
            raise SpecError(f"{path}: {name} is not a number from {least} in every row")
    calls = _products(sizes, dtype) if kind == "gemm" else _attentions(sizes, dtype)
    return MeasuredCalls(calls, seconds, {name: size.tolist() for name, size in sizes.items()})


def _products(sizes: dict[str, FloatArray], dtype: str) -> Products:
    ones = np.ones(len(sizes["m"]))
    operand = 1.0 if dtype.startswith("fp8") else 2.0
    return Products(ones, sizes["m"], sizes["n"], sizes["k"], operand * ones, 2 * ones)


def _attentions(sizes: dict[str, FloatArray], dtype: str) -> Attentions:
    ones = np.ones(len(sizes["batch_size"]))
    decodes = "step" in sizes
    return Attentions(
        batch=sizes["batch_size"],
        queries=ones if decodes else sizes["isl"],
        keys=sizes["step"] + 1 if decodes else sizes["isl"],
        heads=sizes["num_heads"],
        key_heads=sizes["num_key_value_heads"],
        head_size=sizes["head_dim"],
        window=sizes["window_size"],
        causal=ones,
        element_bytes=2 * ones,
        cache_bytes=(1.0 if dtype == "fp8" else 2.0) * ones,
    )


class MeasuredTables(Protocol):
    """Measured 16-bit kernels, for families of devices or for particular accelerators."""

    def read(self, accelerator: str, family: str, curves: CurveFamily) -> dict[str, "Residuals"]:
        """Return the residuals of an accelerator's kernels by curve; empty if it has no tables.

        Args:
            accelerator: name of the device, such as ``h100``.
            family: name of the family whose curves it uses.
            curves: these curves.

        Raises:
            SpecError: if a table is missing or damaged.

        """

    def label(self, accelerator: str, family: str) -> str:
        """Return which tables an accelerator takes; empty if it has none."""


@dataclass(frozen=True, slots=True)
class FolderTables:
    """The tables of a folder, whose file names begin with those of families."""

    folder: Path

    def __str__(self) -> str:
        """Return the path of the folder."""
        return str(self.folder)

    def read(
        self,
        accelerator: str,
        family: str,
        curves: CurveFamily,
    ) -> dict[str, "Residuals"]:
        """Return the residuals of a family's kernels by curve.

        Raises:
            SpecError: if the folder has no table of the family, a table is damaged, or
                `curves.measured_on` is missing.

        """
        if curves.measured_on is None:
            raise SpecError(
                f"latency.tables={self} needs the rates of the device of {family} that was"
                f" measured: state latency.curves.{family}.measured_on"
            )
        found = {kind: sorted(self.folder.glob(f"{family}_*{kind}.parquet")) for kind in KINDS}
        paths = {kind: of_kind[0] for kind, of_kind in found.items() if of_kind}
        if not paths:
            raise SpecError(
                f"latency.tables={self} has no table of {family}; name a folder with files such as"
                f" {family}_sxm_gemm.parquet"
            )
        return residuals_of_files(paths, curves, curves.measured_on)

    def label(self, accelerator: str, family: str) -> str:
        """Return the name of the family."""
        return family


def residuals_of_files(
    paths: Mapping[str, Path], curves: CurveFamily, rates: Rates
) -> dict[str, "Residuals"]:
    """Return the residuals of the 16-bit kernels in files, by curve.

    Files are cached until they change.

    Args:
        paths: the file of each kind of table.
        curves: the curves that the residuals correct.
        rates: the rates in bfloat16 of the device that was measured.

    Raises:
        SpecError: if a table is missing or damaged.

    """
    residuals: dict[str, Residuals] = {}
    for kind, path in paths.items():
        name = KINDS[kind]
        try:
            status = path.stat()
            version = status.st_mtime_ns, status.st_size
            residuals[name] = _residuals(path, version, kind, getattr(curves, name), rates)
        except OSError as error:
            raise SpecError(f"{path} cannot be read ({one_line(error)})") from error
    return residuals


@lru_cache(maxsize=16)
def _residuals(
    path: Path,
    version: tuple[int, int],  # part of the cache key
    kind: str,
    curve: GemmCurve | AttentionCurve | DecodeCurve,
    rates: Rates,
) -> "Residuals":
    measured = measured_calls(path, kind, "bfloat16")
    rows = rows_from_memory(measured.calls, measured.seconds, rates.bytes_per_s)
    calls, seconds = measured.calls.only(rows), measured.seconds[rows]
    return Residuals.of(calls, seconds, curve.seconds(calls, rates))


def rows_from_memory(
    calls: Products | Attentions, seconds: FloatArray, bytes_per_s: float
) -> IntArray:
    """Return the rows of a table whose operands were read from memory, as in a run.

    A row that is faster than memory was repeated with its operands in the last-level cache. If
    more than `_WARM_SHARE` of the rows are, and `_WARM_ROWS`, the others were measured in the same
    way: then only those count that no cache holds, or that take much longer than reading.
    """
    moved_bytes, memory_bytes = _moved_bytes(calls), seconds * bytes_per_s
    is_faster = moved_bytes > memory_bytes
    counts = ~is_faster
    if is_faster.sum() > max(_WARM_ROWS - 1, _WARM_SHARE * len(seconds)):
        counts &= (moved_bytes >= _MOST_CACHE_BYTES) | (moved_bytes <= _READING * memory_bytes)
    return np.flatnonzero(counts)


def _moved_bytes(calls: Products | Attentions) -> FloatArray:
    """Return the bytes of operands and results, without what prompts add to a cache."""
    if isinstance(calls, Products):
        operands = (calls.m + calls.n) * calls.k * calls.operand_bytes
        return calls.batch * (operands + calls.m * calls.n * calls.result_bytes)
    reach = np.where(calls.window > 0, calls.window + calls.queries - 1, calls.keys)
    kept_bytes = np.where(calls.cache_bytes > 0, calls.cache_bytes, calls.element_bytes)
    cache = 2 * calls.key_heads * np.minimum(reach, calls.keys) * kept_bytes
    passed = 2 * calls.heads * calls.queries * calls.element_bytes
    return calls.batch * calls.head_size * (cache + passed)


# No slots, because of the cached property.
@dataclass(frozen=True, eq=False)
class Residuals:
    """Residuals of measured times relative to a curve, by the sizes of the calls."""

    places: FloatArray
    """Logarithms to base 2 of the sizes, shape (rows, sizes)."""
    log_ratio: FloatArray
    """Natural logarithm of measured over predicted time. Length rows."""

    @classmethod
    def of(
        cls, calls: Products | Attentions, seconds: FloatArray, predicted: FloatArray
    ) -> "Residuals":
        """Return the residuals of the measured `seconds` of `calls`, but for fallback kernels."""
        usual = np.flatnonzero(seconds < _FALLBACK * predicted)
        return cls(_places(calls.only(usual)), np.log(seconds[usual] / predicted[usual]))

    @cached_property
    def _tree(self) -> "cKDTree":
        from scipy.spatial import cKDTree

        return cKDTree(self.places)

    def is_near(self, calls: Products | Attentions) -> npt.NDArray[np.bool_]:
        """Return whether a row within `_FAR` of each call was measured."""
        places = _places(calls)
        if not len(self.places) or not len(places):
            return np.zeros(len(places), dtype=np.bool_)
        distance, _ = self._tree.query(places)
        return np.asarray(distance <= _FAR)

    def factor(self, calls: Products | Attentions) -> FloatArray:
        """Return the factor that corrects the curve's times; 1 far from all rows."""
        places = _places(calls)
        count = min(_NEIGHBOURS, len(self.places))
        if not count or not len(places):
            return np.ones(len(places))
        distance, rows = self._tree.query(places, k=count)
        distance = np.asarray(distance).reshape(len(places), count)
        weight = 1.0 / (distance + _NEAR) ** 2
        neighbour_log_ratio = self.log_ratio[np.asarray(rows).reshape(len(places), count)]
        total = weight.sum(axis=1) + 1.0 / _FAR**2
        factor: FloatArray = np.exp((weight * neighbour_log_ratio).sum(axis=1) / total)
        return factor


def _places(calls: Products | Attentions) -> FloatArray:
    """Return the coordinates of calls; attention counts sequences times key heads as one."""
    columns: tuple[FloatArray, ...] = calls
    if isinstance(calls, Attentions):
        groups = calls.batch * calls.key_heads
        columns = (groups, calls.heads / calls.key_heads, *calls[1:3], *calls[5:8])
    return np.column_stack([np.log2(1 + column) for column in columns])
