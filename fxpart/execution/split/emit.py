"""`emit`: build the submodules of a cut and the module that calls them."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.fx.node import map_arg

from fxpart.errors import SpecError
from fxpart.execution.split.dependencies import PLACELESS, Dependencies
from fxpart.execution.split.graph_module import DeferredGraphModule, HeldModules, fetched
from fxpart.execution.split.regions import Regions

__all__ = ["Cut", "Style", "emit"]


@dataclass(frozen=True, slots=True)
class Style:
    """Naming of submodules and their nodes, and what submodules own and return."""

    keep_node_names: bool = False
    keep_input_names: bool = True
    tuple_return: bool = False
    late_attributes: bool = False
    """Fetch an attribute only when it is first passed to a partition."""
    own_attributes: bool = False
    """Submodules fetch attributes themselves, under unchanged paths."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A graph module and its cut."""

    module: GraphModule
    children: Sequence[str]
    """Name of the submodule of each partition."""
    dependencies: Dependencies
    regions: Regions
    order: Sequence[int]
    """Partitions in call order."""
    style: Style


@dataclass(slots=True)
class _Submodule:
    """One submodule under construction."""

    graph: Graph = field(default_factory=Graph)
    copies: dict[Node, Node] = field(default_factory=dict)
    """Copies of nodes, by their node in the original graph."""
    inputs: list[Node] = field(default_factory=list)
    """Nodes of the original graph passed as arguments."""

    def repeat(self, node: Node) -> None:
        """Add a copy of a node that opens or closes a region."""
        args = map_arg(node.args, self.copies.__getitem__)
        copy = self.graph.create_node(node.op, node.target, args, {}, type_expr=node.type)
        copy.meta.update(node.meta)
        self.copies[node] = copy


def emit(
    cut: Cut,
    qualname_map: dict[str, str] | None = None,
    top_class: type[GraphModule] = GraphModule,
) -> GraphModule:
    """Return an equivalent module that calls one submodule per partition.

    It has the signature of the original module, including nested inputs and outputs; the original
    is not changed. `qualname_map` receives the new path of each module called by a submodule,
    mapped to its original path.
    """
    attributes: dict[str, object] = {}
    called_with: dict[int, list[Node]] = {}
    for part in cut.order:
        child, called_with[part] = _submodule(cut, part, qualname_map)
        attributes[cut.children[part]] = child
    graph = _calling_graph(cut, called_with, attributes)
    top = top_class(attributes, graph)
    top.training = cut.module.training
    top.meta["partition_names"] = {cut.children[part] for part in cut.order}
    return top


def _submodule(
    cut: Cut, part: int, qualname_map: dict[str, str] | None
) -> tuple[GraphModule, list[Node]]:
    """Return the submodule of a partition, and the nodes passed as its arguments."""
    built, modules = _Submodule(), HeldModules(cut.module, rename=not cut.style.own_attributes)
    _add_inputs(cut, part, built, modules)
    mode = None
    if part in cut.regions.restoring:
        mode = built.graph.call_function(torch.is_grad_enabled)
    for node in cut.regions.entered.get(part, ()):
        built.repeat(node)
    _add_operators(cut, part, built, modules)
    for node in cut.regions.left.get(part, ()):
        built.repeat(node)
    if mode is not None:
        built.graph.call_function(torch._C._set_grad_enabled, (mode,))
    results = tuple(built.copies[node] for node in cut.dependencies.outputs[part])
    single = len(results) == 1 and not cut.style.tuple_return
    built.graph.output(results[0] if single else results)
    child = DeferredGraphModule(modules.attributes, built.graph)
    child.training = cut.module.training
    if qualname_map is not None:
        for name, path in modules.paths.items():
            qualname_map[f"{cut.children[part]}.{name}"] = path
    return child, built.inputs


def _add_inputs(cut: Cut, part: int, built: _Submodule, modules: HeldModules) -> None:
    """Add the placeholders, then the attributes that the submodule fetches itself."""
    fetched_inside = []
    for node in cut.dependencies.inputs[part]:
        if node.op == "get_attr" and _is_fetched_inside(cut, node):
            fetched_inside.append(node)
            continue
        name = node.name if cut.style.keep_input_names else f"arg_{len(built.inputs)}"
        built.copies[node] = built.graph.placeholder(name, node.type)
        built.copies[node].meta.update(node.meta)
        built.inputs.append(node)
    for node in fetched_inside:
        built.copies[node] = built.graph.create_node("get_attr", modules.keep(str(node.target)))
        built.copies[node].meta.update(node.meta)


