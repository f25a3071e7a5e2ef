"""Find a change that makes a model fit: each is tried by itself before it is proposed."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from fxpart.errors import FxpartError, InfeasibleError, NotApplicableError
from fxpart.sharding.zero import STAGES
from runner.config.device_schema import TierConfig
from runner.config.schema import Config, ModeConfig
from runner.config.specs import tiers_in
from runner.experiment.degrees import stated_experts
from runner.experiment.mesh import GATHERING, replica_count
from runner.experiment.model_spec import model_spec
from runner.experiment.serving import absorbs, generates
from runner.experiment.subject import is_captured
from runner.experiment.training import is_training
from runner.experiment.zero import in_stages
from runner.output.terminal import progress

__all__ = ["Change", "changes", "with_remedy"]

_MOST_DEVICES = 8
"""Largest multiple of the number of devices that is tried."""
_FITS_WHERE_IT_DOES = "size_based"
"""A fast mode; whatever it can place, searches can place too."""
_SEARCHES = ("kl_based", "cost_aware", "optimal", "sparse_nn")
_SPREADS_WHERE_IT_CAN = (*_SEARCHES, _FITS_WHERE_IT_DOES)
_MODES_OF_GENERATION = ("size_based", "pipeline", "kl_based")
"""Modes that may find a plan of a generation where others do not, the fastest first."""
_HOSTS_GB = (64, 256, 1024, 4096)
"""Sizes of host memory, in GB, that are proposed as a tier."""


class Change(NamedTuple):
    """A changed configuration, with the overrides to type."""

    overrides: str
    config: Config
    captures: bool = False
    """Whether it needs another captured graph."""
    keeps_mode: bool = False
    """Whether its own mode has to be tried, not one that is faster and fits only if it does."""


def with_remedy(
    config: Config,
    error: InfeasibleError,
    place: Callable[[Config], object],
    *,
    may_capture: bool,
) -> InfeasibleError:
    """Return `error` with the first of `changes` that makes the model fit, or all that do not.

    Args:
        config: the configuration that does not fit.
        error: the error raised for it.
        place: raises an `FxpartError` for a configuration that does not fit, or is invalid.
        may_capture: whether to try changes that capture a graph, which takes seconds.

    """
    tried: list[str] = []
    with progress("trying what would make it fit"):
        knows_devices = error.devices_that_fit is not None
        needed_bytes = error.needed_bytes or 0
        for change in changes(config, knows_devices=knows_devices, needed_bytes=needed_bytes):
            if change.captures and not (may_capture or _has_graph(change.config)):
                continue
            try:
                place(change.config if change.keeps_mode else _quickly(change.config))
            except NotApplicableError:
                continue
            except FxpartError:
                tried.append(change.overrides)
                continue
            return _with_advice(error, f"{change.overrides} makes it fit")
    if not tried or error.devices_that_fit is not None:  # the error already says how many would fit
        return error
    return _with_advice(error, f"tried one at a time, and not enough: {'; '.join(tried)}")


def _with_advice(error: InfeasibleError, advice: str) -> InfeasibleError:
    return InfeasibleError(
        f"{error}; {advice}",
        needed_bytes=error.needed_bytes,
        available_bytes=error.available_bytes,
        devices_that_fit=error.devices_that_fit,
    )


def _has_graph(config: Config) -> bool:
    try:
        return is_captured(config, model_spec(config))
    except FxpartError:
        return False


def _quickly(config: Config) -> Config:
    """Return a configuration without a search, which fits only if `config` fits."""
    if config.mode.name not in _SEARCHES or config.schedule.name != "none":
        return config
    return replace(config, mode=replace(config.mode, name=_FITS_WHERE_IT_DOES, options={}))


def changes(
    config: Config, *, knows_devices: bool = False, needed_bytes: int = 0
) -> Iterator[Change]:
    """Yield changes that may help, in rising order of cost to the user.

    More devices are not proposed if the error `knows_devices`, that is, how many would fit.
    `needed_bytes`, as in the error, is the least size of a proposed host tier.
    """
    yield from _of_strict_settings(config)
    yield from _of_absorbed_latents(config)
    if generates(config) and config.prefill_batch is None and config.model.batch_size > 1:
        yield Change("prefill_batch=1", replace(config, prefill_batch=1))
    yield from _of_spread_experts(config)
    recomputed = replace(config, checkpointing="block")
    recomputes = is_training(config) and config.checkpointing == "none"
    steps = [step for step in (_in_order_1f1b(config), *_of_shards(config)) if step]
    yield from steps
    if recomputes:
        yield Change("checkpointing=block", recomputed, captures=True)
        for step in steps:
            checkpointed = replace(step.config, checkpointing="block")
            yield Change(f"{step.overrides} checkpointing=block", checkpointed, captures=True)
    yield from _of_fewer_microbatches(config)
    if config.granularity != "operator":
        yield Change("granularity=operator", replace(config, granularity="operator"))
    searched = _searched(config)
    if generates(config):
        yield from _of_modes_of_generation(config)
    elif searched is not None:
        yield Change("mode=kl_based", searched)
    yield from _of_host_memory(config, needed_bytes)
    size = config.model.batch_size // 2
    while size >= 1 and size % config.data_parallel == 0:
        smaller = replace(config, model=replace(config.model, batch_size=size))
        yield Change(f"model.batch_size={size}", smaller, captures=True)
        size //= 2
    if knows_devices:
        return
    if config.mode.name != "single":  # which cannot use more devices
        yield from _of_more_devices(config)
    if searched is not None:
        for change in _of_more_devices(searched):
            yield Change(f"mode=kl_based {change.overrides}", change.config)


def _of_spread_experts(config: Config) -> Iterator[Change]:
    """Yield experts as a whole over a tensor-parallel group, each of which is split otherwise."""
    degree, experts = config.tensor_parallel, stated_experts(config)
    fits = bool(experts) and not any(count % degree for count in experts)
    if fits and degree > 1 and config.expert_parallel == 1:
        spread = replace(config, expert_parallel=degree)
        yield Change(f"expert_parallel={degree}", spread, captures=True)


def _of_modes_of_generation(config: Config) -> Iterator[Change]:
    """Yield other modes: each plans for a decode, and none finds all plans whose prefill fits."""
    for name in _MODES_OF_GENERATION:
        if name != config.mode.name:
            changed = replace(config, mode=replace(config.mode, name=name, options={}))
            yield Change(f"mode={name}", changed, keeps_mode=True)


def _of_strict_settings(config: Config) -> Iterator[Change]:
    """Yield the usual value of each setting that was chosen although it leaves less room."""
    if config.reserve.upper_limits:
        reserve = replace(config.reserve, upper_limits=False)
        yield Change("reserve.upper_limits=false", replace(config, reserve=reserve))
    if config.offload.cache == "none" and config.devices.tiers:
        offload = replace(config.offload, cache="auto")
        yield Change("offload.cache=auto", replace(config, offload=offload))


def _of_absorbed_latents(config: Config) -> Iterator[Change]:
    """Yield the decode of engines, whose latent attention makes no keys and values."""
    if config.phase.name == "decode" and not absorbs(config):
        absorbed = replace(config, latent_attention="absorbed")
        yield Change("latent_attention=absorbed", absorbed)


def _searched(config: Config) -> Config | None:
    """Return `config` with a mode that places any model that fits; None if it has such a mode."""
    if config.schedule.name != "none" or config.mode.name in _SPREADS_WHERE_IT_CAN:
        return None
    return replace(config, mode=replace(config.mode, name="kl_based", options={}))


def _of_host_memory(config: Config, needed_bytes: int) -> Iterator[Change]:
    """Yield a host tier of `needed_bytes`, if the devices are a spec without one that large."""
    parts = [part for part in config.devices.spec.split("+") if not part.startswith("host")]
    size_gb = next((size for size in _HOSTS_GB if size * 10**9 >= needed_bytes), None)
    is_spec = all(re.match(r"\d+x|nvme", part) for part in parts)
    if size_gb is None or not is_spec or config.schedule.name != "none":
        return
    if all(
        tier.memory_bytes < needed_bytes for tier in config.devices.tiers if tier.kind == "host"
    ):
        parts.insert(sum("x" in part for part in parts), f"host{size_gb}gb")
        spec = "+".join(parts)
        tiers = [TierConfig(**tier) for tier in tiers_in(spec)[1]]
        changed = replace(config, devices=replace(config.devices, spec=spec, tiers=tiers))
        yield Change(f"devices={spec}", changed)


def _in_order_1f1b(config: Config) -> Change | None:
    """Return the change to 1F1B, which saves the fewest activations; None in inference."""
    if not is_training(config) or config.schedule.name not in ("gpipe", "interleaved"):
        return None
    options = {**config.mode.options, "schedule": "1f1b"}
    overrides = "schedule=1f1b"
    if options.get("interleave", 1) != 1:
        options["interleave"], overrides = 1, "schedule=1f1b mode.interleave=1"
    schedule, mode = replace(config.schedule, name="1f1b"), _known_options(config, options)
    return Change(overrides, replace(config, schedule=schedule, mode=mode))


def _of_shards(config: Config) -> Iterator[Change]:
    """Yield higher ZeRO stages, if replicas train."""
    if not is_training(config) or replica_count(config) == 1:
        return
    for stage in (1, *_stages_of_weights(config)):
        if config.zero < stage:
            yield Change(f"zero={stage}", replace(config, zero=stage))


def _stages_of_weights(config: Config) -> tuple[int, ...]:
    """Return the ZeRO stage that shards weights with the lowest peak, if one applies."""
    if in_stages(config):
        # Gathering weights again in each forward does not lower the peak of a pipeline.
        return () if config.schedule.name == "none" else (GATHERING,)
    return (STAGES[-1],) if config.schedule.name in ("none", "1f1b") else ()


def _of_fewer_microbatches(config: Config) -> Iterator[Change]:
    count = config.microbatches // 2
    while count >= 1 and config.schedule.name != "none":
        mode = _known_options(config, {**config.mode.options, "microbatches": count})
        yield Change(f"microbatches={count}", replace(config, microbatches=count, mode=mode))
        count //= 2


def _of_more_devices(config: Config) -> Iterator[Change]:
    pools = config.devices.pools
    if len(pools) != 1 or config.devices.nodes is not None or not pools:
        return
    times = 2
    while times <= _MOST_DEVICES:
        count = times * pools[0].count
        devices = replace(config.devices, pools=[replace(pools[0], count=count)])
        # A pipeline has as many stages as devices, unless a number is configured.
        yield Change(_counted_spec(config, count), replace(config, devices=devices))
        times *= 2


def _known_options(config: Config, options: dict[str, object]) -> ModeConfig:
    """Return the mode with `options`, except those that it does not have."""
    known = {key: value for key, value in options.items() if key in config.mode.options}
    return replace(config.mode, options=known)


def _counted_spec(config: Config, count: int) -> str:
    """Return the override for `count` devices; for devices from a file, only their number."""
    pool = config.devices.pools[0]
    typed, times, rest = config.devices.spec.partition("x")
    if typed == str(pool.count) and times:
        return f"devices={count}x{rest}"
    return f"devices.pools.0.count={count}"
