"""Map a placement of a training step to the exported forward that is executed."""

import numpy as np

from fxpart.core.graph import IntArray, OpGraph

__all__ = ["forward_devices"]

_UNPLACED = -1


def forward_devices(
    device_of: IntArray, exported_names: tuple[str, ...], forward: OpGraph
) -> IntArray:
    """Return the device of each operator of `forward`, the exported model without its backward.

    An operator without a part in the training step, such as a cast to the dtype a tensor already
    has, goes to the device that produces its first operand, or else to that of its first reader.
    O(operators + reads), plus O(operators) for each operator without a part.

    Args:
        device_of: device of each of the n operators of the training step. Length n.
        exported_names: the operator of `forward` that each of the n is part of, ``""`` if none.
            Length n. Parts of one operator share a device.
        forward: the graph with the names in `exported_names`, m operators.

    Returns:
        A device for each operator of `forward`. Length m.

    """
    device_of_name = dict(zip(exported_names, map(int, device_of), strict=True))
    devices = np.array([device_of_name.get(x, _UNPLACED) for x in forward.names], dtype=np.int64)
    for op in range(forward.n_ops):
        if devices[op] == _UNPLACED:
            devices[op] = _device_of_group(forward, devices, op)
        if devices[op] == _UNPLACED:
            makers = (int(forward.value_producer[v]) for v in forward.reads_of(op))
            devices[op] = next((devices[m] for m in makers if m >= 0), _UNPLACED)
    first_reader = dict[int, int]()
    for op in reversed(range(forward.n_ops)):
        first_reader.update(dict.fromkeys(forward.reads_of(op).tolist(), op))
    first_value = np.searchsorted(forward.value_producer, np.arange(forward.n_ops + 1))
    for op in reversed(range(forward.n_ops)):
        if devices[op] == _UNPLACED:
            values = range(first_value[op], first_value[op + 1])
            readers = [first_reader[v] for v in values if v in first_reader]
            devices[op] = devices[min(readers)] if readers else _UNPLACED
    # An operator without operands and readers goes to the first operator's device.
    devices[devices == _UNPLACED] = device_of[0]
    return devices[forward.group]


def _device_of_group(forward: OpGraph, devices: IntArray, op: int) -> int:
    group = devices[forward.group == forward.group[op]]
    placed = group[group != _UNPLACED]
    return int(placed[0]) if len(placed) else _UNPLACED
