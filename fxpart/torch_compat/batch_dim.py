"""`BatchDimAnalyzer`: the batch dimension of each node of an ATen graph, as torch once found it.

Names and answers are those of ``torch.distributed._spmd.batch_dim_utils`` (torch 2.0 to 2.2). It
answers one node at a time from sizes, so a dimension that happens to have the size of the batch is
mistaken for it; `fxpart.capture.batch_dim.analyze.analyze_batch_dims` follows operators instead.

Deliberate differences: an operator looks for the batch size of its own operands and then for that
of the inputs, not for that of the latest view; sizes may be symbols; among operands of several
kinds a split one decides, not the last one; and `full_reduction` is respected.
"""

from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fxpart.capture.batch_dim.call import base_name, named_arguments, tensors_of
from fxpart.capture.batch_dim.extent import Extent, extent, extents
from fxpart.capture.batch_dim.layout import PARTIAL, REPLICATED, BatchDimError, act_spec
from fxpart.capture.batch_dim.views import VIEWS, Moved, moved, overlapping_dim

__all__ = ["BatchDimAnalyzer"]


class BatchDimAnalyzer:
    """Answers with a dimension, -1 (replicated) or -2 (partial) for nodes with ``meta["val"]``.

    Query nodes in graph order, after `init_batch_dim_size` and `set_batch_dim` of the inputs, since
    an answer depends on those of the operands.
    """

    def __init__(self, batch_dim: int = 0) -> None:
        self.batch_dim = batch_dim
        """The batch dimension of the inputs."""
        self.batch_dim_map: dict[fx.Node, int] = {}
        self._size: Extent | None = None
        self._input_size: Extent | None = None

    @property
    def batch_dim_size(self) -> Extent:
        """The batch size; after a view, its size there; -1 until set."""
        return -1 if self._size is None else self._size

    def init_batch_dim_size(self, batch_dim_size: Extent) -> None:
        """Set the batch size of the inputs, an integer or a symbolic one.

        Raises:
            BatchDimError: if another size was set before.

        """
        size = extent(batch_dim_size)
        if self._size is not None and self._size != size:
            raise BatchDimError(
                f"the batch size is {self._size} already, {size} was asked for; make a new"
                " BatchDimAnalyzer for another batch size"
            )
        self._size = self._input_size = size

    def set_batch_dim(self, node: fx.Node, batch_dim: int) -> None:
        """Set the answer for `node`."""
        self.batch_dim_map[node] = batch_dim

    def get_batch_dim(self, node: fx.Node) -> int:
        """Return the answer for `node`.

        Raises:
            BatchDimError: if it has none yet.

        """
        if node not in self.batch_dim_map:
            raise BatchDimError(
                f"nothing is known about the batch of node {node.name}; call compute_batch_dim for"
                " the nodes in the order of the graph, or set_batch_dim"
            )
        return self.batch_dim_map[node]

    def compute_batch_dim(self, node: fx.Node, full_reduction: bool = False) -> int:
        """Return the answer for `node`, and store it.

        A view moves its operand's batch by its own rule, and with it the batch size. For other
        operators the answer is the first dimension of that size. If there is none, a result without
        dimensions (or any result, with `full_reduction`) keeps its operand's answer, and other
        results are partial (-2). An operator without operands, or with only replicated ones, is
        replicated (-1).

        Raises:
            BatchDimError: if `init_batch_dim_size` was not called, a viewed node has no answer, or
                the node has no ``meta["val"]``.

        """
        if self._size is None:
            raise BatchDimError(
                f"the batch dimension of node {node.name} was asked for before the batch size is"
                " known; call init_batch_dim_size first"
            )
        if node not in self.batch_dim_map:
            dim = self._by_view(node)
            self.set_batch_dim(node, self._by_size(node, full_reduction) if dim is None else dim)
        return self.batch_dim_map[node]

    def compute_act_spec(self, node: fx.Node, mesh: DeviceMesh) -> DTensorSpec:
        """Return the placement of `node` on `mesh`: ``Shard(d)``, ``Replicate()``, ``Partial()``.

        See `fxpart.capture.batch_dim.layout` for the type, and for meshes of several dimensions.
        """
        return act_spec(self.compute_batch_dim(node), node.meta.get("val"), mesh)

    def _by_view(self, node: fx.Node) -> int | None:
        """Return the dimension to which a view moves its operand's batch, if any."""
        name, operands = base_name(node), node.all_input_nodes
        if name not in VIEWS or node.op != "call_function" or not operands:
            return None
        source = Moved(self.get_batch_dim(operands[0]))
        operand_shape = self._shapes(operands[0])[0]
        if not 0 <= source.dim < len(operand_shape):
            return None
        result_shapes = self._shapes(node)
        target = moved(name, named_arguments(node), operand_shape, result_shapes, source)[0]
        dim = target.dim if target is not None else None
        if dim is None and name not in {"select", "unbind", "squeeze"}:
            dim = overlapping_dim(operand_shape, result_shapes[0], source)
        if dim is not None:
            self._size = result_shapes[0][dim]
        return dim

    def _by_size(self, node: fx.Node, full_reduction: bool) -> int:
        shapes = self._shapes(node)
        sizes = self._sizes(node)
        for shape in shapes:
            for size in sizes:
                if size in shape:
                    return shape.index(size)
        answers = [self.batch_dim_map.get(operand, REPLICATED) for operand in node.all_input_nodes]
        split = next((answer for answer in answers if answer >= 0), None)
        if split is None:
            return PARTIAL if PARTIAL in answers else REPLICATED
        return split if full_reduction or () in shapes else PARTIAL

    def _sizes(self, node: fx.Node) -> list[Extent]:
        """Return the possible batch sizes: those of the operands, then that of the inputs.

        If no operand is split, that of the last view comes first.
        """
        sizes: list[Extent] = []
        for operand in node.all_input_nodes:
            dim = self.batch_dim_map.get(operand, REPLICATED)
            shape = self._shapes(operand)[0] if dim >= 0 else ()
            if 0 <= dim < len(shape) and shape[dim] not in sizes:
                sizes.append(shape[dim])
        latest = [] if sizes else [self.batch_dim_size]
        return [*sizes, *latest, *([] if self._input_size is None else [self._input_size])]

    def _shapes(self, node: fx.Node) -> list[tuple[Extent, ...]]:
        if "val" not in node.meta:
            raise BatchDimError(
                f'node {node.name} has no meta["val"], which describes its result; trace with'
                " fake tensors, as torch.export and make_fx do"
            )
        tensors = tensors_of(node.meta["val"])
        return [extents(tensor.shape) for tensor in tensors if tensor is not None]
