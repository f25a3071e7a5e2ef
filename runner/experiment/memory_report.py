"""Where memory is fullest and what lies there, in the words of the terminal, files and MLflow."""

from collections.abc import Mapping, Sequence

from fxpart.cost.peak_tensors import DevicePeak, LiveTensor
from fxpart.cost.storage_kinds import KINDS
from runner.output.units import size_unit

__all__ = [
    "MANY",
    "fullest",
    "peak_line",
    "peak_rows",
    "tensor_columns",
    "training_bytes",
]

MANY = dict(
    zip(
        KINDS,
        (
            "weights",
            "optimizer state",
            "inputs",
            "gradients",
            "outputs",
            "saved activations",
            "received",
            "temporaries",
        ),
        strict=True,
    )
)
"""What several storages of each kind are called."""

_OF_TRAINING = ("optimizer state", "gradient", "saved activation")
_WORTH_A_WORD = 0.01
"""Kinds below this share of a peak are added up as other."""


def fullest(peaks: Sequence[DevicePeak]) -> DevicePeak:
    """Return the peak with the most bytes, of several the first device's."""
    return max(peaks, key=lambda peak: peak.bytes)


def peak_line(peaks: Sequence[DevicePeak]) -> str:
    """Return where the fullest device has its peak, and what it holds then, in one line."""
    peak = fullest(peaks)
    unit = size_unit(peak.bytes)
    large = {
        MANY[kind]: size
        for kind, size in peak.by_kind.items()
        if size >= _WORTH_A_WORD * peak.bytes
    }
    rest = peak.bytes - sum(large.values())
    # What would be shown as 0.00 is not worth a word even added up.
    shown = {**large, "other": rest} if float(unit.show(rest)) else large
    parts = ", ".join(f"{name} {unit.show(size)}" for name, size in shown.items())
    where = f"{peak.module or peak.op_name} ({peak.doing})"
    held = f"{unit.show(peak.bytes)} {unit.name}"
    return f"device {peak.device} holds {held} at {where}: {parts}"


def training_bytes(peaks: Sequence[DevicePeak]) -> Mapping[str, int]:
    """Return what only training has, at the peak of the fullest device.

    By ``optimizer_state``, ``gradients`` and ``saved_activations``; 0 for what is not there then.
    """
    peak = fullest(peaks)
    return {MANY[kind].replace(" ", "_"): peak.by_kind.get(kind, 0) for kind in _OF_TRAINING}


def peak_rows(peaks: Sequence[DevicePeak], top: int | None = None) -> list[dict[str, object]]:
    """Return each peak as plain values, with its `top` largest tensors (None for all it has)."""
    return [
        {
            **{name: getattr(peak, name) for name in DevicePeak.__slots__},
            "tensors": [
                {name: getattr(tensor, name) for name in LiveTensor.__slots__}
                for tensor in peak.tensors[:top]
            ],
        }
        for peak in peaks
    ]


def tensor_columns(peaks: Sequence[DevicePeak], top: int | None = None) -> dict[str, list[object]]:
    """Return the `top` largest tensors at the peak of each device (None for all that are listed).

    As a table: a list for each column.
    """
    rows = [(peak, tensor) for peak in peaks for tensor in peak.tensors[:top]]
    return {
        "device": [peak.device for peak, _ in rows],
        "bytes": [tensor.bytes for _, tensor in rows],
        "kind": [tensor.kind for _, tensor in rows],
        "name": [tensor.name for _, tensor in rows],
        "module": [tensor.module for _, tensor in rows],
        "made_by": [tensor.target for _, tensor in rows],
        "peak_at": [peak.op_name for peak, _ in rows],
    }
