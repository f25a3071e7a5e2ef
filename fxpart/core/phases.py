"""Phases that can be captured: a forward pass, a step of serving or of training."""

from dataclasses import dataclass

from fxpart.errors import SpecError, nearest_names

__all__ = [
    "BACKWARD_ORDERS",
    "CACHED_STEPS",
    "CHECKPOINTING",
    "PHASES",
    "StepOptions",
    "check_phase",
]

CACHED_STEPS = ("prefill", "decode")
"""``prefill``: a pass over a prompt that fills the KV cache. ``decode``: one token per sequence,
using its cache."""

PHASES = ("inference", "training", *CACHED_STEPS, "generate")
"""``inference``: one forward pass. ``training``: forward, loss and backward of a step. The others
are steps of serving, and ``generate`` is both on one placement."""

CHECKPOINTING = ("none", "block", "selective", "core_attention")
"""Activation checkpointing of a training step. ``none``: nothing is recomputed. ``block``:
everything inside each repeated block of the model, such as a transformer layer. ``selective``: the
same except fused attention and every second matrix product of a block, as in torchtitan.
``core_attention``: attention scores and what is derived from them, as in Megatron-LM's selective
recomputation."""

BACKWARD_ORDERS = ("autograd", "late_weight_gradients")
"""Order of the backward. ``autograd``: all gradients of a call together, as in eager PyTorch.
``late_weight_gradients``: gradients of activations, which earlier layers wait for, before gradients
of weights, as in zero-bubble pipelines."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Options of a training step that change what it computes or saves.

    Raises:
        SpecError: if `checkpointing` or `backward_order` does not exist.

    """

    checkpointing: str = "none"
    """One of `CHECKPOINTING`."""
    fused_attention: bool = True
    """Whether attention with dropout is one fused call that saves no probabilities, as on
    accelerators; otherwise separate products and masks, as on a CPU."""
    fused_dropout: bool = True
    """Whether other dropout is one call that saves a byte per element, as on accelerators;
    otherwise several calls that save a mask in the input's dtype, as on a CPU."""

    backward_order: str = "autograd"
    """One of `BACKWARD_ORDERS`."""
    recomputed: tuple[str, ...] = ()
    """Paths of the checkpointed blocks; empty for all of them."""

    def __post_init__(self) -> None:
        """Refuse a name that is not in `CHECKPOINTING` or `BACKWARD_ORDERS`."""
        for field, names in (
            ("checkpointing", CHECKPOINTING),
            ("backward_order", BACKWARD_ORDERS),
        ):
            name = getattr(self, field)
            if name not in names:
                raise SpecError(f"{field}={name} does not exist; {nearest_names(name, names)}")


def check_phase(phase: str, level: str = "operator") -> None:
    """Raise `SpecError` if the phase does not exist or cannot be captured at `level`."""
    if phase not in PHASES:
        raise SpecError(f"phase={phase} does not exist; {nearest_names(phase, PHASES)}")
    if phase != "inference" and level != "operator":
        raise SpecError(
            f"phase={phase} is captured operator by operator, got capture.level={level};"
            " use capture.level=operator"
        )
