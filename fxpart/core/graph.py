"""`OpGraph`: a captured model as arrays. Searches and cost models use these, never torch.

A *value* is a tensor produced by an operator or passed in by the caller. A value either allocates
its own storage, or is a view (or an in-place result) of another value, its *base*. Weights are not
values: they are storages resident on every device with an operator that uses them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fxpart.errors import CycleError, SpecError

__all__ = [
    "AGAIN",
    "CACHE",
    "CAST",
    "ENCODER_STATES",
    "MOST_COUNTED",
    "MOST_KEPT_GRAPHS",
    "PARTIAL",
    "UPDATE",
    "FloatArray",
    "IntArray",
    "OpGraph",
    "csr",
    "grouped",
    "only_user",
    "storage_roots",
    "without_python",
]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
AGAIN = "_again"
"""Name suffix of operators of a checkpoint's backward that repeat one of the forward."""
UPDATE = "optimizer."
"""Target prefix of operators that update a weight, such as ``optimizer.adam``."""
CAST = f"{UPDATE}cast"
"""Target of operators that cast a gradient for the update of a float32 master weight."""
CACHE = "kv_cache_"
"""Name prefix of inputs that are cached from one token to the next."""
ENCODER_STATES = "encoder_states"
"""Name of the input of a decode that holds the encoder's output; only the decoder runs in it."""
PARTIAL = -2
"""Batch dimension of a partial sum, of which each replica has a term to be all-reduced."""


MOST_COUNTED = 2**62
"""Largest allowed sum over a graph: half the range of int64, as headroom for what a plan adds."""
MOST_KEPT_GRAPHS = 48
"""Most graphs in each cache: a recommendation alternates between about this many."""


def _no_tensors() -> IntArray:
    return np.zeros((0, 0), dtype=np.int64)


def _no_numbers() -> IntArray:
    return np.zeros(0, dtype=np.int64)


def _none_is_buffer() -> npt.NDArray[np.bool_]:
    return np.zeros(0, dtype=np.bool_)


def csr(rows: list[list[int]]) -> tuple[IntArray, IntArray]:
    """Return ``(starts, items)``: row ``i`` is ``items[starts[i]:starts[i + 1]]``."""
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=starts[1:])
    return starts, np.fromiter((x for row in rows for x in row), np.int64, int(starts[-1]))


def grouped(by: IntArray, items: IntArray, groups: int) -> tuple[IntArray, IntArray]:
    """Return ``(starts, items)`` as in `csr`: row ``i`` has the items whose ``by`` is i."""
    starts = np.zeros(groups + 1, dtype=np.int64)
    np.cumsum(np.bincount(by, minlength=groups), out=starts[1:])
    return starts, items[np.argsort(by, kind="stable")].astype(np.int64)


