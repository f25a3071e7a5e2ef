"""One device for each module that holds tensors: the device where its operators are planned.

Accelerate places whole modules. So all tensors of one module lie on one device, and so do tied
weights, whichever modules hold them, and everything in a module that is kept whole.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from fxpart.errors import SpecError, nearest_names
from fxpart.graph import IntArray, OpGraph
from fxpart.leaving.module_paths import is_within, owner, parents

__all__ = ["module_homes"]


# The plans of one graph share what follows from the graph alone.
_GRAPHS = 4


@lru_cache(maxsize=_GRAPHS)
def _first_users(graph: OpGraph) -> tuple[int, ...]:
    """Return for each weight the first operator that uses it."""
    first: dict[int, int] = {}
    for weight, op in zip(graph.uses.tolist(), graph.users.tolist(), strict=True):
        first.setdefault(weight, op)
    return tuple(first[weight] for weight in range(len(graph.weight_names)))


@lru_cache(maxsize=_GRAPHS)
def _first_operators(graph: OpGraph) -> dict[str, int]:
    """Return the first operator of each module that has operators of its own, in graph order."""
    first: dict[str, int] = {}
    for op, module in enumerate(graph.modules):
        first.setdefault(module, op)
    return first


def module_homes(
    graph: OpGraph, device_of: IntArray, names: Sequence[str], whole: Sequence[str]
) -> dict[str, int]:
    """Return the device of each module that holds tensors itself, in the order of their names.

    Modules that must share a device take the one where most bytes of their weights are planned; a
    weight counts where it is first used. Modules whose tensors no operator uses go with their own
    operators, else with their neighbours.

    Args:
        graph: the captured model.
        device_of: planned device of each operator. Length n.
        names: all parameters and buffers, as far as they are known; those that operators use are
            added.
        whole: paths of modules that stay on one device with all that is in them.

    Raises:
        SpecError: when a module of `whole` does not exist.

    """
    holders = _holders(graph, names)
    _refuse_unknown(graph, holders, whole)
    leader = {path: path for path in holders}
    _join_ties(graph, leader)
    for module in whole:
        _join(leader, [path for path in holders if is_within(path, module)])
    homes = _heaviest(graph, device_of, leader)
    return _with_unused(graph, device_of, leader, homes)


def _holders(graph: OpGraph, names: Iterable[str]) -> list[str]:
    """Return the modules that hold a tensor, and those that use another module's as their own."""
    found = dict.fromkeys(owner(name) for name in (*names, *graph.weight_names))
    found.update(dict.fromkeys(user for user, _ in _ties(graph)))
    return list(found)


@lru_cache(maxsize=_GRAPHS)
def _ties(graph: OpGraph) -> tuple[tuple[str, str], ...]:
    """Return the pairs of a module and the holder, elsewhere, of a weight that it uses as well."""
    found: dict[tuple[str, str], None] = {}
    holder = [owner(name) for name in graph.weight_names]
    for weight, op in zip(graph.uses.tolist(), graph.users.tolist(), strict=True):
        user = graph.modules[op]
        # A module may use the tensors of modules in it; others are its own by another name.
        if not is_within(holder[weight], user):
            found[user, holder[weight]] = None
    return tuple(found)


def _refuse_unknown(graph: OpGraph, holders: Iterable[str], whole: Sequence[str]) -> None:
    if not whole:
        return
    known = {parent for path in (*holders, *graph.modules) for parent in parents(path)}
    for module in whole:
        if module not in known:
            near = nearest_names(module, (path for path in known if path))
            raise SpecError(
                f"the device map is to keep {module} whole, which the model does not have; {near}"
            )


def _root(leader: dict[str, str], path: str) -> str:
    while leader[path] != path:
        leader[path] = leader[leader[path]]
        path = leader[path]
    return path


def _join(leader: dict[str, str], paths: list[str]) -> None:
    for path in paths[1:]:
        leader[_root(leader, path)] = _root(leader, paths[0])


def _join_ties(graph: OpGraph, leader: dict[str, str]) -> None:
    for user, holder in _ties(graph):
        _join(leader, [holder, user])


def _heaviest(graph: OpGraph, device_of: IntArray, leader: dict[str, str]) -> dict[str, int]:
    """Return the device with most bytes of each group of modules; of equals the first in use."""
    first, sizes, planned = _first_users(graph), graph.weight_bytes.tolist(), device_of.tolist()
    bytes_on: dict[str, dict[int, int]] = {}
    for weight in sorted(range(len(first)), key=first.__getitem__):
        on = bytes_on.setdefault(_root(leader, owner(graph.weight_names[weight])), {})
        device = planned[first[weight]]
        on[device] = on.get(device, 0) + sizes[weight]
    return {group: max(on, key=on.__getitem__) for group, on in bytes_on.items()}


def _with_unused(
    graph: OpGraph, device_of: IntArray, leader: dict[str, str], homes: dict[str, int]
) -> dict[str, int]:
    """Return the device of every module of `leader`; `homes` has those of groups in use."""
    for path, op in _first_operators(graph).items():
        if path in leader:
            homes.setdefault(_root(leader, path), int(device_of[op]))
    near: dict[str, int] = {"": int(device_of[0])}
    for path in leader:
        home = homes.get(_root(leader, path))
        if home is not None:
            near.update((parent, near.get(parent, home)) for parent in parents(path) if parent)
    return {
        path: homes.setdefault(
            _root(leader, path), next(near[p] for p in parents(path) if p in near)
        )
        for path in leader
    }
