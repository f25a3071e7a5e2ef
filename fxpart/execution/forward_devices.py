"""From a placement of a training step to one of the exported forward that is really run."""

import numpy as np

from fxpart.core.graph import IntArray, OpGraph

__all__ = ["forward_devices"]

_UNKNOWN = -1


def forward_devices(
    device_of: IntArray, exported_names: tuple[str, ...], forward: OpGraph
) -> IntArray:
    """Return the device of each operator of `forward`, the exported model without its backward.

    An operator that has no part in the training step, since it does nothing (a cast to the dtype
    that a tensor has already), stays with what makes its first operand, or else with what first
    reads its result. O(operators + reads), and of such as have no part O(operators) each.

    Args:
        device_of: device of each of the n operators of the training step. Length n.
        exported_names: which operator of `forward` each of them is a part of, ``""`` for none.
            Length n. Parts of one operator are on one device.
        forward: the graph with the names that `exported_names` has, m operators.

    Returns:
        A device for each operator of `forward`. Length m.

    """
    place = {name: int(device) for name, device in zip(exported_names, device_of, strict=True)}
    found = np.array([place.get(name, _UNKNOWN) for name in forward.names], dtype=np.int64)
    for op in range(forward.n_ops):
        if found[op] == _UNKNOWN:
            found[op] = _of_group(forward, found, op)
        if found[op] == _UNKNOWN:
            makers = (int(forward.value_producer[v]) for v in forward.reads_of(op))
            found[op] = next((found[m] for m in makers if m >= 0), _UNKNOWN)
    reader = dict[int, int]()
    for op in reversed(range(forward.n_ops)):
        reader.update(dict.fromkeys(forward.reads_of(op).tolist(), op))
    made = np.searchsorted(forward.value_producer, np.arange(forward.n_ops + 1))
    for op in reversed(range(forward.n_ops)):
        if found[op] == _UNKNOWN:
            readers = [reader[v] for v in range(made[op], made[op + 1]) if v in reader]
            found[op] = found[min(readers)] if readers else _UNKNOWN
    # What neither reads nor is read is computed with what comes first.
    found[found == _UNKNOWN] = device_of[0]
    return found[forward.group]


def _of_group(forward: OpGraph, found: IntArray, op: int) -> int:
    mates = found[forward.group == forward.group[op]]
    known = mates[mates != _UNKNOWN]
    return int(known[0]) if len(known) else _UNKNOWN
