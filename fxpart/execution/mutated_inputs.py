"""Which inputs of a stage its operators write to."""

from torch import fx

from fxpart.split.effects import effects_of
from fxpart.split.memory import SharedMemory

__all__ = ["mutated_inputs"]


def mutated_inputs(module: fx.GraphModule) -> tuple[int, ...]:
    """Return the positions of the inputs that an operator writes to, itself or through a view.

    What may be a view counts as one; see `fxpart.split.effects`.
    """
    memory, written = SharedMemory(), list[fx.Node]()
    for node in module.graph.nodes:
        if node.op.startswith("call_"):
            effects = effects_of(module, node)
            memory.enter(node, effects.shared)
            written += effects.written
    roots = {memory.root(node) for node in written}
    inputs = module.graph.find_nodes(op="placeholder")
    return tuple(at for at, node in enumerate(inputs) if memory.root(node) in roots)
