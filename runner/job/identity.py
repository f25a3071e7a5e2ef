"""The identity of a job: its request, where its results go, and the key that names them.

A job's key hashes everything that decides its result on this machine. Names, folders and the
tracking store are not part of it, nor are comments and docstrings of the code.
"""

import platform
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import fxpart
from fxpart.capture.models.factory_source import factory_digest
from fxpart.core.saved_assignment import assignment_path
from fxpart.errors import FxpartError, SpecError
from fxpart.support.digest import code_digest, stable_digest
from fxpart.support.host import installed_version, machine_key
from fxpart.support.regular_file import read_regular
from runner.config.device_schema import DevicesConfig, LinkConfig
from runner.config.schema import (
    RECOMMEND,
    Config,
    ExecuteConfig,
    LatencyConfig,
    ModeConfig,
    TrackingConfig,
)
from runner.experiment.check import check
from runner.experiment.measured_tables import table_paths
from runner.experiment.mesh import replica_count
from runner.experiment.model_spec import model_spec
from runner.experiment.rates import price_per_hour
from runner.experiment.user_mode import SETTING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "ALIKE_IN_ALL_JOBS",
    "Choices",
    "JobIdentity",
    "SweepIds",
    "config_key",
    "deciding",
    "for_jobs",
    "identified",
    "inputs_key",
    "latency_settings",
    "override_values",
    "refuse_changed",
    "without_elsewhere",
]


@dataclass(frozen=True, slots=True)
class Choices:
    """The names of a run's four main choices."""

    model: str
    mode: str
    devices: str
    transfer_rate: str

    @classmethod
    def of(cls, chosen: Mapping[str, object], config: Config | None) -> "Choices":
        """Return the choices among Hydra's `chosen` groups, for a job with a valid `config` if any.

        A group without a choice is empty: a file may say `override /model: null`.
        """
        names = {name: str(chosen.get(name) or "") for name in cls.__dataclass_fields__}
        if config is not None:
            # For a template such as `transformers`, use the name of the actual model.
            names["model"] = config.model.name
        return cls(**names)


@dataclass(frozen=True, slots=True)
class SweepIds:
    """The sweep that a job belongs to."""

    sweep: str
    """Its id, in `result.json` and in the tags of each job."""
    parent_run: str | None
    """Id of the sweep's own run in MLflow, if any."""
    swept: tuple[str, ...] = ()
    """The keys with several values in the sweep, used in the names of its jobs."""


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """A job, where it was started, and where its results go."""

    choices: Choices
    overrides: tuple[str, ...]
    """The overrides on the command line."""
    folder: Path
    """Output folder."""
    root: Path
    """The user's working directory; MLflow's default store is in ``outputs`` below it."""
    sweep: SweepIds | None = None
    """The sweep it belongs to, if any."""
    key: str | None = None
    """Its `config_key`, once computed."""
    ran_key: str | None = None
    """The `config_key` of what it runs, if that was decided from its own configuration."""
    inputs: str | None = None
    """Its `inputs_key`, once computed; in a sweep, from when the sweep began."""
    tracking: TrackingConfig | None = None
    """Where to log a job whose configuration is invalid; otherwise `Config.tracking` counts."""


def identified(config: Config | None, identity: JobIdentity) -> JobIdentity:
    """Return `identity` with its keys computed, unless they are known.

    They stay None if the model does not exist: the job itself then fails and logs the error.
    """
    if config is None or (identity.key and identity.inputs):
        return identity
    try:
        inputs = inputs_key(config, model_spec(config).key())
    except FxpartError:
        return identity
    key = identity.key or config_key(config, inputs)
    return replace(identity, key=key, inputs=identity.inputs or inputs)


def refuse_changed(config: Config, identity: JobIdentity) -> None:
    """Check that nothing that decides the result has changed since the key was computed.

    Raises:
        SpecError: if something has changed.

    """
    known = identity.inputs
    if known is not None and inputs_key(config, model_spec(config).key()) != known:
        raise SpecError(
            "an input of the result was changed after the start: a source file of the model, a "
            "file that the configuration names, fxpart or torch; repeat the command"
        )


# Overrides as typed, in Hydra's list.

_SECTION = re.compile(r"[./@=]")
"""The characters that end a section's name in an override."""
_SWEEP_ALONE = ("question", "resume", "where", "zip", "rerun")
"""Settings of a sweep that do not apply to its jobs."""
ALIKE_IN_ALL_JOBS = (*_SWEEP_ALONE, "tracking", "figures", "verbose")
"""Settings shared by all jobs of a sweep that affect no result."""


def override_values(overrides: Sequence[str]) -> dict[str, str]:
    """Return ``{key: value}`` of Hydra's list of overrides, without prefixes and quotes."""
    values: dict[str, str] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        values[key.lstrip("+~")] = value[1:-1] if quoted else value
    return values


