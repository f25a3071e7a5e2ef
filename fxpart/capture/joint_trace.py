"""Forward and backward of an exported model as one graph of ATen calls.

The exported graph is run once more under autograd, on tensors without memory, while
`torch.fx.experimental.proxy_tensor.make_fx` writes down every call. Each call is told the module
that it belongs to: a forward call that of its exported node, a backward call that of the forward
call whose gradient it computes, which autograd's own graph says.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._pytree import tree_leaves, tree_map

from fxpart.capture.loss import first_real, loss_of
from fxpart.errors import CaptureError

__all__ = ["EXPORTED", "FORWARD", "ORDER", "StepTrace", "cpu_twin", "trace_step"]

EXPORTED = "fxpart_exported"
"""Key of a node's ``meta``: the name of the exported node that it is a call of, in the forward;
None in the backward and for the loss."""
ORDER = "fxpart_order"
"""Key of a node's ``meta``: how many nodes were written down before it, removed ones included."""
FORWARD = "fxpart_forward"
"""Key of a node's ``meta``: the `ORDER` of the last node of the forward call whose gradient the
node computes; None in the forward."""

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
) -> StepTrace:
    """Return the training step of `program` on `tensors`, which are fake ones of `fake_mode`.

    `place_of` says for each placeholder of the program which of `tensors` it is; several may be
    one, and None is a constant that is no tensor. The loss is the first real-valued result: that
    itself if it is one number, else its mean in float32. Gradients are taken of the tensors that
    require them; one that the loss does not depend on gets none.

    Raises:
        CaptureError: when no result is real-valued.

    """
    step = _Step(program, tuple(place_of))
    # Calls of the CPU's own library, such as that for a whole recurrent layer, are not written down
    # as such: their FLOPs are not known, and no other device has them.
    with fake_mode, torch.enable_grad(), torch.backends.mkldnn.flags(enabled=False):
        traced = make_fx(step, _allow_non_fake_inputs=True)(*tensors)
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
    with_gradient: tuple[int, ...] = ()

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        mode = get_proxy_mode()
        assert mode is not None, "make_fx runs a step in its own mode"
        labels = _Labels(mode.tracer.graph)
        results = _Forward(self.program.graph_module, labels).run(*self._inputs(tensors))
        labels.begin(_NOWHERE)
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

    def __init__(self, module: fx.GraphModule, labels: "_Labels", within: str = "") -> None:
        super().__init__(module)
        self._labels = labels
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
        self._labels.begin(_Label(stack, exported=self._here))
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
                return _Forward(body, self._labels, self._here).run(*inputs)
        if target is torch.ops.higher_order.wrap_with_autocast:
            _, dtype, enabled, _, body, *inputs = args
            # A cache would hand on casts made without gradients to where they are wanted.
            with torch.autocast(_DEVICE.type, dtype, enabled=enabled, cache_enabled=False):
                return _Forward(body, self._labels, self._here).run(*inputs)
        args, kwargs = tree_map(_ours, (args, kwargs))
        if target is torch.ops.aten.histc.default and not args[0].is_floating_point():
            # The CPU counts real numbers only; other devices, which count whole ones, say so.
            counted = super().call_function(target, (args[0].float(), *args[1:]), kwargs)
            return counted.to(args[0].dtype)
        return super().call_function(target, args, kwargs)


def _ours(argument: object) -> object:
    return _DEVICE if isinstance(argument, torch.device) else argument


@dataclass(frozen=True, eq=False, slots=True)
class _Label:
    """What a node of the graph being made belongs to."""

    stack: dict[str, Any]
    """The module, as `torch.export` writes it."""
    forward: int | None = None
    """Of a node of the backward, see `FORWARD`."""
    exported: str | None = None
    """Of a node of the forward, see `EXPORTED`."""


_NOWHERE = _Label({})


@dataclass(eq=False)
class _Labels:
    """Writes into the nodes of a graph that is being made what they belong to."""

    graph: fx.Graph
    label: _Label = _NOWHERE
    done: fx.Node | None = None
    """The last node that has its label."""
    count: int = 0
    """Nodes that have one."""
    tagged: dict[Node, _Label] = field(default_factory=dict)
    """Autograd's nodes, and the calls that made them."""

    def begin(self, label: _Label) -> None:
        """Label what was made since the last call; what is made next belongs to `label`."""
        fresh = []
        for node in reversed(self.graph.nodes):
            if node is self.done:
                break
            fresh.append(node)
        for node in reversed(fresh):
            node.meta["nn_module_stack"] = self.label.stack
            node.meta[FORWARD] = self.label.forward
            node.meta[EXPORTED] = self.label.exported
            node.meta[ORDER] = self.count
            self.count += 1
        self.done = fresh[0] if fresh else self.done
        self.label = label

    def tag(self, result: object, stack: dict[str, Any]) -> None:
        """Remember that what autograd recorded for `result`, and nobody has yet, is of `stack`."""
        self.begin(self.label)
        label = _Label(stack, self.count - 1)
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        waiting = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node not in self.tagged:
                self.tagged[node] = label
                waiting.extend(before for before, _ in node.next_functions if before is not None)

    def start_backward(self) -> None:
        """From here on, autograd says which call's gradient is being computed."""
        self.begin(_Label({}, self.count - 1))
        for node, label in self.tagged.items():
            node.register_prehook(_Begin(self, label))

    def finish(self) -> None:
        """Label the rest, and let go of autograd's graph."""
        self.begin(_NOWHERE)
        self.tagged.clear()


@dataclass(eq=False)
class _Begin:
    """Called by autograd right before one of its nodes runs."""

    labels: _Labels
    label: _Label

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Let what is made next belong to the call whose gradient is next."""
        self.labels.begin(self.label)
