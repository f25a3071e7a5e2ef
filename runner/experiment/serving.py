"""Serving steps: prefill of a prompt, and decode of one token against a cache."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from fxpart.core.absorbed import latent_projections, with_absorbed_latents
from fxpart.core.few_bits import (
    CACHE_DTYPES,
    WeightFormat,
    with_cache_dtype,
    with_few_bits,
    with_few_bits_at_any_size,
    with_routed_share,
)
from fxpart.core.graph import OpGraph
from fxpart.core.phases import CACHED_STEPS
from fxpart.core.symbolic_graph import SymbolicGraph
from fxpart.cost.dequantized import TimesDequantized, TimesWithCastInputs
from fxpart.cost.evaluation import Evaluation
from fxpart.cost.problem import Problem
from fxpart.cost.tables import LatencySource
from fxpart.errors import NotApplicableError, SpecError, nearest_names
from fxpart.schedule import ScheduleResult
from runner.config.schema import Config
from runner.experiment.training import is_training
from runner.experiment.weight_format import check_format
from runner.output.terminal import counted
from runner.output.units import GIB

__all__ = [
    "absorbs",
    "as_served",
    "check_serving",
    "generated_len",
    "generates",
    "is_serving",
    "latent_line",
    "served_at_any_size",
    "serving_metrics",
    "unfused_line",
    "with_dequantization",
    "with_served_cache",
]

GENERATE = "generate"
_DECODES = ("decode", GENERATE)
_LATENT = ("expanded", "absorbed")
_LEAST_OUTPUT = 2
"""Least tokens to generate: the first comes from prefill, so a single one has no time per token."""
_SINKS = ".sinks"
"""End of the names of weights that attention adds to its scores, as logits of no token."""
_MOST_PAIRS = 4096
"""Most pairs of sizes in one table."""


def absorbs(config: Config) -> bool:
    """Return whether a decode has absorbed projections of latents."""
    return config.latent_attention == "absorbed"


def is_serving(config: Config) -> bool:
    """Return whether prefill, decode or both are planned."""
    return config.phase.name in CACHED_STEPS or generates(config)


def generates(config: Config) -> bool:
    """Return whether prefill and decode are planned together."""
    return config.phase.name == GENERATE


def check_serving(config: Config) -> None:
    """Check the settings of serving, which other phases must not have.

    Raises:
        SpecError: if a setting is unknown, out of range or not of this phase; the message says what
            to use.

    """
    check_format(config)
    _check_few_bits(config)
    _check_generate(config)
    _check_serving_sweep(config)
    if config.context_len is None:
        return
    if not is_serving(config):
        raise NotApplicableError(
            f"context_len={config.context_len} sets the length of a cache, got "
            f"phase={config.phase.name}; use phase=decode or phase=prefill"
        )
    if config.context_len < 1:
        raise SpecError(f"context_len={config.context_len} must be a whole number, 1 or more")


def _check_generate(config: Config) -> None:
    """Check that only a generation has lengths, and that it has no settings of single steps."""
    if not generates(config):
        of_generation = {**_lengths(config), "prefill_batch": config.prefill_batch}
        for name, length in of_generation.items():
            if length is not None:
                raise NotApplicableError(
                    f"{name}={length} applies to a generation, not to phase={config.phase.name}; "
                    "add phase=generate"
                )
        return
    generated_len(config)
    if config.prefill_batch is not None and config.prefill_batch < 1:
        raise SpecError(f"prefill_batch={config.prefill_batch} must be 1 or more, or null for all")
    against = {
        f"context_len={config.context_len}": config.context_len is not None,
        f"execute={config.execute.name}": config.execute.name != "none",
        f"capture.symbolic={config.capture.symbolic}": config.capture.symbolic != "none",
        f"capture.level={config.capture.level}": config.capture.level != "operator",
        f"data_parallel={config.data_parallel} beside expert_parallel={config.expert_parallel}": (
            config.data_parallel > 1 and config.expert_parallel > 1
        ),
        f"schedule={config.schedule.name}": config.schedule.name != "none",
        "devices.saturate_host=true": config.devices.saturate_host,
        f"latency={config.latency.name}": not config.latency.is_computed,
    }
    for conflict in (name for name, is_set in against.items() if is_set):
        raise NotApplicableError(
            f"phase=generate plans prompts and decode at once, with a cache of prompt_len +"
            f" output_len tokens; leave out {conflict}, or use phase=prefill and phase=decode"
        )


def _lengths(config: Config) -> dict[str, int | None]:
    return {"prompt_len": config.prompt_len, "output_len": config.output_len}


def generated_len(config: Config) -> int:
    """Return the tokens of a generated text, its prompt included.

    Raises:
        SpecError: if a length is missing or too small.

    """
    lengths, total = _lengths(config), 0
    for name, least in (("prompt_len", 1), ("output_len", _LEAST_OUTPUT)):
        length = lengths[name]
        if length is None or length < least:
            raise SpecError(
                f"{name}={'null' if length is None else length} must be a whole number, {least} or"
                " more, with phase=generate"
            )
        total += length
    return total


def _check_serving_sweep(config: Config) -> None:
    """Check that the sizes of ``serving_sweep`` are possible for this generation."""
    batches, contexts = config.serving_sweep.batches, config.serving_sweep.contexts
    if not (batches or contexts):
        return
    if not generates(config):
        raise NotApplicableError(
            f"serving_sweep applies to a generation, not to phase={config.phase.name}; add "
            "phase=generate"
        )
    least_context = 1 + (config.output_len or 0)
    for name, sizes, low in (("batches", batches, 1), ("contexts", contexts, least_context)):
        if bad := [size for size in sizes if size < low]:
            raise SpecError(
                f"serving_sweep.{name} has {bad[0]}, which must be {low} or more"
                + (": a prompt, and output_len tokens after it" if name == "contexts" else "")
            )
    if uneven := [batch for batch in batches if batch % config.data_parallel]:
        raise SpecError(
            f"serving_sweep.batches has {uneven[0]}, which data_parallel={config.data_parallel}"
            " does not divide"
        )
    if (pairs := max(len(batches), 1) * max(len(contexts), 1)) > _MOST_PAIRS:
        raise SpecError(f"serving_sweep has {pairs} pairs of sizes; ask for {_MOST_PAIRS} or fewer")


def _check_few_bits(config: Config) -> None:
    names = ("auto", *CACHE_DTYPES)
    if config.kv_cache not in names:
        suggestion = nearest_names(config.kv_cache, names)
        raise SpecError(f"kv_cache={config.kv_cache} does not exist; {suggestion}")
    if config.kv_cache != "auto" and not is_serving(config):
        raise NotApplicableError(
            f"kv_cache={config.kv_cache} sets the dtype of a cache, got phase={config.phase.name}; "
            "use phase=decode or phase=prefill"
        )
    if config.latent_attention not in _LATENT:
        suggestion = nearest_names(config.latent_attention, _LATENT)
        raise SpecError(f"latent_attention={config.latent_attention} does not exist; {suggestion}")
    if absorbs(config) and config.phase.name not in _DECODES:
        raise NotApplicableError(
            f"latent_attention=absorbed applies to a decode, got phase={config.phase.name}; use"
            " phase=decode or phase=generate"
        )
    if conflict := _against_absorbed(config) if absorbs(config) else "":
        raise NotApplicableError(
            f"latent_attention=absorbed is predicted for one size, and not run here; leave out"
            f" {conflict}, or latent_attention"
        )
    chosen = {
        f"weights={config.weights.name}": config.weights.name != "none",
        f"kv_cache={config.kv_cache}": config.kv_cache != "auto",
    }
    against = {
        f"phase={config.phase.name}": (
            config.phase.name == "training" and config.finetune.name == "none",
            "serving, and for the frozen weights of finetune=lora",
        ),
        f"execute={config.execute.name}": (
            config.execute.name != "none",
            "plans that are not run, because random weights have the model's dtype",
        ),
        f"capture.symbolic={config.capture.symbolic}": (
            config.capture.symbolic != "none",
            "one size, because formulas count whole dtypes",
        ),
        f"model.autocast={config.model.autocast}": (
            config.model.autocast is not None,
            "matrix products that read such weights, not a cast of them",
        ),
        f"latency={config.latency.name}": (
            not config.latency.is_computed,
            "computed times, because no quantized kernels were measured",
        ),
    }
    for choice in (name for name, is_set in chosen.items() if is_set):
        for conflict, (is_set, reason) in against.items():
            if is_set:
                raise NotApplicableError(
                    f"{choice} is supported for {reason}; leave out {conflict}, or {choice}"
                )


def _against_absorbed(config: Config) -> str:
    """Return the setting that conflicts with absorbed projections, if any."""
    against = {
        f"execute={config.execute.name}": config.execute.name != "none",
        f"capture.symbolic={config.capture.symbolic}": config.capture.symbolic != "none",
        f"model.autocast={config.model.autocast}": config.model.autocast is not None,
        f"latency={config.latency.name}": not config.latency.is_computed,
        f"weights={config.weights.name}": config.weights.fused_rows is not None,
    }
    return next((choice for choice, is_set in against.items() if is_set), "")


def as_served(config: Config, graph: OpGraph) -> OpGraph:
    """Return `graph` with weights and cache in the formats of `config`.

    If each device of a tensor-parallel group runs its own experts on all tokens of the group, it
    multiplies only its share of the rows.

    Raises:
        SpecError: if the model's weights do not allow the format.

    """
    plain = graph
    if config.weights.name != "none":
        with _split_named(config):
            graph = with_few_bits(graph, _weight_format(config))
    if has_experts_in_place(config):
        share = config.expert_imbalance / config.expert_parallel
        graph = with_routed_share(graph, share, plain)
    return with_served_cache(config, graph)


def with_dequantization(config: Config, times: LatencySource) -> LatencySource:
    """Return the source of times, with dequantized weights or cast inputs if the format has any."""
    if config.weights.name == "none":
        return times
    if config.weights.activations is not None:
        is_compiled = config.runtime.name == "compiled"
        return TimesWithCastInputs(times, _weight_format(config), fuses_casts=is_compiled)
    if config.weights.fused_rows is None:
        return times
    return TimesDequantized(times, _weight_format(config))


def with_served_cache(config: Config, graph: OpGraph) -> OpGraph:
    """Return `graph` with the cache in the format of `config`, read as it says."""
    if config.kv_cache != "auto":
        graph = with_cache_dtype(graph, config.kv_cache)
    if not absorbs(config):
        return graph
    absorbed = with_absorbed_latents(graph)
    if absorbed is graph and config.phase.name == "decode":
        raise NotApplicableError(
            "latent_attention=absorbed changes nothing, as the model caches no latents that fused"
            " attention reads; leave it out"
        )
    return absorbed


def served_at_any_size(config: Config, symbolic: SymbolicGraph) -> SymbolicGraph | None:
    """Return `symbolic` with weights in the format of `config`.

    None if they keep their own dtype, or if the bytes that are read depend on the sizes.

    Raises:
        SpecError: if the model's weights do not allow the format.

    """
    if config.weights.name == "none" or has_experts_in_place(config):
        return None
    with _split_named(config):
        return with_few_bits_at_any_size(symbolic, _weight_format(config))


def _weight_format(config: Config) -> WeightFormat:
    return WeightFormat(**{k: v for k, v in vars(config.weights).items() if k != "source"})


@contextmanager
def _split_named(config: Config) -> Iterator[None]:
    """Add to an error that the weights are one device's part, if they are."""
    try:
        yield
    except SpecError as error:
        if config.tensor_parallel == 1:
            raise
        split = f"split over tensor_parallel={config.tensor_parallel}"
        raise NotApplicableError(f"{error} ({split})") from error


