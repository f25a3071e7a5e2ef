"""`split_by_tags`: one submodule for each tag on the nodes of a graph."""

from collections.abc import Sequence
from typing import Literal, overload

from torch.fx import GraphModule, Node

from fxpart.errors import CycleError, SpecError, nearest_names
from fxpart.split.cut import Partitions, cut_module
from fxpart.split.dependencies import PLACELESS
from fxpart.split.emit import Style

__all__ = ["split_by_tags"]


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
    """Return a module with a child for each of `tags`, called in that order, computing the same.

    Every operator of the graph has an attribute ``tag``, set by the caller. Takes what
    ``torch.fx.passes.split_utils.split_by_tags`` takes. Unlike `split_module`, a child fetches the
    attributes that it uses itself, and all that it holds has the path that it had. A tag without
    operators gives a child that takes and returns nothing. O(nodes + edges).

    Args:
        gm: what is cut; its graph stays as it is.
        tags: names of the children, in the order in which they are called.
        return_fqn_mapping: whether to return a mapping too: from the path of each module or
            attribute that children use to its path in the result. Of several children, the last.
        return_tuple: a single result of a child is returned as a tuple too.
        GraphModuleCls: class of the result.

    Raises:
        SpecError: for an operator without a tag, a tag that is not among `tags`, and a tag that is
            there twice or cannot name a child.
        CycleError: when an operator reads from one whose tag comes later; or for autocast regions
            and grad modes as in `split_module`.

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
