"""`Workload`: a published placement problem, with given operator times and transfer costs.

The format is that of *Efficient Algorithms for Device Placement of DNN Graph Operators* (Tarnawski
et al., NeurIPS 2020, arXiv:2006.16423; repository ``msr-fiddle/dnn-partitioning``).
`fxpart.cost.blocking` has its cost model.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray, OpGraph, csr
from fxpart.core.topology import DeviceSpec, Link, Topology, uniform_topology
from fxpart.errors import SpecError

__all__ = ["Workload", "workload_graph", "workload_topology"]

_BYTES_PER_S = 1e6
_NEVER = 1e3
"""Time of an operator on a device that cannot run it, as a multiple of the sum of all times."""


@dataclass(frozen=True, eq=False, slots=True)
class Workload:
    """Operators in topological order on equal accelerators and CPU cores.

    With n operators and m edges. Devices are numbered accelerators first, then CPU cores.
    """

    name: str
    names: tuple[str, ...]
    """Operator names. Length n."""
    accelerator_s: FloatArray
    """Time on an accelerator; infinite if it cannot run there. Shape (n,)."""
    core_s: FloatArray
    """Time on a CPU core. Shape (n,)."""
    move_s: FloatArray
    """Time to move an operator's output between an accelerator and the host. Shape (n,)."""
    size_bytes: IntArray
    """Memory of each operator on an accelerator. Shape (n,)."""
    is_backward: npt.NDArray[np.bool_]
    """Shape (n,)."""
    colour: IntArray
    """First operator of each set that must share a device. Shape (n,)."""
    sources: IntArray
    """Tail of each edge. Shape (m,)."""
    targets: IntArray
    """Head of each edge. Shape (m,)."""
    accelerators: int
    cores: int
    memory_bytes: int
    """Memory of one accelerator."""
    most_pieces: int | None = None
    """Most pieces per accelerator, each of which runs as a whole; None for any number."""

    @property
    def n_ops(self) -> int:
        """Number of operators."""
        return len(self.names)

    @property
    def n_devices(self) -> int:
        """Number of devices: accelerators, then CPU cores."""
        return self.accelerators + self.cores

    @property
    def times(self) -> FloatArray:
        """Time of each operator on each device in s, shape (n, D); infinite if it cannot run."""
        on_accelerator = np.arange(self.n_devices) < self.accelerators
        columns = np.where(on_accelerator, self.accelerator_s[:, None], self.core_s[:, None])
        return np.asarray(columns, dtype=np.float64)

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return `times` with very large instead of infinite times, since searches add them up.

        This makes a workload a `fxpart.cost.tables.LatencySource` for its graph.
        """
        times = self.times
        if times.shape != (graph.n_ops, topology.n_devices):
            raise SpecError(
                f"the times are of {times.shape[0]} operators on {times.shape[1]} devices, asked"
                f" for {graph.n_ops} on {topology.n_devices}; use the workload's own devices"
            )
        finite = np.where(np.isfinite(times), times, 0.0)
        return np.where(np.isfinite(times), times, _NEVER * max(1.0, float(finite.sum())))


def workload_graph(workload: Workload) -> OpGraph:
    """Return the workload as a graph of operators that produce one value each.

    Operator sizes become weights. The bytes of a value encode its transfer time over the links of
    `workload_topology` in microseconds; the cost model does not use them.
    """
    w, n = workload, workload.n_ops
    rows: list[list[int]] = [[] for _ in range(n)]
    for source, target in zip(w.sources.tolist(), w.targets.tolist(), strict=True):
        rows[target].append(source)
    read_start, reads = csr(rows)
    number = np.arange(n, dtype=np.int64)
    zeros = np.zeros(n, dtype=np.int64)
    none = np.zeros(0, dtype=np.int64)
    is_read = np.zeros(n, dtype=np.bool_)
    is_read[w.sources] = True
    return OpGraph(
        names=w.names,
        modules=("",) * n,
        targets=("workload.operator",) * n,
        dtypes=("float32",) * n,
        flops=zeros,
        moved_bytes=zeros,
        group=w.colour,
        value_names=w.names,
        value_producer=number,
        value_bytes=np.round(w.move_s * _BYTES_PER_S).astype(np.int64),
        value_alloc_bytes=zeros,
        value_base=np.full(n, -1, dtype=np.int64),
        value_is_output=~is_read,
        read_start=read_start,
        reads=reads,
        weight_names=w.names,
        weight_bytes=w.size_bytes,
        weight_state_bytes=zeros,
        use_start=np.arange(n + 1, dtype=np.int64),
        uses=number,
        forward_of=_forward_of(w, rows),
        gradient_values=none,
        gradient_weights=none,
    )


def _forward_of(w: Workload, reads: list[list[int]]) -> IntArray:
    """Return the forward operator of each: the first of its colour, or the latest it depends on."""
    number = np.arange(w.n_ops, dtype=np.int64)
    count = int(np.count_nonzero(~w.is_backward))
    if w.is_backward[:count].any() or not count:
        return number  # forward operators depend on backward ones, so phases cannot be ordered
    forward_of = number.copy()
    for op in range(count, w.n_ops):
        if w.colour[op] < count:
            forward_of[op] = w.colour[op]
        else:
            forward_of[op] = max((int(forward_of[read]) for read in reads[op]), default=count - 1)
    return forward_of


def workload_topology(workload: Workload) -> Topology:
    """Return the topology of its accelerators, then CPU cores, all joined by equal links."""
    w = workload
    flops, bandwidth = {"float32": 1.0}, 1.0
    # Cores have no memory limit, so make room for everything.
    host = max(1, int(w.size_bytes.sum()) + int(w.move_s.sum() * _BYTES_PER_S) + w.n_ops)
    devices = [DeviceSpec("accelerator", max(1, w.memory_bytes), flops, bandwidth)] * w.accelerators
    devices += [DeviceSpec("cpu_core", host, flops, bandwidth)] * w.cores
    return uniform_topology(tuple(devices), Link(_BYTES_PER_S))
