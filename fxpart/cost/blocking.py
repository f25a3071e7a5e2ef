"""The published cost model: transfers that block a device and are paid on both of its sides.

That of *Efficient Algorithms for Device Placement of DNN Graph Operators* (arXiv:2006.16423). Two
values: the largest load of any device, and the time of one sample where what an accelerator holds
runs as one piece. `Workload` has the numbers; devices are accelerators first, then CPU cores.
"""

import numpy as np

from fxpart.core.graph import FloatArray, IntArray, csr
from fxpart.core.workload import Workload
from fxpart.errors import InfeasibleError, show_bytes
from fxpart.support.compiled import compiled

__all__ = [
    "device_loads_s",
    "latency_of_pieces",
    "piece_latency",
    "refuse_unfit",
    "sample_latency_s",
]


def device_loads_s(workload: Workload, device_of: IntArray) -> FloatArray:
    """Return the load of each device in s a sample; `device_of` (n,). Shape (D,).

    An accelerator pays for its operators, and once for each output that crosses its border, in or
    out; a CPU core for its operators alone.
    """
    w = workload
    here = np.where(device_of < w.accelerators, w.accelerator_s, w.core_s)
    loads = np.bincount(device_of, weights=here, minlength=w.n_devices)
    apart = device_of[w.sources] != device_of[w.targets]
    crossing = w.sources[apart]
    ends = np.concatenate([device_of[crossing], device_of[w.targets[apart]]])
    # One line for each output and device, however many edges carry it there.
    paid = np.unique(np.stack([np.tile(crossing, 2), ends]), axis=1)
    np.add.at(loads, paid[1], np.where(paid[1] < w.accelerators, w.move_s[paid[0]], 0.0))
    return np.asarray(loads, dtype=np.float64)


def sample_latency_s(workload: Workload, device_of: IntArray) -> float:
    """Return when one sample is through, in s; infinite where pieces wait for each other.

    What an accelerator holds is one piece: it starts when all it reads is there, and takes its
    operators, the outputs it reads and those of its own that are read elsewhere, one after the
    other. There are CPU cores for all.
    """
    pieces = np.where(device_of < workload.accelerators, device_of, -1)
    return piece_latency(workload, pieces, workload.accelerators)


def piece_latency(workload: Workload, pieces: IntArray, count: int) -> float:
    """Return when one sample is through, in s, given the piece of each operator, -1 on the CPU."""
    w = workload
    rows: list[list[int]] = [[] for _ in range(w.n_ops)]
    for u, v in zip(w.sources.tolist(), w.targets.tolist(), strict=True):
        rows[u].append(v)
    seconds = latency_of_pieces(*csr(rows), w.accelerator_s, w.core_s, w.move_s, pieces, count)
    return float(seconds)


@compiled
def latency_of_pieces(  # noqa: PLR0912, PLR0915, PLR0917 - compiled: one loop, all by position
    start: IntArray,
    after: IntArray,
    accelerator_s: FloatArray,
    core_s: FloatArray,
    move_s: FloatArray,
    pieces: IntArray,
    count: int,
) -> float:
    """Return when one sample is through, in s, given the piece of each operator, -1 on the CPU.

    `start` and `after` are CSR by operator: those that read it. The graph is walked with each piece
    as one vertex, the last `count` of n + count.
    """
    n = pieces.shape[0]
    takes = np.zeros(n + count)
    waits = np.zeros(n + count, dtype=np.int64)
    ready = np.zeros(n + count)
    seen = np.full(n + count, -1, dtype=np.int64)
    for u in range(n):
        here = n + pieces[u] if pieces[u] >= 0 else u
        takes[here] += accelerator_s[u] if pieces[u] >= 0 else core_s[u]
        crosses = False
        for i in range(start[u], start[u + 1]):
            v = after[i]
            there = n + pieces[v] if pieces[v] >= 0 else v
            if there == here:
                continue
            crosses = True
            waits[there] += 1
            if there >= n and seen[there] != u:
                seen[there] = u
                takes[there] += move_s[u]
        if crosses and here >= n:
            takes[here] += move_s[u]
    member_start = np.zeros(count + 1, dtype=np.int64)
    for u in range(n):
        if pieces[u] >= 0:
            member_start[pieces[u] + 1] += 1
    member_start = np.cumsum(member_start)
    members = np.empty(member_start[count], dtype=np.int64)
    filled = member_start[:count].copy()
    for u in range(n):
        if pieces[u] >= 0:
            members[filled[pieces[u]]] = u
            filled[pieces[u]] += 1
    queue = np.empty(n + count, dtype=np.int64)
    tail, expected = 0, 0
    for vertex in range(n + count):
        real = vertex >= n or pieces[vertex] < 0
        expected += real
        if real and waits[vertex] == 0:
            queue[tail] = vertex
            tail += 1
    latest, head = 0.0, 0
    while head < tail:
        vertex = queue[head]
        head += 1
        finish = ready[vertex] + takes[vertex]
        latest = max(latest, finish)
        first = member_start[vertex - n] if vertex >= n else vertex
        last = member_start[vertex - n + 1] if vertex >= n else vertex + 1
        for m in range(first, last):
            u = members[m] if vertex >= n else m
            for i in range(start[u], start[u + 1]):
                v = after[i]
                there = n + pieces[v] if pieces[v] >= 0 else v
                if there == vertex:
                    continue
                ready[there] = max(ready[there], finish)
                waits[there] -= 1
                if waits[there] == 0:
                    queue[tail] = there
                    tail += 1
    return latest if tail == expected else np.inf


def refuse_unfit(workload: Workload, device_of: IntArray) -> None:
    """Refuse a placement that the published rules rule out.

    Raises:
        InfeasibleError: for colours that part, an operator where it cannot run, too much on an
            accelerator, or more pieces on it than `Workload.most_pieces`.

    """
    w = workload
    parted = np.flatnonzero(device_of != device_of[w.colour])
    if len(parted):
        raise InfeasibleError(
            f"{w.names[int(parted[0])]} is on device {device_of[parted[0]]}, an operator of its"
            f" colour on device {device_of[w.colour[parted[0]]]}; they must share one"
        )
    on_accelerator = device_of < w.accelerators
    astray = np.flatnonzero(on_accelerator & np.isinf(w.accelerator_s))
    if len(astray):
        raise InfeasibleError(
            f"{w.names[int(astray[0])]} runs on CPU cores only, the placement has it on"
            f" accelerator {device_of[astray[0]]}"
        )
    held = np.zeros(w.n_devices, dtype=np.int64)
    np.add.at(held, device_of, w.size_bytes)
    for device in range(w.accelerators):
        if held[device] > w.memory_bytes:
            raise InfeasibleError(
                f"accelerator {device} would hold {show_bytes(int(held[device]))}, it has"
                f" {show_bytes(w.memory_bytes)}"
            )
    if w.most_pieces == 1 and np.isinf(sample_latency_s(w, device_of)):
        raise InfeasibleError(
            "an accelerator holds one piece, which runs whole, and pieces of this placement wait"
            " for each other; use mode=optimal or mode=pipeline"
        )
