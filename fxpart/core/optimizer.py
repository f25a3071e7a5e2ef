"""`with_optimizer`: the optimizer's part of a training step, as operators and resident state."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.granularity import join_groups
from fxpart.core.graph import CAST, UPDATE, IntArray, OpGraph
from fxpart.core.update_rules import (
    FUSED,
    MASTER_ITEMSIZE,
    PASSES,
    Sizes,
    UpdateRule,
    cast_moved_bytes,
    moved_bytes,
    scratch_bytes,
    state_tensors,
)
from fxpart.core.weight_state import with_state
from fxpart.errors import SpecError, nearest_names

__all__ = [
    "IMPLEMENTATIONS",
    "OPTIMIZERS",
    "STATE_DTYPES",
    "AddedOperators",
    "Optimizer",
    "with_optimizer",
]


# Operators appended to a graph, each kept on the device of an existing one.


class AddedOperators(NamedTuple):
    """K operators of no FLOPs, each of which reads one value and makes one. Length K each."""

    names: tuple[str, ...]
    """Of the operator, and of the value that it makes."""
    modules: tuple[str, ...]
    target: str
    """Of all of them; no array."""
    dtypes: tuple[str, ...]
    moved_bytes: IntArray
    reads: IntArray
    """The value that each reads."""
    partner: IntArray
    """The operator of the graph that each stays with, and whose forward operator is its own."""
    uses: IntArray
    """The weight storage that each uses; or of length 0, if they use none."""
    made_bytes: IntArray
    """Of the value that each makes, in storage of its own."""
    stays: npt.NDArray[np.bool_]
    """Whether that lives to the end of the step."""


def _with_operators(graph: OpGraph, added: AddedOperators) -> OpGraph:
    """Return `graph` with further operators at its end. O(n log n)."""
    n, count = graph.n_ops, len(added.names)
    numbers = np.arange(n, n + count)
    partners = np.concatenate([np.arange(n), added.partner])
    group = np.concatenate([graph.group, numbers])
    use_counts = np.zeros(count, dtype=np.int64) + (len(added.uses) > 0)
    return replace(
        graph,
        names=graph.names + added.names,
        modules=graph.modules + added.modules,
        targets=graph.targets + (added.target,) * count,
        dtypes=graph.dtypes + added.dtypes,
        flops=_joined(graph.flops, np.zeros(count)),
        moved_bytes=_joined(graph.moved_bytes, added.moved_bytes),
        group=join_groups(group, partners),
        value_names=graph.value_names + added.names,
        value_producer=_joined(graph.value_producer, numbers),
        value_bytes=_joined(graph.value_bytes, added.made_bytes),
        value_alloc_bytes=_joined(graph.value_alloc_bytes, added.made_bytes),
        value_base=_joined(graph.value_base, np.full(count, -1)),
        value_is_output=np.concatenate([graph.value_is_output, added.stays]),
        value_held=_joined(graph.value_held, np.full(count, -1))
        if len(graph.value_held)
        else graph.value_held,
        read_start=_joined(graph.read_start, len(graph.reads) + np.arange(1, count + 1)),
        reads=_joined(graph.reads, added.reads),
        use_start=_joined(graph.use_start, len(graph.uses) + np.cumsum(use_counts)),
        uses=_joined(graph.uses, added.uses),
        forward_of=_joined(graph.forward_of, graph.forward_of[added.partner]),
    )


def _joined(present: IntArray, more: npt.NDArray[np.generic]) -> IntArray:
    return np.concatenate([present, more.astype(np.int64)])


OPTIMIZERS = ("none", "sgd", "momentum", "adam", "adamw")
"""``momentum`` is SGD with momentum; ``none`` adds nothing to a step."""
IMPLEMENTATIONS = ("for_loop", "foreach", "fused")
"""As torch.optim names them. It takes ``for_loop`` on a CPU and ``foreach`` on CUDA by itself."""
STATE_DTYPES = ("float64", "float32", "bfloat16", "float16")
"""What states may be kept in."""

_ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "complex128": 16,
    "complex64": 8,
}
"""Bytes of a number of a weight that has a gradient."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """How weights are updated. States are as torch.optim keeps them."""

    name: str = "none"
    """One of `OPTIMIZERS`."""
    state_dtype: str | None = None
    """One of `STATE_DTYPES`; None for that of the weight, or of its float32 copy if it has one."""
    master_weights: bool = False
    """Whether a float32 copy is kept of every weight of fewer bits, and is what is updated. Its
    gradient is then cast to float32 before the first update, and the cast stays to the end of
    the step: torch.optim takes no other."""
    implementation: str = "for_loop"
    """One of `IMPLEMENTATIONS`: which tensors an update makes on the way."""
    main_gradients: bool = False
    """Whether gradients are added up in float32 beside the weights, and so need no cast."""

    def __post_init__(self) -> None:
        """Refuse names that do not exist."""
        _refuse_unknown("optimizer", self.name, OPTIMIZERS)
        _refuse_unknown("optimizer.implementation", self.implementation, IMPLEMENTATIONS)
        if self.state_dtype is not None:
            _refuse_unknown("optimizer.state_dtype", self.state_dtype, STATE_DTYPES)

    @property
    def rule(self) -> UpdateRule:
        """What an update keeps and moves.

        Raises:
            KeyError: for ``none``.

        """
        return (FUSED if self.implementation == "fused" else PASSES)[self.name]


def _refuse_unknown(option: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        shown = " ".join(name.split())
        raise SpecError(f"{option}={shown} does not exist; {nearest_names(name, names)}")


def with_optimizer(graph: OpGraph, optimizer: Optimizer) -> OpGraph:
    """Return a training step with the updates of its weights, which come last.

    There is one operator for each gradient, in their order, named ``update.`` and the weight, with
    target ``optimizer.`` and the name. It reads the gradient, uses the weight, belongs to the
    module that owns it, and stays on the device where the gradient is made; so a weight that
    several devices use, such as a tied one, is updated where its gradient is summed. It makes one
    value: what it allocates, which is gone when it has run, or with ``foreach`` at the end of the
    step. With master weights, operators ``cast.`` and the weight come before all updates.

    State is resident: `OpGraph.weight_state_bytes` is on every device that uses the weight. A
    weight without a gradient has none.

    With ``for_loop`` torch gives an update's last tensor back in the next one: each update counts
    that of the weight before it in the graph. Where that lies on another device, the first update
    of a device counts too much, by one tensor.

    Raises:
        SpecError: for a graph without gradients or with updates already, or for a weight whose
            dtype cannot be trained.

    """
    if optimizer.name == "none":
        return graph
    _refuse_untrained(graph, optimizer)
    trained = _trained(graph)
    sizes, rule = _sizes(trained, optimizer), optimizer.rule
    if not optimizer.main_gradients:
        graph = _with_casts(graph, trained, sizes)
    at_once = optimizer.implementation == "foreach" and rule.has_scratch
    count, has_master = len(trained.names), sizes.has_master > 0
    updated = _with_operators(
        graph,
        AddedOperators(
            names=tuple(f"update.{name}" for name in trained.names),
            modules=trained.modules,
            target=UPDATE + optimizer.name,
            dtypes=tuple(np.where(has_master, "float32", trained.dtypes).tolist()),
            moved_bytes=moved_bytes(rule, sizes),
            reads=_gradients(graph, has_master & (not optimizer.main_gradients)),
            partner=trained.partner,
            uses=graph.gradient_weights,
            made_bytes=scratch_bytes(rule, sizes, at_once=at_once),
            stays=np.full(count, at_once),
        ),
    )
    return with_state(updated, graph.gradient_weights, state_tensors(rule, sizes))


def _refuse_untrained(graph: OpGraph, optimizer: Optimizer) -> None:
    if not len(graph.gradient_values):
        raise SpecError(
            f"optimizer={optimizer.name} updates weights by their gradients, the graph of"
            f" {graph.n_ops} operators has none: it is no training step, or no weight that its loss"
            " depends on requires a gradient; capture one with phase=training, unfreeze weights, or"
            " use optimizer=none"
        )
    if graph.is_update.any():
        raise SpecError(
            f"optimizer={optimizer.name} was asked for, the graph has updates of"
            f" {graph.targets[-1].removeprefix(UPDATE)} already; give the graph without them"
        )


class _Trained(NamedTuple):
    """The weights that have a gradient, in the order of the gradients. Length G each."""

    names: tuple[str, ...]
    """Of the weight; two parts of one storage are told apart by a number."""
    modules: tuple[str, ...]
    dtypes: tuple[str, ...]
    partner: IntArray
    """The operator that makes the gradient."""
    gradient_bytes: IntArray


def _trained(graph: OpGraph) -> _Trained:
    maker = graph.value_producer[graph.gradient_values]
    # A gradient may be an input of the graph as it is: then the first operator that uses its weight
    # stands in.
    first_user = np.full(len(graph.weight_names), graph.n_ops - 1, dtype=np.int64)
    np.minimum.at(first_user, graph.uses, graph.users)
    partner = np.where(maker >= 0, maker, first_user[graph.gradient_weights])
    owners = [graph.weight_names[weight] for weight in graph.gradient_weights.tolist()]
    seen: dict[str, int] = {}
    names = []
    for owner in owners:
        seen[owner] = seen.get(owner, 0) + 1
        names.append(owner if seen[owner] == 1 else f"{owner}.{seen[owner]}")
    return _Trained(
        tuple(names),
        tuple(owner.rpartition(".")[0] for owner in owners),
        tuple(graph.dtypes[op] for op in partner.tolist()),
        partner,
        graph.value_bytes[graph.gradient_values],
    )


def _sizes(trained: _Trained, optimizer: Optimizer) -> Sizes:
    for name, dtype in zip(trained.names, trained.dtypes, strict=True):
        if dtype not in _ITEMSIZE:
            raise SpecError(
                f"optimizer={optimizer.name} cannot update {name}, whose gradient is of dtype"
                f" {dtype}; there are: {', '.join(_ITEMSIZE)}"
            )
    itemsize = np.array([_ITEMSIZE[dtype] for dtype in trained.dtypes], dtype=np.int64)
    has_master = (itemsize < MASTER_ITEMSIZE).astype(np.int64) * optimizer.master_weights
    state_itemsize = np.where(has_master > 0, MASTER_ITEMSIZE, itemsize)
    if optimizer.state_dtype is not None:
        state_itemsize = np.full_like(itemsize, _ITEMSIZE[optimizer.state_dtype])
    return Sizes(trained.gradient_bytes // itemsize, itemsize, state_itemsize, has_master)


def _with_casts(graph: OpGraph, trained: _Trained, sizes: Sizes) -> OpGraph:
    """Return `graph` with the gradients of weights that have a float32 copy cast, in order."""
    cast = np.flatnonzero(sizes.has_master)
    if not len(cast):
        return graph
    of = cast.tolist()
    return _with_operators(
        graph,
        AddedOperators(
            names=tuple(f"cast.{trained.names[i]}" for i in of),
            modules=tuple(trained.modules[i] for i in of),
            target=CAST,
            dtypes=("float32",) * len(of),
            moved_bytes=cast_moved_bytes(sizes)[cast],
            reads=graph.gradient_values[cast],
            partner=trained.partner[cast],
            uses=np.empty(0, dtype=np.int64),
            made_bytes=sizes.numbers[cast] * MASTER_ITEMSIZE,
            stays=np.ones(len(of), dtype=np.bool_),
        ),
    )


def _gradients(graph: OpGraph, has_master: npt.NDArray[np.bool_]) -> IntArray:
    """Return the value by which each weight is updated: its gradient, or the cast of it."""
    gradients = graph.gradient_values.copy()
    casts = int(has_master.sum())
    gradients[has_master] = np.arange(graph.n_values - casts, graph.n_values)
    return gradients
