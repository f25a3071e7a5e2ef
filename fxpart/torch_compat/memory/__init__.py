"""Memory of an fx graph, from the storages of its values: `build_memory_profile` and its relatives.

The functions have the names, arguments and results of torch's
``torch._inductor.fx_passes.memory_estimator``, and its answers where they are right. They differ on
purpose from those of torch 2.13:

- Tensors on the CPU count. Torch drops them, so a graph of the CPU takes 0 bytes.
- A result that nobody reads goes right after its operator. In torch it is never freed.
- A storage that several inputs share goes when all of them may. Torch asks the first alone.
- Attributes stay, their module keeps them; two names of one tensor count once. Torch asks whether
  they are releasable, and goes by the metadata of each.
- What an operator's schema says it writes into, or views, is that storage, also in a graph that was
  read from a file, where each node has a storage of its own. There, calls that may or may not copy
  (``reshape``, ``to``, ``contiguous``) count as copies: the answer is then an upper bound.
- A storage that a node has in common with none of its operands is its own. Torch takes metadata
  that a pass copied from another node for an alias of it.
- A node that is read and carries no ``meta["val"]`` is an error. In torch it takes 0 bytes.
- `get_fwd_bwd_interactions` and `get_peak_memory` work. Torch's raise ``TypeError`` on every graph.
- Inputs of the forward that the backward does not read stay throughout the backward. They are
  missing in torch's formula. All inputs of the forward stay, whatever they are called.
- `MemoryTracker` refuses a node before what it reads, twice, or of another graph, by an error of
  its own. Torch asserts, and lets a node of no storage pass.
- An item of a long tuple holds that item. Torch goes through all items for each: quadratic.
"""

from fxpart.torch_compat.memory.forward_backward import get_fwd_bwd_interactions, get_peak_memory
from fxpart.torch_compat.memory.profile import MemoryTracker, build_memory_profile

__all__ = [
    "MemoryTracker",
    "build_memory_profile",
    "get_fwd_bwd_interactions",
    "get_peak_memory",
]
