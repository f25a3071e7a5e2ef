"""The typed shape of the configuration: Hydra checks every file and override against it.

`register` gives the shape to Hydra; `read_config` makes plain, typed values of a composed
configuration; `build_topology` makes devices and links of two of its sections.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from fxpart.errors import SpecError, nearest_names
from fxpart.topology import DeviceSpec, Link, Topology, uniform_topology
from runner.tracking import TrackingConfig

__all__ = [
    "CaptureConfig",
    "Config",
    "DevicesConfig",
    "ExecuteConfig",
    "LatencyConfig",
    "LinkConfig",
    "ModeConfig",
    "ModelConfig",
    "PhaseConfig",
    "PoolConfig",
    "ScheduleConfig",
    "build_topology",
    "read_config",
    "register",
]


@dataclass
class ModelConfig:
    """What is cut: a transformers architecture with its configuration, or a function's result."""

    name: str = MISSING
    architecture: str | None = None
    """A class of transformers, such as ``LlamaForCausalLM``."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the architecture's configuration; what is left out has its default."""
    factory: str | None = None
    """``package.module:function`` that builds the model and its inputs."""
    factory_args: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 1
    seq_len: int | None = None
    dtype: str = "float32"


@dataclass
class PoolConfig:
    """Some equal devices."""

    count: int = MISSING
    name: str = MISSING
    """The accelerator."""
    memory_bytes: int = MISSING
    """Of one device."""
    flops_per_s: dict[str, float] = field(default_factory=dict)
    """Dense peak by dtype name."""
    memory_bandwidth_bytes_per_s: float = MISSING
    source: str = ""
    """Where the numbers come from."""


@dataclass
class LinkConfig:
    """A link between any two devices, one way."""

    name: str = ""
    bytes_per_s: float = MISSING
    latency_s: float = 0.0
    source: str = ""


@dataclass
class DevicesConfig:
    """What the model is cut over."""

    spec: str = MISSING
    """The name that was asked for."""
    pools: list[PoolConfig] = field(default_factory=list)
    nodes: list[int] | None = None
    """The machine that each pool sits in; all in one if left out."""
    between_nodes: LinkConfig | None = None
    """The link between machines; `transfer_rate` if left out."""
    saturate_host: bool = False
    """Whether the placement is copied onto idle devices, as often as it fits."""


@dataclass
class LatencyConfig:
    """How long an operator takes: coefficients of a model, or measurements."""

    name: str = MISSING
    source: str = "roofline"
    """``roofline`` with the coefficients below, ``profiled`` or ``calibrated``."""
    compute_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    op_overhead_s: float = 0.0
    file: str | None = None
    """Of a calibration; without one, this model's own measurements are fitted."""
    device: str = "cpu"
    """What is measured on: ``cpu`` or ``cuda``."""
    threads: int = 1
    repeats: int = 5
    """Times that each kind of operator is run."""


@dataclass
class PhaseConfig:
    """What of the model is captured."""

    name: str = "inference"
    """``inference`` or ``training``."""


@dataclass
class ScheduleConfig:
    """How the stages of a pipeline take turns."""

    name: str = "none"
    """``none`` or one of `fxpart.schedule.SCHEDULES`."""


@dataclass
class ExecuteConfig:
    """Whether, and how, the plan is carried out on this machine."""

    name: str = "none"
    """``none``, ``local`` or ``pipeline``."""
    repeats: int = 5
    seed: int = 0
    """Of random weights and inputs."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    threads: int = 1
    timeout_s: float = 120.0
    """After which a stage that shows no sign of life ends the run."""
    save_stages: bool = False


@dataclass
class CaptureConfig:
    """How the model's graph is come by."""

    level: str = "operator"
    cache_dir: str = MISSING
    use_cache: bool = True


@dataclass
class ModeConfig:
    """A mode and its options; the mode itself checks their names and types."""

    name: str
    options: dict[str, Any]


