"""`with_absorbed_latents`: a decode whose attention reads latents instead of keys and values.

A model with multi-head latent attention caches a latent of `r` numbers for each token, and `dr` of
a key's position. Its module projects all latents to keys and values of every head for each token
that it decodes. Engines apply the projections to queries and results instead, "absorbed" into them
(DeepSeek-V2, 2024, arXiv:2405.04434, section 2.1.2): a query of a head has `r + dr` numbers then,
and all heads share the latents as keys and as values.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxpart.core.few_bits import graph_item_bytes, keys_and_values
from fxpart.core.graph import OpGraph

__all__ = ["ABSORBED", "latent_projections", "with_absorbed_latents"]

ABSORBED = "absorbed."
"""Prefix of the targets of operators with absorbed projections."""


class _Layer(NamedTuple):
    """The latent attention of a layer; numbers of elements, not bytes."""

    projection: int
    """The operator that projects the latents."""
    attention: int
    between: tuple[int, ...]
    """The operators that make keys and values of its result and of cached positions."""
    latents: float
    """Elements of all cached latents."""
    positions: float
    """Elements of all cached positions of keys."""
    rank: float
    """r, the size of a latent."""
    rotary: float
    """dr, the size of a key's position."""
    key: float
    """Size of the part of a key that is projected."""
    value: float
    """Size of a value."""
    query_heads: float
    """Queries of all texts times heads."""

    @property
    def projection_flops(self) -> int:
        """FLOPs of projecting queries and results."""
        return int(2 * self.query_heads * (self.key + self.value) * self.rank)

    def attention_flops(self, graph: OpGraph) -> int:
        """Return the FLOPs of attention over latents."""
        share = (2 * self.rank + self.rotary) / (self.key + self.rotary + self.value)
        return int(int(graph.flops[self.attention]) * share)

    def saves_flops(self, graph: OpGraph) -> bool:
        """Return whether absorbed projections take fewer FLOPs."""
        before = int(graph.flops[self.projection]) + int(graph.flops[self.attention])
        return self.projection_flops + self.attention_flops(graph) < before


def latent_projections(graph: OpGraph) -> list[int]:
    """Return the products of weights with cached keys or values."""
    is_key_value = keys_and_values(graph)[0]
    # Attention may use weights of its own, such as sinks.
    with_weights = np.setdiff1d(graph.users, graph.attention[:, 0])
    return [
        op
        for op in with_weights[graph.flops[with_weights] > 0].tolist()
        if is_key_value[graph.reads_of(op)].any()
    ]


def with_absorbed_latents(graph: OpGraph) -> OpGraph:
    """Return a graph with absorbed projections in the layers that take fewer FLOPs with them.

    The projections of a layer's queries and results are one operator, in place of that of the
    latents; keys and values take no memory. Both are placed together with the attention. A prefill,
    which has more queries, keeps its own. Apply it after `with_cache_dtype`, and to no format of
    weights that dequantizes them by a kernel of its own.
    """
    is_key_value = keys_and_values(graph)[0]
    found = (_layer(graph, op, is_key_value) for op in latent_projections(graph))
    layers = [layer for layer in found if layer and layer.saves_flops(graph)]
    if not layers:
        return graph
    changed = replace(
        graph,
        flops=graph.flops.copy(),
        moved_bytes=graph.moved_bytes.copy(),
        group=graph.group.copy(),
        value_bytes=graph.value_bytes.copy(),
        value_alloc_bytes=graph.value_alloc_bytes.copy(),
    )
    for layer in layers:
        _absorb(graph, layer, changed, is_key_value)
    absorbed = {op for layer in layers for op in (layer.projection, layer.attention)}
    named = ((ABSORBED if op in absorbed else "") + name for op, name in enumerate(graph.targets))
    is_absorbed = np.isin(graph.attention[:, 0], list(absorbed))
    return replace(changed, targets=tuple(named), attention=graph.attention[~is_absorbed])


