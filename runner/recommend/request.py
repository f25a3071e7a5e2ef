"""The request of a recommendation: ``recommend.*`` overrides on top of a run's."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from fxpart.errors import SpecError, nearest_names
from runner.plans.request import VARIED, Request, Space, check_request

__all__ = ["PREFIX", "read_request"]

PREFIX = "recommend."


def read_request(arguments: Sequence[str]) -> tuple[Request, list[str]]:
    """Parse the ``recommend.*`` overrides; return the request and the other arguments.

    Raises:
        SpecError: if a key is unknown or a value is invalid.

    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    request_texts = [text for text in arguments if text.lstrip("+").startswith(PREFIX)]
    structured = OmegaConf.structured(Request)
    for text in request_texts:
        key, value = _parsed(text)
        try:
            OmegaConf.update(structured, key, value)
        except OmegaConfBaseException as error:
            first_line = str(error).splitlines()[0]
            raise SpecError(f"{text}: {first_line}; {_KINDS}") from error
    request = OmegaConf.to_object(structured)
    assert isinstance(request, Request)
    check_request(request, PREFIX)
    return request, [text for text in arguments if text not in request_texts]


_KINDS = (
    "such as recommend.objective=latency, recommend.global_batch=64,"
    " recommend.space.tensor_parallel=[1,2,4] or recommend.limits.tpot_ms=50"
)


def _parsed(text: str) -> tuple[str, Any]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    path, equals, _ = text.partition("=")
    key = path.lstrip("+").removeprefix(PREFIX)
    known = [name.name for name in fields(Request) if name.name != "space"]
    known += [f"space.{name.name}" for name in fields(Space)]
    if key not in known and not key.startswith("limits."):
        suggestion = nearest_names(f"{PREFIX}{key}", [f"{PREFIX}{name}" for name in known])
        raise SpecError(f"{path} does not exist; {suggestion}")
    try:
        override = OverridesParser.create().parse_override(text) if equals else None
    except HydraException as error:
        raise SpecError(f"{text} has an unreadable value; {_KINDS}") from error
    if override is None or override.is_sweep_override():
        raise SpecError(f"{text}: a list of values is written in brackets; {_KINDS}")
    value = override.value()
    if (
        (key in VARIED or key.startswith("space."))
        and value is not None
        and not isinstance(value, list)
    ):
        value = [value]
    return key, value
