"""`OperatorProfile`: measured times of the operators of one graph.

They are measured in `fxpart.execution.profiling`; this module only stores them, so that a warm
start does not need torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.core.topology import Topology
from fxpart.cost.tables import same_on_every_device
from fxpart.errors import FxpartError, SpecError
from fxpart.support.digest import stable_digest
from fxpart.support.host import installed_version, machine_key
from fxpart.support.json_file import read_document
from fxpart.support.whole_file import write_whole

__all__ = ["OperatorProfile", "profile_path", "read_profile", "write_profile"]


@dataclass(frozen=True, eq=False, slots=True)
class OperatorProfile:
    """Measured times of the operators of one graph, on one kind of device."""

    seconds: FloatArray
    """Time of each operator. Length n."""
    samples: IntArray
    """Number of measurements whose median each time is. Length n."""
    device_name: str
    """Name of the measured device, such as ``NVIDIA H200``, or a CPU with its number of threads."""
    executed: int = 0
    """Number of operators that were run for this profile; 0 if every time was cached."""
    lost_share: float = 0.0
    """Share of the measured time in which the processor ran other work."""

    def __post_init__(self) -> None:
        """Check that times and samples have equal lengths, and times are finite and >= 0."""
        if len(self.seconds) != len(self.samples):
            raise SpecError(
                f"a profile has {len(self.seconds)} times and {len(self.samples)} counts of"
                " samples; give one of each for every operator"
            )
        wrong = np.flatnonzero(~(np.isfinite(self.seconds) & (self.seconds >= 0)))
        if len(wrong):
            raise SpecError(
                f"a profile's time of operator {int(wrong[0])} is {self.seconds[wrong[0]]} s;"
                " times must be finite and at least 0"
            )

    @property
    def total_s(self) -> float:
        """The sum of all operators' times: one run on one device."""
        return float(self.seconds.sum())

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D).

        It is the same on every device, since one kind of device was measured. The grouping of
        `graph` may differ from the profiled one, but not its operators.

        Raises:
            SpecError: if the graph has another number of operators.

        """
        if graph.n_ops != len(self.seconds):
            raise SpecError(
                f"the profile has {len(self.seconds)} operators, but the graph has {graph.n_ops}; "
                "profile this graph"
            )
        return same_on_every_device(self.seconds, topology)


# Profiles on disk: one JSON file per model, so that a warm start measures nothing. The file name is
# a hash of everything that determines the times: the model and its capture, the machine, and the
# version of torch. The folder can be deleted at any time.

_SCHEMA, _VERSION = "fxpart-profile", 1
_ADVICE = "make the folder writable, or name another one"
_MOST_S = 1e9
"""Longer times are taken as damage."""


def profile_path(cache_dir: Path, model: Mapping[str, object], device: str = "cpu") -> Path:
    """Return the path of the profile of a model on this machine's `device`.

    `model` is everything else that determines the profile, as JSON-serializable data: the key of
    the model, the level and phase of its capture, the number of repeats.
    """
    parts = {
        "model": model,
        "machine": machine_key(device),
        "torch": installed_version("torch"),
        "version": _VERSION,
    }
    return cache_dir / f"profile-{stable_digest(parts)[:32]}.json"


def _operators(graph: OpGraph) -> str:
    """Return a hash of the operators of `graph`, regardless of their grouping."""
    return stable_digest(
        {
            "names": list(graph.names),
            "targets": list(graph.targets),
            "dtypes": list(graph.dtypes),
            "flops": graph.flops.tolist(),
            "moved_bytes": graph.moved_bytes.tolist(),
        }
    )


def write_profile(path: Path, graph: OpGraph, profile: OperatorProfile) -> None:
    """Write the `profile` of `graph` to `path`, atomically.

    Raises:
        CacheError: if the folder cannot be written.

    """
    document = {
        "schema": _SCHEMA,
        "version": _VERSION,
        "operators": _operators(graph),
        "device_name": profile.device_name,
        "torch": installed_version("torch"),
        "seconds": profile.seconds.tolist(),
        "samples": profile.samples.tolist(),
        "lost_share": profile.lost_share,
    }
    write_whole(path, json.dumps(document), f"the profile to {path.parent}", _ADVICE)


def read_profile(path: Path, graph: OpGraph) -> OperatorProfile | None:
    """Return the profile of `graph` at `path`.

    None if it is missing, damaged or of other operators, so that the caller measures again.
    """
    try:
        document = read_document(path, _SCHEMA, _VERSION)
        if document["operators"] != _operators(graph):
            return None
        profile = OperatorProfile(
            np.array(document["seconds"], dtype=np.float64),
            np.array(document["samples"], dtype=np.int64),
            str(document["device_name"]),
            lost_share=float(document.get("lost_share", 0.0)),
        )
    except (FxpartError, KeyError, ValueError, TypeError, OverflowError):
        return None
    n = (graph.n_ops,)
    if profile.seconds.shape != n or profile.samples.shape != n or (profile.samples < 1).any():
        return None
    usable = (profile.seconds >= 0) & (profile.seconds < _MOST_S)
    return profile if usable.all() else None