def _absorb(
    graph: OpGraph, layer: _Layer, changed: OpGraph, is_key_value: npt.NDArray[np.bool_]
) -> None:
    """Write what absorbing a layer changes into the arrays of `changed`."""
    projection, attention = layer.projection, layer.attention
    item_bytes, between = graph_item_bytes(graph), list(layer.between)
    sizes, moved = graph.value_bytes, changed.moved_bytes
    made = np.isin(graph.value_producer, [projection, *between]) & ~is_key_value
    changed.value_bytes[made], changed.value_alloc_bytes[made] = 0, 0
    absorbed_bytes = int(layer.query_heads * layer.rank) * item_bytes
    result = _first_result(graph, projection)
    changed.value_bytes[result] = changed.value_alloc_bytes[result] = absorbed_bytes
    # Queries and results are read and written before and after; weights are read as they were.
    parts_bytes = int(layer.query_heads * (layer.key + layer.value)) * item_bytes
    moved[projection] += parts_bytes + 2 * absorbed_bytes
    moved[projection] -= int(sizes[graph.reads_of(projection)].sum() + sizes[result])
    moved[between] = 0
    cached_bytes = int(layer.latents + layer.positions) * item_bytes
    moved[attention] += cached_bytes + 2 * absorbed_bytes - parts_bytes
    moved[attention] -= int(sizes[graph.reads_of(attention)[1:3]].sum())
    changed.flops[projection] = layer.projection_flops
    changed.flops[attention] = layer.attention_flops(graph)
    groups = changed.group[[projection, *between, attention]]
    changed.group[np.isin(changed.group, groups)] = groups.min()


def _follow(
    graph: OpGraph, projection: int, is_key_value: npt.NDArray[np.bool_], attentions: set[int]
) -> tuple[int | None, tuple[int, ...], list[int]]:
    """Return the attention that reads the result of a projection, and what is made for it.

    That is the operators between, and the cached values that they read. The attention is None if
    any other operator reads what is made for it.
    """
    made = set(np.flatnonzero(graph.value_producer == projection).tolist())
    module = graph.modules[projection].rpartition(".")[0]
    between: list[int] = []
    cached: list[int] = []
    attention = None
    for op in range(projection + 1, graph.n_ops):
        reads = graph.reads_of(op).tolist()
        reads_made = bool(made & {*reads, *graph.value_base[reads].tolist()})
        if attention is not None:
            if reads_made:
                return None, (), []
            continue
        of_cache = [v for v in reads if is_key_value[v] and graph.modules[op] == module]
        if op in attentions and reads_made:
            attention = op
        elif reads_made or (of_cache and "index_copy_" not in graph.targets[op]):
            if graph.flops[op]:
                return None, (), []
            between.append(op)
            cached += of_cache
            made |= set(np.flatnonzero(graph.value_producer == op).tolist())
    return attention, tuple(between), cached


def _first_result(graph: OpGraph, op: int) -> int:
    return int(np.searchsorted(graph.value_producer, op))


def _root(graph: OpGraph, value: int) -> int:
    """Return the value whose memory a view lies in."""
    while graph.value_base[value] >= 0:
        value = int(graph.value_base[value])
    return value


def _layer(graph: OpGraph, projection: int, is_key_value: npt.NDArray[np.bool_]) -> _Layer | None:
    """Return the attention that follows a projection of latents; None if there is none."""
    size_of = {op: size for op, size, *_ in graph.attention.tolist()}
    item_bytes = graph_item_bytes(graph)
    attention, between, cached = _follow(graph, projection, is_key_value, set(size_of))
    if attention is None:
        return None
    latents, projected = (
        float(graph.value_bytes[of].sum()) / item_bytes
        for of in (
            [v for v in graph.reads_of(projection).tolist() if is_key_value[v]],
            _first_result(graph, projection),
        )
    )
    operands = (graph.value_bytes[graph.reads_of(attention)[1:3]] / item_bytes).tolist()
    size = size_of[attention]
    rank = float(graph.flops[projection]) / (2 * projected)
    heads_of_tokens = operands[0] / size
    value = operands[-1] / heads_of_tokens
    key = projected / heads_of_tokens - value
    if len(operands) < 2 or key <= 0 or key > size or rank != round(rank):
        return None
    roots = {_root(graph, v) for v in cached}
    return _Layer(
        projection,
        attention,
        between,
        latents,
        sum(float(graph.value_bytes[v]) for v in roots) / item_bytes,
        rank,
        size - key,
        key,
        value,
        float(graph.value_bytes[_first_result(graph, attention)]) / item_bytes / value,
    )
