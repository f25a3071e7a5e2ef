"""`Calibration`: a roofline with a few coefficients fitted to measured times.

It extrapolates to operators that were never measured, in other models or at other sizes.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.core.operator_kinds import REDUCING, operator_name
from fxpart.core.topology import LEAST_RATE, Topology
from fxpart.cost.tables import same_on_every_device
from fxpart.errors import SpecError, nearest_names
from fxpart.support.json_file import read_document, what_is_wrong
from fxpart.support.whole_file import write_whole

__all__ = [
    "FRESH_BYTES",
    "Calibration",
    "compute_keys",
    "fresh_bytes",
    "is_free",
    "is_view",
    "move_keys",
    "read_calibration",
    "write_calibration",
]


# Classes of operators that share a rate, by what limits them.

FRESH_BYTES = 2**25
_WIDE = "convolution"
_FEW_PRODUCTS = 64
"""Most products per result of a narrow convolution: a 7 x 7 window on one channel has 49."""
_ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_FUNCTIONS = frozenset(
    {
        *("cos", "elu", "erf", "exp", "gelu", "log", "log_softmax", "_log_softmax", "mish", "selu"),
        *(
            "sigmoid",
            "silu",
            "sin",
            "softmax",
            "_softmax",
            "_safe_softmax",
            "softplus",
            "tan",
            "tanh",
        ),
    }
)


def compute_keys(graph: OpGraph) -> list[str]:
    """Return the class and dtype of each operator, such as ``gemm float32``. Length n.

    It is ``""`` for operators other than matrix products, convolutions and attention.
    """
    return [
        f"{_compute_class(graph, op)} {dtype}" if flops > 0 else ""
        for op, (dtype, flops) in enumerate(zip(graph.dtypes, graph.flops.tolist(), strict=True))
    ]


def _compute_class(graph: OpGraph, op: int) -> str:
    target = graph.targets[op]
    if "conv" in target:
        return "narrow convolution" if _is_narrow(graph, int(graph.forward_of[op])) else _WIDE
    return "attention" if "attention" in target else "gemm"


def _is_narrow(graph: OpGraph, op: int) -> bool:
    """Return whether a convolution sums few products per result, such as a depthwise one."""
    result = int(np.searchsorted(graph.value_producer, op))
    if result == graph.n_values or graph.value_producer[result] != op:
        return False
    results = float(graph.value_bytes[result]) / _ITEMSIZE.get(graph.dtypes[op], 4)
    return float(graph.flops[op]) <= 2 * _FEW_PRODUCTS * results


def move_keys(graph: OpGraph) -> list[str]:
    """Return what limits the memory bandwidth of each operator. Length n.

    ``function`` for elementwise functions such as ``exp``, ``reduction`` for reductions, ``""`` for
    copies, sums, and operators with FLOPs.
    """
    return [
        "" if flops > 0 else _move_class(operator_name(target))
        for target, flops in zip(graph.targets, graph.flops.tolist(), strict=True)
    ]


def _move_class(name: str) -> str:
    if name.removesuffix("_backward").removesuffix("_backward_data") in _FUNCTIONS:
        return "function"
    return "reduction" if name in REDUCING else ""


def fresh_bytes(graph: OpGraph) -> IntArray:
    """Return the bytes of each operator's results that are too large for allocator reuse. Length n.

    On a CPU, the C library maps such memory anew each time (from 32 MiB on, in glibc), and every
    page faults on first write.
    """
    large = (graph.value_alloc_bytes >= FRESH_BYTES) & (graph.value_producer >= 0)
    fresh = np.zeros(graph.n_ops, dtype=np.int64)
    np.add.at(fresh, graph.value_producer[large], graph.value_alloc_bytes[large])
    return fresh


def is_view(graph: OpGraph) -> npt.NDArray[np.bool_]:
    """Return which operators neither compute nor move bytes. Length n."""
    views: npt.NDArray[np.bool_] = (graph.flops == 0) & (graph.moved_bytes == 0)
    return views


def is_free(graph: OpGraph) -> npt.NDArray[np.bool_]:
    """Return which operators call nothing on the device and only select an item. Length n."""
    return np.array([target == "getitem" for target in graph.targets], dtype=np.bool_)


_SCHEMA, _VERSION = "fxpart-calibration", 2
_MOST_S = 1e9
"""Largest cost of an operator or a byte."""
_ADVICE = "make the folder writable, or name another one"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Roofline coefficients of one kind of device, with the errors of the fit.

    An operator takes ``overhead + flops / rate of its class and dtype + bytes / bandwidth of its
    kind``, plus `fresh_s_per_byte` for results of 32 MiB or more. A view takes `view_s`, and
    selecting an item of a tuple takes no time. Computing and moving are added, since neither hides
    the other wholly: in a small matrix product each takes a good part of the time.
    """

    overhead_s: float
    """Fixed cost of an operator that computes or moves anything."""
    view_s: float
    """Cost of an operator that only makes a view."""
    bytes_per_s: float
    """Achieved memory bandwidth of copies and sums, and of kinds not in `moves_per_s`."""
    flops_per_s: Mapping[str, float]
    """Achieved FLOP/s by class and dtype, such as ``gemm float32``."""
    device_name: str
    """Name of the measured device."""
    fresh_s_per_byte: float = 0.0
    """Cost per byte of memory that the system maps anew for each large result, as on CPUs."""
    total_errors: tuple[float, ...] = ()
    """Relative error of the total time of each fitted graph: predicted / measured - 1."""
    op_error: float = 0.0
    """Sum over operators of abs(predicted - measured), divided by the sum of measured times."""
    spearman: float = 0.0
    """Rank correlation of predicted and measured times, views left out; -1 to 1."""
    held_out_errors: tuple[float, ...] = ()
    """As `total_errors`, with each graph predicted by a fit to the others only. Of a single graph,
    the error of the total of its operators of several sizes, each quarter of the sizes predicted by
    a fit to the others. Empty if the others lack its kinds of operators."""
    moves_per_s: Mapping[str, float] = field(default_factory=dict)
    """Achieved memory bandwidth of the other kinds of `move_keys`."""
    spread: Mapping[str, float] = field(default_factory=dict)
    """Typical factor between predicted and measured times of the fitted operators, by class and
    dtype or by kind of memory traffic (``move`` for `bytes_per_s`): the exponential of the root
    mean square of its logarithm, weighted by the square root of their time."""
    lost_share: float = 0.0
    """Largest share of the time of a profile in which the processor ran other work."""

    def __post_init__(self) -> None:
        """Check that costs and rates are in range and errors are finite."""
        costs = {name: getattr(self, name) for name in ("overhead_s", "view_s", "fresh_s_per_byte")}
        rates = {"bytes_per_s": self.bytes_per_s, **self.flops_per_s, **self.moves_per_s}
        for name, cost in costs.items():
            if not 0 <= cost < _MOST_S:
                raise SpecError(
                    f"calibration: {name} must be at least 0 and below {_MOST_S:.0e} s, got {cost}"
                )
        for name, rate in rates.items():
            if not LEAST_RATE <= rate < np.inf:
                raise SpecError(
                    f"calibration: {name} must be finite and at least {LEAST_RATE:.0e}, got {rate}"
                )
        errors = (*self.total_errors, *self.held_out_errors, self.op_error, self.spearman)
        errors = (*errors, *self.spread.values(), self.lost_share)
        if not all(map(math.isfinite, errors)):
            raise SpecError("calibration: its errors must be finite numbers")
        if not 0 <= self.lost_share <= 1:
            raise SpecError(f"calibration: lost_share must be from 0 to 1, got {self.lost_share}")
        least = min((*self.total_errors, *self.held_out_errors), default=0.0)
        if least < -1:
            raise SpecError(f"calibration: a relative error must be at least -1, got {least}")

    def seconds(self, graph: OpGraph) -> FloatArray:
        """Return the time of each operator of `graph`, shape (n,).

        Raises:
            SpecError: if the graph computes in a dtype that was not calibrated.

        """
        per_flop, per_byte = self.s_per_unit(graph)
        busy = self.overhead_s + graph.flops * per_flop + graph.moved_bytes * per_byte
        busy += fresh_bytes(graph) * self.fresh_s_per_byte
        seconds = np.where(is_view(graph), self.view_s, busy)
        seconds[is_free(graph)] = 0.0
        return seconds

    def s_per_unit(self, graph: OpGraph) -> tuple[FloatArray, FloatArray]:
        """Return the seconds per FLOP and per byte of each operator of `graph`, each shape (n,).

        Raises:
            SpecError: if the graph computes in a dtype that was not calibrated.

        """
        keys, moves = compute_keys(graph), move_keys(graph)
        rate_of = {key: self._rate(key) for key in dict.fromkeys(keys)}
        rates = np.array([rate_of[key] for key in keys])
        bandwidths = np.array([self.moves_per_s.get(kind, self.bytes_per_s) for kind in moves])
        return 1.0 / rates, 1.0 / bandwidths

    def _rate(self, key: str) -> float:
        """Return FLOP/s of a class and dtype, falling back to another class of the same dtype."""
        if not key:
            return 1.0
        kind, _, dtype = key.rpartition(" ")
        same_dtype = [name for name in self.flops_per_s if name.rpartition(" ")[2] == dtype]
        fallbacks = [f"{_WIDE} {dtype}"] if _WIDE in kind else []
        for name in (key, *fallbacks, f"gemm {dtype}", *sorted(same_dtype)):
            if name in self.flops_per_s:
                return self.flops_per_s[name]
        raise SpecError(
            f"the calibration has no rate for {key}; {nearest_names(key, self.flops_per_s)};"
            f" calibrate on a model that computes in {dtype}"
        )

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D).

        It is the same on every device, since one kind of device was measured.

        Raises:
            SpecError: if the graph computes in a dtype that was not calibrated.

        """
        return same_on_every_device(self.seconds(graph), topology)


def write_calibration(path: str | Path, calibration: Calibration) -> None:
    """Write `calibration` to `path` as JSON, atomically.

    Raises:
        CacheError: if the folder cannot be written.

    """
    path, fields = Path(path), asdict(calibration)
    for rates in ("flops_per_s", "moves_per_s", "spread"):
        fields[rates] = dict(sorted(fields[rates].items()))
    document = {"schema": _SCHEMA, "version": _VERSION, **fields}
    text = json.dumps(document, indent=2) + "\n"
    write_whole(path, text, f"the calibration to {path.parent}", _ADVICE)


def read_calibration(path: str | Path) -> Calibration:
    """Read the calibration at `path`.

    Raises:
        SpecError: if the file is missing, damaged or of another kind.

    """
    path = Path(path)
    document = read_document(path, _SCHEMA, _VERSION)
    if document["version"] != _VERSION:
        raise SpecError(
            f"{path} was fitted by an older fxpart, to another formula; calibrate again"
        )
    try:
        rates, moves, spread = (
            {str(key): float(rate) for key, rate in document[field].items()}
            for field in ("flops_per_s", "moves_per_s", "spread")
        )
        return Calibration(
            float(document["overhead_s"]),
            float(document["view_s"]),
            float(document["bytes_per_s"]),
            rates,
            str(document["device_name"]),
            float(document["fresh_s_per_byte"]),
            tuple(float(error) for error in document["total_errors"]),
            float(document["op_error"]),
            float(document["spearman"]),
            tuple(float(error) for error in document["held_out_errors"]),
            moves,
            spread,
            float(document.get("lost_share", 0.0)),
        )
    except SpecError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise SpecError(f"{path} is damaged ({what_is_wrong(error)}); calibrate again") from error
