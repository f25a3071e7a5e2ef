"""`TraceTimes`: operator times from a `torch.profiler` (Kineto) trace.

An operator takes the time of a traced one of the same name, dtype and sizes, or else a time
interpolated between traced sizes. If kernels were traced, the time of an operator is that of the
kernels launched while it ran on the host; otherwise its host time.
"""

import gzip
import io
import json
import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from fxpart.core.graph import FloatArray, OpGraph
from fxpart.core.topology import Topology
from fxpart.cost.calibration import is_free, is_view
from fxpart.cost.roofline import LatencyModel
from fxpart.errors import SpecError, one_line
from fxpart.support.regular_file import read_regular

__all__ = ["Coverage", "Trace", "TraceTimes", "read_trace"]

_BYTES = {
    "double": 8,
    "float": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2": 1,
    "c10::Float8_e5m2fnuz": 1,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
    "long": 8,
    "long int": 8,
    "int": 4,
    "short": 2,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
}
_FLOATING = {
    "double": "float64",
    "float": "float32",
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e4m3fnuz": "float8_e4m3fnuz",
    "c10::Float8_e5m2": "float8_e5m2",
    "c10::Float8_e5m2fnuz": "float8_e5m2fnuz",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}
_PRODUCTS = {"mm": 0, "bmm": 0, "linear": 0, "matmul": 0, "addmm": 1, "baddbmm": 1}
"""Products, and the argument whose last dimension is summed over."""
_WRITES = {"index_put", "_index_put_impl", "_unsafe_index_put"}
"""Operators with a list of indices, of which a trace has no sizes. What they write says how much
they do; what `index` reads does not."""
_NUMBER_BYTES = 16
"""Largest number that torch wraps in a tensor of no dimensions: a trace has it as an operand of 8
or 16 bytes, a graph does not have it."""
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_MOST_BYTES = 2**30
"""Largest unpacked trace, several million operators."""
_MOST_US = {"dur": 1e12, "ts": 1e17}
"""Longest duration, eleven days, and latest time stamp."""
_ADVICE = "export one with torch.profiler.profile(record_shapes=True).export_chrome_trace(file)"


class _Call(NamedTuple):
    """The attributes that determine an operator's time."""

    name: str
    """Name without overload, such as ``aten::mm``."""
    dtype: str
    sizes: tuple[int, ...]
    """Distinct sizes in bytes of the tensors that it reads, ascending; see `_operand_sizes`."""
    depth: int
    """Size of the dimension that a product sums over; otherwise 0."""

    @property
    def work(self) -> float:
        """The quantity that its time scales with: multiplications of a product, otherwise bytes."""
        if not self.depth or not self.sizes:
            return float(max(1, sum(self.sizes)))
        left, right = (self.sizes[-2:] * 2)[:2]
        return max(1.0, left * right / self.depth)


@dataclass(frozen=True, eq=False, slots=True)
class Trace:
    """Median times of the operators of a trace."""

    seconds: Mapping[_Call, float]
    on_device: bool
    """Whether these are kernel times rather than host times."""


class Coverage(NamedTuple):
    """Number of a graph's operators (except views) covered by a trace."""

    exact: int
    interpolated: dict[str, int]
    """Counts by name of operators traced with other sizes, the most frequent first."""
    missing: dict[str, int]
    """Counts by name of operators not in the trace, for which the roofline is used."""

    def sentence(self) -> str:
        """Return the coverage as a sentence."""
        counts = {"interpolated": self.interpolated, "by the roofline": self.missing}
        total = self.exact + sum(sum(of_kind.values()) for of_kind in counts.values())
        parts = [f"{self.exact} of {total} operators at their exact sizes"]
        for how, of_kind in counts.items():
            if of_kind:
                names = ", ".join(f"{count} {name}" for name, count in of_kind.items())
                parts.append(f"{sum(of_kind.values())} {how} ({names})")
        return ", ".join(parts)