@dataclass(frozen=True, eq=False, slots=True)
class OpGraph:
    """A model's operators in topological order, with their reads, results and costs.

    With ``n`` operators, ``V`` values, ``W`` weight storages. All integer arrays are int64.
    The graph's inputs are values without a producer (-1); they come first.
    """

    names: tuple[str, ...]
    """Name of the operator's node in the captured graph; unique. Length n."""
    modules: tuple[str, ...]
    """Path of the innermost module that the operator belongs to, ``""`` for the root. Length n."""
    targets: tuple[str, ...]
    """What the operator calls, such as ``aten.linear.default``. Length n."""
    dtypes: tuple[str, ...]
    """The dtype that the operator computes in, such as ``bfloat16``. Length n."""
    flops: IntArray
    """Floating-point operations of matrix products, convolutions and attention. Length n."""
    moved_bytes: IntArray
    """Bytes read from and written to device memory; 0 for views. Length n."""
    group: IntArray
    """Operators with the same number must share a device (in-place results, tuples and their
    items). The number is the index of the group's first operator. Length n."""

    value_names: tuple[str, ...]
    """Name of the node (and item) that the value is. Length V."""
    value_producer: IntArray
    """Operator that makes the value, or -1 for an input of the graph. Length V."""
    value_bytes: IntArray
    """Bytes that a transfer of the value carries: its elements, densely packed. Length V."""
    value_alloc_bytes: IntArray
    """Bytes of storage newly allocated with the value; 0 for views. Length V."""
    value_base: IntArray
    """The value whose storage this one lives in, or -1 when it has its own. Length V."""
    value_is_output: npt.NDArray[np.bool_]
    """Whether the value is returned to the caller, and so lives to the end. Length V."""

    read_start: IntArray
    """CSR starts into `reads`. Length n + 1."""
    reads: IntArray
    """Values that each operator reads, each once, in order of first use."""
    weight_names: tuple[str, ...]
    """First name of each weight storage; tied weights share one. Length W."""
    weight_bytes: IntArray
    """Bytes of each weight storage. Length W."""
    weight_state_bytes: IntArray
    """Bytes of optimizer state of each weight, wherever it is placed; 0 for untrained weights.
    Length W."""
    use_start: IntArray
    """CSR starts into `uses`. Length n + 1."""
    uses: IntArray
    """Weight storages that each operator uses, each once."""
    forward_of: IntArray
    """For a backward operator, the forward operator whose gradient it computes; otherwise the
    operator itself. Length n."""
    gradient_values: IntArray
    """The values that are gradients of weights; empty without a backward. Length G."""
    gradient_weights: IntArray
    """The weight storage of each gradient. Length G."""
    state_tensor_bytes: IntArray = field(default_factory=_no_tensors)
    """The state tensors that sum to `weight_state_bytes`, one per weight in each row, 0 for none:
    shape (K, W). Without rows, the state of a weight is a single tensor."""
    attention: IntArray = field(default_factory=_no_tensors)
    """Details of fused attention calls that sizes in bytes do not give, a row each: the operator,
    the head dimension, and 1 if attention is causal. Shape (A, 3)."""
    value_held: IntArray = field(default_factory=_no_numbers)
    """The last operator that begins while a Python variable of the model still references the
    value, as in an eager run; -1 if no reference outlives its readers. Length V, or 0 for no
    references."""

    weight_is_buffer: npt.NDArray[np.bool_] = field(default_factory=_none_is_buffer)
    """Whether a weight is a buffer or a constant, not a parameter, as far as the capture tells.
    Length W, or 0 if none is."""
    unread_weight_names: tuple[str, ...] = ()
    """First name of each weight storage of the model that no operator uses, such as those of an
    encoder of images in a decode; they are none of the W. Empty at module level. Length U."""
    unread_weight_bytes: IntArray = field(default_factory=_no_numbers)
    """Bytes of each of these storages. Length U."""

    def __post_init__(self) -> None:
        """Check the invariants: lengths, index ranges, and producers before readers."""
        n, values = len(self.names), len(self.value_producer)
        if n == 0:
            raise SpecError("the captured graph has no operators: there is nothing to place")
        self._refuse_lengths()
        tensors = self.state_tensor_bytes
        if len(tensors) and not np.array_equal(tensors.sum(axis=0), self.weight_state_bytes):
            raise SpecError("the tensors of a weight's state must add up to its bytes")
        self._refuse_uncounted()
        self._refuse_astray()
        if len(self.gradient_values) != len(self.gradient_weights):
            raise SpecError("each gradient must name its weight")
        if (np.diff(self.value_producer) < 0).any() or self.value_producer.max(initial=0) >= n:
            raise SpecError("values must be numbered in the order of their producers")
        if (self.value_base >= np.arange(values)).any():
            raise SpecError("a value's base must be made before it")
        if not np.array_equal(self.group[self.group], self.group):
            raise SpecError("a group must be named by its first operator")
        forward = self.forward_of
        if (forward > np.arange(n)).any() or not np.array_equal(forward[forward], forward):
            raise SpecError("a backward operator must name a forward one before it")
        readers = self.readers
        late = np.flatnonzero(self.value_producer[self.reads] >= readers)
        if len(late):
            op = self.names[int(readers[late[0]])]
            raise CycleError(f"operator {op} reads a value that is made after it")

    def _refuse_lengths(self) -> None:
        """Refuse arrays of inconsistent lengths."""
        n, values = len(self.names), len(self.value_producer)
        if len(self.read_start) != n + 1 or len(self.use_start) != n + 1 or len(self.flops) != n:
            raise SpecError(f"graph arrays disagree in length: {n} operators")
        if any(
            len(column) != n
            for column in (
                self.modules,
                self.targets,
                self.dtypes,
                self.moved_bytes,
                self.group,
                self.forward_of,
            )
        ):
            raise SpecError(f"graph arrays disagree in length: {n} operators")
        of_values = (self.value_names, self.value_bytes, self.value_alloc_bytes, self.value_base)
        if any(len(column) != values for column in (*of_values, self.value_is_output)):
            raise SpecError(f"graph arrays disagree in length: {values} values")
        if len(self.value_held) not in (0, values):
            raise SpecError(f"graph arrays disagree in length: {values} values")
        weights = len(self.weight_names)
        if len(self.weight_bytes) != weights or len(self.weight_state_bytes) != weights:
            raise SpecError(f"graph arrays disagree in length: {weights} weights")
        if len(self.weight_is_buffer) not in (0, weights):
            raise SpecError(f"graph arrays disagree in length: {weights} weights")
        unread = len(self.unread_weight_names)
        if len(self.unread_weight_bytes) != unread:
            raise SpecError(f"graph arrays disagree in length: {unread} unread weights")

    def _refuse_uncounted(self) -> None:
        """Refuse negative sizes, and sums that might overflow int64."""
        stored = (
            self.weight_bytes,
            self.weight_state_bytes,
            self.unread_weight_bytes,
            self.value_alloc_bytes,
        )
        sums = {
            "FLOPs": (self.flops,),
            "bytes to move": (self.moved_bytes,),
            "bytes of values": (self.value_bytes,),
            "bytes of weights, their state and tensors": stored,
        }
        for unit, columns in sums.items():
            if any(column.min(initial=0) < 0 for column in columns):
                raise SpecError(f"the graph has a negative number of {unit}")
            rough_sum = sum(float(column.sum(dtype=np.float64)) for column in columns)
            # Near the limit use Python integers, which neither round nor wrap.
            is_near_limit = rough_sum > MOST_COUNTED / 2
            if is_near_limit and sum(sum(column.tolist()) for column in columns) > MOST_COUNTED:
                raise SpecError(
                    f"the model has {rough_sum:.3g} {unit}, at most {MOST_COUNTED:.3g} are counted;"
                    " make it, its batch or its sequences smaller"
                )

    def _refuse_astray(self) -> None:
        """Refuse indices of operators, values and weights that are out of range."""
        n, values, weights = self.n_ops, self.n_values, len(self.weight_names)
        for start, items in ((self.read_start, self.reads), (self.use_start, self.uses)):
            if start[0] != 0 or start[-1] != len(items) or (np.diff(start) < 0).any():
                raise SpecError("the starts of a graph's rows must ascend from 0 to their number")
        for numbers, low, high in (
            (self.value_producer, -1, n),
            (self.value_base, -1, values),
            (self.value_held, -1, n),
            (self.reads, 0, values),
            (self.uses, 0, weights),
            (self.group, 0, n),
            (self.forward_of, 0, n),
            (self.gradient_values, 0, values),
            (self.gradient_weights, 0, weights),
        ):
            if len(numbers) and not (low <= numbers.min() and numbers.max() < high):
                raise SpecError(f"the graph names number {numbers.max()} of {high}")

    @property
    def n_ops(self) -> int:
        """Number of operators."""
        return len(self.names)

    @property
    def n_values(self) -> int:
        """Number of values, the graph's inputs included."""
        return len(self.value_producer)

    @property
    def total_weight_bytes(self) -> int:
        """Bytes of all weights; tied weights count once."""
        return int(self.weight_bytes.sum())

    @property
    def frozen_weights(self) -> IntArray:
        """Indices of the parameters without a gradient, in ascending order."""
        is_frozen = np.ones(len(self.weight_names), dtype=np.bool_)
        is_frozen[self.gradient_weights] = False
        if len(self.weight_is_buffer):
            is_frozen &= ~self.weight_is_buffer
        return np.flatnonzero(is_frozen)

    @property
    def is_update(self) -> npt.NDArray[np.bool_]:
        """Whether an operator belongs to the optimizer's update, run once per step. Length n."""
        return _is_update(self)

    @property
    def value_is_cache(self) -> npt.NDArray[np.bool_]:
        """Whether a value is an input cached from one token to the next. Length V."""
        is_cache = np.zeros(self.n_values, dtype=np.bool_)
        for value in np.flatnonzero(self.value_producer < 0).tolist():
            is_cache[value] = self.value_names[value].startswith(CACHE)
        return is_cache

    @property
    def is_backward(self) -> npt.NDArray[np.bool_]:
        """Whether an operator belongs to the backward of a training step, or comes after it.

        Weight updates count too, as they are also tied to a forward operator. Length n.
        """
        backward: npt.NDArray[np.bool_] = self.forward_of != np.arange(self.n_ops)
        return backward

    @property
    def first_backward(self) -> int:
        """Index of the first backward operator, or `n_ops` if there is no backward.

        Raises:
            SpecError: if a forward operator comes after a backward one.

        """
        backward = self.is_backward
        first = self.n_ops - int(np.count_nonzero(backward))
        if backward[:first].any():
            early = self.names[int(np.argmax(backward))]
            raise SpecError(
                f"the backward of a training step must come after its forward, operator {early} of"
                " it comes before; order the operators so that those of the backward are the last"
            )
        return first

    @property
    def readers(self) -> IntArray:
        """The operator of each item of `reads`. Same length as `reads`."""
        return np.repeat(np.arange(self.n_ops), np.diff(self.read_start))

    @property
    def users(self) -> IntArray:
        """The operator of each item of `uses`. Same length as `uses`."""
        return np.repeat(np.arange(self.n_ops), np.diff(self.use_start))

    @property
    def is_check(self) -> npt.NDArray[np.bool_]:
        """Whether an operator produces nothing and is grouped with one that does. Length n.

        An example are the assertions about tensors that `torch.export` leaves in a graph.
        """
        makers = self.value_producer[self.value_producer >= 0]
        makes_nothing = np.bincount(makers, minlength=self.n_ops) == 0
        checks: npt.NDArray[np.bool_] = makes_nothing & (self.group != np.arange(self.n_ops))
        return checks

    def reads_of(self, op: int) -> IntArray:
        """Return the values that operator `op` reads."""
        return self.reads[self.read_start[op] : self.read_start[op + 1]]

    def uses_of(self, op: int) -> IntArray:
        """Return the weight storages that operator `op` uses."""
        return self.uses[self.use_start[op] : self.use_start[op + 1]]


