"""Weights and inputs of a program, made when they are first needed on the device."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from fxpart.capture.storage import place_in_memory
from fxpart.execution.free_memory import free_bytes
from fxpart.profiling.made_tensors import made_value, made_weight

__all__ = ["Given", "given_to"]

_MOST_KEPT_BYTES = 4 * 2**30
_KEPT_SHARE = 0.25
_EVICTING_BYTES = 96 * 2**20
"""More than the last cache of most processors and GPUs."""


@dataclass(eq=False, slots=True)
class Given:
    """What a program's placeholders stand for. Tied weights are one tensor."""

    device: torch.device
    keep: bool
    """Whether tensors stay from pass to pass: then all of a pass are made before it, and lie where
    they would in a real run. Else they are made before each use, and dropped after the last."""
    likes: dict[fx.Node, Any]
    """What stands for each placeholder in the captured graph."""
    real: dict[fx.Node, Tensor]
    """Tensors of whole numbers whose values are known: positions, tables of indices."""
    key: dict[fx.Node, Hashable]
    """Equal for the names of one tensor; not there for an input."""
    made: dict[Hashable, Tensor] = field(default_factory=dict)

    def make(self, nodes: Iterable[fx.Node]) -> bool:
        """Make what is not there yet of the placeholders among `nodes`; return whether any was."""
        before = len(self.made)
        for node in nodes:
            key = self.key.get(node, node)
            if isinstance(self.likes.get(node), Tensor) and key not in self.made:
                self.made[key] = self._new(node)
        return len(self.made) > before

    def _new(self, node: fx.Node) -> Tensor:
        if node in self.real:
            # A copy: an operator may write into it.
            return self.real[node].detach().to(self.device, copy=True)
        make = made_weight if node in self.key else made_value
        return make(self.likes[node], self.device)

    def value(self, node: fx.Node) -> Any:  # noqa: ANN401 - a placeholder may be any constant
        """Return what the placeholder stands for; its tensor must have been made."""
        like = self.likes[node]
        return self.made[self.key.get(node, node)] if isinstance(like, Tensor) else like

    def replace(self, node: fx.Node, tensor: Tensor) -> None:
        """Let `tensor` stand for a placeholder from now on; other nodes are left alone."""
        if node in self.likes:
            self.made[self.key.get(node, node)] = tensor

    def drop(self, nodes: Iterable[fx.Node]) -> None:
        """Let go of the tensors of the placeholders among `nodes`, unless they are to be kept."""
        if not self.keep:
            for node in nodes:
                self.made.pop(self.key.get(node, node), None)

    def evict(self) -> None:
        """Push what was just written out of the device's caches, as a run of the model would."""
        torch.empty(_EVICTING_BYTES, dtype=torch.uint8, device=self.device).fill_(1)


def given_to(program: ExportedProgram, device: torch.device) -> Given:
    """Return what `program` is given, nothing made yet."""
    signature = program.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    likes: dict[fx.Node, Any] = {}
    real: dict[fx.Node, Tensor] = {}
    key: dict[fx.Node, Hashable] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        likes[node] = node.meta.get("val")
        name = names.get(node.name)
        held = program.state_dict.get(name, program.constants.get(name)) if name else None
        if not isinstance(held, Tensor):
            continue
        key[node] = place_in_memory(held)
        if held.device.type != "meta" and not held.is_floating_point() and type(held) is Tensor:
            real[node] = held
    return Given(device, _fits(likes, key, device), likes, real, key)


def _fits(likes: dict[fx.Node, Any], key: dict[fx.Node, Hashable], device: torch.device) -> bool:
    once = {key.get(node, node): like for node, like in likes.items() if isinstance(like, Tensor)}
    total = sum(int(like.numel()) * like.element_size() for like in once.values())
    return total <= min(_MOST_KEPT_BYTES, _KEPT_SHARE * free_bytes(device))
