"""A generation's plan at other sizes: every batch at every context that was asked for."""

from dataclasses import dataclass
from itertools import product

from fxpart.errors import NotApplicableError, SpecError
from runner.config.sections import Config
from runner.experiment.generation import GenerationPlan, Pace
from runner.experiment.serving_steps import ServingSteps, Sizes

__all__ = ["ServingRow", "check_table", "serving_table"]


@dataclass(frozen=True, slots=True)
class ServingRow:
    """What the plan takes for some texts of one length, whether or not it holds them."""

    pace: Pace
    needed_bytes: int
    """What is expected on the device that is fullest next to its memory, beside tensors too."""
    device: int
    """That device."""
    fits: bool
    """Whether a run of these sizes would be told to fit."""

    @property
    def context_len(self) -> int:
        """Tokens of each text: its prompt, and what is generated."""
        return self.pace.prompt_len + self.pace.output_len


def check_table(config: Config, steps: ServingSteps) -> None:
    """Refuse contexts of ``serving_sweep`` that the model of `steps` cannot have.

    Raises:
        NotApplicableError: for contexts of a model with an encoder.
        SpecError: for a context that is longer than the model's.

    """
    contexts = config.serving_sweep.contexts
    if not contexts:
        return
    if steps.has_encoder:
        raise NotApplicableError(
            "serving_sweep.contexts is of decoders, whose prompts have any length; an encoder is"
            " captured at prompt_len alone: leave it out, or sweep prompt_len with -m"
        )
    try:
        steps.decode(steps.sizes.texts, max(contexts))
    except SpecError as error:
        reason, _, _ = str(error).partition(";")
        raise SpecError(
            f"serving_sweep.contexts has {max(contexts)}, which the model has no room for:"
            f" {reason}; leave it out"
        ) from error


def serving_table(plan: GenerationPlan) -> tuple[ServingRow, ...]:
    """Return a row for each context and batch of ``serving_sweep``, in rising order; none for none.

    `check_table` has refused what the model cannot have.
    """
    sweep, usual = plan.config.serving_sweep, plan.sizes
    if not (sweep.batches or sweep.contexts):
        return ()
    output_len = usual.context_len - usual.prompt_len
    contexts = sorted(set(sweep.contexts or [usual.context_len]))
    batches = sorted(set(sweep.batches or [usual.texts]))
    sizes = [Sizes(n, length - output_len, length) for length, n in product(contexts, batches)]
    return tuple(_row(plan, at) for at in sizes)


def _row(plan: GenerationPlan, at: Sizes) -> ServingRow:
    needs = plan.needs(at)
    fullest = max(needs, key=lambda need: need.needed.expected / max(need.total_bytes, 1))
    return ServingRow(
        plan.pace(at),
        needed_bytes=round(fullest.needed.expected),
        device=fullest.device,
        fits=plan.has_room(at) and all(need.verdict != "does not fit" for need in needs),
    )
