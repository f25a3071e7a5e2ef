"""A lower bound of the time of one sample under the published cost model.

Operators of a path run sequentially. The operators on an accelerator run as one piece, which no
path may leave and re-enter. So an accelerator has at most one stretch of the path, together with
everything between the stretch's ends; all of that takes time and memory, and inputs and outputs of
the stretch are moved. Dynamic programming minimizes over all ways to assign the path to the CPU and
to one stretch per accelerator. O(m^2 (k + 1)) for a path of m operators and k accelerators. Where
any number of pieces is allowed, the bound is the path alone.
"""

from collections.abc import Sequence

import numpy as np

from fxpart.core.graph import FloatArray, IntArray
from fxpart.core.workload import Workload

__all__ = ["sample_bound_s"]

_MOST_ON_PATH = 2048
"""Longest prefix of a path that is considered, since tables grow with its square."""
_ROUNDING = 1e-12


def sample_bound_s(workload: Workload) -> float:
    """Return the bound in s from the longest path with all operators on their fastest devices.

    With a single piece on each accelerator, what lies between two operators of the path must run
    with them; with any number of pieces, only the path itself must run.
    """
    w = workload
    by_source = np.argsort(w.sources, kind="stable")
    # In-edges of an operator come before its out-edges.
    ends = w.sources[by_source].tolist(), w.targets[by_source].tolist()
    edges = list(zip(*ends, strict=True))
    path = _longest_path(w, edges)
    if w.most_pieces is None:
        return float(np.minimum(w.accelerator_s, w.core_s)[path].sum())
    return _path_bound_s(w, edges, path)


def _longest_path(w: Workload, edges: Sequence[tuple[int, int]]) -> IntArray:
    """Return the operators of the longest path, in order."""
    takes_s = np.minimum(w.accelerator_s, w.core_s)
    before_s, via = np.zeros(w.n_ops), np.full(w.n_ops, -1)
    for source, target in edges:
        if via[target] < 0 or before_s[source] + takes_s[source] > before_s[target]:
            before_s[target], via[target] = before_s[source] + takes_s[source], source
    path = [int(np.argmax(before_s + takes_s))]
    while via[path[-1]] >= 0:
        path.append(int(via[path[-1]]))
    return np.array(path[::-1][:_MOST_ON_PATH], dtype=np.int64)


def _path_bound_s(w: Workload, edges: Sequence[tuple[int, int]], path: IntArray) -> float:
    """Return the least time in which the operators of `path` (m,) can run."""
    count = len(path)
    since = np.full(w.n_ops, -1)
    since[path] = np.arange(count)
    until = np.where(since >= 0, since, count)
    for source, target in edges:
        since[target] = max(since[target], since[source])
    for source, target in reversed(edges):
        until[source] = min(until[source], until[target])
    run_s = _stretches_s(w, edges, since, until, count)
    least_s = np.full((w.accelerators + 1, count + 1), np.inf)
    least_s[:, 0] = 0.0
    for end in range(count):
        least_s[:, end + 1] = least_s[:, end] + w.core_s[path[end]]
        ended_s = (least_s[:-1, : end + 1] + run_s[: end + 1, end]).min(axis=1)
        least_s[1:, end + 1] = np.minimum(least_s[1:, end + 1], ended_s)
    return float(least_s[:, -1].min())


def _stretches_s(
    w: Workload, edges: Sequence[tuple[int, int]], since: IntArray, until: IntArray, count: int
) -> FloatArray:
    """Return the least time of the piece with each stretch of a path, in s. Shape (m, m).

    Rows are the first operator of the stretch and columns the last; infinite if it does not fit.
    `since` (n,) is each operator's last ancestor on the path or -1, `until` its first descendant or
    m. The piece with stretch a to b contains all operators with since >= a and until <= b, and none
    with since > b or until < a.
    """
    inside = (since >= 0) & (until < count)
    # Operators that cannot be between, such as weights, go with one of their colour that is.
    stands_for = np.full(w.n_ops, -1)
    stands_for[w.colour[inside]] = np.flatnonzero(inside)
    stands_for = np.where(inside, np.arange(w.n_ops), stands_for[w.colour])
    with_it = stands_for >= 0
    run_s = _moved_s(w, edges, since, until, count)
    known_s = np.where(np.isfinite(w.accelerator_s), w.accelerator_s, 0.0)
    totals = []
    for amount in (known_s, w.size_bytes, np.isinf(w.accelerator_s)):
        of_op, between = np.zeros(w.n_ops), np.zeros((count, count))
        np.add.at(of_op, stands_for[with_it], amount[with_it])
        np.add.at(between, (since[inside], until[inside]), of_op[inside])
        totals.append(_between(between))
    run_s = (run_s + totals[0]) * (1.0 - _ROUNDING)
    run_s[(totals[1] > w.memory_bytes) | (totals[2] > 0)] = np.inf
    run_s[np.tril_indices(count, -1)] = np.inf
    return np.asarray(run_s)


def _between(table: FloatArray) -> FloatArray:
    """Return sums over all cells at or below the row, and at or left of the column."""
    return np.asarray(np.cumsum(np.cumsum(table[::-1], axis=0)[::-1], axis=1))


def _moved_s(
    w: Workload, edges: Sequence[tuple[int, int]], since: IntArray, until: IntArray, count: int
) -> FloatArray:
    """Return the time to move inputs and outputs of the piece with each stretch. Shape (m, m).

    An output of the piece is moved if a reader's `since` is after the stretch; the output of an
    operator with `until` before the stretch is moved if a reader is in the piece.
    """
    out_s, in_s = np.zeros((count, count)), np.zeros((count, count + 1))
    readers: list[list[int]] = [[] for _ in range(w.n_ops)]
    for source, target in edges:
        readers[source].append(target)
    for op, followers in enumerate(readers):
        if not followers or w.move_s[op] <= 0:
            continue
        latest = max(since[reader] for reader in followers)
        if since[op] >= 0 and latest > until[op]:
            out_s[since[op], until[op]] += w.move_s[op]
            out_s[since[op], latest] -= w.move_s[op]
        # For each start of a stretch, the first end at which a reader is in the piece.
        read_at = np.full(count + 1, count)
        for reader in followers:
            if since[reader] >= 0:
                read_at[since[reader]] = min(read_at[since[reader]], until[reader])
        read_at = np.minimum.accumulate(read_at[::-1])[::-1]
        begins = np.arange(min(until[op] + 1, count), count)
        in_s[begins, read_at[begins]] += w.move_s[op]
    return _between(out_s) + np.cumsum(in_s, axis=1)[:, :count]
