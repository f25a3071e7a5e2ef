"""Module-level capture by `torch.fx.symbolic_trace`, with one operator per leaf module.

For plain modules (multilayer perceptrons, convolutional networks, recommenders); models with
control flow over tensors need `fxpart.capture.export_program`.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fxpart.capture.builder import GraphBuilder
from fxpart.capture.call_costs import moved_bytes
from fxpart.capture.calls import keep_all_terms, storage_key
from fxpart.capture.inference.from_export import compute_dtype
from fxpart.capture.models.user_code import user_errors, user_line
from fxpart.core.graph import OpGraph
from fxpart.core.operator_kinds import is_shrunk_loss
from fxpart.errors import CaptureError, one_line

__all__ = ["module_graph", "trace_modules"]


def trace_modules(module: nn.Module) -> fx.GraphModule:
    """Return `module` traced with its leaf modules kept as calls.

    Raises:
        CaptureError: if the module's Python cannot be traced.

    """

    def cannot_be_traced(error: BaseException) -> CaptureError:
        return CaptureError(
            f"{type(module).__name__} cannot be captured by torch.fx.symbolic_trace"
            f"{user_line(error)}: {one_line(error)}; use capture.level=operator, which takes any"
            " exportable model"
        )

    with user_errors(cannot_be_traced), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fx.symbolic_trace(module)


def module_graph(traced: fx.GraphModule, args: tuple[Any, ...]) -> OpGraph:
    """Return the `OpGraph` of a traced module, with one operator per call node.

    Sizes, aliases and costs come from one run on the example inputs; parameters and inputs may be
    on the meta device, where a run computes nothing.

    Raises:
        CaptureError: if the run fails.

    """

    def does_not_run(error: BaseException) -> CaptureError:
        return CaptureError(
            f"{type(traced).__name__} does not run on the example inputs{user_line(error)}:"
            f" {one_line(error)}"
        )

    with user_errors(does_not_run), torch.no_grad():
        return _Recorder(traced).record(args)


class _Recorder(fx.Interpreter):
    """Runs the graph once and adds every call to a `GraphBuilder`."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced, garbage_collect_values=False)
        self._builder = GraphBuilder()
        self._weights: dict[fx.Node, list[int]] = {}
        self._values: dict[fx.Node, list[int]] = {}
        self._results: dict[fx.Node, Any] = {}

    def record(self, args: tuple[Any, ...]) -> OpGraph:
        """Run on `args` and return the recorded graph."""
        self.run(*args)
        return self._builder.finish()

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401 - what a node returns is anything
        """Run one node and add it."""
        inputs = [t for i in n.all_input_nodes for t in _tensors(self._results.get(i))]
        versions = [t._version for t in inputs]
        with _WholeLosses(), FlopCounterMode(display=False) as counter:
            result = super().run_node(n)
        self._results[n] = result
        if n.op == "placeholder":
            leaves = tree_leaves(result)
            names = [n.name] if len(leaves) == 1 else [f"{n.name}.{i}" for i in range(len(leaves))]
            self._values[n] = [
                self._builder.add_value(name, -1, leaf)
                for name, leaf in zip(names, leaves, strict=True)
            ]
        elif n.op == "get_attr":
            self._weights[n] = [
                self._builder.add_weight(str(n.target), t, t) for t in _tensors(result)
            ]
        elif n.op == "output":
            for operand in n.all_input_nodes:
                self._builder.outputs.update(self._values.get(operand, ()))
        else:
            mutated = [t for t, v in zip(inputs, versions, strict=True) if t._version != v]
            self._add_call(n, inputs, result, mutated, int(counter.get_total_flops()))
        return result

    def _add_call(
        self,
        node: fx.Node,
        inputs: list[torch.Tensor],
        result: object,
        mutated: list[torch.Tensor],
        flops: int,
    ) -> None:
        builder, op = self._builder, len(self._builder.names)
        outputs = [leaf for leaf in tree_leaves(result) if leaf is not None]
        weights = self._own_weights(node)
        builder.names.append(node.name)
        builder.modules.append(str(node.target) if node.op == "call_module" else "")
        builder.targets.append(self._callee(node))
        builder.dtypes.append(compute_dtype(outputs, inputs))
        builder.reads.append(self._reads(node, outputs))
        fetched = [w for i in node.all_input_nodes for w in self._weights.get(i, ())]
        called = [builder.add_weight(name, t, t) for name, t in weights]
        builder.uses.append(list(dict.fromkeys([*fetched, *called])))
        for tensor in mutated:
            builder.mutate(op, tensor)
        single = len(outputs) == 1
        self._values[node] = [
            builder.add_value(node.name if single else f"{node.name}.{i}", op, out)
            for i, out in enumerate(outputs)
        ]
        if self._is_item(node):
            makers = [builder.producers[v] for v in builder.reads[op]]
            builder.together.extend((maker, op) for maker in makers if maker >= 0)
        results = [
            out
            for out, value in zip(outputs, self._values[node], strict=True)
            if torch.is_tensor(out) and builder.alloc_bytes[value] > 0
        ]
        parameters = [t for _, t in weights if torch.is_tensor(t)]
        builder.flops.append(flops)
        builder.moved.append(
            moved_bytes(self._kind(node), [*parameters, *inputs], results, mutated)
        )

    def _reads(self, node: fx.Node, outputs: list[object]) -> list[int]:
        """Return the values read by a node; taking an item of a tuple reads only that item."""
        read = [v for i in node.all_input_nodes for v in self._values.get(i, ())]
        if self._is_item(node):
            # An item that is itself a tuple, or a slice of one, is recognized by its storages.
            keys = {storage_key(t) for t in outputs if isinstance(t, torch.Tensor)}
            source, position = node.args
            results = self._results[source]  # type: ignore[index]
            if isinstance(position, int) and len(results) == len(read):
                return [read[position]]
            read = [v for v in read if self._builder.storage_of_value.get(v) in keys]
        return list(dict.fromkeys(read))

    def _is_item(self, node: fx.Node) -> bool:
        """Return whether the node takes an item of a tuple, as opposed to indexing a tensor."""
        if self._callee(node) != "getitem" or not isinstance(node.args[0], fx.Node):
            return False
        return isinstance(self._results[node.args[0]], list | tuple)

    def _own_weights(self, node: fx.Node) -> list[tuple[str, torch.Tensor]]:
        if node.op != "call_module":
            return []
        called = self.fetch_attr(str(node.target))
        return [
            (f"{node.target}.{name}", tensor)
            for name, tensor in [*called.named_parameters(), *called.named_buffers()]
        ]

    def _callee(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return type(self.fetch_attr(str(node.target))).__name__
        return getattr(node.target, "__name__", str(node.target))

    def _kind(self, node: fx.Node) -> str:
        """Return the operator's name for `moved_bytes`."""
        names = {"Embedding": "embedding", "EmbeddingBag": "embedding_bag"}
        return names.get(self._callee(node), self._callee(node))


class _WholeLosses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager in which reduced losses keep the storage of all their terms, also on meta."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - as torch calls it
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        result = func(*args, **(kwargs or {}))
        if is_shrunk_loss(str(func)):
            keep_all_terms(_tensors((args, kwargs)), result)
        return result


def _tensors(result: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
