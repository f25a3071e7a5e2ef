"""Convert configurations composed by Hydra to typed values.

`register` registers the schema with Hydra; `read_config` converts a configuration to a `Config`.
"""

import pickle
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import BooleanNode, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError

from fxpart.errors import SpecError, nearest_names
from runner.config.auto_latency import with_decided_latency
from runner.config.device_schema import DevicesConfig, LinkConfig, PoolConfig
from runner.config.schema import Config, ModeConfig, Schema, TrackingConfig, sections_in
from runner.config.wrong_values import refused_by_omegaconf, typed_key

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["TypedSection", "read_config", "read_tracking", "register"]


_SCHEMA = "schema"


def register() -> None:
    """Register the schema, which must come first in the defaults of ``config.yaml``. Idempotent."""
    store = ConfigStore.instance()
    if store.repo.get(f"{_SCHEMA}.yaml") is not None:
        return
    schema = OmegaConf.structured(Schema)
    # Hydra closes dictionaries against new keys. These stay open, so that
    # model.config.num_hidden_layers=4 needs no +; unknown keys are rejected where they are used.
    opened = (schema.model.config, schema.model.factory_args, schema.mode, schema.price_per_hour)
    for open_dict in opened:
        OmegaConf.set_struct(open_dict, False)
    _refuse_numbers_of_switches(schema)
    store.store(name=_SCHEMA, node=schema, provider="fxpart")


