"""The published cost model: transfers block a device, and both ends pay for them.

It is that of *Efficient Algorithms for Device Placement of DNN Graph Operators* (arXiv:2006.16423),
with two costs: the largest load of any device, and the time of one sample if the operators on an
accelerator run as one piece. `Workload` has the numbers; accelerators come before CPU cores.
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
    """Return the load of each device in s per sample; `device_of` has shape (n,). Shape (D,).

    An accelerator pays for its operators, and once for each output that it sends or receives; a CPU
    core only for its operators.
    """
    w = workload
    op_s = np.where(device_of < w.accelerators, w.accelerator_s, w.core_s)
    loads = np.bincount(device_of, weights=op_s, minlength=w.n_devices)
    is_cut = device_of[w.sources] != device_of[w.targets]
    crossing = w.sources[is_cut]
    ends = np.concatenate([device_of[crossing], device_of[w.targets[is_cut]]])
    # Each output and device once, regardless of the number of edges between.
    moves = np.unique(np.stack([np.tile(crossing, 2), ends]), axis=1)
    np.add.at(loads, moves[1], np.where(moves[1] < w.accelerators, w.move_s[moves[0]], 0.0))
    return np.asarray(loads, dtype=np.float64)


def sample_latency_s(workload: Workload, device_of: IntArray) -> float:
    """Return the latency of one sample in s; infinite if pieces wait for each other.

    The operators on an accelerator are one piece: it starts when all its inputs are ready, and
    takes the time of its operators, its inputs, and its outputs that are read elsewhere. The number
    of CPU cores is unlimited.
    """
    pieces = np.where(device_of < workload.accelerators, device_of, -1)
    return piece_latency(workload, pieces, workload.accelerators)


def piece_latency(workload: Workload, pieces: IntArray, count: int) -> float:
    """Return the latency of one sample in s, given the piece of each operator (-1 on the CPU)."""
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
    """Return the latency of one sample in s, given the piece of each operator (-1 on the CPU).

    `start` and `after` are the readers of each operator as CSR. The traversal contracts each piece
    to one vertex, the last `count` of n + count.
    """
    n = pieces.shape[0]
    duration_s = np.zeros(n + count)
    waits = np.zeros(n + count, dtype=np.int64)
    ready = np.zeros(n + count)
    last_sender = np.full(n + count, -1, dtype=np.int64)
    for u in range(n):
        source = n + pieces[u] if pieces[u] >= 0 else u
        duration_s[source] += accelerator_s[u] if pieces[u] >= 0 else core_s[u]
        crosses = False
        for i in range(start[u], start[u + 1]):
            v = after[i]
            target = n + pieces[v] if pieces[v] >= 0 else v
            if target == source:
                continue
            crosses = True
            waits[target] += 1
            if target >= n and last_sender[target] != u:
                last_sender[target] = u
                duration_s[target] += move_s[u]
        if crosses and source >= n:
            duration_s[source] += move_s[u]
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
        finish = ready[vertex] + duration_s[vertex]
        latest = max(latest, finish)
        first = member_start[vertex - n] if vertex >= n else vertex
        last = member_start[vertex - n + 1] if vertex >= n else vertex + 1
        for m in range(first, last):
            u = members[m] if vertex >= n else m
            for i in range(start[u], start[u + 1]):
                v = after[i]
                target = n + pieces[v] if pieces[v] >= 0 else v
                if target == vertex:
                    continue
                ready[target] = max(ready[target], finish)
                waits[target] -= 1
                if waits[target] == 0:
                    queue[tail] = target
                    tail += 1
    return latest if tail == expected else np.inf


def refuse_unfit(workload: Workload, device_of: IntArray) -> None:
    """Refuse a placement that violates the published rules.

    Raises:
        InfeasibleError: if operators of a colour are on different devices, an operator is on an
            accelerator that cannot run it, an accelerator's memory is exceeded, or with
            `Workload.most_pieces` of 1 pieces wait for each other.

    """
    w = workload
    parted = np.flatnonzero(device_of != device_of[w.colour])
    if len(parted):
        raise InfeasibleError(
            f"{w.names[int(parted[0])]} is on device {device_of[parted[0]]}, an operator of its"
            f" colour on device {device_of[w.colour[parted[0]]]}; they must share one"
        )
    on_accelerator = device_of < w.accelerators
    misplaced = np.flatnonzero(on_accelerator & np.isinf(w.accelerator_s))
    if len(misplaced):
        raise InfeasibleError(
            f"{w.names[int(misplaced[0])]} runs on CPU cores only, the placement has it on"
            f" accelerator {device_of[misplaced[0]]}"
        )
    used_bytes = np.zeros(w.n_devices, dtype=np.int64)
    np.add.at(used_bytes, device_of, w.size_bytes)
    for device in range(w.accelerators):
        if used_bytes[device] > w.memory_bytes:
            raise InfeasibleError(
                f"accelerator {device} would hold {show_bytes(int(used_bytes[device]))}, it has"
                f" {show_bytes(w.memory_bytes)}"
            )
    if w.most_pieces == 1 and np.isinf(sample_latency_s(w, device_of)):
        raise InfeasibleError(
            "an accelerator holds one piece, which runs whole, and pieces of this placement wait"
            " for each other; use mode=optimal or mode=pipeline"
        )
