"""What of a model's life is captured: a pass forward, a step of serving or of training."""

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
"""``prefill``: a pass over a prompt that writes the cache. ``decode``: one token for each text,
against its cache."""

PHASES = ("inference", "training", *CACHED_STEPS, "generate")
"""``inference``: one pass forward. ``training``: forward, loss and backward of a step. The others
are steps of serving, and ``generate`` is both of them on one placement."""

CHECKPOINTING = ("none", "block", "selective", "core_attention")
"""What a training step computes again instead of keeping. ``none``: nothing. ``block``: what is
made inside each repeated block of the model, such as a transformer's layers. ``selective``: the
same without fused attention and every second matrix product of a block, as torchtitan does it.
``core_attention``: scores of attention and what is made of them, as Megatron-LM's selective
recomputation does it."""

BACKWARD_ORDERS = ("autograd", "late_weight_gradients")
"""In which order a backward runs. ``autograd``: a call's gradients together, as eager PyTorch does.
``late_weight_gradients``: what earlier layers wait for first, the gradients of weights after it,
as zero-bubble pipelines do."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How a training step is run, where that changes what it computes and keeps.

    Raises:
        SpecError: for a way of checkpointing, or an order, that does not exist.

    """

    checkpointing: str = "none"
    """One of `CHECKPOINTING`."""
    fused_attention: bool = True
    """Whether attention that has dropout is one fused call that keeps no probabilities, as
    accelerators run it. Else it is the products, and the masks, that a CPU runs and keeps."""
    fused_dropout: bool = True
    """Whether other dropout is one call that keeps a byte for each element, as accelerators run it.
    Else it is the several calls that a CPU runs, which keep a number of the element's dtype."""

    backward_order: str = "autograd"
    """One of `BACKWARD_ORDERS`."""
    recomputed: tuple[str, ...] = ()
    """Paths of the blocks that are checkpointed; none for all of them."""

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
    """Raise `SpecError` for a phase that does not exist, or that `level` cannot capture."""
    if phase not in PHASES:
        raise SpecError(f"phase={phase} does not exist; {nearest_names(phase, PHASES)}")
    if phase != "inference" and level != "operator":
        raise SpecError(
            f"phase={phase} is captured operator by operator, got capture.level={level};"
            " use capture.level=operator"
        )
