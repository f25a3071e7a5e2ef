"""Steps of serving: the pass over a prompt, and one token against a cache."""

from fxpart.core.phases import CACHED_STEPS
from fxpart.cost.evaluation import Evaluation
from fxpart.errors import NotApplicableError, SpecError
from runner.config.sections import Config
from runner.output.units import GIB

__all__ = ["check_serving", "is_serving", "serving_metrics"]


def is_serving(config: Config) -> bool:
    """Return whether a step with a cache is planned."""
    return config.phase.name in CACHED_STEPS


def check_serving(config: Config) -> None:
    """Refuse a cache where there is none, and a context that has no room for a step.

    Raises:
        SpecError: with what to write instead.

    """
    if config.context_len is None:
        return
    if not is_serving(config):
        raise NotApplicableError(
            f"context_len={config.context_len} is of a cache, got phase={config.phase.name}; add"
            " phase=decode or phase=prefill"
        )
    if config.context_len < 1:
        raise SpecError(f"context_len={config.context_len} must be a whole number, 1 or more")


def serving_metrics(step: str, texts: int, evaluation: Evaluation) -> dict[str, float]:
    """Return what only a step with a cache has, one of `CACHED_STEPS`, for a batch of `texts`."""
    latency_s = evaluation.latency_s
    cache_gib = sum(use.cache_bytes for use in evaluation.devices) / GIB
    if step == "prefill":
        return {"kv_cache_gib": cache_gib, "ttft_ms": latency_s * 1e3}
    # A text's next token needs this one.
    tokens_per_s = texts / latency_s if latency_s else float("inf")
    return {"kv_cache_gib": cache_gib, "tpot_ms": latency_s * 1e3, "tokens_per_s": tokens_per_s}
