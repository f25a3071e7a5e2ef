"""`generate_pipeline_partition`: cut a model into stages after modules named by path.

Cuts may be at any depth, and a stage may span branches of the model:

    cut_after = [enc.block.1, dec.block.0]

    enc.block.0  enc.block.1 | enc.block.2  dec.block.0 | dec.block.1  head
           submod_0          |         submod_1         |     submod_2
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from fxpart.errors import CaptureError, SpecError, nearest_names, one_line
from fxpart.execution.split.cut import Partitions, cut_module
from fxpart.execution.split.emit import Style
from fxpart.execution.stages.flat_graph import QUALNAME_MAP
from fxpart.execution.stages.values import move_items_to_their_tuple

__all__ = ["CutTrace", "generate_pipeline_partition"]


# Tracing inlines modules that contain a cut; all others are single calls.


@dataclass(frozen=True, eq=False, slots=True)
class CutTrace:
    """The graph of a module, and the ends of the calls of its submodules."""

    graph_module: fx.GraphModule
    ends: dict[str, list[fx.Node]]
    """The last node of each call of a module, by module path."""


def _trace_opened(model: nn.Module, opened: frozenset[str]) -> CutTrace:
    """Return the graph of `model` in which it and the modules in `opened` are inlined.

    All other modules are single calls and need not be traceable.

    Raises:
        CaptureError: if a module in `opened`, or `model` itself, cannot be traced.

    """
    tracer = _Tracer(opened)
    try:
        with warnings.catch_warnings():
            # Warnings by the model or torch only matter for a run with data.
            warnings.simplefilter("ignore")
            graph = tracer.trace(model)
    # Tracing runs the model's code, which may raise anything.
    except Exception as error:
        raise _untraceable(model, tracer.inside, error) from error
    return CutTrace(fx.GraphModule(model, graph, type(model).__name__), tracer.ends)


class _Tracer(fx.Tracer):
    """Inlines some modules, and records where each call of a module ends."""

    def __init__(self, opened: frozenset[str]) -> None:
        super().__init__()
        self._opened = opened
        self.ends: dict[str, list[fx.Node]] = {}
        self.inside: list[str] = []
        """Paths of the modules being called, innermost last."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is a single call."""
        return module_qualified_name not in self._opened

    def call_module(
        self,
        m: nn.Module,
        forward: Any,  # noqa: ANN401 - as fx has it
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401 - as fx has it
        """Trace one call of a module."""
        path = self.path_of_module(m)
        self.inside.append(path)
        result = super().call_module(m, forward, args, kwargs)
        self.inside.pop()
        self.ends.setdefault(path, []).append(next(iter(reversed(self.graph.nodes))))
        return result


def _untraceable(model: nn.Module, inside: list[str], error: Exception) -> CaptureError:
    path = inside[-1] if inside else ""
    failed = model.get_submodule(path)
    subject = f"{path} ({type(failed).__name__})" if path else type(failed).__name__
    higher = f"; cut at a higher level, such as after {path}" if path else ""
    return CaptureError(
        f"{subject} cannot be traced, which a cut inside it needs: {one_line(error)}{higher}; or"
        " export the model and split it by operators, with split_by_assignment"
    )


# Cutting.


def generate_pipeline_partition(model: nn.Module, cut_after: Sequence[str]) -> fx.GraphModule:
    """Return `model` with its operators in children ``submod_0``, ``submod_1``, ...

    A stage ends after each module named in `cut_after`, in the order in which the model calls them,
    regardless of the order of the list. Only modules that contain a named one are traced, so these
    must be traceable by `torch.fx`; all others are single calls.

    The result has the signature of `model` and computes the same. Weights are the same objects, so
    tied ones stay tied, and they keep their path within a stage: parameter ``a.b.weight`` becomes
    ``submod_1.a.b.weight``. ``result.meta["qualname_map"]`` maps every path of a module or weight
    used by a stage to its path in `model`.

    Raises:
        SpecError: if a path is the model itself, does not exist or is named twice, a module is not
            called exactly once, or a cut leaves a stage without operators.
        CaptureError: if a module that contains a cut cannot be traced.

    """
    _check_paths(model, cut_after)
    first_name = {module: path for path, module in model.named_modules()}
    opened = {first_name[model.get_submodule(p)] for path in cut_after for p in _parents(path)}
    trace = _trace_opened(model, frozenset(opened))
    ends = {path: _end(model, trace, path, first_name) for path in cut_after}
    stage_of = _stages(trace.graph_module.graph, ends)
    stages = range(len(cut_after) + 1)
    children = [f"submod_{stage}" for stage in stages]
    paths: dict[str, str] = {}
    split = cut_module(
        trace.graph_module,
        stage_of,
        Partitions(children, stages, by_number=True),
        Style(own_attributes=True, late_attributes=True),
        qualname_map=paths,
    )
    split.meta[QUALNAME_MAP] = paths
    return split


def _parents(path: str) -> Iterator[str]:
    """Yield the paths of the modules containing the one at `path`, except the model itself."""
    parts = path.split(".")
    return (".".join(parts[:depth]) for depth in range(1, len(parts)))


def _check_paths(model: nn.Module, cut_after: Sequence[str]) -> None:
    kind = type(model).__name__
    module_paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    if isinstance(cut_after, str) or not cut_after:
        raise SpecError(
            f"cut_after={cut_after!r} names no list of modules; give at least one path of {kind},"
            f" such as [{module_paths[0] if module_paths else ''}]"
        )
    for path in cut_after:
        if not path or (path == kind and path not in module_paths):
            raise SpecError(
                f"cut_after={path!r} is {kind} itself, and after it nothing is left; name modules"
                f" inside it; {nearest_names(path, module_paths)}"
            )
        if path not in module_paths:
            raise SpecError(
                f"{kind} has no module {path!r} to cut after; {nearest_names(path, module_paths)}"
            )
    twice = next((path for path in cut_after if list(cut_after).count(path) > 1), None)
    if twice:
        raise SpecError(f"cut_after names {twice} twice; a stage ends there once")


def _end(model: nn.Module, trace: CutTrace, path: str, first_name: dict[nn.Module, str]) -> fx.Node:
    """Return the last node of the only call of the module at `path`."""
    module = model.get_submodule(path)
    calls = trace.ends.get(first_name[module], [])
    if not calls:
        last = next(reversed(list(module.named_children())), None)
        instead = f"cut after {path}.{last[0]}" if last else "name a module that it calls"
        raise SpecError(
            f"{type(model).__name__} never calls {path} ({type(module).__name__}); {instead}"
        )
    if len(calls) > 1:
        raise SpecError(
            f"{type(model).__name__} calls {path} {len(calls)} times, so a cut after it could be"
            " in as many places; cut after a module that is called once"
        )
    return calls[0]


def _stages(graph: fx.Graph, ends: dict[str, fx.Node]) -> dict[fx.Node, int]:
    """Return the stage of each operator: the number of cuts before it."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    cuts = sorted(ends, key=lambda path: order[ends[path]])
    operators = [n for n in order if n.op not in {"placeholder", "get_attr", "output"}]
    stage_of: dict[fx.Node, int] = {}
    stage = 0
    for node in operators:
        while stage < len(cuts) and order[ends[cuts[stage]]] < order[node]:
            stage += 1
        stage_of[node] = stage
    move_items_to_their_tuple(graph, stage_of)
    used_stages = set(stage_of.values())
    empty = next((s for s in range(len(cuts) + 1) if s not in used_stages), None)
    if empty is not None:
        raise _empty_stage(cuts, empty)
    return stage_of


def _empty_stage(cuts: list[str], stage: int) -> SpecError:
    if stage == len(cuts):
        where = f"after {cuts[-1]}"
    elif stage == 0:
        where = f"before the end of {cuts[0]}"
    else:
        where = f"between the ends of {cuts[stage - 1]} and {cuts[stage]}"
    return SpecError(
        f"{len(cuts)} cuts make {len(cuts) + 1} stages, and the model computes nothing {where};"
        f" leave out the cut after {cuts[min(stage, len(cuts) - 1)]}"
    )
