"""Measured NCCL collectives, compared with rings at ``transfer_rate=nvlink3`` and ``nvlink4``.

Every source of times except ``latency=kernels`` models them this way.
"""

from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf

from benchmarks.truth.collectives import SOURCE, messages
from benchmarks.truth.kernel_tables import DEVICES
from benchmarks.truth.row import Row
from runner.config.paths import conf_dir

__all__ = ["NAME", "SOURCE", "rows"]

NAME = "collectives, as bare rings"
_LINKS = {"a100_sxm": "nvlink3", "h100_sxm": "nvlink4"}


def rows(data: Path) -> Iterator[Row]:
    """Yield a row for each kind, size and number of ranks."""
    for prefix in DEVICES:
        link = OmegaConf.load(conf_dir() / "transfer_rate" / f"{_LINKS[prefix]}.yaml")
        for row in messages(data, prefix, None, float(link.latency_s)):
            # Nothing is fitted, so every row counts as held out.
            yield Row(row.label, row.predicted, row.measured, row.unit, held_out=True)
