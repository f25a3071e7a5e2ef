"""`build_model`: a `ModelSpec` made into a module and its example inputs, by default on meta."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpart.errors import FxpartError, SpecError, one_line
from fxpart.models.spec import ModelSpec

__all__ = ["BuiltModel", "build_model"]


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

    An architecture's inputs are described at `fxpart.models.inputs.example_inputs`. Its
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
        from fxpart.models.factory import factory_model

        return BuiltModel(*factory_model(spec, place))
    from fxpart.models.architecture import architecture_model
    from fxpart.models.inputs import example_inputs
    from fxpart.models.random_inputs import drawn_inputs

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
