"""Linear layers that multiply in 8 bits in a training step, as torchao's ``Float8Linear``.

Weights, activations and gradients stay in 16 bits; before each product its two operands are cast to
8 bits, with scales from their largest elements (torchao's ``convert_to_float8_training``). So the
memory of a step is that of 16 bits but for the cast operands, which live as long as a product, and
are not counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxpart.core.graph import FloatArray, IntArray, OpGraph, storage_roots
from fxpart.core.topology import DeviceSpec, Topology
from fxpart.cost.tables import LatencySource
from fxpart.errors import NotApplicableError, SpecError

__all__ = ["RECIPES", "TimesInFloat8", "cast_bytes", "linear_modules", "with_float8_rates"]

RECIPES: Mapping[str, int] = {"tensorwise": 2, "rowwise": 0}
"""Bytes read for the scale of each element, by torchao's name of the recipe.

One scale of a tensor needs a pass over it before the cast; one of a row is found in the same pass.
"""
_16_BITS = ("bfloat16", "float16")
_FLOAT8 = "float8_e4m3"
"""Prefix of the rate's name: some accelerators have the variant ``fnuz``."""
_ELEMENT_BYTES = 2
_PRODUCTS = ("aten.mm.", "aten.addmm.")
_LINEAR = "aten.linear."
_TRANSPOSES = ("aten.t.", "aten.transpose.", "aten.permute.")


@dataclass(frozen=True, eq=False, slots=True)
class TimesInFloat8:
    """Operator times where linear layers multiply in 8 bits.

    A product takes the time of one in 16 bits on devices whose 16-bit rate is that of 8 bits, and
    the time to cast its operands.
    """

    others: LatencySource
    """Source of all times in 16 bits."""
    recipe: str
    """One of `RECIPES`."""
    filter_fqns: tuple[str, ...] = ()
    """Parts of the paths of linear layers that stay in 16 bits."""

    def op_time_s(self, graph: OpGraph, topology: Topology) -> FloatArray:
        """Return the time of each operator on each device in seconds, shape (n, D).

        Raises:
            SpecError: if a device cannot multiply in 8 bits, or no layer is in 16 bits.

        """
        times = self.others.op_time_s(graph, topology).copy()
        casts = cast_bytes(graph, self.recipe, linear_modules(graph, self.filter_fqns))
        products = np.array(list(casts), dtype=np.int64)
        if not len(products):
            raise NotApplicableError(
                f"float8={self.recipe} found no linear layer that multiplies in bfloat16 or float16"
                " by its own weight; use model.dtype=bfloat16, fewer float8.filter_fqns, or"
                " float8=none"
            )
        faster = self.others.op_time_s(graph, with_float8_rates(topology))
        # An operator that only moves these bytes.
        flops, moved = graph.flops.copy(), graph.moved_bytes.copy()
        flops[products], moved[products] = 0, list(casts.values())
        casting = self.others.op_time_s(replace(graph, flops=flops, moved_bytes=moved), topology)
        times[products] = faster[products] + np.where(moved[products, None], casting[products], 0.0)
        return times


def linear_modules(graph: OpGraph, filter_fqns: Sequence[str] = ()) -> frozenset[str]:
    """Return the paths of modules that multiply by their own weight, transposed, in 16 bits.

    Those are the ``nn.Linear`` of a model, whose weights may be gathered first. A layer whose
    weight is tied to another module's, such as a head, is left out, and so is a path with one of
    `filter_fqns` in it.
    """
    weights = set(graph.weight_names)
    return frozenset(
        path
        for op in _products(graph)
        if f"{(path := graph.modules[op])}.weight" in weights
        and not graph.is_backward[op]
        and not any(part in path for part in filter_fqns)
        and (graph.targets[op].startswith(_LINEAR) or _transposes(graph, op))
    )


def _transposes(graph: OpGraph, op: int) -> bool:
    """Return whether the module of a product transposes one of its operands."""
    makers = graph.value_producer[graph.reads_of(op)].tolist()
    return any(
        maker >= 0
        and graph.modules[maker] == graph.modules[op]
        and graph.targets[maker].startswith(_TRANSPOSES)
        for maker in makers
    )


def _products(graph: OpGraph) -> list[int]:
    """Return the products of matrices in 16 bits."""
    return [
        op
        for op in np.flatnonzero(graph.flops).tolist()
        if graph.targets[op].startswith((*_PRODUCTS, _LINEAR)) and graph.dtypes[op] in _16_BITS
    ]


def cast_bytes(graph: OpGraph, recipe: str, linear: frozenset[str]) -> dict[int, int]:
    """Return the bytes moved to cast operands, for each product of the modules `linear`.

    A tensor is cast once in a forward, and again in a backward, since 16 bits are saved: the first
    product that needs it is charged. It is written once for each side of a product that it is on,
    as the kernels read the left operand by rows and the right one by columns.
    """
    roots = storage_roots(graph)
    casts: dict[int, int] = {}
    cast: set[tuple[int, bool]] = set()
    written: set[tuple[int, bool, int]] = set()
    for op in _products(graph):
        if graph.modules[op] not in linear:
            continue
        casts[op], is_backward = 0, bool(graph.is_backward[op])
        for side, (root, elements) in enumerate(_operands(graph, op, roots)):
            if (root, is_backward) not in cast:
                cast.add((root, is_backward))
                casts[op] += elements * (_ELEMENT_BYTES + RECIPES[recipe])
            if (root, is_backward, side) not in written:
                written.add((root, is_backward, side))
                casts[op] += elements
    return casts


def _operands(graph: OpGraph, op: int, roots: IntArray) -> list[tuple[int, int]]:
    """Return the tensor and the number of elements of both operands, the left one first.

    A weight that no view stands for has a negative number.
    """
    target = graph.targets[op]
    values = graph.reads_of(op).tolist()
    values = values[1:3] if target.startswith("aten.addmm.") else values[:2]
    operands = [(int(roots[v]), int(graph.value_bytes[v]) // _ELEMENT_BYTES) for v in values]
    if target.startswith(_LINEAR):
        weight = int(graph.uses_of(op)[0])
        size = int(graph.weight_bytes[weight]) // _ELEMENT_BYTES
        operands = [operands[0], (-1 - weight, size)]
    return operands


def with_float8_rates(topology: Topology) -> Topology:
    """Return the devices with the rates of 8 bits in place of those of 16 bits.

    Raises:
        SpecError: if a device has no such rate.

    """
    return replace(topology, devices=tuple(map(_with_float8_rate, topology.devices)))


def _with_float8_rate(device: DeviceSpec) -> DeviceSpec:
    rates = device.flops_per_s
    name = next((name for name in rates if name.startswith(_FLOAT8)), None)
    if name is None:
        raise SpecError(
            f"{device.name} has no rate of {_FLOAT8} to multiply in 8 bits; leave out float8 and"
            " weights.activations, or use devices such as h100"
        )
    sustained = device.sustained_flops_per_s
    return replace(
        device,
        flops_per_s={**rates, **dict.fromkeys(_16_BITS, rates[name])},
        sustained_flops_per_s={
            **{dtype: rate for dtype, rate in sustained.items() if dtype not in _16_BITS},
            **(dict.fromkeys(_16_BITS, sustained[name]) if name in sustained else {}),
        },
    )
