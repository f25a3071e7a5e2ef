"""Measured NCCL collectives, compared with `collective_time_s` and the shipped curves.

These curves are those of ``latency=kernels``; `benchmarks.truth.collectives_ring` covers the other
sources of times.
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.truth.kernel_tables import DEVICES, FAMILIES
from benchmarks.truth.nccl_tables import KINDS, Messages, read_messages
from benchmarks.truth.row import Row
from fxpart.core.topology import Link
from fxpart.cost.collectives import CollectiveCurves, collective_time_s

__all__ = ["NAME", "SOURCE", "message_rows", "messages", "rows"]

NAME = "collectives in one machine"
SOURCE = "ai-dynamo/aiconfigurator, systems data (Apache-2.0), NCCL, 2 to 8 GPUs on NVLink"


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each kind, size and number of ranks."""
    for prefix, device in DEVICES.items():
        yield from messages(data, prefix, FAMILIES[device.curves].collectives)


def messages(
    data: Path, prefix: str, curves: CollectiveCurves | None, latency_s: float = 0.0
) -> Iterator[Row]:
    """Yield a row for each message measured on one kind of device.

    Args:
        data: folder of the published files.
        prefix: key of `DEVICES`.
        curves: fitted curves; None for rings at the rate of the links.
        latency_s: latency of a link.

    """
    for kind in KINDS.values():
        yield from message_rows(kind, read_messages(data, prefix, kind), curves, latency_s)


def message_rows(
    kind: str, measured: Messages, curves: CollectiveCurves | None, latency_s: float = 0.0
) -> Iterator[Row]:
    """Yield a row for each measured message; other arguments as those of `messages`."""
    link = Link(measured.bytes_per_s, latency_s)
    for size, ranks, seconds, label, held_out in zip(
        measured.size.tolist(),
        measured.ranks.tolist(),
        measured.seconds.tolist(),
        measured.labels,
        measured.held_out.tolist(),
        strict=True,
    ):
        predicted = collective_time_s(kind, size, int(ranks), link, curves)
        yield Row(label, 1e6 * predicted, 1e6 * seconds, "us", held_out)
