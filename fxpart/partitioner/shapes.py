"""Run a graph on example inputs, so that each node knows what it returns."""

import contextlib
import io
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.fx.passes.shape_prop import ShapeProp

from fxpart.errors import CaptureError, one_line

__all__ = ["propagate"]


class _Quiet(ShapeProp):
    """Torch's shape propagation, without the traceback that it prints when a node fails."""

    at: Node | None = None

    def run_node(self, n: Node) -> Any:  # noqa: ANN401 - as in torch
        self.at = n
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            result = super().run_node(n)
        sys.stderr.write(said.getvalue())
        return result


def _check_inputs(fx_module: GraphModule, args: Sequence[Any]) -> None:
    """Refuse what is no list of inputs, and one that is too long or too short."""
    if not isinstance(args, (list, tuple)):
        kind = "a Tensor" if isinstance(args, torch.Tensor) else f"of type {type(args).__name__}"
        raise CaptureError(f"args is {kind}; give a list of example inputs, such as [x]")
    inputs = [node for node in fx_module.graph.nodes if node.op == "placeholder"]
    if type(fx_module.graph._codegen) is not CodeGen:
        return  # nested inputs are checked where they are taken apart
    asked = [node for node in inputs if not node.args and not str(node.target).startswith("*")]
    starred = any(str(node.target).startswith("*") for node in inputs)
    if len(args) < len(asked) or (len(args) > len(inputs) and not starred):
        names = ", ".join(str(node.target) for node in inputs[:8])
        raise CaptureError(
            f"{len(args)} example inputs are given, the graph takes {len(inputs)}"
            f" ({names or 'none'}); give one for each"
        )


def propagate(fx_module: GraphModule, args: Sequence[Any]) -> None:
    """Run `fx_module` on `args`, and leave ``meta["tensor_meta"]`` on each node.

    Raises:
        CaptureError: when the inputs are not those of the graph, or an operator fails on them.

    """
    _check_inputs(fx_module, args)
    run = _Quiet(fx_module)
    try:
        run.propagate(*args)
    except Exception as error:
        cause = error.__cause__ or error
        what = f"operator {run.at.name} fails on" if run.at else "the graph does not take"
        raise CaptureError(
            f"{what} the example inputs ({one_line(cause)}); give inputs that the model can run on"
        ) from cause
