"""`build_model`: a `ModelSpec` made into a module and its example inputs, by default on meta."""

import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.executorch import register_dynamic_cache_export_support
from transformers.models.auto import modeling_auto
from transformers.utils import logging as transformers_logging

from fxpart.capture.models.spec import ModelSpec
from fxpart.errors import FxpartError, SpecError, nearest_names, one_line

__all__ = ["BuiltModel", "architecture_model", "build_model", "model_class", "model_config"]


# A model class of transformers by name, with a checked configuration, without weights.

META = torch.device("meta")

# Keys that every configuration class takes although its signature does not list them.
_COMMON_KEYS = (
    "attn_implementation",
    "experts_implementation",
    "num_labels",
    "output_attentions",
    "tie_word_embeddings",
)
# Keys of published configurations that transformers folds into rope_parameters.
_ROPE_KEYS = ("partial_rotary_factor", "rope_scaling", "rope_theta")
# ModelSpec.dtype says these.
_DTYPE_KEYS = ("dtype", "torch_dtype")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from writing advice on weights and tokens to the terminal."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _model_class_names() -> list[str]:
    """Return the model classes that transformers lists, without importing any."""
    names: list[str] = []
    for mapping in vars(modeling_auto):
        if mapping.startswith("MODEL_") and mapping.endswith("_NAMES"):
            for entry in getattr(modeling_auto, mapping).values():
                names += [entry] if isinstance(entry, str) else entry
    return names


def model_class(architecture: str) -> type[Any]:
    """Return the model class of transformers with that name.

    Raises:
        SpecError: when there is none, or it is a base class that computes nothing.

    """
    with _quiet():
        found = getattr(transformers, architecture, None)
    is_model = inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)
    if found is None or not is_model:
        what = "is not in transformers" if found is None else "is no model class of transformers"
        raise SpecError(
            f"architecture={architecture} {what} {transformers.__version__};"
            f" {nearest_names(architecture, _model_class_names())}"
        )
    if found.config_class is None or "forward" not in _methods(found):
        raise SpecError(
            f"architecture={architecture} is a base class without a forward of its own;"
            f" {nearest_names(architecture, _model_class_names())}"
        )
    cls: type[Any] = found
    return cls


def _methods(cls: type[Any]) -> set[str]:
    """Return what `cls` defines below `nn.Module`."""
    own = cls.__mro__[: cls.__mro__.index(nn.Module)]
    return {name for owner in own for name in vars(owner)}


def _unlisted_keys(cls: type[Any]) -> set[str]:
    """Return the keys that the model's code reads although its configuration need not have them.

    An example is ``head_dim`` of Qwen3MoeForCausalLM, which its published configurations set.
    """
    code = Path(inspect.getfile(cls)).read_text(encoding="utf-8")
    return set(re.findall(r"getattr\(\s*(?:self\.)?config,\s*\"([a-z]\w*)\"", code))


def _config_keys(config_class: type[Any]) -> set[str]:
    keys = set(inspect.signature(config_class).parameters) - {"self", "kwargs", *_DTYPE_KEYS}
    keys |= {*config_class.attribute_map, *_COMMON_KEYS}
    return keys | set(_ROPE_KEYS) if "rope_parameters" in keys else keys


def _check_keys(
    config_class: type[Any], unlisted: set[str], overrides: Mapping[str, Any], where: str
) -> None:
    """Refuse keys that the class would keep as attributes that nothing reads."""
    keys = _config_keys(config_class) | unlisted
    for key, value in overrides.items():
        if key in _DTYPE_KEYS:
            raise SpecError(f"{where}.{key} is said by model.dtype; set that instead")
        if key not in keys:
            raise SpecError(
                f"{where}.{key} is not a key of {config_class.__name__}; {nearest_names(key, keys)}"
            )
        part = config_class.sub_configs.get(key)
        # Where the part's class depends on its model_type, only transformers can check it.
        if isinstance(value, Mapping) and hasattr(part, "attribute_map"):
            _check_keys(part, unlisted, value, f"{where}.{key}")


