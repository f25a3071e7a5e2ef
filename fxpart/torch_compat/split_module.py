"""`split_module` and `split_by_tags`: cut a graph by a callback, or by tags on its nodes."""

from collections.abc import Callable, Sequence
from typing import Literal, overload

from torch import nn
from torch.fx import GraphModule, Node

from fxpart.errors import CycleError, SpecError, nearest_names
from fxpart.execution.split.cut import Partitions, cut_module
from fxpart.execution.split.dependencies import PLACELESS
from fxpart.execution.split.emit import Style

__all__ = ["split_by_tags", "split_module"]


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
    """Return an equivalent module with a child ``submod_<id>`` per partition id.

    Has the arguments and results of ``torch.fx.passes.split_module.split_module``, except for the
    differences in ``docs/differences.md``. O(nodes + edges).

    - A child takes the values used by its operators, in order of first use: inputs of the graph,
      tensor attributes (which stay attributes of the result), results of other children. Modules
      called by its operators become its own, as the same objects: tied weights stay tied, and
      gradients reach the weights of `m`.
    - A child returns the values used by others or the caller, in order of first use: a single one
      directly, several as a tuple.
    - Node ``meta``, defaults of inputs, unused operators, and nested inputs and outputs are
      preserved.
    - If ``meta["example_value"]`` has symbolic sizes, a child also takes the symbols in the shapes
      of its inputs.
    - Autocast regions and grad modes are entered and exited in each child that they span.
    - In-place writes: partitions that access a tensor written by one of them are called in an order
      that keeps each write at its position among the reads. If that is impossible, the cut is
      refused. Known writes are those of torch's own functions and modules, by schema, by a trailing
      underscore in the name, by ``out=`` and ``inplace=True``; not those inside other modules.
      Children called by hand, in other processes or on copies, share no memory: there only the
      passed values are correct.
    - Random numbers are drawn in the order in which partitions are called: with
      `keep_original_order`, the graph's order if ids never decrease along the graph.

    Args:
        m: the module to cut; its graph is not changed.
        root_m: the traced module; not used.
        split_callback: returns the partition id of an operator: an int, or anything convertible to
            a string. Called once per call node, in graph order.
        qualname_map: filled with the new path of each called module, mapped to its path in `m`.
        keep_original_order: call partitions in the order of their first operators, as far as their
            dependences allow; otherwise in any order they allow.
        keep_original_node_name: whether nodes in children keep their names.
        keep_original_input_name: whether inputs of children are named after the passed values;
            otherwise ``arg_0``, ``arg_1``, ...
        partition_affix: children are named ``submod_<affix>_<id>``.
        tuple_return: whether a single result is also returned as a tuple.

    Raises:
        CycleError: if partitions wait for each other, or ids decrease along a graph that has
            autocast regions or grad modes.
        SpecError: if an id cannot be part of a name.
        CaptureError: if the graph fetches an attribute that `m` lacks, or leaves an autocast region
            open.

    """
    ids = {op: split_callback(op) for op in m.graph.nodes if op.op not in PLACELESS}
    child_of = {op: _child_name(part_id, partition_affix) for op, part_id in ids.items()}
    id_of_child: dict[str, object] = {}
    for op, part_id in ids.items():
        id_of_child.setdefault(child_of[op], part_id)
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


def _child_name(part_id: object, affix: str | None) -> str:
    """Return the name of the submodule of a partition."""
    name = f"submod_{part_id}" if affix is None else f"submod_{affix}_{part_id}"
    if "." in name:
        raise SpecError(
            f"partition id {part_id!r} would name a submodule {name}, and names of submodules have"
            " no dots; give numbers"
        )
    return name


@overload
def split_by_tags(
    gm: GraphModule,
    tags: Sequence[str],
    return_fqn_mapping: Literal[False] = ...,
    return_tuple: bool = ...,
    GraphModuleCls: type[GraphModule] = ...,  # noqa: N803
) -> GraphModule: ...


@overload
def split_by_tags(
    gm: GraphModule,
    tags: Sequence[str],
    return_fqn_mapping: Literal[True],
    return_tuple: bool = ...,
    GraphModuleCls: type[GraphModule] = ...,  # noqa: N803
) -> tuple[GraphModule, dict[str, str]]: ...


def split_by_tags(
    gm: GraphModule,
    tags: Sequence[str],
    return_fqn_mapping: bool = False,
    return_tuple: bool = False,
    GraphModuleCls: type[GraphModule] = GraphModule,  # noqa: N803 - torch's name
) -> GraphModule | tuple[GraphModule, dict[str, str]]:
    """Return an equivalent module with a child for each of `tags`, called in that order.

    Every operator of the graph has an attribute ``tag``, set by the caller. Has the arguments of
    ``torch.fx.passes.split_utils.split_by_tags``. Unlike with `split_module`, a child fetches its
    attributes itself, and everything in it keeps its path. A tag without operators yields a child
    that takes and returns nothing. O(nodes + edges).

    Args:
        gm: the module to cut; its graph is not changed.
        tags: names of the children, in call order.
        return_fqn_mapping: whether to also return a mapping from the path of each module or
            attribute used by children to its path in the result, in the last of these children.
        return_tuple: whether a single result of a child is also returned as a tuple.
        GraphModuleCls: class of the result.

    Raises:
        SpecError: if an operator has no tag or one not among `tags`, or a tag occurs twice or
            cannot name a child.
        CycleError: if an operator reads from one with a later tag; and for autocast regions and
            grad modes as in `split_module`.

    """
    number = {tag: index for index, tag in enumerate(tags)}
    if len(number) < len(tags) or any("." in tag or not tag for tag in tags):
        raise SpecError(
            f"tags name children and are {', '.join(map(repr, tags))}; give each once, without dots"
        )
    ops = [node for node in gm.graph.nodes if node.op not in PLACELESS]
    part_of = {node: number[_tag(node, number)] for node in ops}
    for node in ops:
        for operand in node.all_input_nodes:
            if part_of.get(operand, -1) > part_of[node]:
                raise CycleError(
                    f"{node.name} is tagged {tags[part_of[node]]} and reads {operand.name}, tagged"
                    f" {tags[part_of[operand]]}, which comes later in tags; order the tags so that"
                    " none reads from a later one"
                )
    style = Style(True, True, return_tuple, late_attributes=True, own_attributes=True)
    paths: dict[str, str] = {}
    partitions = Partitions(tags, tags, by_number=True)
    result = cut_module(
        gm, part_of, partitions, style, qualname_map=paths, top_class=GraphModuleCls
    )
    for tag in tags:
        child = result.get_submodule(tag)
        assert isinstance(child, GraphModule)
        for node in child.graph.nodes:
            if node.op not in PLACELESS:
                node.tag = tag
    if return_fqn_mapping:
        return result, {old: new for new, old in paths.items()}
    return result


def _tag(node: Node, known: dict[str, int]) -> str:
    tag = getattr(node, "tag", None)
    if tag is None:
        raise SpecError(f"{node.name} has no tag; set node.tag for every operator of the graph")
    if tag not in known:
        raise SpecError(
            f"{node.name} is tagged {tag!r}, which is not among tags;"
            f" {nearest_names(str(tag), known)}"
        )
    return str(tag)
