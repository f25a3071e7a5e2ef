"""What a job is called and known by: its choices, its parameters, its key."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version

from runner.config import Config

__all__ = ["Choices", "config_key", "parameters", "run_name"]


@dataclass(frozen=True, slots=True)
class Choices:
    """The four choices of a run, as they were named."""

    model: str
    mode: str
    devices: str
    transfer_rate: str


def run_name(choices: Choices) -> str:
    """Return a short name that reads at a glance, such as ``kl_based · 4x16gb · pcie4 · gpt2``."""
    return " · ".join((choices.mode, choices.devices, choices.transfer_rate, choices.model))


def config_key(config: Config) -> str:
    """Return the hash of everything that decides the result: not where it is kept or logged."""
    settings = asdict(config)
    for aside in ("tracking", "capture"):
        settings.pop(aside, None)
    settings["level"] = config.capture.level
    settings["fxpart"] = version("fxpart")
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parameters(config: Config, choices: Choices) -> dict[str, object]:
    """Return the parameters to log: the four choices bare, what they leave open dotted.

    What follows from a choice (the size of a named device, say) is not repeated: a comparison
    would show it as three more columns that differ.
    """
    settings = asdict(config)
    kept: dict[str, object] = {**asdict(choices)}
    model = settings["model"]
    open_choices: dict[str, object] = {
        "model": {k: model[k] for k in ("batch_size", "seq_len", "dtype", "config")},
        "mode": settings["mode"]["options"],
        "latency": settings["latency"],
        "capture": {"level": config.capture.level},
    }
    kept.update(_flat(open_choices))
    return kept


def _flat(nested: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat
