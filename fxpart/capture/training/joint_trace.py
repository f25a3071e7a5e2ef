"""`trace_step`: trace forward and backward of an exported model as one graph of ATen calls.

The exported graph is rerun under autograd, on fake tensors, while
`torch.fx.experimental.proxy_tensor.make_fx` records every call. Each call is labelled with its
module: a forward call with that of its exported node, a backward call with that of the forward call
whose gradient it computes, by autograd's own graph.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.utils._pytree import tree_leaves, tree_map

from fxpart.capture.inference.eager_lifetimes import (
    ATTACHED,
    CALL,
    HELD,
    LEAF,
    TO_THE_END,
    takes_gradients,
)
from fxpart.capture.training.biased_attention import biased_attention
from fxpart.capture.training.interpolation import resized
from fxpart.capture.training.joint_labels import (
    EXPORTED,
    FORMULA,
    FORWARD,
    KEPT,
    NOWHERE,
    ORDER,
    Label,
    Labels,
)
from fxpart.capture.training.loss import first_real, loss_of
from fxpart.capture.training.unread_branches import Branch, hold_saved
from fxpart.capture.training.user_functions import functions_called
from fxpart.core.phases import StepOptions
from fxpart.errors import CaptureError

__all__ = ["StepTrace", "cpu_twin", "fused", "trace_step"]


_PROBABILITY_POSITION = 4
"""In `scaled_dot_product_attention`: query, key, value, mask, probability."""

_DEVICE = torch.device("cpu")
"""Device of the fake tensors. On meta, attention would be traced as the products of its definition,
which keep every probability; here it is one fused call, unless it has dropout."""

_CHECKS = ("aten._assert_tensor_metadata.default",)
"""Calls that only check values fixed by the capture."""

_Arithmetic = Callable[[Any, Any], Any]


# Calls that accelerators run as one kernel, and the CPU as several.


def fused(
    target: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: StepOptions
) -> Callable[[], Tensor] | None:
    """Return a function to run in place of a call of `target`; None to run the call itself."""
    if target is torch.ops.aten.dropout.default and options.fused_dropout:
        return _dropout(*args, **kwargs)
    if target is torch.ops.aten.scaled_dot_product_attention.default and options.fused_attention:
        return _attention(args, kwargs)
    return None


def _dropout(x: Tensor, p: float, train: bool) -> Callable[[], Tensor] | None:
    """Return dropout with a mask of one byte per element, since the CPU's mask uses floats."""
    if not train or not 0 < p < 1:
        return None

    def run() -> Tensor:
        result: Tensor = torch.ops.aten.native_dropout.default(x, p, train)[0]
        return result

    return run


def _attention(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Tensor] | None:
    """Return attention with the memory and cost of a fused call that the CPU lacks, or None.

    This covers attention with a learned bias, and with dropout: a fused call redraws the same
    random numbers in its backward and only keeps the generator's state, which is omitted here.
    """
    position = _PROBABILITY_POSITION
    probability = args[position] if len(args) > position else kwargs.get("dropout_p", 0.0)
    if len(args) > position:
        args = (*args[:position], 0.0, *args[position + 1 :])
    kwargs = {name: value for name, value in kwargs.items() if name != "dropout_p"}
    biased = biased_attention(args, kwargs)
    if biased is not None or probability == 0.0:
        return biased

    def run() -> Tensor:
        result: Tensor = torch.ops.aten.scaled_dot_product_attention.default(*args, **kwargs)
        return result

    return run


# Symbolic sizes. A trace takes a size from the tensor at hand, so that a backward would keep
# activations only for their sizes, which also follow from the sizes of the inputs.


def _compute_sizes_from_inputs(graph: fx.Graph) -> None:
    """Make `graph` compute every size from the sizes of its placeholders.

    A size that is not a polynomial in these is unchanged, as is a graph without symbols.
    """
    sizes = _Sizes(graph)
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, SymInt):
            size = sizes.node_of(value.node.expr)
            if size is not None and size is not node:
                node.replace_all_uses_with(size)