@lru_cache(maxsize=MOST_KEPT_GRAPHS)
def _is_update(graph: OpGraph) -> npt.NDArray[np.bool_]:
    updates = {target for target in set(graph.targets) if target.startswith(UPDATE)}
    is_update = np.array([target in updates for target in graph.targets], dtype=np.bool_)
    is_update.flags.writeable = False
    return is_update


def only_user(count: int, items: IntArray, users: IntArray) -> IntArray:
    """Return the only user of each of `count` items; -1 for none or several.

    Args:
        count: number of items.
        items: used items, one for each use.
        users: what uses them, such as a block or a unit; -1 for a user that does not count as one.

    """
    lowest = np.full(count, np.iinfo(np.int64).max)
    highest = np.full(count, -1, dtype=np.int64)
    np.minimum.at(lowest, items, users)
    np.maximum.at(highest, items, users)
    only: IntArray = np.where(lowest == highest, highest, -1)
    return only


def storage_roots(graph: OpGraph) -> IntArray:
    """Return the value that owns the storage of each value, itself unless a view. Length V."""
    root = np.arange(graph.n_values, dtype=np.int64)
    for value in np.flatnonzero(graph.value_base >= 0).tolist():  # a base comes before its views
        root[value] = root[graph.value_base[value]]
    return root


def without_python(graph: OpGraph, compiled: Sequence[str] = ()) -> OpGraph:
    """Return `graph` without Python references, so values are freed after their last reader.

    With `compiled`, the compiled part of each operator, or an empty text, only references that end
    within the part that made the value are dropped. Length n.
    """
    if not compiled or not len(graph.value_held):
        return replace(graph, value_held=_no_numbers())
    part = np.array(compiled)
    made, held = part[graph.value_producer], part[graph.value_held]
    known = (graph.value_producer >= 0) & (graph.value_held >= 0)
    is_inside = known & (made == held) & (made != "")
    return replace(graph, value_held=np.where(is_inside, -1, graph.value_held))
