"""A generation's plan at other sizes: every batch at every context of ``serving_sweep``."""

from dataclasses import dataclass
from itertools import product

from fxpart.errors import NotApplicableError, SpecError
from runner.config.schema import Config
from runner.experiment.generation import GenerationPlan, Pace
from runner.experiment.serving_steps import ServingSteps, Sizes

__all__ = ["ServingRow", "check_table", "serving_table"]


@dataclass(frozen=True, slots=True)
class ServingRow:
    """The plan's times and memory at one batch and context, whether or not it fits."""

    pace: Pace
    needed_bytes: int
    """Expected memory of the relatively fullest device, including that besides tensors."""
    device: int
    """The fullest device."""
    fits: bool
    """Whether a run of these sizes would fit."""

    @property
    def context_len(self) -> int:
        """Tokens of each text: its prompt and the generated ones."""
        return self.pace.prompt_len + self.pace.output_len


def check_table(config: Config, steps: ServingSteps) -> None:
    """Check that the model of `steps` supports the contexts of ``serving_sweep``.

    Raises:
        NotApplicableError: if the model has an encoder.
        SpecError: if a context is longer than the model's longest.

    """
    contexts = config.serving_sweep.contexts
    if not contexts:
        return
    if steps.has_encoder:
        raise NotApplicableError(
            "serving_sweep.contexts applies to decoders, whose prompts can have any length; an "
            "encoder is captured at prompt_len only: leave it out, or sweep prompt_len with -m"
        )
    try:
        steps.decode(steps.sizes.texts, max(contexts))
    except SpecError as error:
        reason, _, _ = str(error).partition(";")
        raise SpecError(
            f"serving_sweep.contexts has {max(contexts)}, which is too long for the model: "
            f"{reason}; leave it out"
        ) from error


def serving_table(plan: GenerationPlan) -> tuple[ServingRow, ...]:
    """Return a row for each context and batch of ``serving_sweep``, in rising order.

    Call `check_table` first. Without a sweep there are no rows.
    """
    sweep, usual = plan.config.serving_sweep, plan.sizes
    if not (sweep.batches or sweep.contexts):
        return ()
    output_len = usual.context_len - usual.prompt_len
    contexts = sorted(set(sweep.contexts or [usual.context_len]))
    replicas = plan.config.data_parallel
    batches = sorted({batch // replicas for batch in sweep.batches} or {usual.texts})
    sizes = [Sizes(n, length - output_len, length) for length, n in product(contexts, batches)]
    return tuple(_row(plan, size) for size in sizes)


def _row(plan: GenerationPlan, sizes: Sizes) -> ServingRow:
    needs = plan.needs(sizes)
    fullest = max(needs, key=lambda need: need.needed.expected / max(need.total_bytes, 1))
    return ServingRow(
        plan.pace(sizes),
        needed_bytes=round(fullest.needed.expected),
        device=fullest.device,
        fits=plan.fits(sizes),
    )