def model_config(cls: type[Any], overrides: Mapping[str, Any]) -> Any:  # noqa: ANN401 - transformers' classes are untyped
    """Return the configuration of model class `cls`: its defaults, changed by `overrides`.

    `use_cache` is False unless `overrides` says otherwise: one pass over a prompt has no use for
    the cache.

    Raises:
        SpecError: for a key that the class does not have or a value that it refuses.

    """
    config_class = cls.config_class
    _check_keys(config_class, _unlisted_keys(cls), overrides, "config")
    settings = dict(overrides)
    if "use_cache" in _config_keys(config_class):
        settings.setdefault("use_cache", False)
    try:
        with _quiet():
            return config_class(**settings)
    except Exception as error:
        raise SpecError(f"{config_class.__name__} refuses the config: {one_line(error)}") from error


def architecture_model(
    architecture: str,
    overrides: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device = META,
) -> nn.Module:
    """Return the model with `dtype` parameters on `device`, for inference.

    Nothing is downloaded. On the meta device no memory is taken for weights; elsewhere they are
    drawn at random, from torch's generators, as the architecture starts its training. The
    configuration is the module's `config`.

    Raises:
        SpecError: for an architecture that does not exist, or a configuration that it refuses.

    """
    cls = model_class(architecture)
    config = model_config(cls, overrides)
    try:
        with _quiet(), device:
            model: nn.Module = cls._from_config(config, dtype=dtype).eval()
    except Exception as error:
        raise SpecError(
            f"{architecture} cannot be built with this config: {one_line(error)}"
        ) from error
    if getattr(config, "use_cache", False):
        # Tells torch.export how to take the cache that the model returns apart.
        register_dynamic_cache_export_support()  # type: ignore[no-untyped-call]
    return model


@dataclass(frozen=True, eq=False, slots=True)
class BuiltModel:
    """A module for inference and what it is called with, all of it on one device."""

    module: nn.Module
    args: tuple[Any, ...]
    """Positional example inputs."""
    kwargs: dict[str, Tensor]
    """Named example inputs."""


def build_model(spec: ModelSpec, device: torch.device | None = None) -> BuiltModel:
    """Return the model that `spec` describes and example inputs for it.

    Parameters, buffers and inputs lie on the meta device, so that a model of any size takes no
    memory; nothing is downloaded. The module is in eval mode, with parameters in the spec's dtype
    (a factory is told the dtype, and what it makes of it is kept).

    On another `device`, weights and inputs are drawn from torch's generators: seed them first. What
    a factory returns as inputs is kept as it is.

    An architecture's inputs are described at `fxpart.capture.models.inputs.example_inputs`. Its
    ``use_cache`` is off. With ``config.use_cache=true``, decoder-only models export as well, and
    the keys and values of every layer are outputs of the graph; models with an encoder and a
    decoder then do not export.

    Raises:
        SpecError: for a name, a configuration or a shape that does not exist.
        CaptureError: when a factory fails.

    """
    place = torch.device("meta") if device is None else device
    if spec.architecture is None:
        # Only what the spec needs is imported: transformers takes seconds.
        from fxpart.capture.models.factory import factory_model

        return BuiltModel(*factory_model(spec, place))
    pass
    from fxpart.capture.models.inputs import drawn_inputs, example_inputs

    dtype: torch.dtype = getattr(torch, spec.dtype)
    module = architecture_model(spec.architecture, spec.config, dtype, place)
    try:
        inputs = example_inputs(module, spec.batch_size, spec.seq_len, dtype)
        if place.type != "meta":
            inputs = drawn_inputs(module, inputs, place)
    except (RuntimeError, OverflowError) as error:
        if isinstance(error, FxpartError):
            raise
        raise SpecError(
            f"model {spec.name}: no tensors of model.batch_size={spec.batch_size} and"
            f" model.seq_len={spec.seq_len} can be made: {one_line(error)}; choose smaller ones"
        ) from error
    return BuiltModel(module, (), inputs)
