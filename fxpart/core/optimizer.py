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
    "ITEMSIZE",
    "OPTIMIZERS",
    "STATE_DTYPES",
    "AddedOperators",
    "Optimizer",
    "with_optimizer",
]


# Operators appended to a graph, each bound to the device of an existing one.


class AddedOperators(NamedTuple):
    """K appended operators without FLOPs, each reading and producing one value. Length K each."""

    names: tuple[str, ...]
    """Name of the operator and of its value."""
    modules: tuple[str, ...]
    target: str
    """Shared by all of them."""
    dtypes: tuple[str, ...]
    moved_bytes: IntArray
    reads: IntArray
    """The value that each reads."""
    partner: IntArray
    """The operator of the graph that each shares a device and a forward operator with."""
    uses: IntArray
    """The weight storage that each uses; of length 0 if they use none."""
    made_bytes: IntArray
    """Size of each produced value, which has its own storage."""
    stays: npt.NDArray[np.bool_]
    """Whether the value lives until the end of the step."""


def _with_operators(graph: OpGraph, added: AddedOperators) -> OpGraph:
    """Return `graph` with operators appended. O(n log n)."""
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


def _joined(present: IntArray, added: npt.NDArray[np.generic]) -> IntArray:
    return np.concatenate([present, added.astype(np.int64)])


OPTIMIZERS = ("none", "sgd", "momentum", "adam", "adamw")
"""``momentum`` is SGD with momentum; ``none`` adds no update."""
IMPLEMENTATIONS = ("for_loop", "foreach", "fused")
"""Implementations of torch.optim, which defaults to ``for_loop`` on CPU and ``foreach`` on CUDA."""
STATE_DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Dtypes of optimizer state."""

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "complex128": 16,
    "complex64": 8,
}
"""Bytes per element of trainable dtypes."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """How weights are updated, with the state of torch.optim."""

    name: str = "none"
    """One of `OPTIMIZERS`."""
    state_dtype: str | None = None
    """One of `STATE_DTYPES`; None for the dtype of the weight, or of its float32 copy if any."""
    master_weights: bool = False
    """Whether weights of lower precision have a float32 master copy, which is what is updated.
    Their gradients are then cast to float32 before the first update and the casts live until the
    end of the step, since torch.optim accepts no other dtype."""
    implementation: str = "for_loop"
    """One of `IMPLEMENTATIONS`, which determines an update's temporaries."""
    main_gradients: bool = False
    """Whether gradients are accumulated in float32 buffers, and so need no cast."""

    def __post_init__(self) -> None:
        """Check the names."""
        _refuse_unknown("optimizer", self.name, OPTIMIZERS)
        _refuse_unknown("optimizer.implementation", self.implementation, IMPLEMENTATIONS)
        if self.state_dtype is not None:
            _refuse_unknown("optimizer.state_dtype", self.state_dtype, STATE_DTYPES)

    @property
    def rule(self) -> UpdateRule:
        """The state and memory traffic of an update.

        Raises:
            KeyError: if the optimizer is ``none``.

        """
        return (FUSED if self.implementation == "fused" else PASSES)[self.name]


