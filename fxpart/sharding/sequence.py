"""`regions_of`: the tensor-parallel regions of a sequence-parallel model.

Between regions, each device has its piece of the sequence in the residual stream, norms and
dropout: Korthikanti et al., Reducing activation recomputation in large transformer models, MLSys
2023, arXiv:2205.05198. A region is a module that begins with column-parallel layers and ends with a
row-parallel one, as attention and MLP do.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fxpart.errors import NotApplicableError
from fxpart.sharding.context import is_causal_alone, with_positions
from fxpart.sharding.tensor_plan import text_config

__all__ = ["Regions", "check_positions", "count_positions", "regions_of"]

_COLUMNS = ("colwise", "packed_colwise")
_HEADS = ("colwise_gather_output", "colwise_rep")
_ROWS = ("rowwise", "packed_rowwise")
_INSIDE = ("replicated_with_grad_allreduce", "replicate")


@dataclass(frozen=True, slots=True)
class Regions:
    """The modules of a model, by the part of the sequence that they see."""

    paths: tuple[str, ...]
    """Regions: their input is gathered for all layers inside, their output is scattered."""
    inner: frozenset[str]
    """Column-parallel layers inside regions."""
    outside: tuple[str, ...]
    """Modules with weights that see only this device's positions."""
    embedding_owner: str
    """The module that owns the embedding, whose output is scattered first."""


def regions_of(module: nn.Module, styles: Mapping[str, str], aside: Sequence[str] = ()) -> Regions:
    """Return the regions of a model with a tensor-parallel plan.

    Modules in `aside` (distributed experts) see pieces, and their weights are on this device only.

    Raises:
        NotApplicableError: if the plan has other kinds of layers.

    """
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    by_parent: dict[str, set[str]] = {}
    embeddings: list[str] = []
    heads: list[str] = []
    for path, style in styles.items():
        if path in parameters:
            continue
        parent = path.rpartition(".")[0]
        if style in _COLUMNS or style in _ROWS:
            by_parent.setdefault(parent, set()).add("row" if style in _ROWS else "column")
        elif style == "embedding_rowwise":
            embeddings.append(path)
        elif style in _HEADS:
            heads.append(path)
        elif style not in _INSIDE:
            raise _refused(module, f"{path} is {style}")
    incomplete = next((path for path, kinds in by_parent.items() if len(kinds) < 2), None)
    if incomplete is not None:
        raise _refused(module, f"{incomplete} does not both begin by columns and end by rows")
    if len(heads) > 1:
        raise _refused(module, f"{heads[0]} is {styles[heads[0]]}, and no head")
    if len(embeddings) != 1:
        raise _refused(module, f"{len(embeddings)} embeddings are split instead of one")
    paths = tuple(by_parent)
    inner = frozenset(p for p, s in styles.items() if s in _COLUMNS and p not in parameters)
    outside = []
    for name, part in module.named_modules():
        is_inside = any(f"{name}.".startswith(f"{path}.") for path in (*paths, *aside))
        if part._parameters and not is_inside and name not in styles:
            outside.append(name)
    return Regions(paths, inner, tuple(outside), embeddings[0].rpartition(".")[0])


def _refused(module: nn.Module, reason: str) -> NotApplicableError:
    return NotApplicableError(
        "sequence_parallel=true splits the operators between attention and MLP, but in the plan of "
        f"{type(module).__name__} {reason}; set sequence_parallel=false"
    )


def check_positions(module: nn.Module, count: int, degree: int) -> None:
    """Raise `NotApplicableError` if a sequence of `count` positions cannot be split.

    That is if `degree` does not divide it, or if it is longer than a window of attention: a model
    makes the masks of windows from the length of its piece.
    """
    window = getattr(text_config(getattr(module, "config", None)), "sliding_window", None)
    if isinstance(window, int) and count > window:
        raise _refused(module, f"attention sees a window of {window} of the {count} tokens")
    if count % degree:
        below = count - count % degree
        near = f"{below} or {below + degree}" if below else str(degree)
        raise NotApplicableError(
            f"sequence_parallel=true splits {count} positions over tensor_parallel={degree}"
            f" devices; use model.seq_len={near}"
        )


def count_positions(module: nn.Module) -> None:
    """Derive positions from the ids, since each device has only a piece of the embeddings.

    Raises:
        NotApplicableError: if the model takes no positions, or its masks are not causal.

    """
    names = list(inspect.signature(module.forward).parameters)
    if "position_ids" not in names:
        raise _refused(module, "positions are not among its inputs")
    config: Any = getattr(module, "config", None)
    # Other kernels take a causal flag instead of a mask.
    forward = module.forward
    if getattr(config, "_attn_implementation", None) == "eager":
        if not is_causal_alone(module):
            raise _refused(module, "attention as products is not causal over all earlier positions")
        forward = partial(_with_mask, forward, next(module.parameters()).dtype)
    module.forward = partial(with_positions, forward, names, torch.arange)


def _with_mask(forward: Any, dtype: torch.dtype, **arguments: Any) -> Any:  # noqa: ANN401
    """Call `forward` with a causal mask over the whole sequence, unless it has a mask."""
    if arguments.get("attention_mask") is None:
        ids = arguments["input_ids"]
        lowest = torch.finfo(dtype).min
        mask = torch.full((ids.shape[1],) * 2, lowest, dtype=dtype, device=ids.device).triu(1)
        arguments["attention_mask"] = mask[None, None]
    return forward(**arguments)
