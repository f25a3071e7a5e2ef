"""What a job is called and known by: its choices, its parameters, its key."""

import platform
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import fxpart
from fxpart.core.saved_assignment import assignment_path
from fxpart.support.digest import stable_digest
from fxpart.support.host import installed_version, machine_key
from runner.config.sections import (
    Config,
    DevicesConfig,
    ExecuteConfig,
    LatencyConfig,
    LinkConfig,
    ModeConfig,
)

__all__ = [
    "Choices",
    "config_key",
    "inputs_key",
    "override_values",
    "parameters",
    "without_elsewhere",
]


_FXPART = Path(fxpart.__file__).parent
_EXPERIMENT = Path(__file__).resolve().parent.parent / "experiment"
"""The room of the runner that decides a metric: an edit elsewhere costs no sweep its results."""
_SECTION = re.compile(r"[./@=]")
"""What ends the name of a section in an override."""
_MEASURED = ("device", "threads", "repeats")
"""What decides measured times."""


@dataclass(frozen=True, slots=True)
class Choices:
    """The four choices of a run, as they were named."""

    model: str
    mode: str
    devices: str
    transfer_rate: str


def config_key(config: Config, inputs: str) -> str:
    """Return the hash of what decides the result: its `inputs_key`, and this machine if it counts.

    It counts where times are measured.
    """
    machine = {device: _machine(device) for device in _measured_devices(config)}
    return stable_digest({"inputs": inputs, "machine": machine})[:16]


def inputs_key(config: Config, model: Mapping[str, object]) -> str:
    """Return the hash of what decides the result on any machine.

    No names, and not where it is kept or logged; the source of fxpart and of what decides metrics
    here is a part of it. `model` is the `ModelSpec.key` of the configuration's model: of a factory
    it knows the sources.
    """
    parts = {
        "model": model,
        "level": config.capture.level,
        "devices": _device_numbers(config.devices),
        "transfer_rate": _link_numbers(config.transfer_rate),
        "latency": _latency_numbers(config.latency),
        "granularity": config.granularity,
        "phase": config.phase.name,
        "training": _training_numbers(config),
        "reserve": {k: v for k, v in asdict(config.reserve).items() if k not in ("name", "source")},
        "data_parallel": config.data_parallel,
        "all_reduce": asdict(config.all_reduce) if config.data_parallel > 1 else {},
        "symbolic": config.capture.symbolic,
        "batch_sweep": config.batch_sweep if config.capture.symbolic != "none" else None,
        "schedule": config.schedule.name,
        "microbatches": config.microbatches,
        "execute": _execute_numbers(config.execute),
        "mode": _mode_numbers(config.mode),
        "versions": {package: installed_version(package) for package in ("fxpart", "torch")},
        "code": _code_digest(_FXPART),
        "runner": _code_digest(_EXPERIMENT),
    }
    return stable_digest(parts)


@cache
def _code_digest(root: Path) -> str:
    """Return a hash of a package's source: a version says little of what is being worked on."""
    paths = sorted(root.rglob("*.py"))
    digest = sha256()
    for path in paths:
        content = path.read_bytes()
        # With lengths, so that no text can pass from one file to the next.
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _measured_devices(config: Config) -> list[str]:
    """Return the devices of this machine that the result is measured on, mostly none."""
    latency, execute = config.latency, config.execute
    found = []
    # A file of measurements says it all, wherever it is read.
    if latency.source in ("profiled", "calibrated") and not latency.file:
        found.append(latency.device)
    if execute.name != "none":
        found.append(execute.device)
    return list(dict.fromkeys(found))


@cache
def _machine(device: str) -> dict[str, object]:
    """Return what tells the machine that this process runs on from others."""
    return {"architecture": platform.machine(), **machine_key(device)}


def _training_numbers(config: Config) -> dict[str, object]:
    """Return what decides a training step beside the model; empty in inference."""
    if config.phase.name != "training":
        return {}
    phase = {"train_mode": config.phase.train_mode, "fused_kernels": config.phase.fused_kernels}
    return {**phase, "checkpointing": config.checkpointing, "optimizer": asdict(config.optimizer)}


def _device_numbers(devices: DevicesConfig) -> dict[str, object]:
    pools = [asdict(pool) for pool in devices.pools]
    return {
        "pools": [{k: v for k, v in pool.items() if k not in ("name", "source")} for pool in pools],
        "nodes": devices.nodes,
        "between_nodes": devices.between_nodes and _link_numbers(devices.between_nodes),
        "saturate_host": devices.saturate_host,
    }


