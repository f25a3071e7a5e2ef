"""Memory peaks and their live tensors, for the terminal, files and MLflow."""

from collections.abc import Mapping, Sequence

from fxpart.cost.peak_tensors import DevicePeak, LiveTensor
from fxpart.cost.storage_kinds import PLURALS
from runner.output.units import GIB, size_unit

__all__ = [
    "fullest",
    "peak_line",
    "peak_rows",
    "tensor_columns",
    "training_metrics",
]

_WORTH_A_WORD = 0.01
"""Kinds of tensors below this share of a peak are summed as "other"."""


def fullest(peaks: Sequence[DevicePeak]) -> DevicePeak:
    """Return the peak with the most bytes, the first one among equals."""
    return max(peaks, key=lambda peak: peak.bytes)


def peak_line(peaks: Sequence[DevicePeak], rooms: Mapping[int, int] | None = None) -> str:
    """Return a line on the peak of the fullest device: where it occurs and what is live there.

    `rooms` are the bytes that devices keep free for copies, by logical id.
    """
    room_of = rooms or {}
    peak = max(peaks, key=lambda peak: peak.bytes + room_of.get(peak.device, 0))
    capacity_bytes = room_of.get(peak.device, 0)
    unit = size_unit(peak.bytes + capacity_bytes)
    large = {
        PLURALS[kind]: size
        for kind, size in peak.by_kind.items()
        if size >= _WORTH_A_WORD * peak.bytes
    }
    rest_bytes = peak.bytes - sum(large.values())
    # Leave out a remainder that would print as 0.00.
    shown = {**large, "other": rest_bytes} if float(unit.show(rest_bytes)) else large
    shown |= {"room for copies": capacity_bytes} if capacity_bytes else {}
    parts = ", ".join(f"{name} {unit.show(size)}" for name, size in shown.items())
    where = f"{peak.module or peak.op_name} ({peak.doing})"
    amount = f"{unit.show(peak.bytes + capacity_bytes)} {unit.name}"
    return f"device {peak.device} holds {amount} at {where}: {parts}"


def training_metrics(peaks: Sequence[DevicePeak]) -> dict[str, float]:
    """Return the metrics of training-only memory at the peak of the fullest device."""
    held_bytes = fullest(peaks).by_kind
    return {
        "optimizer_state_gib": held_bytes.get("optimizer state", 0) / GIB,
        "gradients_gib": held_bytes.get("gradient", 0) / GIB,
        "saved_activations_gib": held_bytes.get("saved activation", 0) / GIB,
    }


def peak_rows(peaks: Sequence[DevicePeak], top: int | None = None) -> list[dict[str, object]]:
    """Return each peak as plain values with its `top` largest tensors, or all listed ones."""
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
    """Return the `top` largest tensors at each device's peak, or all listed, as columns."""
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
