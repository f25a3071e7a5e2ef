"""A program's call nodes as steps: what each calls, and whether its result must be a real one."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from fxpart.capture.regions import REGIONS, body_of
from fxpart.errors import SpecError
from fxpart.graph import OpGraph
from fxpart.profiling.regions import holds_validity, runnable_body
from fxpart.profiling.signature import signature

__all__ = ["Step", "steps_of"]

_SMALL_BYTES = 2**18
"""Of all that an operator reads and writes: a fraction of a processor's own cache."""


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One operator."""

    node: fx.Node
    args: tuple[Any, ...]
    """What it is called with: nodes, lists of nodes, constants, and graphs of regions; devices are
    the real one."""
    kwargs: dict[str, Any]
    signature: str
    is_exact: bool
    """Whether its result must be a real one. Made numbers will not do where they must agree with
    each other, as the sizes of groups with the number of rows: results in whole numbers, and all
    that follows from whole numbers and masks alone, are always computed."""
    is_small: bool
    """Whether it takes no more time to run it than to make up its result."""
    is_region: bool
    """Whether it calls a graph of its own, in a mode of its own."""
    needs_validity: bool
    """Whether it refuses some values of its arguments."""


def steps_of(program: ExportedProgram, graph: OpGraph, device: torch.device) -> list[Step]:
    """Return the operators of `program` in order, to be run on `device`.

    Raises:
        SpecError: when `graph` is not the graph of `program`, or sizes are symbols.

    """
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    if tuple(node.name for node in calls) != graph.names:
        raise SpecError(
            f"the graph ({graph.n_ops} operators) is not that of the program ({len(calls)} calls);"
            " give op_graph(program), or the two that were captured together"
        )
    exact, steps = _exact_inputs(program), []
    for node in calls:
        if _is_exact(node, exact):
            exact.add(node)
        args = tuple(_on_device(given, device) for given in node.args)
        kwargs = {name: _on_device(given, device) for name, given in node.kwargs.items()}
        steps.append(
            Step(
                node,
                args,
                kwargs,
                signature(node),
                is_exact=node in exact,
                is_small=_is_small(node),
                is_region=node.target in REGIONS,
                needs_validity=holds_validity(node),
            )
        )
    return steps


def _is_small(node: fx.Node) -> bool:
    touched = [node.meta.get("val"), *(given.meta.get("val") for given in node.all_input_nodes)]
    tensors = [leaf for leaf in tree_leaves(touched) if isinstance(leaf, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors) <= _SMALL_BYTES


def _on_device(given: Any, device: torch.device) -> Any:  # noqa: ANN401 - as torch types arguments
    if isinstance(given, fx.Node) and given.op == "get_attr":
        return runnable_body(body_of(given), device)
    if isinstance(given, list):
        return [_on_device(item, device) for item in given]
    return device if isinstance(given, torch.device) else given


def _exact_inputs(program: ExportedProgram) -> set[fx.Node]:
    """Return the inputs that are whole numbers or masks, once no size is a symbol."""
    found = set()
    for node in program.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        if any(isinstance(size, torch.SymInt) for size in value.shape):
            raise SpecError(
                f"input {node.name} has a size that is a symbol, and only real sizes can be"
                " measured; export without dynamic shapes"
            )
        if not (value.is_floating_point() or value.is_complex()):
            found.add(node)
    return found


def _is_exact(node: fx.Node, exact: set[fx.Node]) -> bool:
    made = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    read = [given for given in node.all_input_nodes if given.meta.get("val") is not None]
    whole = [t for t in made if not (t.is_floating_point() or t.is_complex())]
    # A mask may be any: random ones will do.
    return any(t.dtype != torch.bool for t in whole) or all(given in exact for given in read)