def _mode_numbers(mode: ModeConfig) -> dict[str, object]:
    """Return the mode and its options; of a saved placement what the file says, not where it is."""
    options = dict(mode.options)
    saved = options.get("assignment")
    if mode.name == "aot_based" and isinstance(saved, str):
        # A file that cannot be read is refused later, in words of its own.
        with suppress(OSError):
            options["assignment"] = sha256(assignment_path(saved).read_bytes()).hexdigest()
    return {"name": mode.name, "options": options}


def _latency_numbers(latency: LatencyConfig) -> dict[str, object]:
    """Return where the times of operators come from, without names."""
    numbers = _latency_settings(latency)
    if latency.file:
        # A file that cannot be read is refused later, in words of its own.
        with suppress(OSError):
            numbers["file"] = sha256(Path(latency.file).read_bytes()).hexdigest()
    return {"source": latency.source, **numbers}


def _latency_settings(latency: LatencyConfig) -> dict[str, object]:
    """Return the fields that count for this source."""
    own = {
        "roofline": ("compute_efficiency", "bandwidth_efficiency", "op_overhead_s"),
        "profiled": _MEASURED,
        # A file says it all: nothing is measured.
        "calibrated": ("file",) if latency.file else _MEASURED,
    }
    # A source that does not exist is refused later.
    return {name: getattr(latency, name) for name in own.get(latency.source, ())}


def _execute_numbers(execute: ExecuteConfig) -> dict[str, object]:
    """Return how the plan is carried out, without what does not change what is measured."""
    counts = () if execute.name == "none" else ("repeats", "seed", "device", "threads")
    numbers = {name: getattr(execute, name) for name in ("name", *counts)}
    # Asked for, the stages are a part of the result: a job that kept none has another.
    return {**numbers, "save_stages": True} if counts and execute.save_stages else numbers


def _link_numbers(link: LinkConfig) -> dict[str, float]:
    return {"bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}


def override_values(overrides: Sequence[str]) -> dict[str, str]:
    """Return ``{key: value}`` of overrides as Hydra lists them, without its marks and quotes."""
    values: dict[str, str] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        values[key.lstrip("+~")] = value[1:-1] if quoted else value
    return values


def without_elsewhere(
    overrides: Iterable[str], aside: Collection[str] = ("tracking", "hydra")
) -> tuple[str, ...]:
    """Return the overrides that say what is run: not where it is kept, which may hold a password.

    Nor what is for Hydra. `aside` are the sections that are left out.
    """
    return tuple(one for one in overrides if _SECTION.split(one.lstrip("+~"), 1)[0] not in aside)


def parameters(config: Config, choices: Choices, overrides: Sequence[str]) -> dict[str, object]:
    """Return the parameters to log: the four choices bare, what they leave open dotted.

    What follows from a choice (the size of a named device, say) is not repeated: a comparison
    would show it as three more columns that differ. What was overridden is logged wherever it is,
    save for the tracking: where a run is kept is no part of it, and may hold a password.
    """
    settings = asdict(config)
    kept: dict[str, object] = {**asdict(choices)}
    model = settings["model"]
    from_model = ("batch_size", "seq_len", "dtype", "config", "factory", "factory_args")
    open_choices: dict[str, object] = {
        "model": {k: model[k] for k in from_model},
        "mode": settings["mode"]["options"],
        "latency": _latency_settings(config.latency),
        "capture": {"level": config.capture.level},
    }
    kept.update(_flat(open_choices))
    kept.update(_chosen(config))
    for key, value in override_values(overrides).items():
        # A mapping, such as model.config={a: 1}, is there key by key already.
        known = any(name == key or name.startswith(f"{key}.") for name in kept)
        aside = key.startswith("tracking.") or key == "model.name"  # which is `model`
        if "." in key and not known and not aside:
            kept[key] = value
    return kept


def _chosen(config: Config) -> dict[str, object]:
    """Return the other choices; some only of runs that have them.

    Elsewhere they would be columns of the same word.
    """
    kept: dict[str, object] = {}
    kept["granularity"] = config.granularity
    kept["latency"] = config.latency.name
    kept["phase"] = config.phase.name
    if config.phase.name == "training":
        kept["optimizer"], kept["checkpointing"] = config.optimizer.name, config.checkpointing
    if config.data_parallel > 1:
        kept["data_parallel"] = config.data_parallel
    if config.capture.symbolic != "none":
        kept["capture.symbolic"] = config.capture.symbolic
    kept["reserve"] = config.reserve.name
    if config.schedule.name != "none":
        kept["schedule"], kept["microbatches"] = config.schedule.name, config.microbatches
    if config.execute.name != "none":
        kept["execute"] = config.execute.name
        execute = {k: v for k, v in asdict(config.execute).items() if k != "name"}
        kept.update(_flat({"execute": execute}))
    return kept


def _flat(nested: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat
