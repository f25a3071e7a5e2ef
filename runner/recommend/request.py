"""What is asked of a recommendation: overrides under ``recommend.``, beside those of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fxpart.errors import SpecError, nearest_names

__all__ = ["OBJECTIVES", "Request", "Space", "read_request"]

OBJECTIVES = ("throughput", "latency")
"""The most examples per second; the least time of one step, or of one input."""
_PREFIX = "recommend."
_MOST_ROWS = 1000


@dataclass  # not frozen: OmegaConf would refuse overrides of it
class Space:
    """The values that are tried of each setting; null: all that go with the model and devices."""

    tensor_parallel: list[int] | None = None
    data_parallel: list[int] | None = None
    zero: list[int] | None = None
    batch: list[int] | None = None
    """Examples that a replica takes at a time: in one microbatch, where there are several."""
    microbatches: list[int] | None = None
    schedule: list[str] | None = None
    checkpointing: list[str] | None = None
    mode: list[str] | None = None


@dataclass
class Request:
    """What is looked for, and where."""

    objective: str = "throughput"
    """One of `OBJECTIVES`."""
    global_batch: int | None = None
    """Examples of a step, of all replicas and microbatches; None: whatever a plan takes."""
    rows: int = 10
    """Plans that are printed and logged."""
    space: Space = field(default_factory=Space)


def read_request(arguments: Sequence[str]) -> tuple[Request, list[str]]:
    """Return what the overrides under ``recommend.`` ask for, and the other arguments.

    Raises:
        SpecError: for a key or a value that makes no sense.

    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    own = [text for text in arguments if text.lstrip("+").startswith(_PREFIX)]
    asked = OmegaConf.structured(Request)
    for text in own:
        key, value = _parsed(text)
        try:
            OmegaConf.update(asked, key, value)
        except OmegaConfBaseException as error:
            first = str(error).splitlines()[0]
            raise SpecError(f"{text}: {first}; {_KINDS}") from error
    request = OmegaConf.to_object(asked)
    assert isinstance(request, Request)
    _check(request)
    return request, [text for text in arguments if text not in own]


_KINDS = (
    "such as recommend.objective=latency, recommend.global_batch=64 or"
    " recommend.space.tensor_parallel=[1,2,4]"
)


def _parsed(text: str) -> tuple[str, Any]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    path, equals, _ = text.partition("=")
    key = path.lstrip("+").removeprefix(_PREFIX)
    known = [name.name for name in fields(Request) if name.name != "space"]
    known += [f"space.{name.name}" for name in fields(Space)]
    if key not in known:
        near = nearest_names(f"{_PREFIX}{key}", [f"{_PREFIX}{name}" for name in known])
        raise SpecError(f"{path} does not exist; {near}")
    try:
        override = OverridesParser.create().parse_override(text) if equals else None
    except HydraException as error:
        raise SpecError(f"{text} has no value that can be read; {_KINDS}") from error
    if override is None or override.is_sweep_override():
        raise SpecError(f"{text}: a list of values is written in brackets; {_KINDS}")
    value = override.value()
    if key.startswith("space.") and value is not None and not isinstance(value, list):
        value = [value]
    return key, value


def _check(request: Request) -> None:
    if request.objective not in OBJECTIVES:
        raise SpecError(
            f"recommend.objective={request.objective} does not exist;"
            f" {nearest_names(request.objective, OBJECTIVES)}"
        )
    batch = request.global_batch
    if batch is not None and batch < 1:
        raise SpecError(f"recommend.global_batch={batch} must be 1 or more, or null")
    if not 1 <= request.rows <= _MOST_ROWS:
        raise SpecError(f"recommend.rows={request.rows} must be from 1 to {_MOST_ROWS}")
    for name, values in vars(request.space).items():
        if values is not None and not values:
            raise SpecError(f"recommend.space.{name}=[] leaves no plan; give values, or null")
        least = 0 if name == "zero" else 1
        for value in values or ():
            if isinstance(value, int) and value < least:
                raise SpecError(f"recommend.space.{name}: {value} must be {least} or more")
