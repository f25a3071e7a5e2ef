"""Memory of an fx graph, from the storages of its values: `build_memory_profile` and others.

The functions have the names, arguments and results of
``torch._inductor.fx_passes.memory_estimator``, and its answers where those are correct. They
deliberately differ from torch 2.13:

- Tensors on the CPU count. Torch drops them, so a graph on the CPU takes 0 bytes.
- A result without readers is freed right after its operator. In torch it is never freed.
- A storage shared by several inputs is released if all of them may be. Torch checks only the first.
- Attributes stay, since their module keeps them; two names of one tensor count once. Torch checks
  whether they are releasable, and uses the metadata of each.
- A result that the operator's schema declares as written or as a view has that operand's storage,
  even in a graph read from a file, where each node has its own storage. There, calls that may copy
  (``reshape``, ``to``, ``contiguous``) count as copies, so the answer is an upper bound.
- A storage that a node shares with none of its operands is its own. Torch mistakes metadata copied
  from another node by a pass for an alias of that node.
- A node with readers but without ``meta["val"]`` is an error. In torch it takes 0 bytes.
- `get_fwd_bwd_interactions` and `get_peak_memory` work. Torch's raise ``TypeError`` on every graph.
- Inputs of the forward that the backward does not read stay throughout the backward. They are
  missing in torch's formula. All inputs of the forward stay, whatever their names.
- `MemoryTracker` raises its own error for a node scheduled before its operands, twice, or from
  another graph. Torch asserts, and accepts a node without a storage.
- An item of a long tuple holds that item. Torch visits all items for each, which is quadratic.
"""

from fxpart.torch_compat.memory.forward_backward import get_fwd_bwd_interactions, get_peak_memory
from fxpart.torch_compat.memory.profile import MemoryTracker, build_memory_profile

__all__ = [
    "MemoryTracker",
    "build_memory_profile",
    "get_fwd_bwd_interactions",
    "get_peak_memory",
]