def has_experts_in_place(config: Config) -> bool:
    """Return whether experts run on all tokens of their tensor-parallel group, not sent around."""
    return 1 < config.expert_parallel == config.tensor_parallel and not is_training(config)


def serving_metrics(
    step: str,
    texts: int,
    evaluation: Evaluation,
    schedule: ScheduleResult | None = None,
    *,
    alike: int = 1,
) -> dict[str, float]:
    """Return the metrics of a serving step, one of `CACHED_STEPS`, for a batch of `texts`.

    Each microbatch of a schedule has such a batch, with its own cache. Each device of `evaluation`
    stands for `alike` devices: its group, in all replicas.
    """
    batches = schedule.microbatches if schedule else 1
    # Decodes of one batch cannot overlap: a text's next token needs this one.
    step_s = schedule.step_s if schedule else evaluation.latency_s
    cache_bytes = sum(use.cache_bytes for use in evaluation.devices)
    metrics = {"kv_cache_gib": alike * batches * cache_bytes / GIB}
    if step == "prefill":
        return metrics | {"ttft_ms": step_s * 1e3}
    tokens_per_s = batches * texts / step_s if step_s else float("inf")
    return metrics | {"tpot_ms": step_s * 1e3, "tokens_per_s": tokens_per_s}


def latent_line(config: Config, problem: Problem) -> str:
    """Return a note if a token projects the whole cache, as latent attention of transformers does.

    Engines multiply the projections into queries and results instead ("absorb": DeepSeek-V2,
    arXiv:2405.04434, 2.1.2), and read the latents alone. Empty if there is no such product, and in
    a prefill, whose cache is what was computed anyway.
    """
    graph = problem.graph
    projections = latent_projections(graph)
    if config.phase.name not in _DECODES or absorbs(config) or not projections:
        return ""
    seconds = problem.costs.op_time_s.min(axis=1)
    share = seconds[projections].sum() / max(seconds.sum(), np.finfo(float).tiny)
    advice = "" if _against_absorbed(config) else ", add latent_attention=absorbed"
    return (
        f"{counted(len(projections), 'product')} of a token with its whole cache, as transformers"
        f" computes latent attention, take {share:.0%} of the operators' time; vLLM and SGLang"
        f" absorb them{advice}"
    )


def unfused_line(config: Config, problem: Problem) -> str:
    """Return a note if transformers computes attention with sinks as products; empty if not."""
    graph = problem.graph
    homes = {name.removesuffix(_SINKS) for name in graph.weight_names if name.endswith(_SINKS)}
    if not is_serving(config) or not homes or len(graph.attention):
        return ""
    seconds = problem.costs.op_time_s.min(axis=1)
    of_attention = np.array([module in homes for module in graph.modules])
    share = seconds[of_attention].sum() / max(seconds.sum(), np.finfo(float).tiny)
    return (
        f"products with repeated keys, as transformers computes attention with sinks, take"
        f" {share:.0%} of the operators' time; engines have one kernel for it, add"
        " +model.config.attn_implementation=fused"
    )
