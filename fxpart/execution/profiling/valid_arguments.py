"""Make an operator's arguments valid: indices within bounds, probabilities between 0 and 1.

Made-up values are random, and some operators reject some values.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["changed_nodes", "needs_validity", "valid_arguments"]

Named = dict[str, Any]
"""Arguments of a call, by parameter name."""
_Rule = Callable[[Named], Named]
"""Returns the changed arguments."""


def needs_validity(target: Callable[..., Any]) -> bool:
    """Return whether the operator rejects some argument values."""
    return _rule(target) is not None


def _rule(target: Callable[..., Any]) -> _Rule | None:
    schema = getattr(target, "_schema", None)
    return None if schema is None else _RULES.get(schema.name.rpartition("::")[2].removesuffix("_"))


def valid_arguments(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with every index and probability among them made valid."""
    rule = _rule(target)
    if rule is None:
        return args, kwargs
    schema: Any = target
    names = [argument.name for argument in schema._schema.arguments]
    # Omitted arguments take their default, which is None or 0 for those read by rules.
    named = {**dict.fromkeys(names), **dict(zip(names, args, strict=False)), **kwargs}
    changed = rule(named)
    positional = tuple(changed.get(name, value) for name, value in zip(names, args, strict=False))
    return positional, {name: changed.get(name, value) for name, value in kwargs.items()}


def changed_nodes(
    arguments: Any,  # noqa: ANN401 - tuples, lists and mappings of nodes and constants
    before: Any,  # noqa: ANN401
    after: Any,  # noqa: ANN401
) -> Iterator[tuple[fx.Node, Tensor]]:
    """Yield the nodes among `arguments` whose values were made valid, with their new values."""
    if type(arguments) is fx.Node:
        if after is not before and after.dtype == before.dtype:
            yield arguments, after
    elif isinstance(arguments, Mapping):
        for name, argument in arguments.items():
            yield from changed_nodes(argument, before[name], after[name])
    elif isinstance(arguments, list | tuple):
        for argument, old, new in zip(arguments, before, after, strict=True):
            yield from changed_nodes(argument, old, new)


def _within(index: Tensor, bound: int) -> Tensor:
    """Return `index` with every number in 0..bound-1, unchanged if it already is."""
    if index.numel() == 0 or bound < 1 or index.dtype == torch.bool:
        return index
    if int(index.min()) >= 0 and int(index.max()) < bound:
        return index
    return index.remainder(bound)


def _rows(table: str, indices: str) -> _Rule:
    return lambda named: {indices: _within(named[indices], int(named[table].shape[0]))}


def _rows_of_gradient(named: Named) -> Named:
    return {"indices": _within(named["indices"], int(named["num_weights"]))}


def _along_dim(named: Named) -> Named:
    target = named["self"]
    bound = int(target.shape[named["dim"]]) if target.dim() else 1
    return {"index": _within(named["index"], bound)}


def _bag(named: Named) -> Named:
    """Make the offsets of the bags ascending positions into the indices, starting at 0."""
    indices = _within(named["indices"], int(named["weight"].shape[0]))
    offsets = named["offsets"]
    if offsets is None or offsets.numel() == 0:
        return {"indices": indices}
    ascending = _within(offsets, max(1, int(indices.numel()))).sort().values
    ascending[0] = 0
    return {"indices": indices, "offsets": ascending}


def _index_list(named: Named) -> Named:
    sizes, valid, dim = named["self"].shape, [], 0
    for index in named["indices"]:
        if index is None or index.dtype == torch.bool:
            valid.append(index)
            dim += 1 if index is None else index.dim()
            continue
        valid.append(_within(index, int(sizes[dim])))
        dim += 1
    return {"indices": valid}


def _classes(named: Named) -> Named:
    """Make integer labels less than the number of classes: dimension 1, or the only one."""
    scores, labels = named["self"], named["target"]
    if labels.is_floating_point():
        return {}
    return {"target": _within(labels, int(scores.shape[1 if scores.dim() > 1 else 0]))}


def _plane(named: Named) -> Named:
    height, width = named["self"].shape[-2:]
    return {"indices": _within(named["indices"], int(height) * int(width))}


def _counted(named: Named) -> Named:
    """Make values floating-point on a CPU, where histograms do not take integers."""
    values = named["self"]
    return {} if values.is_cuda or values.is_floating_point() else {"self": values.float()}


_RULES: dict[str, _Rule] = {
    "embedding": _rows("weight", "indices"),
    "embedding_dense_backward": _rows_of_gradient,
    "embedding_bag": _bag,
    "_embedding_bag_backward": _rows_of_gradient,
    "_embedding_bag_dense_backward": _rows_of_gradient,
    "_embedding_bag": _bag,
    "_embedding_bag_forward_only": _bag,
    "index": _index_list,
    "_unsafe_index": _index_list,
    "index_put": _index_list,
    "_unsafe_index_put": _index_list,
    "index_select": _along_dim,
    "index_add": _along_dim,
    "index_copy": _along_dim,
    "index_fill": _along_dim,
    "gather": _along_dim,
    "scatter": _along_dim,
    "scatter_add": _along_dim,
    "scatter_reduce": _along_dim,
    "take": lambda named: {"index": _within(named["index"], int(named["self"].numel()))},
    "one_hot": lambda named: {"self": _within(named["self"], int(named["num_classes"] or -1))},
    "cross_entropy_loss": _classes,
    "nll_loss": _classes,
    "nll_loss_nd": _classes,
    "nll_loss_forward": _classes,
    "nll_loss_backward": _classes,
    "nll_loss2d": _classes,
    "nll_loss2d_forward": _classes,
    "nll_loss2d_backward": _classes,
    "max_pool2d_with_indices_backward": _plane,
    "histc": _counted,
    "bernoulli": lambda named: {"self": named["self"].clamp(0, 1)},
    "multinomial": lambda named: {"self": named["self"].abs()},
}
