"""The request of a recommendation: an objective, a batch, and the values to try."""

from dataclasses import dataclass, field
from itertools import product
from math import isfinite
from typing import NamedTuple

from fxpart.errors import SpecError, nearest_names
from runner.config.schema import Config
from runner.experiment.rates import price_per_hour
from runner.output.metrics import BY_NAME

__all__ = [
    "OBJECTIVES",
    "ONLY",
    "VARIED",
    "Request",
    "Space",
    "Variant",
    "check_price",
    "check_request",
    "variants",
]

OBJECTIVES = ("throughput", "latency", "cost")
"""Most examples per second; least time of one step, or of one input; least cost per example."""
VARIED = ("devices", "weights", "kv_cache")
"""The choices of which a request may list several, each a configuration of its own."""
_MOST_ROWS = 1000
_FROM_ZERO = ("zero", "sequence_parallel")


@dataclass  # not frozen: OmegaConf would refuse overrides of it
class Space:
    """The values to try of each setting; null for all that suit the model and devices."""

    tensor_parallel: list[int] | None = None
    sequence_parallel: list[bool] | None = None
    data_parallel: list[int] | None = None
    context_parallel: list[int] | None = None
    expert_parallel: list[int] | None = None
    zero: list[int] | None = None
    batch: list[int] | None = None
    """Examples per replica at a time: in one microbatch, if there are several."""
    microbatches: list[int] | None = None
    schedule: list[str] | None = None
    checkpointing: list[str] | None = None
    mode: list[str] | None = None


@dataclass
class Request:
    """The objective of a recommendation and the space to search."""

    objective: str = "throughput"
    """One of `OBJECTIVES`."""
    global_batch: int | None = None
    """Examples per step, over all replicas and microbatches; None leaves them to the plan."""
    rows: int = 10
    """Number of plans to print and log."""
    devices: list[str] | None = None
    """Devices to choose from; None for those of the run."""
    weights: list[str] | None = None
    """Formats of weights to choose from; None for that of the run."""
    kv_cache: list[str] | None = None
    """Dtypes of the cache to choose from; None for that of the run."""
    limits: dict[str, float] = field(default_factory=dict)
    """By metric of a run, the largest value that is allowed, or the smallest if more is better."""
    space: Space = field(default_factory=Space)


class Variant(NamedTuple):
    """The choices of one configuration that plans vary; empty where there is only one."""

    devices: str = ""
    weights: str = ""
    kv_cache: str = ""

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides that make these choices."""
        return tuple(f"{name}={text}" for name, text in self._asdict().items() if text)


ONLY = Variant()
"""The choices of a run that has no others."""


def variants(request: Request) -> list[Variant]:
    """Return all combinations of the choices that `request` lists."""
    listed = (getattr(request, name) or [""] for name in VARIED)
    return [Variant(*choices) for choices in product(*listed)]


def check_request(request: Request, prefix: str) -> None:
    """Raise `SpecError` if a setting is unknown, empty or out of range; `prefix` names settings."""
    if request.objective not in OBJECTIVES:
        raise SpecError(
            f"{prefix}objective={request.objective} does not exist;"
            f" {nearest_names(request.objective, OBJECTIVES)}"
        )
    batch = request.global_batch
    if batch is not None and batch < 1:
        raise SpecError(f"{prefix}global_batch={batch} must be 1 or more, or null")
    if not 1 <= request.rows <= _MOST_ROWS:
        raise SpecError(f"{prefix}rows={request.rows} must be from 1 to {_MOST_ROWS}")
    for name in VARIED:
        if getattr(request, name) == []:
            raise SpecError(f"{prefix}{name}=[] leaves no plan; give {name}, or null")
    _check_limits(request, prefix)
    for name, values in vars(request.space).items():
        if values is not None and not values:
            raise SpecError(f"{prefix}space.{name}=[] leaves no plan; give values, or null")
        lower = 0 if name in _FROM_ZERO else 1
        is_list = values is None or isinstance(values, list | tuple)
        if not is_list or not all(isinstance(value, int | str) for value in values or ()):
            raise SpecError(
                f"{prefix}space.{name}={values} must be a list, such as [1,2]; correct it"
            )
        for value in values or ():
            if isinstance(value, int) and value < lower:
                raise SpecError(f"{prefix}space.{name}: {value} must be {lower} or more")


def _check_limits(request: Request, prefix: str) -> None:
    known = [name for name, metric in BY_NAME.items() if metric.better]
    for name, limit in request.limits.items():
        if name not in known:
            raise SpecError(
                f"{prefix}limits: no metric {name} gets better or worse;"
                f" {nearest_names(name, known)}"
            )
        if not isfinite(limit) or limit < 0:
            raise SpecError(f"{prefix}limits.{name}={limit} must be a number from 0")


def check_price(config: Config, request: Request) -> None:
    """Raise `SpecError` if the objective is cost and the price of a device is unknown."""
    if request.objective != "cost" or price_per_hour(config) is not None:
        return
    known = {
        pool.name: config.price_per_hour.get(pool.name, pool.price_per_hour)
        for pool in config.devices.pools
    }
    missing = [name for name, price in known.items() if price is None]
    raise SpecError(
        f"objective=cost needs the price of {missing[0]}, which its file does not set; add "
        f"price_per_hour={{{missing[0]}: 2.5}}, in USD"
    )