@dataclass(eq=False)
class _Sizes:
    """The nodes that compute sizes, each once, right after the placeholders."""

    graph: fx.Graph
    nodes: dict[sympy.Expr, fx.Node] = field(default_factory=dict)
    """Nodes by size."""
    input_dims: dict[sympy.Symbol, tuple[fx.Node, int]] = field(default_factory=dict)
    """A placeholder and its dimension with each symbol as size."""
    last: fx.Node = field(init=False)
    """The node after which the next size is inserted."""

    def __post_init__(self) -> None:
        """Collect the symbols that are sizes of the inputs."""
        placeholders = self.graph.find_nodes(op="placeholder")
        for node in placeholders:
            value = node.meta.get("val")
            for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if isinstance(size, SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    self.input_dims.setdefault(size.node.expr, (node, dim))
        self.last = placeholders[-1]

    def node_of(self, size: sympy.Expr) -> fx.Node | None:
        """Return the node that computes `size`; None if it is not a polynomial in input sizes."""
        if size in self.nodes:
            return self.nodes[size]
        if not size.free_symbols <= self.input_dims.keys() or not size.is_polynomial():
            return None
        terms = [self._product(term) for term in sympy.Add.make_args(size.expand())]
        node = self._joined(operator.add, terms)
        if isinstance(node, fx.Node):
            self.nodes[size] = node
        return self.nodes.get(size)

    def _product(self, term: sympy.Expr) -> fx.Node | int:
        factors: list[fx.Node | int] = []
        for factor in sympy.Mul.make_args(term):
            base, exponent = factor.as_base_exp()
            part = int(base) if base.is_Integer else self._symbol(base)
            factors += [part] * int(exponent)
        return self._joined(operator.mul, factors)

    def _symbol(self, symbol: sympy.Symbol) -> fx.Node:
        if symbol not in self.nodes:
            node, dim = self.input_dims[symbol]
            size = node.meta["val"].shape[dim]
            self.nodes[symbol] = self._call(torch.ops.aten.sym_size.int, (node, dim), size)
        return self.nodes[symbol]

    def _joined(self, how: _Arithmetic, parts: list[fx.Node | int]) -> fx.Node | int:
        def join(left: fx.Node | int, right: fx.Node | int) -> fx.Node | int:
            values = [part if isinstance(part, int) else part.meta["val"] for part in (left, right)]
            return self._call(how, (left, right), how(*values))

        return reduce(join, parts)

    def _call(
        self, target: Callable[..., Any], args: tuple[fx.Node | int, ...], value: SymInt
    ) -> fx.Node:
        with self.graph.inserting_after(self.last):
            node = self.graph.call_function(target, args)
        node.meta.update({"val": value, "nn_module_stack": {}, ORDER: -1})
        node.meta.update(dict.fromkeys((FORWARD, EXPORTED, FORMULA)))
        self.last = node
        return node


# The trace.


@dataclass(frozen=True, eq=False, slots=True)
class StepTrace:
    """One traced training step."""

    graph_module: fx.GraphModule
    """Takes the tensors given to `trace_step`; returns the loss, then one gradient for each entry
    of `with_gradient`."""
    with_gradient: tuple[int, ...]
    """Positions of the tensors with a gradient, in order."""


def trace_step(
    program: torch.export.ExportedProgram,
    tensors: Sequence[Tensor],
    tensor_of: Sequence[int | None],
    fake_mode: AbstractContextManager[Any],
    options: StepOptions,
    *,
    recomputes: bool,
) -> StepTrace:
    """Return the training step of `program` on `tensors`, fake tensors of `fake_mode`.

    `tensor_of` has the index in `tensors` of each placeholder of the program; several may share
    one, and None is a non-tensor constant. The loss is the `loss_of` the first floating-point
    result. Gradients are computed for the tensors that require them and affect the loss. What
    autograd saves for other results is held as in a run, unless the step `recomputes` blocks, which
    save less.

    Raises:
        CaptureError: if no result is floating-point.

    """
    step = _Step(program, tuple(tensor_of), options, recomputes)
    # Without calls of the CPU's own library, such as that for a whole recurrent layer: their FLOPs
    # are unknown, and no other device has them.
    with fake_mode, torch.enable_grad(), torch.backends.mkldnn.flags(enabled=False):
        traced = make_fx(step, _allow_non_fake_inputs=True)(*tensors)
    _compute_sizes_from_inputs(traced.graph)
    traced.graph.eliminate_dead_code(_is_run)
    traced.recompile()
    return StepTrace(traced, step.with_gradient)


def _is_run(node: fx.Node) -> bool:
    """Return whether Python runs a call even if nothing reads its result.

    A model's own calls are all run; numbers and items of results are no calls, but an item may be
    held although nothing reads it.
    """
    leaves = tree_leaves(node.meta.get("val"))
    is_call = node.target is not operator.getitem and any(isinstance(v, Tensor) for v in leaves)
    of_model = is_call and node.meta.get(EXPORTED) is not None
    is_held = KEPT in node.meta or (node.target is operator.getitem and bool(node.meta.get(HELD)))
    return node.is_impure() or is_held or of_model


def cpu_twin(tensor: Tensor, *, requires_grad: bool) -> Tensor:
    """Return a fresh tensor of the same shape, strides and dtype; in a fake mode, a fake one."""
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_DEVICE)
    return twin.requires_grad_(requires_grad)


