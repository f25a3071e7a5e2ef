"""`Calibration`: a roofline whose few coefficients were fitted to measured times.

It says how long operators take that were never measured: of other models, or of other sizes.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

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
    "read_calibration",
    "write_calibration",
]


# Classes of operators that share one rate, by what limits them.

FRESH_BYTES = 2**25


def compute_keys(graph: OpGraph) -> list[str]:
    """Return for each operator its class and dtype, such as ``gemm float32``. Length n.

    ``""`` for one that computes nothing (no matrix product, convolution or attention).
    """
    return [
        f"{_compute_class(target)} {dtype}" if flops > 0 else ""
        for target, dtype, flops in zip(graph.targets, graph.dtypes, graph.flops, strict=True)
    ]


def _compute_class(target: str) -> str:
    if "conv" in target:
        return "convolution"
    return "attention" if "attention" in target else "gemm"


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

    An operator takes ``overhead + max(flops / rate of its class and dtype, bytes / bytes_per_s)``
    and `fresh_s_per_byte` for results of 32 MiB or more, a view `view_s`, and the taking of an item
    from a tuple nothing.
    """

    overhead_s: float
    """Fixed cost of an operator that computes or moves anything."""
    view_s: float
    """Cost of an operator that only makes another view of its input."""
    bytes_per_s: float
    """Achieved memory bandwidth."""
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

    def __post_init__(self) -> None:
        """Refuse coefficients that make no times, or errors that are no numbers."""
        costs = {name: getattr(self, name) for name in ("overhead_s", "view_s", "fresh_s_per_byte")}
        rates = {"bytes_per_s": self.bytes_per_s, **self.flops_per_s}
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
        busy = np.maximum(graph.flops / rates, graph.moved_bytes / self.bytes_per_s)
        busy += self.overhead_s + fresh_bytes(graph) * self.fresh_s_per_byte
        seconds = np.where(is_view(graph), self.view_s, busy)
        seconds[is_free(graph)] = 0.0
        return seconds

    def _rate(self, key: str) -> float:
        """Return FLOP/s of a class and dtype; a class not sampled runs as another of its dtype."""
        if not key:
            return 1.0
        _, _, dtype = key.partition(" ")
        alike = [name for name in self.flops_per_s if name.partition(" ")[2] == dtype]
        for name in (key, f"gemm {dtype}", *sorted(alike)):
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
    fields["flops_per_s"] = dict(sorted(calibration.flops_per_s.items()))
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
        rates = {str(key): float(rate) for key, rate in document["flops_per_s"].items()}
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
        )
    except SpecError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise SpecError(f"{path} is damaged ({what_is_wrong(error)}); calibrate again") from error