@dataclass
class _Sections:
    """What `Config` and the shape of the files have in common."""

    model: ModelConfig = field(default_factory=ModelConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    transfer_rate: LinkConfig = field(default_factory=LinkConfig)
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    phase: PhaseConfig = field(default_factory=PhaseConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    execute: ExecuteConfig = field(default_factory=ExecuteConfig)
    microbatches: int = 1
    """That a schedule runs in one step."""
    granularity: str = "operator"
    """What stays together: ``operator``, ``module``, or a depth in the module tree."""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


@dataclass
class _Schema(_Sections):
    """The shape of the files: a mode's options stand beside its name, ``mode.max_passes=4``."""

    mode: dict[str, Any] = field(default_factory=dict)


@dataclass
class Config(_Sections):
    """Everything that a run is made of."""

    mode: ModeConfig = field(default_factory=lambda: ModeConfig("", {}))


def register() -> None:
    """Give Hydra the shape; ``schema`` must stand first in the defaults of ``config.yaml``."""
    schema = OmegaConf.structured(_Schema)
    # Hydra closes dictionaries against new keys. These are open, so that
    # model.config.num_hidden_layers=4 needs no +; the model and the mode refuse wrong names.
    for open_dict in (schema.model.config, schema.model.factory_args, schema.mode):
        OmegaConf.set_struct(open_dict, False)
    ConfigStore.instance().store(name="schema", node=schema, provider="fxpart")


def read_config(composed: DictConfig) -> Config:
    """Return the typed values of a configuration that Hydra has composed.

    Raises:
        SpecError: for a value that is needed and not given, or that refers to nothing.

    """
    model = composed.get("model") or {}
    # Checked before values are resolved: a model's name may refer to either of the two.
    if model.get("architecture") is None and model.get("factory") is None:
        raise SpecError(
            "the model has neither an architecture nor a factory; give model.architecture=..., a"
            " class of transformers, or model.factory=package.module:function"
        )
    try:
        values = OmegaConf.to_object(composed)
    except MissingMandatoryValue as error:
        raise SpecError(f"{error.full_key} is needed; give {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        said = str(error).splitlines()[0]
        raise SpecError(f"configuration: {error.full_key or 'value'}: {said}") from error
    if not isinstance(values, _Schema):
        raise SpecError("the configuration has no schema; list `schema` first in its defaults")
    options = dict(values.mode)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise SpecError(f"mode.name must be a mode's name, got {name!r}; such as mode=kl_based")
    sections = {key: value for key, value in vars(values).items() if key != "mode"}
    _refuse_unknown(values, [section.name for section in fields(Config)], "")
    return Config(**sections, mode=ModeConfig(name, options))


def _refuse_unknown(section: object, known: Sequence[str], path: str) -> None:
    """Refuse keys that a ``+`` on the command line has added, in `section` and all inside it."""
    for key, value in vars(section).items():
        if key not in known:
            raise SpecError(f"{path}{key} does not exist; {nearest_names(key, known)}")
        for index, inner in enumerate(value if isinstance(value, list) else [value]):
            if is_dataclass(inner):
                where = f"{path}{key}.{index}." if isinstance(value, list) else f"{path}{key}."
                _refuse_unknown(inner, [f.name for f in fields(inner)], where)


def build_topology(devices: DevicesConfig, transfer_rate: LinkConfig) -> Topology:
    """Return the devices, pool by pool, with `transfer_rate` between those of one machine.

    Raises:
        SpecError: for a number that makes no sense, or machines that do not match the pools.

    """
    nodes = devices.nodes if devices.nodes is not None else [0] * len(devices.pools)
    if len(nodes) != len(devices.pools):
        raise SpecError(
            f"devices.nodes names the machines of {len(nodes)} pools, there are"
            f" {len(devices.pools)}; give one for each"
        )
    built = tuple(
        DeviceSpec(
            name=pool.name,
            memory_bytes=pool.memory_bytes,
            flops_per_s=dict(pool.flops_per_s),
            memory_bandwidth_bytes_per_s=pool.memory_bandwidth_bytes_per_s,
            node=node,
        )
        for pool, node in zip(devices.pools, nodes, strict=True)
        for _ in range(_count(pool))
    )
    far = devices.between_nodes
    return uniform_topology(built, _link(transfer_rate), _link(far) if far else None)


def _count(pool: PoolConfig) -> int:
    if pool.count < 1:
        raise SpecError(f"devices.pools: count of {pool.name} must be at least 1, got {pool.count}")
    return pool.count


def _link(link: LinkConfig) -> Link:
    return Link(bytes_per_s=link.bytes_per_s, latency_s=link.latency_s)