@dataclass(eq=False)
class _Step:
    """The function for `make_fx`: forward, loss, and gradients of all tensors that require one."""

    program: torch.export.ExportedProgram
    tensor_of: tuple[int | None, ...]
    options: StepOptions
    recomputes: bool
    with_gradient: tuple[int, ...] = ()

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        mode = get_proxy_mode()
        assert mode is not None, "make_fx runs a step in its own mode"
        labels = Labels(mode.tracer.graph)
        with labels.python if functions_called(self.program.graph_module) else nullcontext():
            return self._traced(labels, tensors)

    def _traced(self, labels: Labels, tensors: Sequence[Tensor]) -> list[Tensor]:
        for node, index in zip(self._placeholders(), self.tensor_of, strict=True):
            if node.meta.get(LEAF) and index is not None:
                tensors[index].requires_grad_()
        made = _Made()
        loss = self._loss(labels, tensors, made)
        labels.tag(loss, {})
        trained = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        gradients: Sequence[Tensor | None] = ()
        if loss.requires_grad and trained:
            labels.start_backward()
            inputs = [*(tensors[i] for i in trained), *made.leaves]
            gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
        labels.finish()
        _keep(gradients[len(trained) :])
        indexed_gradients = [
            (i, g)
            for i, gradient in zip(trained, gradients, strict=False)
            if (g := self._accumulated(tensors[i], gradient)) is not None
        ]
        self.with_gradient = tuple(i for i, _ in indexed_gradients)
        return [loss, *(gradient for _, gradient in indexed_gradients)]

    def _accumulated(self, tensor: Tensor, gradient: Tensor | None) -> Tensor | None:
        """Return `gradient`, or what the backward of a user's Function added to ``.grad``."""
        if tensor.grad is not None and gradient is not None:
            functions = ", ".join(functions_called(self.program.graph_module))
            raise CaptureError(
                f"{functions}, a torch.autograd.Function, adds to the .grad of a weight that is"
                " also used outside of it, which a captured step cannot do; have its backward"
                " return that gradient"
            )
        return tensor.grad if gradient is None else gradient

    def _inputs(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [
            node.meta.get("val") if index is None else tensors[index]
            for node, index in zip(self._placeholders(), self.tensor_of, strict=True)
        ]

    def _placeholders(self) -> list[fx.Node]:
        return list(self.program.graph.find_nodes(op="placeholder"))

    def _loss(self, labels: Labels, tensors: Sequence[Tensor], made: "_Made") -> Tensor:
        """Run the forward and return its loss."""
        forward = _Forward(self.program.graph_module, labels, self.options, made)
        results = forward.run(*self._inputs(tensors))
        # As in a function that returns only the loss.
        _hold(results, (TO_THE_END,))
        made.add(results, (TO_THE_END,))
        labels.begin(NOWHERE)
        result = first_real(tree_leaves(results))
        if result is not None:
            loss = loss_of(result)
            # `watched_export` has recorded what autograd saves if the forward takes gradients.
            if not self.recomputes and not takes_gradients(self.program):
                hold_saved(loss, made.branches)
            made.branches.clear()  # else autograd's graph would outlive the forward
            return loss
        raise CaptureError(
            "the model returns no real-valued tensor to take a loss of; return the loss, or a "
            "tensor whose mean can be taken, first"
        )


def _hold(results: object, releases: Sequence[int]) -> None:
    """Add `releases`, see `HELD`, to the nodes of the tensors in `results`."""
    mode = get_proxy_mode()
    assert mode is not None, "make_fx runs a step in its own mode"
    for result in tree_leaves(results):
        slot = get_proxy_slot(result, mode.tracer, None) if isinstance(result, Tensor) else None
        if slot is not None and releases:
            slot.proxy.node.meta.setdefault(HELD, []).extend(releases)


def _keep(gradients: Sequence[Tensor | None]) -> None:
    """Keep `gradients` to the end of the step, though it does not return them.

    A backward accumulates those of tensors that the model itself makes require one.
    """
    mode = get_proxy_mode()
    assert mode is not None, "make_fx runs a step in its own mode"
    last = next(iter(reversed(mode.tracer.graph.nodes)))
    for gradient in gradients:
        if gradient is not None:
            node = get_proxy_slot(gradient, mode.tracer).proxy.node
            node.meta[KEPT] = last.meta[ORDER]


@dataclass(eq=False, slots=True)
class _Made:
    """Tensors that a forward computes, for the gradients of the step."""

    leaves: list[Tensor] = field(default_factory=list)
    """Those that the model's code makes require a gradient."""
    branches: list[Branch] = field(default_factory=list)
    """The branches of those that have a gradient."""

    def add(self, results: object, releases: Sequence[int]) -> None:
        """Add the branches of the tensors in `results`, released as in `ATTACHED`."""
        if releases:
            tensors = (leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor))
            self.branches += [(t.grad_fn, releases) for t in tensors if t.grad_fn is not None]


