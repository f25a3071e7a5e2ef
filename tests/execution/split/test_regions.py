"""Autocast regions and grad modes over several partitions."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.split_module import split_module as torch_split

from fxpart.errors import CaptureError, CycleError
from fxpart.torch_compat.split_module import split_module
from tests.execution.split.random_graphs import call_nodes

ENTER, EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
SET_GRAD = torch._C._set_grad_enabled


@pytest.fixture(autouse=True)
def _grad_mode_as_before() -> Iterator[None]:
    """Restore the grad mode, which some graphs here change."""
    with torch.enable_grad():
        yield


def _autocast(graph: Graph, dtype: torch.dtype = torch.bfloat16) -> Node:
    return graph.call_function(ENTER, ("cpu", dtype, True, None))


def _autocast_graph() -> GraphModule:
    """Return two matrix products in autocast, one before and one after; all dtypes are returned."""
    graph = Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_function(torch.mm, (x, x))]
    mode = _autocast(graph)
    nodes += [graph.call_function(torch.mm, (x, x)) for _ in range(2)]
    graph.call_function(EXIT, (mode,))
    nodes.append(graph.call_function(torch.mm, (x, x)))
    graph.output(tuple(nodes))
    return GraphModule(nn.Module(), graph)


def _numbered(module: GraphModule, ids: list[int]) -> Callable[[Node], int]:
    part_of = dict(zip(call_nodes(module), ids, strict=True))
    return part_of.__getitem__


def _functions(module: GraphModule, name: str) -> list[str]:
    child = module.get_submodule(name)
    assert isinstance(child, GraphModule)
    return [getattr(n.target, "__name__", "") for n in child.graph.nodes if n.op == "call_function"]


def test_each_partition_enters_and_leaves_autocast() -> None:
    module = _autocast_graph()
    split = split_module(module, None, _numbered(module, [0, 0, 0, 1, 2, 2]))
    assert _functions(split, "submod_0") == ["mm", "_enter_autocast", "mm", "_exit_autocast"]
    assert _functions(split, "submod_1") == ["_enter_autocast", "mm", "_exit_autocast"]
    assert _functions(split, "submod_2") == ["_enter_autocast", "_exit_autocast", "mm"]
    x = torch.randn(3, 3)
    results, expected = split(x), module(x)
    dtypes = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
    assert [t.dtype for t in results] == dtypes
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert not torch.is_autocast_enabled("cpu")


def test_a_partition_alone_leaves_autocast_again() -> None:
    module = _autocast_graph()
    split = split_module(module, None, _numbered(module, [0, 0, 0, 1, 2, 2]))
    x = torch.randn(3, 3)
    for name, dtype in (("submod_1", torch.bfloat16), ("submod_2", torch.float32)):
        assert split.get_submodule(name)(x).dtype == dtype
        assert not torch.is_autocast_enabled("cpu")


def test_nested_autocast_is_left_from_the_inside_out() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    outer = _autocast(graph)
    inner = _autocast(graph, torch.float16)
    nodes = [graph.call_function(torch.mm, (x, x)) for _ in range(2)]
    graph.call_function(EXIT, (inner,))
    nodes.append(graph.call_function(torch.mm, (x, x)))
    graph.call_function(EXIT, (outer,))
    graph.output(tuple(nodes))
    module = GraphModule(nn.Module(), graph)
    split = split_module(module, None, _numbered(module, [0, 0, 0, 1, 1, 2, 2]))
    assert _functions(split, "submod_0") == [
        "_enter_autocast", "_enter_autocast", "mm", "_exit_autocast", "_exit_autocast",
    ]  # fmt: skip
    first = split.get_submodule("submod_0")
    assert isinstance(first, GraphModule)
    entered = [n for n in first.graph.nodes if n.target is ENTER]
    left = [n.args[0] for n in first.graph.nodes if n.target is EXIT]
    assert left == entered[::-1]
    x_value = torch.randn(3, 3)
    assert [t.dtype for t in split(x_value)] == [torch.float16, torch.float16, torch.bfloat16]


def _grad_graph(*, leave_off: bool = False) -> GraphModule:
    """Return products before, inside and after ``torch.no_grad``."""
    graph = Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_function(torch.mul, (x, 2.0))]
    graph.call_function(SET_GRAD, (False,))
    nodes += [graph.call_function(torch.mul, (x, 3.0)) for _ in range(2)]
    if not leave_off:
        graph.call_function(SET_GRAD, (True,))
        nodes.append(graph.call_function(torch.mul, (x, 4.0)))
    graph.output(tuple(nodes))
    return GraphModule(nn.Module(), graph)


def test_each_partition_sets_the_grad_mode_and_restores_it() -> None:
    module = _grad_graph()
    split = split_module(module, None, _numbered(module, [0, 0, 0, 1, 2, 2]))
    assert _functions(split, "submod_1") == [
        "is_grad_enabled", "_set_grad_enabled", "mul", "_set_grad_enabled",
    ]  # fmt: skip
    assert _functions(split, "submod_2") == ["_set_grad_enabled", "mul"]
    x = torch.randn(3, requires_grad=True)
    assert [t.requires_grad for t in split(x)] == [True, False, False, True]
    for ambient in (True, False):
        with torch.set_grad_enabled(ambient):
            split.get_submodule("submod_0")(x)
            split.get_submodule("submod_1")(x)
            assert torch.is_grad_enabled() == ambient


def test_a_partition_run_again_computes_the_same_gradients() -> None:
    # As the first stage of a pipeline does with its second micro-batch.
    module = _grad_graph()
    first = split_module(module, None, _numbered(module, [0, 0, 0, 1, 2, 2])).get_submodule(
        "submod_0"
    )
    x = torch.randn(3, requires_grad=True)
    assert [[t.requires_grad for t in first(x)] for _ in range(2)] == [[True, False]] * 2


@pytest.mark.parametrize("leave_off", [False, True])
def test_a_mode_left_by_the_graph_stays(leave_off: bool) -> None:
    module = _grad_graph(leave_off=leave_off)
    count = len(call_nodes(module))
    split = split_module(module, None, _numbered(module, [0, 1, 1, 2, 2, 2][:count]))
    x = torch.randn(3, requires_grad=True)
    for model in (module, split):
        with torch.set_grad_enabled(False):
            model(x)
            assert torch.is_grad_enabled() != leave_off


def test_partitions_with_modes_run_in_graph_order() -> None:
    module = _grad_graph(leave_off=True)
    ids = _numbered(module, [0, 1, 1, 1])
    split = split_module(module, None, ids)
    x = torch.randn(3, requires_grad=True)
    assert [t.requires_grad for t in split(x)] == [True, False, False]
    # Both partitions only read x, and torch runs the later one first.
    with torch.enable_grad():
        by_torch = torch_split(module, module, ids)(x)
    assert [t.requires_grad for t in by_torch] == [False, False, False]


def test_an_affix_does_not_matter() -> None:
    module = _autocast_graph()
    ids = _numbered(module, [0, 0, 0, 1, 2, 2])
    split = split_module(module, None, ids, partition_affix="pp")
    x = torch.randn(3, 3)
    assert [t.dtype for t in split(x)] == [t.dtype for t in module(x)]
    with pytest.raises(KeyError):
        torch_split(module, module, ids, partition_affix="pp")


def test_the_callback_is_asked_once_under_regions_too() -> None:
    for split, times in ((split_module, 1), (torch_split, 2)):
        module, nodes = _autocast_graph(), list[Node]()

        def zero(node: Node, nodes: list[Node] = nodes) -> int:
            nodes.append(node)
            return 0

        split(module, module, zero)
        ops = call_nodes(module)
        assert (nodes == ops) == (times == 1)
        assert len(nodes) >= times * len(ops)


@pytest.mark.parametrize("graph", [_autocast_graph, _grad_graph])
def test_decreasing_ids_are_refused_by_name(graph: Callable[[], GraphModule]) -> None:
    module = graph()
    with pytest.raises(
        CycleError,
        match=r"never go back along the graph: (mul_2|mm_2) is in partition 0, .* in partition 1;",
    ):
        split_module(module, None, _numbered(module, [0, 1, 1, 0, 1, 1]))
    # Numbers are ordered by value, as in torch.
    with pytest.raises(CycleError, match=r"is in partition 3, .* before it in partition 4"):
        split_module(module, None, _numbered(module, [4, 4, 4, 3, 3, 3]))
    words = _numbered(module, [4, 4, 4, 3, 3, 3])
    assert split_module(module, None, lambda n: f"p{words(n)}") is not None
    back = _numbered(module, [0, 0, 1, 1, 0, 0])
    with pytest.raises(CycleError, match=r"is in partition p0, .* before it in partition p1"):
        split_module(module, None, lambda n: f"p{back(n)}")


def test_an_incomplete_autocast_is_refused() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    mode = _autocast(graph)
    graph.output(graph.call_function(torch.mm, (x, x)))
    module = GraphModule(nn.Module(), graph)
    with pytest.raises(CaptureError, match=f"autocast is entered by {mode.name} and never left"):
        split_module(module, None, lambda _: 0)
    with graph.inserting_before(graph.output_node()):
        graph.call_function(EXIT, (mode,))
        graph.call_function(EXIT, (mode,))
    with pytest.raises(CaptureError, match="left by _exit_autocast_1, which was not entered"):
        split_module(module, None, lambda _: 0)


def _random_modes(seed: int) -> GraphModule:
    """Return nested autocast regions and grad modes around products of a float32 matrix."""
    generator = torch.Generator().manual_seed(seed)
    graph, nodes, open_modes = Graph(), list[Node](), list[Node]()
    x = graph.placeholder("x")
    for _ in range(12):
        match int(torch.randint(0, 6, (), generator=generator)):
            case 0:
                open_modes.append(_autocast(graph))
            case 1 if open_modes:
                graph.call_function(EXIT, (open_modes.pop(),))
            case 2:
                graph.call_function(SET_GRAD, (bool(torch.rand((), generator=generator) < 0.5),))
            case _:
                nodes.append(graph.call_function(torch.mm, (x, x)))
    while open_modes:
        graph.call_function(EXIT, (open_modes.pop(),))
    graph.output(tuple(nodes))
    return GraphModule(nn.Module(), graph)


def _seen(module: nn.Module, x: Tensor) -> tuple[list[tuple[torch.dtype, bool]], bool]:
    with torch.enable_grad():
        results = [(t.dtype, t.requires_grad) for t in module(x)]
        return results, torch.is_grad_enabled()


def test_random_modes_in_random_runs_of_partitions() -> None:
    x = torch.randn(2, 2, requires_grad=True)
    both = 0
    for seed in range(60):
        module = _random_modes(seed)
        ops = call_nodes(module)
        generator = torch.Generator().manual_seed(seed)
        steps = torch.randint(0, 2, (len(ops),), generator=generator).cumsum(0).tolist()
        split = split_module(module, None, _numbered(module, steps))
        expected = _seen(module, x)
        assert _seen(split, x) == expected
        both += len(set(expected[0])) > 1
        # Every partition but the last can be run alone, any number of times.
        for part in sorted(set(steps[:-1]) - {steps[-1]}):
            for ambient in (True, False):
                with torch.set_grad_enabled(ambient):
                    child = split.get_submodule(f"submod_{part}")
                    assert isinstance(child, GraphModule)
                    child(*[x for n in child.graph.nodes if n.op == "placeholder"])
                    assert torch.is_grad_enabled() == ambient
            assert not torch.is_autocast_enabled("cpu")
    assert both >= 20