@dataclass(frozen=True, eq=False, slots=True)
class TraceTimes:
    """Operator times on the traced device."""

    trace: Trace
    roofline: LatencyModel
    """The model for operators that are not in the trace."""

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D).

        Traced times are the same on every device, since one device was traced.
        """
        seconds, _ = self._times(graph)
        missing = np.isnan(seconds)
        return np.where(
            missing[:, None], self.roofline.op_time_s(graph, topology), seconds[:, None]
        )

    def coverage(self, graph: OpGraph) -> Coverage:
        """Return how much of `graph` the trace covers."""
        return self._times(graph)[1]

    def _times(self, graph: OpGraph) -> tuple[FloatArray, Coverage]:
        """Return the time of each operator (nan if it has no traced kind) and the coverage."""
        by_kind = _by_kind(self.trace)
        # No operator takes less than the shortest traced one.
        least_s = min(seconds for seconds in self.trace.seconds.values() if seconds > 0)
        views, free = is_view(graph), is_free(graph)
        seconds = np.full(graph.n_ops, np.nan)
        exact = 0
        interpolated: Counter[str] = Counter()
        missing: Counter[str] = Counter()
        for op, target in enumerate(graph.targets):
            if free[op] or (views[op] and self.trace.on_device):
                seconds[op] = 0.0
                continue
            time_s, is_exact = self._time(_call_of(graph, op), by_kind)
            seconds[op] = time_s if is_exact else np.maximum(time_s, least_s)
            if views[op]:
                seconds[op] = np.nan_to_num(time_s)
            elif is_exact:
                exact += 1
            elif math.isnan(time_s):
                missing[target] += 1
            else:
                interpolated[target] += 1
        counts = (dict(names.most_common()) for names in (interpolated, missing))
        return seconds, Coverage(exact, *counts)

    def _time(self, call: _Call, by_kind: "_Kinds") -> tuple[float, bool]:
        """Return the time of a call (nan if unknown), and whether it is an exact match."""
        stem = call.name.removesuffix("_")
        for name in dict.fromkeys((call.name, stem, f"{stem}_")):
            traced_s = self._traced_s(call._replace(name=name))
            if traced_s is not None:
                return traced_s, True
        for name in dict.fromkeys((call.name, stem, f"{stem}_")):
            if (name, call.dtype) in by_kind:
                return _interpolated(by_kind[name, call.dtype], call.work), False
        return math.nan, False

    def _traced_s(self, call: _Call) -> float | None:
        """Return the time of the same call in the trace, or None."""
        seconds = self.trace.seconds.get(call)
        if seconds is not None or call.name.partition("::")[2].removesuffix("_") not in _WRITES:
            return seconds
        same_operands = [
            traced
            for traced in self.trace.seconds
            if traced[:2] == call[:2] and traced.sizes and set(traced.sizes) <= set(call.sizes)
        ]
        most = max(same_operands, key=lambda traced: len(traced.sizes), default=None)
        return None if most is None else self.trace.seconds[most]


_Kinds = dict[tuple[str, str], tuple[FloatArray, FloatArray]]
"""By name and dtype: ascending logarithms of work, and logarithms of seconds."""


def _by_kind(trace: Trace) -> _Kinds:
    points: defaultdict[tuple[str, str], dict[float, list[float]]] = defaultdict(dict)
    for call, seconds in trace.seconds.items():
        if seconds > 0:
            points[call.name, call.dtype].setdefault(math.log(call.work), []).append(seconds)
    return {
        kind: (
            np.array(sorted(of_kind)),
            np.array([math.log(median(of_kind[work])) for work in sorted(of_kind)]),
        )
        for kind, of_kind in points.items()
    }


def _interpolated(points: tuple[FloatArray, FloatArray], work: float) -> float:
    """Return the time at `work`, proportional to it outside the traced range."""
    works, times = points
    log_work = math.log(work)
    log_beyond = log_work - float(np.clip(log_work, works[0], works[-1]))
    return math.exp(float(np.interp(log_work, works, times)) + log_beyond)


def _call_of(graph: OpGraph, op: int) -> _Call:
    namespace, _, overload = graph.targets[op].partition(".")
    name = overload.partition(".")[0]
    sizes = [*graph.value_bytes[graph.reads_of(op)], *graph.weight_bytes[graph.uses_of(op)]]
    depth = 0
    if name in _PRODUCTS:
        first_result = int(np.searchsorted(graph.value_producer, op))
        results = int(graph.value_bytes[first_result]) if first_result < graph.n_values else 0
        element = next((_BYTES[t] for t, d in _FLOATING.items() if d == graph.dtypes[op]), 4)
        depth = int(graph.flops[op]) * element // (2 * results) if results else 0
    return _Call(f"{namespace}::{name}", graph.dtypes[op], _operand_sizes(sizes), depth)


def _operand_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the distinct sizes, ascending, without those of numbers next to larger operands.

    Operands that are all as small as a number count as one.
    """
    distinct = {int(size) for size in sizes if size}
    large = tuple(sorted(size for size in distinct if size > _NUMBER_BYTES))
    return large or ((_NUMBER_BYTES,) if distinct else ())


# Reading.


