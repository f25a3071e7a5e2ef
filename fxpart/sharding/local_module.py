"""`shard_module`: reduce a model to the part run by one device of a tensor-parallel group.

Parameters are replaced by their shards, and collectives run before or after the forward of modules:
column- and row-parallel layers as in Shoeybi et al., Megatron-LM, arXiv:1909.08053, and torch's
`ColwiseParallel` and `RowwiseParallel`. Modules that the plan does not name are replicated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fxpart.errors import NotApplicableError, nearest_names
from fxpart.sharding.collectives import (
    all_gather,
    all_reduce,
    embedded_rows,
    gather_sequence,
    scatter_sequence,
    sum_gradient,
)
from fxpart.sharding.extra_plans import SHARED_BIAS
from fxpart.sharding.loss_parallel import compute_loss_on_shards
from fxpart.sharding.sequence import Regions, count_positions, regions_of
from fxpart.sharding.tensor_plan import check_heads, tensor_plan, text_config

__all__ = ["shard_module"]

_Forward = Callable[..., Any]
_OF_KEYS = ("k_proj", "v_proj")
"""Layers of the keys and values of an attention in transformers."""
_GATHERED = ("colwise_gather_output", "colwise_rep")
"""Styles of layers whose outputs are split and then gathered."""


@dataclass(eq=False, slots=True)
class _Group:
    """The group, and the parameters sharded so far."""

    size: int
    rank: int
    shards: dict[int, tuple[nn.Parameter, int | None]] = field(default_factory=dict)
    """Shard and split dimension by the id of the whole parameter, which tied modules share."""
    wholes: list[nn.Parameter] = field(default_factory=list)
    """References that keep the ids valid."""
    split_head: str | None = None
    """Path of the head, if its outputs stay split for a loss over a split vocabulary."""
    is_megatron: bool = False
    """Whether positions come before the batch, so that gathered pieces of a sequence need no copy,
    and are gathered again in the backward."""
    rotary_dim: int | None = None
    """The size of the positional part of a key, in models with multi-head latent attention."""
    copies: dict[str, int] = field(default_factory=dict)
    """The number of devices that hold the same outputs, by the path of a layer; 1 for others."""
    regions: Regions | None = None
    """The regions with whole activations under sequence parallelism; None without it."""

    def entered(self, x: Tensor, path: str) -> Tensor:
        """Return the input of a column-parallel layer, whose gradient is summed."""
        if self.regions is None:
            return sum_gradient(x, self.size)
        # The input of a region is gathered once for all its layers.
        return x if path in self.regions.inner else self.gathered(x)

    def gathered(self, x: Tensor) -> Tensor:
        """Gather a sequence of which each device has a piece."""
        return gather_sequence(x, self.size, again=self.is_megatron)

    def left(self, x: Tensor) -> Tensor:
        """All-reduce a partial sum, or reduce-scatter it under sequence parallelism."""
        if self.regions is None:
            return all_reduce(x, self.size)
        return scatter_sequence(x, self.size, in_place=self.is_megatron)


def shard_module(
    module: nn.Module,
    group: int,
    rank: int = 0,
    plan: Mapping[str, str] | None = None,
    *,
    sequence: bool = False,
    megatron: bool = False,
    loss_parallel: bool = False,
    copies_keys: bool = False,
    whole: Sequence[str] = (),
) -> nn.Module:
    """Reduce `module` in place to the part on device `rank` of a group of `group`; return it.

    Args:
        module: a model on any device, including meta; it is modified.
        group: number of devices in the group.
        rank: rank of the device.
        plan: the style of modules and parameters by path; None for `tensor_plan`.
        sequence: whether activations between split layers are split along the sequence (Korthikanti
            et al., arXiv:2205.05198), as by torch's `SequenceParallel`.
        megatron: whether pieces of a sequence are gathered again in the backward instead of saving
            the whole, and the loss of `as_megatron` is computed on parts of the vocabulary.
        loss_parallel: whether the model's own loss is, as by torch's `loss_parallel`.
        copies_keys: whether a group may be a multiple of the heads of keys and values, each of
            which several devices then hold, as in vLLM. Such a part computes no gradients for them.
        whole: modules to leave alone whatever the plan says, such as experts that are distributed
            otherwise.

    Raises:
        NotApplicableError: if the model has no plan, a style is unknown, the group does not divide
            a size, or `loss_parallel` does not suit the model.

    """
    if group == 1:
        return module
    check_heads(module, group, copies_keys=copies_keys)
    styles = tensor_plan(module) if plan is None else dict(plan)
    inside = tuple(f"{path}." for path in whole)
    styles = {path: s for path, s in styles.items() if not f"{path}.".startswith(inside)}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    rotary_dim = getattr(text_config(getattr(module, "config", None)), "qk_rope_head_dim", None)
    state = _Group(group, rank, is_megatron=megatron, rotary_dim=rotary_dim)
    if copies_keys:
        state.copies = _copy_keys(module, styles, group)
    if loss_parallel:
        compute_loss_on_shards(module, group, rank)
    if loss_parallel or megatron:
        state.split_head = _head_of(module, styles)
    if sequence:
        state.regions = regions_of(module, styles, whole)
    for path, style in styles.items():
        if style not in _STYLES:
            raise NotApplicableError(
                f"{path} has the unknown style {style} in the plan of {type(module).__name__}; "
                f"{nearest_names(style, _STYLES)}"
            )
        if path in parameters:
            owner, _, name = path.rpartition(".")
            _shard(module.get_submodule(owner), name, state, style, path)
        else:
            _STYLES[style](module.get_submodule(path), state, path)
    _refuse_whole_ties(module, state)
    if state.regions is not None:
        _split_sequence(module, state, state.regions)
    return module


def _copy_keys(module: nn.Module, styles: Mapping[str, str], group: int) -> dict[str, int]:
    """Let each device of `group` hold a whole head of keys and values where these are fewer.

    Neighbours hold the same one. Each has fewer heads of queries for it, of which the attention is
    told.

    Returns:
        the number of devices that hold the same head, by the paths of the layers that compute it.

    """
    copies: dict[str, int] = {}
    for path, attention in module.named_modules():
        layers = [f"{path}.{name}" for name in _OF_KEYS if f"{path}.{name}" in styles]
        groups: Any = getattr(attention, "num_key_value_groups", None)
        size: Any = getattr(attention, "head_dim", None)
        if not layers or not isinstance(groups, int) or not isinstance(size, int):
            continue
        heads = module.get_parameter(f"{layers[0]}.weight").shape[0] // size
        count = group // heads
        if count > 1 and group % heads == 0 and groups % count == 0:
            vars(attention)["num_key_value_groups"] = groups // count
            copies.update(dict.fromkeys(layers, count))
    return copies


def _refuse_whole_ties(module: nn.Module, group: _Group) -> None:
    """Raise `NotApplicableError` if a module keeps a weight whole that the plan splits in another.

    Its part would be a weight of its own, stored beside the whole and trained apart from it.
    """
    for path, parameter in module.named_parameters(remove_duplicate=False):
        shard, _ = group.shards.get(id(parameter), (parameter, None))
        if shard is not parameter:
            raise NotApplicableError(
                f"{path} is tied to a weight that the plan splits, but which it leaves whole here; "
                "set model.config.tie_word_embeddings=false"
            )


def _head_of(module: nn.Module, styles: Mapping[str, str]) -> str:
    """Return the path of the layer that computes the logits, which the plan must split."""
    model: Any = module
    head = model.get_output_embeddings()
    path: str = next(path for path, part in module.named_modules() if part is head)
    if styles.get(path) not in _GATHERED:
        raise NotApplicableError(
            f"a loss of shards needs logits that are split over the vocabulary, but the plan of "
            f"{type(module).__name__} leaves {path} whole; set loss_parallel=false engine=torch"
        )
    return path


def _split_sequence(module: nn.Module, group: _Group, regions: Regions) -> None:
    """Gather positions at the start of regions, and sum the gradients of weights outside."""
    for path in regions.paths:
        _wrap(module.get_submodule(path), partial(_gathered_input, group))
    for path in regions.outside:
        _sum_weight_gradients(module.get_submodule(path), group, path)
    count_positions(module.get_submodule(regions.embedding_owner))


def _gathered_input(group: _Group, forward: _Forward, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    if args:
        return forward(group.gathered(args[0]), *args[1:], **kwargs)
    name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    return forward(**{**kwargs, name: group.gathered(kwargs[name])})


def _shard(module: nn.Module, name: str, group: _Group, style: str, path: str) -> None:
    """Replace one parameter by its shard."""
    whole = module._parameters.get(name)
    if whole is None:
        return
    dim = _dimension(style, whole)
    shard = group.shards.get(id(whole))
    if shard is None:
        halves = 2 if style.startswith("packed") else 1
        local = whole if dim is None else _part(whole, dim, halves, group, path)
        if style == SHARED_BIAS:
            with torch.no_grad():
                local = nn.Parameter(whole / group.size, requires_grad=whole.requires_grad)
        shard = local, dim
        group.shards[id(whole)] = shard
        group.wholes.append(whole)
    elif shard[1] != dim:
        raise NotApplicableError(
            f"{path} is tied to a weight that is split along another dimension"
        )
    module._parameters[name] = shard[0]


def _dimension(style: str, whole: Tensor) -> int | None:
    """Return the dimension along which a parameter is split, None if it is replicated."""
    if style in ("colwise", "packed_colwise", *_GATHERED):
        return max(whole.ndim - 2, 0)
    if style == "embedding_rowwise":
        return 0
    if style in ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise"):
        return None if whole.ndim == 1 else whole.ndim - 1
    return None


def _part(whole: nn.Parameter, dim: int, halves: int, group: _Group, path: str) -> nn.Parameter:
    """Return this device's shard; each of the `halves` concatenated parts is split separately."""
    size = whole.shape[dim]
    copies = group.copies.get(path.rpartition(".")[0], 1)
    count = group.size // copies
    if size % (count * halves):
        raise NotApplicableError(
            f"tensor_parallel={group.size} must divide dimension {dim} of {path}, which has {size};"
            f" use a divisor of {size // halves}"
        )
    with torch.no_grad():
        parts = [torch.chunk(p, count, dim)[group.rank // copies] for p in whole.chunk(halves, dim)]
        local = parts[0].clone() if halves == 1 else torch.cat(parts, dim)
    return nn.Parameter(local.contiguous(), requires_grad=whole.requires_grad)


# Styles.


def _wrap(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """Replace the forward of `module` by `wrapper`, which gets the original as first argument."""
    module.forward = partial(wrapper, module.forward)


def _shard_all(module: nn.Module, group: _Group, style: str, path: str) -> None:
    for name in list(module._parameters):
        _shard(module, name, group, style, f"{path}.{name}")


def _colwise(module: nn.Module, group: _Group, path: str, style: str = "colwise") -> None:
    _shard_all(module, group, style, path)

    def run(forward: _Forward, x: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return forward(group.entered(x, path), *args, **kwargs)

    _wrap(module, run)


def _colwise_gather(module: nn.Module, group: _Group, path: str) -> None:
    _shard_all(module, group, "colwise", path)

    def run(forward: _Forward, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        # The input lives until the outputs are gathered, as with torch's `ColwiseParallel` hooks.
        x = group.entered(x, path)
        part = forward(x, *args, **kwargs)
        return part if path == group.split_head else all_gather(part, group.size)

    _wrap(module, run)


def _rowwise(module: nn.Module, group: _Group, path: str, style: str = "rowwise") -> None:
    _shard_all(module, group, style, path)

    def run(forward: _Forward, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        bias = module._parameters.get("bias")
        if bias is None:
            return group.left(forward(*args, **kwargs))
        # The bias is added once, to the sum.
        module._parameters["bias"] = None
        try:
            total = group.left(forward(*args, **kwargs))
        finally:
            module._parameters["bias"] = bias
        return total + (bias if group.regions is None else sum_gradient(bias, group.size))

    _wrap(module, run)


def _rowwise_split_input(module: nn.Module, group: _Group, path: str) -> None:
    _rowwise(module, group, path)

    def run(forward: _Forward, x: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        x = sum_gradient(x, group.size)
        return forward(torch.chunk(x, group.size, dim=-1)[group.rank], *args, **kwargs)

    _wrap(module, run)


def _embedding_rowwise(module: nn.Module, group: _Group, path: str) -> None:
    """Look up rows of this device's part of the table, with zeros for others."""
    _shard_all(module, group, "embedding_rowwise", path)

    def run(forward: _Forward, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with _Lookup(module._parameters["weight"], group):
            return forward(*args, **kwargs)

    _wrap(module, run)


class _Lookup(TorchFunctionMode):
    """Makes a lookup in the part `weight` of a table one in the whole.

    The module's own forward runs, which may scale or normalize what it looked up.
    """

    def __init__(self, weight: Any, group: _Group) -> None:  # noqa: ANN401
        super().__init__()
        self._weight, self._group = weight, group

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401 - as torch calls it
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is not functional.embedding or args[1] is not self._weight:
            return func(*args, **(kwargs or {}))
        group = self._group
        rows = embedded_rows(
            args[0], self._weight, group.size, group.rank, whole_gradient=not group.is_megatron
        )
        return group.left(rows)


def _latent_keys(module: nn.Module, group: _Group, path: str) -> None:
    """Sum the gradient of the positional part of the keys of multi-head latent attention.

    The last outputs of this replicated layer go to this device's heads directly; the others through
    a column-parallel layer, which sums their gradient.
    """
    if group.rotary_dim is None:
        raise NotApplicableError(
            f"{path} computes the keys of latent attention, but the model's configuration has no"
            " qk_rope_head_dim, the size of their positional part"
        )

    def run(forward: _Forward, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        keys = forward(*args, **kwargs)
        latent, rotary = keys.split([keys.shape[-1] - group.rotary_dim, group.rotary_dim], dim=-1)
        return torch.cat([latent, sum_gradient(rotary, group.size)], dim=-1)

    _wrap(module, run)


def _experts(module: nn.Module, group: _Group, path: str) -> None:
    """Run this device's part of every expert, and sum the partial outputs."""

    def run(forward: _Forward, x: Tensor, *routing: Any) -> Tensor:  # noqa: ANN401
        if len(routing) >= 2:
            indices, weights, *rest = routing
            routing = (indices, sum_gradient(weights, group.size), *rest)
        return all_reduce(forward(sum_gradient(x, group.size), *routing), group.size)

    _wrap(module, run)


def _sum_weight_gradients(module: nn.Module, group: _Group, path: str) -> None:
    """Sum the gradients of replicated weights that see only this device's heads or positions."""

    def run(forward: _Forward, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        wholes = {name: p for name, p in module._parameters.items() if p is not None}
        try:
            for name, whole in wholes.items():
                module._parameters[name] = sum_gradient(whole, group.size)  # type: ignore[assignment]
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(wholes)

    _wrap(module, run)


def _sum_output(module: nn.Module, group: _Group, path: str) -> None:
    def run(forward: _Forward, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        return all_reduce(forward(*args, **kwargs), group.size)

    _wrap(module, run)


def _nothing(module: nn.Module, group: _Group, path: str) -> None:
    """Leave the module replicated."""


_STYLES: Mapping[str, Callable[[nn.Module, _Group, str], None]] = {
    "colwise": _colwise,
    "colwise_gather_output": _colwise_gather,
    "colwise_rep": _colwise_gather,
    "packed_colwise": partial(_colwise, style="packed_colwise"),
    "rowwise": _rowwise,
    "packed_rowwise": partial(_rowwise, style="packed_rowwise"),
    "rowwise_split_input": _rowwise_split_input,
    "rowwise_rep": _rowwise_split_input,
    "embedding_rowwise": _embedding_rowwise,
    "moe_tp_experts": _experts,
    "replicated_with_grad_allreduce": _sum_weight_gradients,
    "all_reduce": _sum_output,
    "mla_kv_a_proj": _latent_keys,
    "replicate": _nothing,
    "local_params": _nothing,
    SHARED_BIAS: _nothing,
}
"""The styles that a plan may name, in the terms of transformers but for the last."""