class _Forward(fx.Interpreter):
    """Runs an exported graph; regions under no_grad or autocast are inlined."""

    def __init__(
        self,
        module: fx.GraphModule,
        labels: Labels,
        options: StepOptions,
        made: _Made,
        within: str = "",
    ) -> None:
        super().__init__(module)
        self._labels = labels
        self._options = options
        self._made = made
        self._within = within
        """Name of the node that calls the region; empty outside of regions."""
        self._current = within

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401 - what a node returns is anything
        """Run one node, with its calls labelled with its module."""
        if str(n.target) in _CHECKS:
            return None
        if n.op != "call_function":
            return super().run_node(n)
        stack = n.meta.get("nn_module_stack") or {}
        self._current = self._within or n.name
        self._labels.begin(Label(stack, exported=self._current, call=n.meta.get(CALL)))
        if n.target is torch.ops.fxpart_user.function.default:
            self._labels.python.begin(self.map_nodes_to_values(n.args, n))
            result = super().run_node(n)
            self._labels.python.end(result)
        else:
            result = super().run_node(n)
        if n.meta.get(LEAF) and not result.requires_grad:
            self._made.leaves.append(result.requires_grad_())
        self._labels.tag(result, stack)
        _hold(result, n.meta.get(HELD, ()))
        self._made.add(result, n.meta.get(ATTACHED, ()))
        return result

    def call_function(
        self, target: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401 - as the class above types it
        """Call `target` with every device in its arguments replaced by `_DEVICE`."""
        if target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            enabled, body, *inputs = args
            with torch.set_grad_enabled(enabled):
                return self._inside(body).run(*inputs)
        if target is torch.ops.higher_order.wrap_with_autocast:
            _, dtype, enabled, _, body, *inputs = args
            # A cache would reuse casts made without gradients where gradients are needed.
            with torch.autocast(_DEVICE.type, dtype, enabled=enabled, cache_enabled=False):
                return self._inside(body).run(*inputs)
        args, kwargs = tree_map(
            lambda leaf: _DEVICE if isinstance(leaf, torch.device) else leaf, (args, kwargs)
        )
        replacement = fused(target, args, kwargs, self._options)
        if replacement is not None:
            return replacement()
        if target is torch.ops.aten.histc.default and not args[0].is_floating_point():
            # Histograms on the CPU do not take integers, those on other devices do.
            counted = super().call_function(target, (args[0].float(), *args[1:]), kwargs)
            return counted.to(args[0].dtype)
        target, args = resized(target, args) or (target, args)
        if target is torch.ops.aten.pad.default:
            # The kernel in C++ takes sizes as numbers, which would fix symbolic ones; the one in
            # Python does not.
            with enable_python_dispatcher():
                return super().call_function(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def _inside(self, body: fx.GraphModule) -> "_Forward":
        return _Forward(body, self._labels, self._options, self._made, self._current)
