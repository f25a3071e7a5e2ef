"""Build transformers models by class name, with checked configurations, without weights."""

import inspect
import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations.executorch import register_dynamic_cache_export_support
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto import modeling_auto
from transformers.utils import logging as transformers_logging

from fxpart.capture.models.fused_attention import FUSED, check_fused, register_fused
from fxpart.capture.models.misspelt import COMMON_KEYS
from fxpart.errors import SpecError, nearest_names, one_line

__all__ = ["architecture_model", "has_encoder_and_decoder", "model_class", "model_config"]

META = torch.device("meta")

# Keys of published configurations that transformers folds into rope_parameters.
_ROPE_KEYS = ("partial_rotary_factor", "rope_scaling", "rope_theta")
# Indices and ids of tokens may be negative.
_SIZE = re.compile(
    r"^(?:n|num|d|max)_|(?:_size|_sizes|_dim|_dims|_length|layers|heads|positions|channels|depths|depth"
    r"|dropout|kernel|stride|experts|eps)$"
)
# Set by ModelSpec.dtype.
_DTYPE_KEYS = ("dtype", "torch_dtype")
_ATTENTION = "attn_implementation"


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' advice on weights and tokens."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _model_class_names() -> list[str]:
    """Return the names of transformers' model classes, without importing any."""
    names: list[str] = []
    for mapping in vars(modeling_auto):
        if mapping.startswith("MODEL_") and mapping.endswith("_NAMES"):
            for entry in getattr(modeling_auto, mapping).values():
                names += [entry] if isinstance(entry, str) else entry
    return names


def model_class(architecture: str) -> type[Any]:
    """Return the model class of transformers with that name.

    Raises:
        SpecError: if there is none, or it is a base class that computes nothing.

    """
    with _quiet():
        cls = getattr(transformers, architecture, None)
    if not (inspect.isclass(cls) and issubclass(cls, transformers.PreTrainedModel)):
        what = "is not in transformers" if cls is None else "is not a model class of transformers"
        raise SpecError(
            f"architecture={architecture} {what} {transformers.__version__};"
            f" {nearest_names(architecture, _model_class_names())}"
        )
    if cls.config_class is None or "forward" not in _methods(cls):
        others = [name for name in _model_class_names() if name != architecture]
        raise SpecError(
            f"architecture={architecture} has no forward of its own, it is a base class or made of"
            f" several models; {nearest_names(architecture, others)}"
        )
    model: type[Any] = cls
    return model


def has_encoder_and_decoder(architecture: str) -> bool:
    """Return whether a model of that class has an encoder and a decoder.

    Raises `SpecError` if the class does not exist.
    """
    cls = model_class(architecture)
    # A decoder alone, such as BartForCausalLM, has the configuration of the whole model.
    has_decoder = "decoder_input_ids" in inspect.signature(cls.forward).parameters
    return has_decoder and bool(getattr(cls.config_class, "is_encoder_decoder", False))


def _methods(cls: type[Any]) -> set[str]:
    """Return the names that `cls` and its bases below `nn.Module` define."""
    classes = cls.__mro__[: cls.__mro__.index(nn.Module)]
    return {name for owner in classes for name in vars(owner)}


def _unlisted_keys(cls: type[Any]) -> set[str]:
    """Return the keys that the model's code reads although its configuration class lacks them.

    An example is ``head_dim`` of Qwen3MoeForCausalLM, which its published configurations set.
    """
    code = Path(inspect.getfile(cls)).read_text(encoding="utf-8")
    return set(re.findall(r"getattr\(\s*(?:self\.)?config,\s*\"([a-z]\w*)\"", code))


def _config_keys(config_class: type[Any]) -> set[str]:
    keys = set(inspect.signature(config_class).parameters) - {"self", "kwargs", *_DTYPE_KEYS}
    keys |= {*config_class.attribute_map, *COMMON_KEYS}
    return keys | set(_ROPE_KEYS) if "rope_parameters" in keys else keys


def _read_settings(cls: type[Any]) -> set[str]:
    """Return what the model's code reads from configurations and its own one does not have."""
    code = Path(inspect.getfile(cls)).read_text(encoding="utf-8")
    own = inspect.signature(cls.config_class).parameters
    return set(re.findall(r"config\.([a-z]\w*)\b(?!\()", code)) - set(own)


