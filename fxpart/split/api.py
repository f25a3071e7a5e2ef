"""`split_module`: one submodule for each partition that a callback names."""

from collections.abc import Callable

from torch import nn
from torch.fx import GraphModule, Node

from fxpart.errors import SpecError
from fxpart.split.cut import Partitions, cut_module
from fxpart.split.dependencies import PLACELESS
from fxpart.split.emit import Style

__all__ = ["split_module"]


def split_module(  # noqa: PLR0917 - torch's order
    m: GraphModule,
    root_m: nn.Module | None,
    split_callback: Callable[[Node], object],
    qualname_map: dict[str, str] | None = None,
    keep_original_order: bool | None = False,
    keep_original_node_name: bool | None = False,
    keep_original_input_name: bool = True,
    *,
    partition_affix: str | None = None,
    tuple_return: bool = False,
) -> GraphModule:
    """Return a module with a child ``submod_<id>`` for each partition id, which computes the same.

    Takes what ``torch.fx.passes.split_module.split_module`` takes and gives what that gives;
    ``docs/differences.md`` lists where it does not. O(nodes + edges).

    - A child takes what its operators use, in the order of first use: inputs of the graph, tensor
      attributes (which stay attributes of the result), results of other children. Modules that
      operators call become its own, as the same objects: tied weights stay tied, and gradients
      reach the weights of `m`.
    - A child returns what others or the caller use, in the order of first use: one result as it
      is, several as a tuple.
    - ``meta`` of nodes is kept, as are defaults of inputs, operators that nothing uses, and nested
      inputs and outputs.
    - Where ``meta["example_value"]`` has symbolic sizes, a child also takes the symbols in the
      shapes of what it takes.
    - Autocast regions and grad modes are entered and left in each child that they span.
    - Writes in place: partitions that touch a tensor which one of them writes into are called so
      that each write keeps its place among the reads, as in the graph. Where that cannot be, the
      cut is refused. Known are the writes of torch's own functions and modules, by schema, by a
      name that ends in an underscore, by ``out=`` and ``inplace=True``; not those inside modules
      of others. Children called by hand, in other processes or on copies, share no memory: there
      only what is passed by name is right.
    - Random numbers are drawn in the order in which partitions are called. That is the graph's
      order for ids that never go back along the graph with `keep_original_order`.

    Args:
        m: what is cut; its graph stays as it is.
        root_m: the module that was traced; not used.
        split_callback: gives the partition id of an operator: an int, or what has a string. Called
            once for each call node, in graph order.
        qualname_map: receives the new path of each module called, with its path in `m`.
        keep_original_order: call partitions in the order of their first operators, as far as their
            dependences allow it; otherwise in some order that these allow.
        keep_original_node_name: nodes in children have the names that they have in `m`.
        keep_original_input_name: inputs of children have the names of what they take; otherwise
            ``arg_0``, ``arg_1``, ...
        partition_affix: children are ``submod_<affix>_<id>``.
        tuple_return: a single result is returned as a tuple too.

    Raises:
        CycleError: when partitions wait for each other; or when ids go back along a graph that
            has autocast regions or grad modes.
        SpecError: for an id that cannot be part of a name.
        CaptureError: for a graph that fetches what `m` lacks, or leaves an autocast region open.

    """
    ids = {op: split_callback(op) for op in m.graph.nodes if op.op not in PLACELESS}
    child_of = {op: _child(one, partition_affix) for op, one in ids.items()}
    id_of_child: dict[str, object] = {}
    for op, one in ids.items():
        id_of_child.setdefault(child_of[op], one)
    number = {child: index for index, child in enumerate(id_of_child)}
    by_number = bool(keep_original_order)
    style = Style(bool(keep_original_node_name), keep_original_input_name, tuple_return, by_number)
    return cut_module(
        m,
        {op: number[child] for op, child in child_of.items()},
        Partitions(list(id_of_child), list(id_of_child.values()), by_number=by_number),
        style,
        qualname_map=qualname_map,
    )


def _child(one: object, affix: str | None) -> str:
    """Return the name of the submodule of a partition with an id."""
    name = f"submod_{one}" if affix is None else f"submod_{affix}_{one}"
    if "." in name:
        raise SpecError(
            f"partition id {one!r} would name a submodule {name}, and names of submodules have no"
            " dots; give numbers"
        )
    return name