class _SwitchNode(BooleanNode):
    """A boolean; OmegaConf's own node accepts any number, and takes all but 0 for true."""

    def _validate_and_convert_impl(self, value: Any) -> bool:  # noqa: ANN401 - OmegaConf's
        if isinstance(value, int) and not isinstance(value, bool):
            raise ValidationError("Value '$VALUE' is not a valid bool (type $VALUE_TYPE)")
        return super()._validate_and_convert_impl(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_SwitchNode":
        copied = _SwitchNode()
        self._deepcopy_impl(copied, memo)
        return copied


def _refuse_numbers_of_switches(section: DictConfig) -> None:
    """Replace every boolean node in `section`, recursively, by a `_SwitchNode`."""
    for key, node in _nodes(section).items():
        if isinstance(node, DictConfig):
            _refuse_numbers_of_switches(node)
        elif isinstance(node, BooleanNode):
            is_optional = node._is_optional()
            _nodes(section)[key] = _SwitchNode(node._value(), key, section, is_optional)


def read_config(composed: DictConfig) -> Config:
    """Return the typed values of a configuration composed by Hydra.

    Raises:
        SpecError: if a value is missing, of the wrong type or a broken reference, or a key is
            unknown.

    """
    try:
        model = composed.get("model") or {}
        # Checked before values are resolved, since a model's name may refer to these.
        if model.get("path") == "":
            raise SpecError("model.path is needed; give model.path=FILE, a published problem")
        if model.get("architecture") is None and model.get("factory") is None:
            raise SpecError(
                "the model has neither an architecture nor a factory; give model.architecture=...,"
                " a class of transformers, or model.factory=package.module:function"
            )
        values = _typed(composed)
    except MissingMandatoryValue as error:
        key = typed_key(error)
        raise SpecError(f"{key} is needed; give {key}=...") from error
    except OmegaConfBaseException as error:
        raise SpecError(refused_by_omegaconf(error)) from error
    if not isinstance(values, Schema):
        raise SpecError("the configuration has no schema; list `schema` first in its defaults")
    _refuse_text(values, "")
    options = dict(values.mode)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise SpecError(
            f"mode.name must be the name of a mode, got {name!r}; choose one, such as mode=kl_based"
        )
    sections = {key: value for key, value in vars(values).items() if key != "mode"}
    _refuse_unknown(values, "")
    config = Config(**sections, mode=ModeConfig(name, options))
    config = _with_published_devices(config) if config.model.path is not None else config
    return with_decided_latency(_with_own_nvlink(config))


_NVLINK, _NVLINK_3_BYTES_PER_S = "nvlink", 300e9
"""The link without a rate of its own, and that of devices without it: an A100's."""


def _with_own_nvlink(config: Config) -> Config:
    """Return `config` with ``nvlink`` as fast as the slowest NVLink of its devices."""
    devices = config.devices
    rates = [pool.nvlink_bytes_per_s or _NVLINK_3_BYTES_PER_S for pool in devices.pools]
    slowest = min(rates, default=_NVLINK_3_BYTES_PER_S)

    def known(link: LinkConfig) -> LinkConfig:
        is_open = link.name == _NVLINK and not link.bytes_per_s
        return replace(link, bytes_per_s=slowest) if is_open else link

    if devices.between_nodes is not None:
        devices = replace(devices, between_nodes=known(devices.between_nodes))
    return replace(config, transfer_rate=known(config.transfer_rate), devices=devices)


@dataclass(slots=True)
class TypedSection:
    """The typed values of a section without interpolations, cached for all jobs that share it."""

    ATTRIBUTE: ClassVar[str] = "fxpart_typed"
    """The attribute that marks a section as unchanged since its files were merged."""
    pickled: bytes | None = None
    """The pickled values, once computed."""


def _typed(composed: DictConfig) -> object:
    """Return `OmegaConf.to_object` of a config, with cached sections: it dominates swept jobs."""
    known = {
        name: vars(node)[TypedSection.ATTRIBUTE]
        for name, node in _nodes(composed).items()
        if TypedSection.ATTRIBUTE in vars(node)
    }
    if not known:
        return OmegaConf.to_object(composed)
    values: dict[str, Any] = {}
    try:
        for name in _nodes(composed):
            section = known.get(name)
            if section is not None and section.pickled is not None:
                values[name] = pickle.loads(section.pickled)
                continue
            value = composed[name]
            values[name] = OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
            if section is not None:
                section.pickled = pickle.dumps(values[name])
    except OmegaConfBaseException:
        return OmegaConf.to_object(composed)  # raises with the full key
    names = {field.name for field in fields(Schema)}
    schema = Schema(**{name: value for name, value in values.items() if name in names})
    vars(schema).update((name, value) for name, value in values.items() if name not in names)
    return schema


def _nodes(composed: DictConfig) -> dict[str, Any]:
    content: Any = composed._content
    return content if isinstance(content, dict) else {}


def read_tracking(section: DictConfig) -> TrackingConfig:
    """Return the typed values of the ``tracking`` section.

    Raises:
        SpecError: if a value is invalid or a broken reference, or a key is unknown.

    """
    try:
        values = OmegaConf.to_object(section)
    except OmegaConfBaseException as error:
        raise SpecError(refused_by_omegaconf(error)) from error
    if not isinstance(values, TrackingConfig):
        raise SpecError("the configuration has no schema; list `schema` first in its defaults")
    _refuse_text(values, "tracking.")
    _refuse_unknown(values, "tracking.")
    return values


def _refuse_unknown(section: "DataclassInstance", path: str) -> None:
    """Raise `SpecError` for keys added by a ``+`` on the command line, in `section` recursively."""
    for inner, prefix in sections_in(section, path):
        known = [field.name for field in fields(inner)]
        for key in vars(inner):
            if key not in known:
                raise SpecError(f"{prefix}{key} does not exist; {nearest_names(key, known)}")


def _refuse_text(section: "DataclassInstance", path: str) -> None:
    """Raise `SpecError` unless lists and mappings in `section` are such, recursively.

    OmegaConf accepts text from an interpolation, such as ``${now:%Y}``, in place of either.
    """
    for inner, prefix in sections_in(section, path):
        inner_type: Any = type(inner)
        for key, kind in _container_kinds(inner_type).items():
            value = getattr(inner, key)
            if not isinstance(value, kind):
                word = "list" if kind is list else "mapping"
                raise SpecError(f"{prefix}{key} must be a {word}, got {value!r}")


@cache
def _container_kinds(section: type[Any]) -> dict[str, type]:
    """Return the keys of `section` that hold a list or a dict, with that type."""
    kinds = {key: get_origin(hint) for key, hint in get_type_hints(section).items()}
    return {key: kind for key, kind in kinds.items() if kind in (list, dict)}


def _with_published_devices(config: Config) -> Config:
    """Return `config` with the devices and links of the published problem at `config.model.path`.

    Raises:
        FxpartError: if the file is not such a problem, or devices or links other than the default
            ones are configured.

    """
    from fxpart.capture.models.workload import read_workload
    from fxpart.core.workload import workload_topology

    for key, value, usual in (
        ("devices", config.devices.spec, "4x16gb"),
        ("transfer_rate", config.transfer_rate.name, "pcie4"),
    ):
        if value != usual:
            raise SpecError(
                f"{key}={value} applies to models, but the devices and links of model=workload are"
                f" given by its file; leave out {key}"
            )
    path = Path(config.model.path or "")
    topology = workload_topology(read_workload(path))
    pools: list[PoolConfig] = []
    for device in topology.devices:
        if pools and pools[-1].name == device.name:
            pools[-1].count += 1
            continue
        pools.append(
            PoolConfig(
                count=1,
                name=device.name,
                memory_bytes=device.memory_bytes,
                flops_per_s=dict(device.flops_per_s),
                sustained_flops_per_s=dict(device.sustained_flops_per_s),
                memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
                on_host=True,  # so that no memory is reserved
                source=path.name,
            )
        )
    spec = "+".join(f"{pool.count}x{pool.name}" for pool in pools)
    name = path.stem if config.model.name == "workload" else config.model.name
    return replace(
        config,
        model=replace(config.model, name=name, depends_on=[str(path)]),
        devices=DevicesConfig(spec=spec, pools=pools),
        transfer_rate=LinkConfig(name="published", bytes_per_s=float(topology.bytes_per_s[0, -1]))
        if topology.n_devices > 1
        else config.transfer_rate,
    )
