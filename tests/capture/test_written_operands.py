"""Operands that a call writes to."""

import torch
from torch import fx

from fxpart.capture.calls import written_operands


def test_only_operands_marked_in_the_schema_are_written() -> None:
    graph = fx.Graph()
    x, y, z = (graph.placeholder(name) for name in "xyz")
    added = graph.call_function(torch.ops.aten.add_.Tensor, (x, y))
    into = graph.call_function(torch.ops.aten.add.out, (x, y), {"out": z})
    many = graph.call_function(torch.ops.aten._foreach_add_.List, ([x, z], [y, y]))
    plain = graph.call_function(torch.ops.aten.add.Tensor, (x, y))
    python = graph.call_function(torch.add, (x, y))
    written = [written_operands(node) for node in (x, added, into, many, plain, python)]
    assert written == [[], [x], [z], [x, z], [], []]
