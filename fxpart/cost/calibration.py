"""`Calibration`: a roofline whose few coefficients were fitted to measured times.

It says how long operators take that were never measured: of other models, or of other sizes.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fxpart.core.fusion import REDUCING, operator_name
from fxpart.core.graph import FloatArray, IntArray, OpGraph
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


# Classes of operators that share one rate, by what limits them.

FRESH_BYTES = 2**25
_WIDE = "convolution"
_FEW_PRODUCTS = 64
"""Of a result of a narrow convolution: a window of 7 x 7 on one channel has 49."""
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
    """Return for each operator its class and dtype, such as ``gemm float32``. Length n.

    ``""`` for one that computes nothing (no matrix product, convolution or attention).
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
    """Return whether a convolution sums few products for each result, as one channel by channel."""
    made = int(np.searchsorted(graph.value_producer, op))
    if made == graph.n_values or graph.value_producer[made] != op:
        return False
    results = float(graph.value_bytes[made]) / _ITEMSIZE.get(graph.dtypes[op], 4)
    return float(graph.flops[op]) <= 2 * _FEW_PRODUCTS * results


def move_keys(graph: OpGraph) -> list[str]:
    """Return for each operator what limits how fast it moves bytes. Length n.

    ``function`` where each element takes a function such as ``exp``, ``reduction`` where several
    elements make one, ``""`` for copies and sums, and for what computes.
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
    """Return the bytes of each operator's results too large to be kept for reuse. Length n.

    The C library of a CPU asks the system for such memory anew each time (from 32 MiB on, in
    glibc), and the system hands it over page by page as it is first written.
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
    """Return which operators call nothing on the device: they only take an item. Length n."""
    return np.array([target == "getitem" for target in graph.targets], dtype=np.bool_)


_SCHEMA, _VERSION = "fxpart-calibration", 1
_MOST_S = 1e9
"""Most that an operator, or a byte, may cost."""
_ADVICE = "make the folder writable, or name another one"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Coefficients of the roofline of one kind of device, and how well they fit.

    An operator takes ``overhead + max(flops / rate of its class and dtype, bytes / rate of moving
    its kind)`` and `fresh_s_per_byte` for results of 32 MiB or more, a view `view_s`, and the
    taking of an item from a tuple nothing.
    """

    overhead_s: float
    """Fixed cost of an operator that computes or moves anything."""
    view_s: float
    """Cost of an operator that only makes another view of its input."""
    bytes_per_s: float
    """Achieved memory bandwidth of copies and sums, and of kinds that `moves_per_s` lacks."""
    flops_per_s: Mapping[str, float]
    """Achieved FLOP/s by class and dtype, such as ``gemm float32``."""
    device_name: str
    """What the times were measured on."""
    fresh_s_per_byte: float = 0.0
    """Cost of memory that the system hands over anew for each large result, as it does on CPUs."""
    total_errors: tuple[float, ...] = ()
    """Of each graph that was fitted: predicted sum of times / measured sum - 1."""
    op_error: float = 0.0
    """Sum over operators of abs(predicted - measured), divided by the sum of measured times."""
    spearman: float = 0.0
    """Rank correlation of predicted and measured times, views left out; -1 to 1."""
    held_out_errors: tuple[float, ...] = ()
    """Of each graph, as `total_errors`, where it is predicted by a fit to the others alone; empty
    for a single graph."""
    moves_per_s: Mapping[str, float] = field(default_factory=dict)
    """Achieved memory bandwidth of the other kinds of `move_keys`."""
    spread: Mapping[str, float] = field(default_factory=dict)
    """By class and dtype, or kind of moving (``move`` of `bytes_per_s`): the typical factor between
    what is predicted and measured of the operators that were fitted, the exponential of the root
    mean square of its logarithm, weighted by the root of their time."""

    def __post_init__(self) -> None:
        """Refuse coefficients that make no times, or errors that are no numbers."""
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
        errors = (*errors, *self.spread.values())
        if not all(map(math.isfinite, errors)):
            raise SpecError("calibration: its errors must be finite numbers")

    def seconds(self, graph: OpGraph) -> FloatArray:
        """Return the time of each operator of `graph`, shape (n,).

        Raises:
            SpecError: for a graph that computes in a dtype that was not in the sample.

        """
        keys = compute_keys(graph)
        rate_of = {key: self._rate(key) for key in dict.fromkeys(keys)}
        rates = np.array([rate_of[key] for key in keys])
        moves = [self.moves_per_s.get(kind, self.bytes_per_s) for kind in move_keys(graph)]
        busy = np.maximum(graph.flops / rates, graph.moved_bytes / np.array(moves))
        busy += self.overhead_s + fresh_bytes(graph) * self.fresh_s_per_byte
        seconds = np.where(is_view(graph), self.view_s, busy)
        seconds[is_free(graph)] = 0.0
        return seconds

    def _rate(self, key: str) -> float:
        """Return FLOP/s of a class and dtype; a class not sampled runs as another of its dtype."""
        if not key:
            return 1.0
        kind, _, dtype = key.rpartition(" ")
        alike = [name for name in self.flops_per_s if name.rpartition(" ")[2] == dtype]
        near = [f"{_WIDE} {dtype}"] if _WIDE in kind else []
        for name in (key, *near, f"gemm {dtype}", *sorted(alike)):
            if name in self.flops_per_s:
                return self.flops_per_s[name]
        raise SpecError(
            f"the calibration has no rate for {key}; {nearest_names(key, self.flops_per_s)};"
            f" calibrate on a model that computes in {dtype}"
        )

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D).

        The same on every device: one kind of device was measured.

        Raises:
            SpecError: for a graph that computes in a dtype that was not in the sample.

        """
        return same_on_every_device(self.seconds(graph), topology)


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write `calibration` to `path` as JSON, whole or not at all.

    Raises:
        CacheError: when the folder cannot be written.

    """
    fields = asdict(calibration)
    for rates in ("flops_per_s", "moves_per_s", "spread"):
        fields[rates] = dict(sorted(fields[rates].items()))
    document = {"schema": _SCHEMA, "version": _VERSION, **fields}
    text = json.dumps(document, indent=2) + "\n"
    write_whole(path, text, f"the calibration to {path.parent}", _ADVICE)


def read_calibration(path: Path) -> Calibration:
    """Return the calibration at `path`.

    Raises:
        SpecError: when there is none, or the file is damaged or of another kind.

    """
    document = read_document(path, _SCHEMA, _VERSION)
    try:
        # Files that were written before lack the last two.
        rates, moves, spread = (
            {str(key): float(rate) for key, rate in by_kind.items()}
            for by_kind in (
                document["flops_per_s"],
                document.get("moves_per_s", {}),
                document.get("spread", {}),
            )
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
            # Files that were written before have none.
            tuple(float(error) for error in document.get("held_out_errors", ())),
            moves,
            spread,
        )
    except SpecError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise SpecError(f"{path} is damaged ({what_is_wrong(error)}); calibrate again") from error
