"""`generate_pipeline_partition`: a model cut into stages after modules that are named by path.

A cut may be at any depth, and a stage may end in one branch of the model and begin in another:

    cut_after = [enc.block.1, dec.block.0]

    enc.block.0  enc.block.1 | enc.block.2  dec.block.0 | dec.block.1  head
           submod_0          |         submod_1         |     submod_2
"""

from collections.abc import Iterator, Sequence

from torch import fx, nn

from fxpart.errors import SpecError, nearest_names
from fxpart.pipeline.cut_trace import CutTrace, trace_opened
from fxpart.pipeline.flat_graph import QUALNAME_MAP
from fxpart.pipeline.values import items_with_their_tuples
from fxpart.split.cut import Partitions, cut_module
from fxpart.split.emit import Style

__all__ = ["generate_pipeline_partition"]


def generate_pipeline_partition(model: nn.Module, cut_after: Sequence[str]) -> fx.GraphModule:
    """Return `model` with its operators in children ``submod_0``, ``submod_1``, ...

    A stage ends after each module named in `cut_after`, in the order in which the model calls them,
    which need not be that of the list. Only modules that hold a named one are traced, so those must
    be traceable by `torch.fx`; all others stay whole.

    The result computes what `model` does and is called as it is. Weights are the same objects, so
    tied ones stay tied, and in a stage they have the path that they have in `model`: parameter
    ``a.b.weight`` is ``submod_1.a.b.weight``. ``result.meta["qualname_map"]`` maps every path of a
    module or weight that a stage uses to the one in `model`.

    Raises:
        SpecError: for the model itself, a path that does not exist or is named twice, a module
            that is not called, or more than once, or a cut that leaves a stage without operators.
        CaptureError: when a module that holds a cut cannot be traced.

    """
    _check_paths(model, cut_after)
    first_name = {module: path for path, module in model.named_modules()}
    opened = frozenset(
        first_name[model.get_submodule(parent)] for path in cut_after for parent in _above(path)
    )
    trace = trace_opened(model, opened)
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


def _above(path: str) -> Iterator[str]:
    """Yield the paths of the modules that hold the one at `path`, the model itself left out."""
    parts = path.split(".")
    return (".".join(parts[:depth]) for depth in range(1, len(parts)))


def _check_paths(model: nn.Module, cut_after: Sequence[str]) -> None:
    kind = type(model).__name__
    known = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    if isinstance(cut_after, str) or not cut_after:
        raise SpecError(
            f"cut_after={cut_after!r} names no list of modules; give at least one path of {kind},"
            f" such as [{known[0] if known else ''}]"
        )
    for path in cut_after:
        if not path or (path == kind and path not in known):
            raise SpecError(
                f"cut_after={path!r} is {kind} itself, and after it nothing is left; name modules"
                f" inside it; {nearest_names(path, known)}"
            )
        if path not in known:
            raise SpecError(
                f"{kind} has no module {path!r} to cut after; {nearest_names(path, known)}"
            )
    twice = next((path for path in cut_after if list(cut_after).count(path) > 1), None)
    if twice:
        raise SpecError(f"cut_after names {twice} twice; a stage ends there once")


def _end(model: nn.Module, trace: CutTrace, path: str, first_name: dict[nn.Module, str]) -> fx.Node:
    """Return the last node of the one call of the module at `path`."""
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
    """Return the stage of each operator: how many of the cuts are before it."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    cuts = sorted(ends, key=lambda path: order[ends[path]])
    operators = [n for n in order if n.op not in {"placeholder", "get_attr", "output"}]
    stage_of: dict[fx.Node, int] = {}
    stage = 0
    for node in operators:
        while stage < len(cuts) and order[ends[cuts[stage]]] < order[node]:
            stage += 1
        stage_of[node] = stage
    items_with_their_tuples(graph, stage_of)
    used = set(stage_of.values())
    empty = next((s for s in range(len(cuts) + 1) if s not in used), None)
    if empty is not None:
        raise _nothing(cuts, empty)
    return stage_of


def _nothing(cuts: list[str], stage: int) -> SpecError:
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