def _refuse_unknown(option: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        shown = " ".join(name.split())
        raise SpecError(f"{option}={shown} does not exist; {nearest_names(name, names)}")


def with_optimizer(graph: OpGraph, optimizer: Optimizer) -> OpGraph:
    """Append the updates of the weights to a training step.

    There is one operator per gradient, in order, named ``update.<weight>`` with target
    ``optimizer.<name>``. It reads the gradient, uses the weight, belongs to the module that owns
    it, and is bound to the device where the gradient is made; so a weight used on several devices,
    such as a tied one, is updated where its gradient is summed. Its value is the memory it
    allocates, freed when it has run, or with ``foreach`` at the end of the step. With master
    weights, operators named ``cast.<weight>`` precede all updates.

    State is resident: `OpGraph.weight_state_bytes` counts on every device that uses the weight. A
    weight without a gradient has no state.

    With ``for_loop`` torch frees an update's last temporary during the next one, so each update
    also counts that of the previous weight in the graph. If that is on another device, the first
    update of a device is overcounted by one tensor.

    Raises:
        SpecError: if the graph has no gradients or already has updates, or the dtype of a weight
            cannot be trained.

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
            f"optimizer={optimizer.name} updates weights by their gradients, but the graph of "
            f"{graph.n_ops} operators has none: it is not a training step, or no weight that its "
            "loss depends on requires a gradient; capture one with phase=training, unfreeze "
            "weights, or use optimizer=none"
        )
    if graph.is_update.any():
        raise SpecError(
            f"optimizer={optimizer.name} was requested, but the graph has updates of "
            f"{graph.targets[-1].removeprefix(UPDATE)} already; give the graph without them"
        )


class _Trained(NamedTuple):
    """The weights with a gradient, in the order of the gradients. Length G each."""

    names: tuple[str, ...]
    """Names of the weights; several parts of one storage are numbered."""
    modules: tuple[str, ...]
    dtypes: tuple[str, ...]
    partner: IntArray
    """The operator that makes the gradient."""
    gradient_bytes: IntArray


def _trained(graph: OpGraph) -> _Trained:
    maker = graph.value_producer[graph.gradient_values]
    # If a gradient is itself an input of the graph, the first user of its weight stands in.
    first_user = np.full(len(graph.weight_names), graph.n_ops - 1, dtype=np.int64)
    np.minimum.at(first_user, graph.uses, graph.users)
    partner = np.where(maker >= 0, maker, first_user[graph.gradient_weights])
    owners = [graph.weight_names[weight] for weight in graph.gradient_weights.tolist()]
    name_counts: dict[str, int] = {}
    names = []
    for owner in owners:
        name_counts[owner] = name_counts.get(owner, 0) + 1
        names.append(owner if name_counts[owner] == 1 else f"{owner}.{name_counts[owner]}")
    return _Trained(
        tuple(names),
        tuple(owner.rpartition(".")[0] for owner in owners),
        tuple(graph.dtypes[op] for op in partner.tolist()),
        partner,
        graph.value_bytes[graph.gradient_values],
    )


def _sizes(trained: _Trained, optimizer: Optimizer) -> Sizes:
    for name, dtype in zip(trained.names, trained.dtypes, strict=True):
        if dtype not in ITEMSIZE:
            raise SpecError(
                f"optimizer={optimizer.name} cannot update {name}, whose gradient is of dtype"
                f" {dtype}; there are: {', '.join(ITEMSIZE)}"
            )
    itemsize = np.array([ITEMSIZE[dtype] for dtype in trained.dtypes], dtype=np.int64)
    has_master = (itemsize < MASTER_ITEMSIZE).astype(np.int64) * optimizer.master_weights
    state_itemsize = np.where(has_master > 0, MASTER_ITEMSIZE, itemsize)
    if optimizer.state_dtype is not None:
        state_itemsize = np.full_like(itemsize, ITEMSIZE[optimizer.state_dtype])
    return Sizes(trained.gradient_bytes // itemsize, itemsize, state_itemsize, has_master)


def _with_casts(graph: OpGraph, trained: _Trained, sizes: Sizes) -> OpGraph:
    """Return `graph` with casts of the gradients of weights that have a float32 copy, in order."""
    cast = np.flatnonzero(sizes.has_master)
    if not len(cast):
        return graph
    cast_list = cast.tolist()
    return _with_operators(
        graph,
        AddedOperators(
            names=tuple(f"cast.{trained.names[i]}" for i in cast_list),
            modules=tuple(trained.modules[i] for i in cast_list),
            target=CAST,
            dtypes=("float32",) * len(cast_list),
            moved_bytes=cast_moved_bytes(sizes)[cast],
            reads=graph.gradient_values[cast],
            partner=trained.partner[cast],
            uses=np.empty(0, dtype=np.int64),
            made_bytes=sizes.numbers[cast] * MASTER_ITEMSIZE,
            stays=np.ones(len(cast_list), dtype=np.bool_),
        ),
    )


def _gradients(graph: OpGraph, has_master: npt.NDArray[np.bool_]) -> IntArray:
    """Return the value that each update reads: the gradient or its cast."""
    gradients = graph.gradient_values.copy()
    casts = int(has_master.sum())
    gradients[has_master] = np.arange(graph.n_values - casts, graph.n_values)
    return gradients
