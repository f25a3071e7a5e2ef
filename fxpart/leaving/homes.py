"""One device for each module that holds tensors: the device where its operators are planned.

Accelerate places whole modules. So all tensors of one module lie on one device, and so do tied
weights, whichever modules hold them, and everything in a module that is kept whole.
"""

from collections.abc import Iterable, Sequence

from fxpart.errors import SpecError, nearest_names
from fxpart.graph import IntArray, OpGraph
from fxpart.leaving.module_paths import is_within, owner, parents

__all__ = ["module_homes"]


def _planned_homes(graph: OpGraph, device_of: IntArray) -> list[tuple[int, int]]:
    """Return for each weight the first operator that uses it, and that operator's device."""
    first: dict[int, int] = {}
    for op in range(graph.n_ops):
        for weight in graph.uses_of(op).tolist():
            first.setdefault(weight, op)
    firsts = [first[weight] for weight in range(len(graph.weight_names))]
    return [(op, int(device_of[op])) for op in firsts]


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


def _ties(graph: OpGraph) -> list[tuple[str, str]]:
    """Return the pairs of a module and the holder, elsewhere, of a weight that it uses as well."""
    found: dict[tuple[str, str], None] = {}
    holder = [owner(name) for name in graph.weight_names]
    for op in range(graph.n_ops):
        user = graph.modules[op]
        for weight in graph.uses_of(op).tolist():
            # A module may use the tensors of modules in it; others are its own by another name.
            if not is_within(holder[weight], user):
                found[user, holder[weight]] = None
    return list(found)


def _refuse_unknown(graph: OpGraph, holders: Iterable[str], whole: Iterable[str]) -> None:
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
    planned = _planned_homes(graph, device_of)
    bytes_on: dict[str, dict[int, int]] = {}
    for weight in sorted(range(len(planned)), key=lambda w: planned[w][0]):
        on = bytes_on.setdefault(_root(leader, owner(graph.weight_names[weight])), {})
        device = planned[weight][1]
        on[device] = on.get(device, 0) + int(graph.weight_bytes[weight])
    return {group: max(on, key=on.__getitem__) for group, on in bytes_on.items()}


def _with_unused(
    graph: OpGraph, device_of: IntArray, leader: dict[str, str], homes: dict[str, int]
) -> dict[str, int]:
    """Return the device of every module of `leader`; `homes` has those of groups in use."""
    for op in range(graph.n_ops):
        path = graph.modules[op]
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
