"""Collectives of NCCL, beside `collective_time_s` with the curves that are shipped.

Those are ``latency=kernels``; `benchmarks.truth.collectives_ring` has what users get elsewhere.
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.truth.kernel_tables import DEVICES, FAMILIES
from benchmarks.truth.nccl_tables import KINDS, read_messages
from benchmarks.truth.row import Row
from fxpart.core.topology import Link
from fxpart.cost.collectives import CollectiveCurves, collective_time_s

__all__ = ["NAME", "SOURCE", "messages", "rows"]

NAME = "collectives in one machine"
SOURCE = "ai-dynamo/aiconfigurator, systems data (Apache-2.0), NCCL, 2 to 8 GPUs on NVLink"


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each kind, size and number of ranks."""
    for prefix, device in DEVICES.items():
        yield from messages(data, prefix, FAMILIES[device.curves].collectives)


def messages(
    data: Path, prefix: str, curves: CollectiveCurves | None, latency_s: float = 0.0
) -> Iterator[Row]:
    """Yield a row for each message that was measured on one kind of device.

    Args:
        data: the folder of the files.
        prefix: one of `DEVICES`.
        curves: None for rings at the rate of the links.
        latency_s: of a link.

    """
    for kind in KINDS.values():
        of_kind = read_messages(data, prefix, kind)
        link = Link(of_kind.bytes_per_s, latency_s)
        for size, ranks, seconds, label, held_out in zip(
            of_kind.size.tolist(),
            of_kind.ranks.tolist(),
            of_kind.seconds.tolist(),
            of_kind.labels,
            of_kind.held_out.tolist(),
            strict=True,
        ):
            predicted = collective_time_s(kind, size, int(ranks), link, curves)
            yield Row(label, 1e6 * predicted, 1e6 * seconds, "us", held_out)