def without_elsewhere(
    overrides: Iterable[str], aside: Collection[str] = ("tracking", "hydra")
) -> tuple[str, ...]:
    """Return the overrides without those of the sections `aside`.

    By default these are tracking, which may hold a password, and Hydra's own settings.
    """
    return tuple(
        override
        for override in overrides
        if _SECTION.split(override.lstrip("+~"), maxsplit=1)[0] not in aside
    )


def for_jobs(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides used to compose the jobs of a sweep."""
    return without_elsewhere(overrides, _SWEEP_ALONE)


def deciding(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides that decide results, and so distinguish one sweep from another."""
    return without_elsewhere(overrides, (*ALIKE_IN_ALL_JOBS, "hydra"))


# The key: the configuration without names and locations, the model, the code and, if times are
# measured, the machine.

_FXPART = Path(fxpart.__file__).parent
_EXPERIMENT, _PLANS = (
    Path(__file__).resolve().parent.parent / room for room in ("experiment", "plans")
)
_DECIDING = (
    "core",  # graphs, devices, assignments
    "capture",  # the graph that a model becomes
    "sharding",  # the shard of a model that one device of a group runs
    "cost",  # the time and memory of an assignment
    "placement",  # the assignment
    "schedule",  # the step of a pipeline
    "support/compiled.py",  # the arithmetic of compiled loops
    "support/random_numbers.py",  # the random numbers of a search
)
"""Library code that every result depends on. Edits elsewhere (plan_export, torch_compat, the other
files of support) invalidate no result; nor do edits of the runner outside of `experiment`, which
computes the metrics."""
_MEASURING = ("execution",)
"""Additional code behind the results of jobs that run something on this machine."""
_MEASURED = ("device", "threads", "repeats")
"""Settings that affect measured times."""


def config_key(config: Config, inputs: str) -> str:
    """Return the hash of everything that decides the result.

    That is the `inputs_key` and, if times are measured, this machine.
    """
    machine = {device: _machine(device) for device in _measured_devices(config)}
    return stable_digest({"inputs": inputs, "machine": machine})[:16]


def inputs_key(config: Config, model: Mapping[str, object]) -> str:
    """Return the hash of what decides the result on any machine.

    `model` is the `ModelSpec.key` of the configuration's model, which covers a factory's sources.
    """
    parts = {
        "model": model,
        "level": config.capture.level,
        "devices": _device_numbers(config.devices),
        "transfer_rate": _link_numbers(config.transfer_rate),
        "latency": _latency_numbers(config),
        "granularity": config.granularity,
        "objective": config.objective,
        "phase": config.phase.name,
        "runtime": asdict(config.runtime),
        "weights": _numbers(config.weights) if config.weights.name != "none" else {},
        "kv_cache": config.kv_cache,
        "latent_attention": config.latent_attention,
        "offload": _numbers(config.offload) if config.devices.tiers else {},
        "lengths": [config.prompt_len, config.output_len],
        "prefill_batch": config.prefill_batch,
        "price": price_per_hour(config),
        "training": _training_numbers(config),
        "reserve": _numbers(config.reserve),
        "data_parallel": config.data_parallel,
        "all_reduce": asdict(config.all_reduce) if _has_sums(config) else {},
        "tensor_parallel": config.tensor_parallel,
        "sequence_parallel": config.sequence_parallel,
        "async_tensor_parallel": config.async_tensor_parallel,
        "loss_parallel": config.loss_parallel,
        "float8": asdict(config.float8),
        "mesh": [config.expert_parallel, config.expert_imbalance, config.context_parallel],
        "engine": config.engine,
        "zero": config.zero,
        "reduce_dtype": config.reduce_dtype,
        "symbolic": config.capture.symbolic,
        "batch_sweep": config.batch_sweep if config.capture.symbolic != "none" else None,
        "serving_sweep": asdict(config.serving_sweep),
        "schedule": config.schedule.name,
        "microbatches": config.microbatches,
        "execute": _execute_numbers(config.execute),
        "mode": _mode_numbers(config.mode),
        **_refusal(config),
        **_code(config),
    }
    return stable_digest(parts)


def _refusal(config: Config) -> dict[str, str]:
    """Return why `config` is refused, if it is.

    A setting that decides nothing may still be refused, and is then not the same as its default.
    """
    try:
        check(config)
    except FxpartError as error:
        return {"refused": str(error)}
    return {}


def _code(config: Config) -> dict[str, object]:
    """Return the versions and digests of the code that the result depends on."""
    rooms = (*_DECIDING, *(_MEASURING if _measured_devices(config) else ()))
    return {
        "versions": {package: installed_version(package) for package in ("fxpart", "torch")},
        "code": {folder: code_digest(_FXPART / folder) for folder in rooms},
        "runner": code_digest(_EXPERIMENT),
        **({"plans": code_digest(_PLANS)} if config.mode.name == RECOMMEND else {}),
    }


def _numbers(section: "DataclassInstance") -> dict[str, object]:
    """Return a section without its name and the source of its numbers."""
    return {key: v for key, v in asdict(section).items() if key not in ("name", "source")}


def _has_sums(config: Config) -> bool:
    """Return whether gradients may be all-reduced; a recommendation chooses the replica count."""
    return replica_count(config) > 1 or config.mode.name == RECOMMEND


def _measured_devices(config: Config) -> list[str]:
    """Return the devices of this machine that the result is measured on, usually none."""
    latency, execute = config.latency, config.execute
    devices = []
    # A file of measurements gives the same times on any machine.
    if latency.source in ("profiled", "calibrated") and not latency.file:
        devices.append(latency.device)
    if execute.name != "none":
        devices.append(execute.device)
    return list(dict.fromkeys(devices))


@cache
def _machine(device: str) -> dict[str, object]:
    """Return what identifies this machine's hardware."""
    return {"architecture": platform.machine(), **machine_key(device)}


def _training_numbers(config: Config) -> dict[str, object]:
    """Return the settings that decide a training step, besides the model; empty in inference."""
    if config.phase.name != "training":
        return {}
    return {
        "train_mode": config.phase.train_mode,
        "fused_kernels": config.phase.fused_kernels,
        "checkpointing": config.checkpointing,
        **({"recomputed_blocks": list(blocks)} if (blocks := config.recomputed_blocks) else {}),
        "backward_order": config.backward_order,
        "optimizer": asdict(config.optimizer),
    }


def _device_numbers(devices: DevicesConfig) -> dict[str, object]:
    return {
        "pools": [_numbers(pool) for pool in devices.pools],
        "nodes": devices.nodes,
        "between_nodes": devices.between_nodes and _link_numbers(devices.between_nodes),
        "pairs": [{"devices": pair.devices, **_link_numbers(pair)} for pair in devices.pairs],
        "saturate_host": devices.saturate_host,
        **({"tiers": [_numbers(tier) for tier in devices.tiers]} if devices.tiers else {}),
        **({"adapters_per_node": adapters} if (adapters := devices.adapters_per_node) else {}),
    }


def _mode_numbers(mode: ModeConfig) -> dict[str, object]:
    """Return the mode and its options, with digests of the files and functions it reads."""
    options = dict(mode.options)
    saved = options.get("assignment")
    if mode.name == "aot_based" and isinstance(saved, str):
        # An unreadable file is reported later, with a message of its own.
        with suppress(OSError):
            options["assignment"] = sha256(read_regular(assignment_path(saved))).hexdigest()
    function = options.get("function")
    if mode.name == "custom" and isinstance(function, str):
        # A missing function is reported later.
        with suppress(FxpartError):
            options["function_sha256"] = factory_digest(function, setting=SETTING)
    return {"name": mode.name, "options": options}


def _latency_numbers(config: Config) -> dict[str, object]:
    """Return the settings behind operator times, with digests of their files, without names."""
    latency = config.latency
    numbers = latency_settings(latency)
    if latency.file:
        # An unreadable file is reported later, with a message of its own.
        with suppress(OSError):
            numbers["file"] = sha256(read_regular(Path(latency.file))).hexdigest()
    if latency.source == "kernels" and latency.tables:
        with suppress(OSError, SpecError):
            numbers["tables"] = [
                (name, sha256(read_regular(path)).hexdigest()) for name, path in table_paths(config)
            ]
    return {"source": latency.source, **numbers}


def latency_settings(latency: LatencyConfig) -> dict[str, object]:
    """Return the fields that apply to the section's source."""
    roofline = ("compute_efficiency", "bandwidth_efficiency", "op_overhead_s")
    read_by = {
        "roofline": roofline,
        "kernels": (*roofline, "curves", "carries_curves", "tables"),
        "trace": (*roofline, "file"),
        "profiled": _MEASURED,
        # With a file, nothing is measured.
        "calibrated": ("file",) if latency.file else _MEASURED,
    }
    # An unknown source is reported later.
    return {name: getattr(latency, name) for name in read_by.get(latency.source, ())}


def _execute_numbers(execute: ExecuteConfig) -> dict[str, object]:
    """Return the settings of the run that affect what is measured."""
    counts = () if execute.name == "none" else ("repeats", "seed", "device", "threads")
    numbers = {name: getattr(execute, name) for name in ("name", *counts)}
    # Saved stages are part of the result, so a job without them has another key.
    return {**numbers, "save_stages": True} if counts and execute.save_stages else numbers


def _link_numbers(link: LinkConfig) -> dict[str, float]:
    return {"bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}
