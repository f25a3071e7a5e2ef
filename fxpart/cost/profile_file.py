"""Profiles on disk: one JSON file for each model, so that a warm start measures nothing.

The file name is a hash of what decides the times: the model and how it is captured, the machine,
and the version of torch. The whole folder can be deleted at any time.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fxpart.cost.machine import machine_key
from fxpart.cost.profile import OperatorProfile
from fxpart.errors import FxpartError
from fxpart.graph import OpGraph
from fxpart.installed import installed_version
from fxpart.json_file import read_document
from fxpart.stable_json import stable_digest
from fxpart.whole_file import write_whole

__all__ = ["profile_path", "read_profile", "write_profile"]

_SCHEMA, _VERSION = "fxpart-profile", 1
_ADVICE = "make the folder writable, or name another one"


def profile_path(cache_dir: Path, model: Mapping[str, object], device: str = "cpu") -> Path:
    """Return where the profile of a model on this machine's `device` lies, or would lie.

    `model` is everything else that decides the profile (JSON-able): the key of the model, the
    level and phase of its capture, the number of repeats.
    """
    parts = {
        "model": model,
        "machine": machine_key(device),
        "torch": installed_version("torch"),
        "version": _VERSION,
    }
    return cache_dir / f"profile-{stable_digest(parts)[:32]}.json"


def _operators(graph: OpGraph) -> str:
    """Return a hash of what `graph` computes; how its operators are grouped is no part of it."""
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
    """Write `profile`, which is of `graph`, to `path`, whole or not at all.

    Raises:
        CacheError: when the folder cannot be written.

    """
    document = {
        "schema": _SCHEMA,
        "version": _VERSION,
        "operators": _operators(graph),
        "device_name": profile.device_name,
        "torch": installed_version("torch"),
        "seconds": profile.seconds.tolist(),
        "samples": profile.samples.tolist(),
    }
    write_whole(path, json.dumps(document), f"the profile to {path.parent}", _ADVICE)


def read_profile(path: Path, graph: OpGraph) -> OperatorProfile | None:
    """Return the profile of `graph` at `path`, or None.

    None when there is none, or it is damaged or of other operators: the caller measures again.
    """
    try:
        document = read_document(path, _SCHEMA, _VERSION)
        if document["operators"] != _operators(graph):
            return None
        profile = OperatorProfile(
            np.array(document["seconds"], dtype=np.float64),
            np.array(document["samples"], dtype=np.int64),
            str(document["device_name"]),
        )
    except (FxpartError, KeyError, ValueError, TypeError, OverflowError):
        return None
    return profile if profile.seconds.shape == (graph.n_ops,) else None
