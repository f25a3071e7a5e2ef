"""Inputs with random contents, for a model that is really run."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpart.errors import SpecError

__all__ = ["drawn_inputs"]


def drawn_inputs(
    model: Any,  # noqa: ANN401 - transformers' classes are untyped
    inputs: Mapping[str, Tensor],
    device: torch.device,
) -> dict[str, Tensor]:
    """Return tensors like `inputs` on `device`, drawn from torch's generators.

    Real numbers are normally distributed; tokens are any that the model's embedding has a row for.

    Args:
        model: a model of transformers.
        inputs: by name, what it is called with; only shapes and dtypes count.
        device: where the result lies.

    Raises:
        SpecError: for tokens of a model that does not say how many it knows.

    """
    return {
        name: torch.randn(given.shape, dtype=given.dtype, device=device)
        if given.is_floating_point()
        else torch.randint(_vocabulary(model, name), given.shape, dtype=given.dtype, device=device)
        for name, given in inputs.items()
    }


def _vocabulary(model: Any, name: str) -> int:  # noqa: ANN401
    """Return how many different tokens the model takes as input `name`."""
    part = model.get_decoder() if name.startswith("decoder_") else model
    for owner in (part, model):
        try:
            table = owner.get_input_embeddings()
        # Where a model has no one table of tokens, transformers raises this.
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(table, nn.Embedding):
            return table.num_embeddings
    stated = getattr(model.config.get_text_config(), "vocab_size", None)
    if not isinstance(stated, int) or stated < 1:
        raise SpecError(
            f"{type(model).__name__} takes {name}, but does not say how many tokens it knows; give"
            " a factory that returns the model and its inputs"
        )
    return stated
