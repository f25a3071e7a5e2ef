"""Forward and backward of an exported model as one graph of ATen calls.

The exported graph is run once more under autograd, on tensors without memory, while
`torch.fx.experimental.proxy_tensor.make_fx` writes down every call. Each call is told the module
that it belongs to: a forward call that of its exported node, a backward call that of the forward
call whose gradient it computes, which autograd's own graph says.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._pytree import tree_leaves, tree_map

from fxpart.capture.fused_calls import fused
from fxpart.capture.input_sizes import compute_sizes_from_inputs
from fxpart.capture.joint_labels import NOWHERE, Label, Labels
from fxpart.capture.loss import first_real, loss_of
from fxpart.errors import CaptureError
from fxpart.phases import StepOptions

__all__ = ["StepTrace", "cpu_twin", "trace_step"]

_DEVICE = torch.device("cpu")
"""Where the tensors without memory are said to lie. On meta, attention would be written down as
the products of its mathematical form, which keep every probability; here it is one fused call,
unless it has dropout."""

_CHECKS = ("aten._assert_tensor_metadata.default",)
"""Calls that only check what the capture has fixed."""


@dataclass(frozen=True, eq=False, slots=True)
class StepTrace:
    """One training step: placeholders in, the loss and gradients out."""

    graph_module: fx.GraphModule
    """Takes the tensors given to `trace_step`; returns the loss, then one gradient for each entry
    of `with_gradient`."""
    with_gradient: tuple[int, ...]
    """Positions of the tensors that get a gradient, in order."""


def trace_step(
    program: torch.export.ExportedProgram,
    tensors: Sequence[Tensor],
    place_of: Sequence[int | None],
    fake_mode: AbstractContextManager[Any],
    options: StepOptions,
) -> StepTrace:
    """Return the training step of `program` on `tensors`, which are fake ones of `fake_mode`.

    `place_of` says for each placeholder of the program which of `tensors` it is; several may be
    one, and None is a constant that is no tensor. The loss is the first real-valued result: that
    itself if it is one number, else its mean in float32. Gradients are taken of the tensors that
    require them; one that the loss does not depend on gets none.

    Raises:
        CaptureError: when no result is real-valued.

    """
    step = _Step(program, tuple(place_of), options)
    # Calls of the CPU's own library, such as that for a whole recurrent layer, are not written down
    # as such: their FLOPs are not known, and no other device has them.
    with fake_mode, torch.enable_grad(), torch.backends.mkldnn.flags(enabled=False):
        traced = make_fx(step, _allow_non_fake_inputs=True)(*tensors)
    compute_sizes_from_inputs(traced.graph)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return StepTrace(traced, step.with_gradient)


def cpu_twin(tensor: Tensor, *, requires_grad: bool) -> Tensor:
    """Return a fresh tensor of the same shape, strides and dtype; in a fake mode, a fake one."""
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_DEVICE)
    return twin.requires_grad_(requires_grad)


@dataclass(eq=False)
class _Step:
    """What `make_fx` runs: forward, loss, and gradients of all tensors that require one."""

    program: torch.export.ExportedProgram
    place_of: tuple[int | None, ...]
    options: StepOptions
    with_gradient: tuple[int, ...] = ()

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        mode = get_proxy_mode()
        assert mode is not None, "make_fx runs a step in its own mode"
        labels = Labels(mode.tracer.graph)
        forward = _Forward(self.program.graph_module, labels, self.options)
        results = forward.run(*self._inputs(tensors))
        labels.begin(NOWHERE)
        loss = self._loss(results)
        labels.tag(loss, {})
        wanted = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        found: Sequence[Tensor | None] = ()
        if loss.requires_grad and wanted:
            labels.start_backward()
            found = torch.autograd.grad(loss, [tensors[i] for i in wanted], allow_unused=True)
        labels.finish()
        kept = [(i, g) for i, g in zip(wanted, found, strict=False) if g is not None]
        self.with_gradient = tuple(i for i, _ in kept)
        return [loss, *(gradient for _, gradient in kept)]

    def _inputs(self, tensors: Sequence[Tensor]) -> list[Any]:
        nodes = self.program.graph.find_nodes(op="placeholder")
        return [
            node.meta.get("val") if place is None else tensors[place]
            for node, place in zip(nodes, self.place_of, strict=True)
        ]

    def _loss(self, results: object) -> Tensor:
        result = first_real(tree_leaves(results))
        if result is not None:
            return loss_of(result)
        raise CaptureError(
            "the model returns no real-valued tensor to take a loss of; return the loss, or what"
            " its mean can be taken of, first"
        )


class _Forward(fx.Interpreter):
    """Runs an exported graph; regions under no_grad or autocast are run in place, not called."""

    def __init__(
        self, module: fx.GraphModule, labels: Labels, options: StepOptions, within: str = ""
    ) -> None:
        super().__init__(module)
        self._labels = labels
        self._options = options
        self._within = within
        """Name of the node that calls the region, where it is one."""
        self._here = within

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401 - what a node returns is anything
        """Run one node, its calls labelled with its module."""
        if str(n.target) in _CHECKS:
            return None
        if n.op != "call_function":
            return super().run_node(n)
        stack = n.meta.get("nn_module_stack") or {}
        self._here = self._within or n.name
        self._labels.begin(Label(stack, exported=self._here))
        result = super().run_node(n)
        self._labels.tag(result, stack)
        return result

    def call_function(
        self, target: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401 - as the class above types it
        """Call `target` with every device in its arguments ours."""
        if target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            enabled, body, *inputs = args
            with torch.set_grad_enabled(enabled):
                return self._inside(body).run(*inputs)
        if target is torch.ops.higher_order.wrap_with_autocast:
            _, dtype, enabled, _, body, *inputs = args
            # A cache would hand on casts made without gradients to where they are wanted.
            with torch.autocast(_DEVICE.type, dtype, enabled=enabled, cache_enabled=False):
                return self._inside(body).run(*inputs)
        args, kwargs = tree_map(_ours, (args, kwargs))
        instead = fused(target, args, kwargs, self._options)
        if instead is not None:
            return instead()
        if target is torch.ops.aten.histc.default and not args[0].is_floating_point():
            # The CPU counts real numbers only; other devices, which count whole ones, say so.
            counted = super().call_function(target, (args[0].float(), *args[1:]), kwargs)
            return counted.to(args[0].dtype)
        return super().call_function(target, args, kwargs)

    def _inside(self, body: fx.GraphModule) -> "_Forward":
        return _Forward(body, self._labels, self._options, self._here)


def _ours(argument: object) -> object:
    return _DEVICE if isinstance(argument, torch.device) else argument
