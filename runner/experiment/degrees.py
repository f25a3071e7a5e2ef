"""Parallel degrees allowed by the heads, experts and devices that a configuration states.

Counts left to the model's defaults are checked when the model is split.
"""

from collections.abc import Sequence
from math import gcd

from fxpart.errors import NotApplicableError, nearest_degrees
from runner.config.sections import Config

__all__ = [
    "check_expert_degree",
    "check_tensor_degree",
    "device_count",
    "expert_degrees",
    "stated_experts",
]

_HEADS = ("num_attention_heads", "num_key_value_heads", "n_head")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def device_count(config: Config) -> int:
    """Return the number of devices."""
    return sum(pool.count for pool in config.devices.pools)


def check_tensor_degree(config: Config, degree: int, n_devices: int) -> None:
    """Raise `NotApplicableError` if `degree` does not divide the heads and the devices.

    The message suggests degrees that divide the heads, and those that divide the devices too.
    """
    counts = {f"model.config.{name}={n}": n for name, n in _stated(config, _HEADS).items()}
    if counts:  # otherwise only devices count, checked when they are grouped
        counts[f"the number of devices, there are {n_devices}"] = n_devices
    heads = list(counts.values())[:-1]
    for what, count in counts.items():
        if count % degree:
            hint = nearest_degrees(degree, counts.values())
            of_heads = nearest_degrees(degree, heads)
            if hint != of_heads and any(number % degree for number in heads):
                hint = f"{of_heads} on a multiple of that many devices, or {hint} on {n_devices}"
            raise NotApplicableError(f"tensor_parallel={degree} must divide {what}; use {hint}")


def check_expert_degree(config: Config, tensor: int, replicas: int) -> None:
    """Raise `NotApplicableError` if `expert_parallel` does not divide the experts or the devices.

    With groups of `tensor` devices, experts are spread over whole groups. Without, the caller
    checks the degree against the replicas.
    """
    degree, experts = config.expert_parallel, stated_experts(config)
    for count in experts:
        if count % degree:
            counts = [count, *([replicas] if gcd(count, replicas) > 1 else [])]
            fitting = expert_degrees(tensor, replicas, experts)
            hint = _nearest(degree, fitting) if tensor > 1 else nearest_degrees(degree, counts)
            raise NotApplicableError(
                f"expert_parallel={degree} must divide the {count} experts; use {hint}"
            )
    if tensor > 1 and (degree % tensor or tensor * replicas % degree):
        raise NotApplicableError(
            f"expert_parallel={degree} spreads experts over whole groups of"
            f" tensor_parallel={tensor}, of which there are {replicas}; use"
            f" {_nearest(degree, expert_degrees(tensor, replicas, experts))}"
        )


def expert_degrees(tensor: int, replicas: int, experts: Sequence[int]) -> list[int]:
    """Return the degrees above 1 that span whole groups of `tensor` and divide all `experts`."""
    homes = [n for n in range(1, replicas + 1) if replicas % n == 0]
    degrees = [tensor * n for n in homes]
    return [d for d in degrees if d > 1 and not any(count % d for count in experts)]


def _nearest(degree: int, fitting: Sequence[int]) -> str:
    below = [str(d) for d in fitting if d < degree][-1:]
    above = [str(d) for d in fitting if d > degree][:1]
    return " or ".join(below + above) or "expert_parallel=1, or another tensor_parallel"


def stated_experts(config: Config) -> list[int]:
    """Return the number of experts per layer, for each config name that states it."""
    return list(_stated(config, _EXPERTS).values())


def _stated(config: Config, names: tuple[str, ...]) -> dict[str, int]:
    values = {name: config.model.config.get(name) for name in names}
    return {name: n for name, n in values.items() if isinstance(n, int) and n > 0}
