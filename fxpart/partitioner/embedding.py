"""Which operators look rows up in a table of embeddings."""

from collections.abc import Sequence

import numpy as np
from torch.fx import GraphModule, Node

from fxpart.partitioner.node_sizes import is_item_of_tuple
from fxpart.static.arrays import BoolArray

__all__ = ["embeddings"]


def _is_embedding_module(root: GraphModule, path: str) -> bool:
    """Return whether the module at `path` is, or holds, an embedding of any kind."""
    return any("Embedding" in type(m).__name__ for m in root.get_submodule(path).modules())


def embeddings(root: GraphModule, ops: Sequence[Node]) -> BoolArray:
    """Return whether each operator is an embedding. Shape (n,).

    A call of a module whose type, or that of a module in it, says so by name; a call of a function
    that does, as exported graphs have it; and an item of the tuple that one of these returns.
    """
    modules: dict[str, bool] = {}
    found: dict[Node, bool] = {}
    for node in ops:
        target = str(node.target)
        if node.op == "call_module":
            if target not in modules:
                modules[target] = _is_embedding_module(root, target)
            found[node] = modules[target]
        elif is_item_of_tuple(node):
            found[node] = found.get(node.all_input_nodes[0], False)
        else:
            name = getattr(node.target, "__name__", target)
            found[node] = node.op == "call_function" and "embedding" in name
    return np.array([found[node] for node in ops], dtype=np.bool_)