def read_trace(path: Path) -> Trace:
    """Read the times in a trace, ``.json`` or ``.json.gz``.

    Raises:
        SpecError: if the file is missing or damaged, or has no operators with shapes.

    """
    try:
        document = json.loads(_text(path))
        events = document["traceEvents"] if isinstance(document, dict) else document
        if not (isinstance(events, list) and all(isinstance(event, dict) for event in events)):
            raise SpecError(f"{path} has no list of events, as a trace has; {_ADVICE}")
        operators = [event for event in events if event.get("cat") == "cpu_op"]
        calls = [_traced_call(event) for event in operators]
        if not any(call and call.sizes for call in calls):
            raise SpecError(f"{path} has no operators with shapes; {_ADVICE}")
        on_device = any(event.get("cat") in _ON_DEVICE for event in events)
        times = _device_s(events, operators) if on_device else _host_s(operators)
        if not any(times):
            raise SpecError(f"{path} has no operator that takes time; {_ADVICE}")
    except SpecError:  # a ValueError too
        raise
    except FileNotFoundError:
        raise SpecError(f"latency.file={path}: there is no such file; {_ADVICE}") from None
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError, KeyError, EOFError, RecursionError) as error:
        raise SpecError(
            f"{path} is not a trace of torch.profiler, or is damaged ({one_line(error)}); {_ADVICE}"
        ) from error
    samples: defaultdict[_Call, list[float]] = defaultdict(list)
    for call, seconds in zip(calls, times, strict=True):
        if call is not None:
            samples[call].append(seconds)
    return Trace({call: median(of_call) for call, of_call in samples.items()}, on_device)


def _text(path: Path) -> bytes:
    packed = read_regular(path)
    if path.suffix != ".gz":
        return packed
    with gzip.open(io.BytesIO(packed)) as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise SpecError(f"{path} is more than {_MOST_BYTES >> 20} MiB unpacked; trace fewer steps")
    return text


def _traced_call(event: Mapping[str, Any]) -> _Call | None:
    arguments = event.get("args") or {}
    dims, types = arguments.get("Input Dims"), arguments.get("Input type")
    if dims is None or types is None:
        return None
    # A number has no dimensions, and the type of a double or long whatever it is combined with.
    shaped = [name for name, shape in zip(types, dims, strict=False) if name in _BYTES and shape]
    dtype = next((_FLOATING[name] for name in shaped or types if name in _FLOATING), "float32")
    list_bytes = next((_BYTES[t] for t, d in _FLOATING.items() if d == dtype), 4)
    sizes: set[int] = set()
    for name, shape in zip(types, dims, strict=False):
        if name in _BYTES:
            sizes.add(math.prod(shape) * _BYTES[name])
        elif shape and isinstance(shape[0], list):  # a list of tensors, whose dtype is not recorded
            sizes.update(math.prod(item_shape) * list_bytes for item_shape in shape)
    name = str(event["name"])
    operand = _PRODUCTS.get(name.partition("::")[2])
    depth = int(dims[operand][-1]) if operand is not None and dims[operand] else 0
    return _Call(name, dtype, _operand_sizes(sizes), depth)


def _host_s(operators: list[Mapping[str, Any]]) -> list[float]:
    return [_us(event, "dur") * 1e-6 for event in operators]


def _device_s(events: list[Mapping[str, Any]], operators: list[Mapping[str, Any]]) -> list[float]:
    """Return the total time of the kernels launched by each operator."""
    kernel_us: defaultdict[int, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in _ON_DEVICE:
            kernel_us[int(event["args"]["correlation"])] += _us(event, "dur")
    launches: defaultdict[object, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in _LAUNCHES:
            launch_us = kernel_us.get(int((event.get("args") or {}).get("correlation", -1)), 0.0)
            launches[event["pid"], event["tid"]].append((_us(event, "ts"), launch_us))
    starts: dict[object, list[float]] = {}
    sums: dict[object, list[float]] = {}
    for thread, thread_launches in launches.items():
        thread_launches.sort()
        starts[thread] = [start for start, _ in thread_launches]
        sums[thread] = [0.0, *accumulate(launch_us for _, launch_us in thread_launches)]
    seconds = []
    for event in operators:
        thread = (event["pid"], event["tid"])
        begin, thread_starts = _us(event, "ts"), starts.get(thread, [])
        first, last = (
            bisect_left(thread_starts, begin),
            bisect_right(thread_starts, begin + _us(event, "dur")),
        )
        total = sums[thread][last] - sums[thread][first] if thread_starts else 0.0
        seconds.append(max(0.0, total) * 1e-6)
    return seconds


def _us(event: Mapping[str, Any], name: str) -> float:
    number = float(event[name])
    if not 0 <= number <= _MOST_US[name]:
        raise ValueError(f"{name} is {number:g}")
    return number
