"""Operator-level capture with `torch.export`, non-strict, on the meta device: no weights needed."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import nn

from fxpart.capture.unmasked_attention import unmasked_attention
from fxpart.errors import CaptureError, one_line
from fxpart.own_line import own_line

__all__ = ["capture_failure", "export_program", "quiet"]

_BRANCHES = (
    "the model branches on the values of a tensor, or makes tensors whose size depends on them"
)
_HINTS = (
    ("data-dependent", _BRANCHES),
    ("DataDependent", _BRANCHES),
    ("meta tensor", "the model reads tensor values while it runs; take its branches from shapes"),
    ("found at least two devices", "create every tensor on the default device, not on cpu"),
)
_EXPERTS = "; for a mixture of experts, set model.config.experts_implementation=grouped_mm"


def capture_failure(module: nn.Module, error: BaseException) -> CaptureError:
    """Return the error that says why `module` cannot be captured, and what helps if known."""
    said = f"{type(error).__name__} {error}"
    hint = next((text for key, text in _HINTS if key in said), "")
    if hint == _BRANCHES and type(module).__module__.startswith("transformers."):
        hint += _EXPERTS
    return CaptureError(
        f"{type(module).__name__} cannot be captured by torch.export{own_line(error)}:"
        f" {one_line(error)}" + (f"; {hint}" if hint else "")
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep back what torch warns, logs and prints: of a failure it is pages, ours is one line."""
    loud = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(loud)


def export_program(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,  # noqa: ANN401 - as torch.export takes it
) -> torch.export.ExportedProgram:
    """Return `module` exported for the shapes and dtypes of the example inputs.

    Parameters and inputs may all be on the meta device; then a model of any size takes no memory.
    Every call node of the result carries the path of the module it comes from. `dynamic_shapes`
    says which sizes of the inputs are symbols, as `torch.export.export` takes it. Attention of
    transformers models is that of a run, see `fxpart.capture.unmasked_attention`.

    Raises:
        CaptureError: when the model cannot be exported; the message names the cause and, where
            one is known, the switch that helps.

    """
    device = next((p.device for p in module.parameters()), torch.device("meta"))
    try:
        inputs = dict(kwargs or {})
        with quiet(), torch.no_grad(), device, unmasked_attention(args, inputs):
            return torch.export.export(
                module, args, inputs, dynamic_shapes=dynamic_shapes, strict=False
            )
    except Exception as error:
        raise capture_failure(module, error) from error
