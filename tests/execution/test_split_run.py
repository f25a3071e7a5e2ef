"""A split module run device by device: copies, freed values, and moved weights."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fxpart.capture.inference.export import export_program
from fxpart.capture.inference.from_export import op_graph
from fxpart.capture.live_bytes import LiveBytes
from fxpart.core.assignment import Assignment
from fxpart.execution.split.placement import split_by_assignment
from fxpart.execution.split_run import partition_weights, physical_devices, split_run
from fxpart.execution.stages.flat_graph import flatten

CPU, META = torch.device("cpu"), torch.device("meta")


class Branches(nn.Module):
    """A weight read by both partitions, a tuple, a constant that names a device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        low, high = torch.chunk(x * self.weight, 2)
        far = torch.arange(2, device=x.device) * low
        return {"far": far + self.weight[:2], "high": high + y}


def _split(*parts: int) -> fx.GraphModule:
    """Return the module cut so that its operators, in order, are in those partitions."""
    program = export_program(Branches(), (torch.arange(4.0), torch.ones(2)))
    graph = op_graph(program)
    assert len(parts) == graph.n_ops, graph.names
    homes = tuple((p,) for p in range(max(parts) + 1))
    return split_by_assignment(program.module(), graph, Assignment(np.array(parts), homes))


INPUTS = (torch.arange(4.0), torch.ones(2))
# mul, split, two items, arange, mul, slice of the weight, two sums
HALVES = (0, 0, 0, 0, 1, 1, 1, 1, 0)


def test_the_flat_graph_has_every_operator_once_by_partition() -> None:
    split = _split(*HALVES)
    flat = flatten(split)
    assert flat.stage_names == ("submod_0", "submod_1")
    calls = [n for n in flat.graph.nodes if n.op == "call_function"]
    assert [flat.stage_of[call] for call in calls] == sorted(HALVES)
    outside = [n.op for n in flat.graph.nodes if flat.stage_of.get(n) not in (0, 1)]
    assert set(outside) <= {"placeholder", "get_attr", "call_module", "output"}


def test_weights_belong_to_each_partition_that_reads_them() -> None:
    split = _split(*HALVES)
    weights = partition_weights(flatten(split))
    assert {number: [t.numel() for t in used] for number, used in weights.items()} == {
        0: [4],
        1: [4],
    }
    assert weights[0][0] is weights[1][0]


def test_a_run_returns_the_result_of_the_module() -> None:
    split = _split(*HALVES)
    expected = split(*INPUTS)
    run = split_run(split, (0, 1), (CPU, CPU))
    result = run.run(INPUTS)
    assert list(result) == ["far", "high"]
    assert all(torch.equal(result[key], expected[key]) for key in expected)
    # x is only read on device 0, y on device 0, where the last sum is.
    assert [[t is x for x in INPUTS] for read in run.inputs_read(INPUTS, 2) for t in read] == [
        [True, False],
        [False, True],
    ]
    assert run.inputs_read(INPUTS, 2)[1] == []


class _EachCall(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports every call of an operator before it is made, with its arguments."""

    def __init__(self, tell: Callable[[OpOverload, tuple[Any, ...]], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        self._tell(func, args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("parts", "homes", "copies"),
    [
        (HALVES, (0, 1), [2]),  # low, once, for its one reader
        (HALVES, (0, 0), []),
        ((0, 0, 0, 0, 1, 2, 1, 2, 2), (0, 1, 2), [2, 2, 2, 2]),  # low, high, arange, slice
    ],
)
def test_a_value_is_sent_to_a_device_once(
    parts: tuple[int, ...], homes: tuple[int, ...], copies: list[int]
) -> None:
    run = split_run(_split(*parts), homes, (CPU,) * 3)
    sizes: list[int] = []

    def tell(call: OpOverload, args: tuple[Any, ...]) -> None:
        if call is torch.ops.aten.clone.default:
            sizes.append(args[0].numel())

    with _EachCall(tell), torch.no_grad():
        run.run(INPUTS, LiveBytes([{}, {}, {}]))
    assert sizes == copies


def test_inputs_are_freed_when_they_are_no_longer_needed() -> None:
    run = split_run(_split(*HALVES), (0, 1), (CPU, CPU))
    inputs = [torch.arange(4.0), torch.ones(2)]
    first, alive_at = weakref.ref(inputs[0]), dict[str, bool]()
    # Passed one by one, so that nothing else holds them.
    handed = (inputs.pop(0) for _ in range(2))
    watch = _EachCall(lambda call, _: alive_at.setdefault(str(call), first() is not None))
    with watch, torch.no_grad():
        run.run(handed)
    assert alive_at["aten.mul.Tensor"]
    assert not alive_at["aten.arange.default"]


def test_partitions_on_another_device_compute_there() -> None:
    # The meta device stands for a second accelerator: it accepts everything and computes nothing.
    split = _split(0, 0, 0, 0, 1, 1, 1, 1, 0)
    before = [str(node.format_node()) for node in split.submod_1.graph.nodes]  # type: ignore[union-attr]
    run = split_run(split, (0, 1), (CPU, META))
    with torch.no_grad():
        result = run.run(INPUTS)
    assert result["far"].device == META
    assert result["high"].device == CPU
    assert torch.equal(result["high"], torch.tensor([5.0, 7.0]))
    # The weight was copied there before, and the split module is unchanged.
    assert {x.device.type for x in run.weights.values()} == {"cpu", "meta"}
    assert split.weight.device == CPU
    assert [str(node.format_node()) for node in split.submod_1.graph.nodes] == before  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("first", "available", "expected"),
    [("cuda:0", 2, [0, 1, 0]), ("cuda:1", 2, [1, 0, 1]), ("cuda", 1, [0, 0, 0])],
)
def test_logical_devices_alternate_over_those_of_cuda(
    monkeypatch: pytest.MonkeyPatch, first: str, available: int, expected: list[int]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: available)
    devices = physical_devices(torch.device(first), 3)
    assert [device.index for device in devices] == expected
    assert physical_devices(CPU, 2) == (CPU, CPU)