def _is_fetched_inside(cut: Cut, node: Node) -> bool:
    """Return whether submodules fetch an attribute themselves, always true for region graphs."""
    return cut.style.own_attributes or isinstance(
        fetched(cut.module, str(node.target)), torch.nn.Module
    )


def _is_only_fetched_inside(cut: Cut, node: Node) -> bool:
    """Return whether only submodules need an attribute, and each fetches it itself.

    True for graphs of regions, which export names ``submod_1``: a submodule of the cut may have the
    same name.
    """
    users_are_placed = all(user in cut.dependencies.part_of for user in node.users)
    return users_are_placed and _is_fetched_inside(cut, node)


def _add_operators(cut: Cut, part: int, built: _Submodule, modules: HeldModules) -> None:
    """Copy the operators of a partition. The inner loop of a cut."""
    copies, create = built.copies, built.graph.create_node
    copy_of, keep_names = copies.__getitem__, cut.style.keep_node_names
    for node in cut.dependencies.ops[part]:
        target = modules.call(str(node.target)) if node.op == "call_module" else node.target
        name = node.name if keep_names else None
        # Set after creation, since `create_node` would search the arguments for symbolic sizes,
        # taking more than half of a cut's time.
        copy = create(node.op, target, name=name, type_expr=node.type)
        copy.args = map_arg(node.args, copy_of)
        if node.kwargs:
            copy.kwargs = map_arg(node.kwargs, copy_of)
        copy.meta.update(node.meta)
        copies[node] = copy


def _calling_graph(
    cut: Cut, called_with: Mapping[int, Sequence[Node]], attributes: dict[str, object]
) -> Graph:
    """Return the graph that calls the submodules; its attributes are added to `attributes`."""
    graph, copies = Graph(), dict[Node, Node]()
    nodes = list(cut.module.graph.nodes)
    late = cut.style.late_attributes
    for node in nodes:
        early = node.op == "get_attr" and not late and not _is_only_fetched_inside(cut, node)
        if early or node.op == "placeholder":
            copies[node] = _copy_source(cut, graph, node, attributes)
    for node in nodes:
        # Operators without a partition, such as input checks, run before all partitions.
        if node.op not in PLACELESS and node not in cut.dependencies.part_of:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "call_module":
                attributes[str(node.target)] = fetched(cut.module, str(node.target))
    for part in cut.order:
        for node in called_with[part]:
            if node not in copies:
                copies[node] = _copy_source(cut, graph, node, attributes)
        _call(cut, graph, part, called_with[part], copies)
    for node in nodes:
        if node.op == "output":
            _return(cut, graph, node, copies, attributes)
    if type(cut.module.graph._codegen) is not CodeGen:
        # The codegen flattens nested inputs and rebuilds nested outputs.
        graph.set_codegen(cut.module.graph._codegen)
    return graph


def _call(
    cut: Cut, graph: Graph, part: int, inputs: Sequence[Node], copies: dict[Node, Node]
) -> None:
    """Call a submodule and unpack its results."""
    call = graph.call_module(cut.children[part], tuple(copies[node] for node in inputs))
    outputs = cut.dependencies.outputs[part]
    if len(outputs) == 1 and not cut.style.tuple_return:
        copies[outputs[0]] = call
        return
    for item, node in enumerate(outputs):
        copies[node] = graph.create_node("call_function", operator.getitem)
        copies[node].args = (call, item)


def _return(
    cut: Cut, graph: Graph, node: Node, copies: dict[Node, Node], attributes: dict[str, object]
) -> None:
    """Add the output of `node`, fetching attributes that only the caller reads."""
    for result in node.all_input_nodes:
        if result not in copies:
            copies[result] = _copy_source(cut, graph, result, attributes)
    # Without a type annotation, like torch's cut.
    returned = graph.output(map_arg(node.args[0], copies.__getitem__))
    returned.meta.update(node.meta)


def _copy_source(cut: Cut, graph: Graph, node: Node, attributes: dict[str, object]) -> Node:
    """Copy a placeholder with its default, or a ``get_attr`` node."""
    target = str(node.target)
    if node.op == "get_attr":
        if target in cut.children:
            raise SpecError(
                f"the graph fetches {target}, which is also the name of a submodule of the cut;"
                " give partition_affix"
            )
        attributes[target] = fetched(cut.module, target)
    keep = cut.style.keep_node_names and node.op == "placeholder"
    name = node.name if keep else None
    copy = graph.create_node(node.op, target, node.args, {}, name, node.type)
    copy.meta.update(node.meta)
    return copy