def _check_keys(
    config_class: type[Any],
    unlisted: set[str],
    read: set[str],
    overrides: Mapping[str, Any],
    where: str,
) -> None:
    """Refuse keys that the class would accept as attributes without ever reading them.

    `unlisted` are keys that any class may lack. A part without parts of its own, such as
    ``attn_config`` of DBRX, may lack any of `read`, since the model reads them from it.
    """
    is_part = where != "config" and not config_class.sub_configs
    keys = _config_keys(config_class) | unlisted | (read if is_part else set())
    for key, value in overrides.items():
        if key in _DTYPE_KEYS:
            raise SpecError(f"{where}.{key} is set by model.dtype; use that instead")
        if key == _ATTENTION and where != "config":
            part = where.removeprefix("config.")
            raise SpecError(
                f"{where}.{key} is not read by transformers; set"
                f" model.config.{key}={{{part}: {value}}} instead"
            )
        if key not in keys:
            raise SpecError(
                f"{where}.{key} is not a key of {config_class.__name__}; {nearest_names(key, keys)}"
            )
        part = config_class.sub_configs.get(key)
        # If the part's class depends on its model_type, only transformers can check it.
        if isinstance(value, Mapping) and hasattr(part, "attribute_map"):
            _check_keys(part, unlisted, read, value, f"{where}.{key}")


def _refuse_nonsense(overrides: Mapping[str, Any], where: str) -> None:
    """Refuse negative sizes, which transformers accepts."""
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            _refuse_nonsense(value, f"{where}.{key}")
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise SpecError(f"{where}.{key}={value} must be a finite number")
            if isinstance(number, int | float) and number < 0 and _SIZE.search(key):
                raise SpecError(f"{where}.{key}={value} must not be negative; it is a size")


def model_config(cls: type[Any], overrides: Mapping[str, Any]) -> Any:  # noqa: ANN401 - transformers' classes are untyped
    """Return the configuration of model class `cls`: its defaults, changed by `overrides`.

    `use_cache` is False unless `overrides` sets it: a single pass over a prompt does not need the
    cache.

    Raises:
        SpecError: if the class lacks a key or refuses a value.

    """
    config_class = cls.config_class
    read = _read_settings(cls) if config_class.sub_configs else set()
    _check_keys(config_class, _unlisted_keys(cls), read, overrides, "config")
    _refuse_nonsense(overrides, "model.config")
    settings = dict(overrides)
    if "use_cache" in _config_keys(config_class):
        settings.setdefault("use_cache", False)
    try:
        with _quiet():
            config = config_class(**settings)
    except Exception as error:
        raise SpecError(f"{config_class.__name__} refuses the config: {one_line(error)}") from error
    _without_cache(config, overrides)
    return config


def _without_cache(config: Any, overrides: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Switch the cache off in the parts of `config`, unless `overrides` sets it."""
    for key in config.sub_configs:
        part, part_overrides = getattr(config, key, None), overrides.get(key, {})
        if part is None or not hasattr(part, "sub_configs"):
            continue
        if hasattr(part, "use_cache") and not (
            isinstance(part_overrides, Mapping) and "use_cache" in part_overrides
        ):
            part.use_cache = bool(overrides.get("use_cache", False))
        _without_cache(part, part_overrides if isinstance(part_overrides, Mapping) else {})


def _attention_names(setting: object, parts: Collection[str]) -> set[str]:
    """Return the attention implementations that `setting` names, one or a mapping of `parts`.

    Raises:
        SpecError: for a part or a name that does not exist. Names of hub kernels, ``owner/name``,
            are not checked.

    """
    by_part = setting if isinstance(setting, Mapping) else {"": setting}
    known = ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys())
    for part, name in by_part.items():
        if part and part not in parts:
            raise SpecError(f"attn_implementation has no part {part}; {nearest_names(part, parts)}")
        if not isinstance(name, str):
            raise SpecError(
                f"attn_implementation={name} must be a name, such as eager or sdpa, or a mapping"
                " from parts of the config to names"
            )
        if name not in known and "/" not in name:
            raise SpecError(
                f"attn_implementation={name} does not exist; {nearest_names(name, known)}"
            )
    return set(by_part.values())


def architecture_model(
    architecture: str,
    overrides: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device = META,
) -> nn.Module:
    """Return the model with `dtype` parameters on `device`, for inference.

    Nothing is downloaded. On the meta device weights take no memory; elsewhere they have the
    architecture's random initial values, from torch's generators. The configuration is the module's
    `config`.

    Raises:
        SpecError: if the architecture does not exist or refuses the configuration.

    """
    cls = model_class(architecture)
    config = model_config(cls, overrides)
    attentions: set[str] = set()
    if (setting := overrides.get(_ATTENTION)) is not None:
        register_fused()
        attentions = _attention_names(setting, config.sub_configs)
    try:
        with _quiet(), device:
            model: nn.Module = cls._from_config(config, dtype=dtype).eval()
    except Exception as error:
        raise SpecError(
            f"{architecture} cannot be built with this config: {one_line(error)}"
        ) from error
    if FUSED in attentions:
        check_fused(model)
    # Lets torch.export flatten the cache that a model returns, some even without `use_cache`.
    register_dynamic_cache_export_support()  # type: ignore[no-untyped-call]
    return model
