"""Collectives of NCCL, beside `collective_time_s` with the curves that are shipped."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.truth.kernel_tables import DEVICES, FAMILIES
from benchmarks.truth.nccl_tables import KINDS, read_messages
from benchmarks.truth.row import Row
from fxpart.core.topology import Link
from fxpart.cost.collectives import collective_time_s

__all__ = ["NAME", "SOURCE", "rows"]

NAME = "collectives in one machine"
SOURCE = "ai-dynamo/aiconfigurator, systems data (Apache-2.0), NCCL, 2 to 8 GPUs on NVLink"


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each kind, size and number of ranks."""
    for prefix, device in DEVICES.items():
        curves = FAMILIES[device.curves].collectives
        for kind in KINDS.values():
            messages = read_messages(data, prefix, kind)
            link = Link(messages.bytes_per_s)
            for size, ranks, seconds, label, held_out in zip(
                messages.size.tolist(),
                messages.ranks.tolist(),
                messages.seconds.tolist(),
                messages.labels,
                messages.held_out.tolist(),
                strict=True,
            ):
                predicted = collective_time_s(kind, size, int(ranks), link, curves)
                yield Row(label, 1e6 * predicted, 1e6 * seconds, "us", held_out)
