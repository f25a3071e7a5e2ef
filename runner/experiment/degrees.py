"""Degrees that heads, experts and devices can have, as far as a configuration states them.

What it leaves to a model's defaults is checked where the model is split.
"""

from math import gcd

from fxpart.errors import NotApplicableError, nearest_degrees
from runner.config.sections import Config

__all__ = ["check_expert_degree", "check_tensor_degree", "device_count", "stated_experts"]

_HEADS = ("num_attention_heads", "num_key_value_heads", "n_head")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def device_count(config: Config) -> int:
    """Return how many devices there are."""
    return sum(pool.count for pool in config.devices.pools)


def check_tensor_degree(config: Config, degree: int, n_devices: int) -> None:
    """Raise `NotApplicableError` for groups of `degree` that heads or devices are not divided by.

    Degrees that are named instead divide them all.
    """
    counts = {f"model.config.{name}={n}": n for name, n in _stated(config, _HEADS).items()}
    if counts:  # else the devices alone decide, where they are put in groups
        counts[f"the number of devices, there are {n_devices}"] = n_devices
    for what, count in counts.items():
        if count % degree:
            raise NotApplicableError(
                f"tensor_parallel={degree} must divide {what}; use"
                f" {nearest_degrees(degree, counts.values())}"
            )


def check_expert_degree(config: Config, replicas: int) -> None:
    """Raise `NotApplicableError` if `expert_parallel` does not divide the stated experts."""
    degree = config.expert_parallel
    for count in stated_experts(config):
        if count % degree:
            counts = [count, replicas] if gcd(count, replicas) > 1 else [count]
            raise NotApplicableError(
                f"expert_parallel={degree} must divide the {count} experts; use"
                f" {nearest_degrees(degree, counts)}"
            )


def stated_experts(config: Config) -> list[int]:
    """Return how many experts a layer has, by each name that the configuration gives them."""
    return list(_stated(config, _EXPERTS).values())


def _stated(config: Config, names: tuple[str, ...]) -> dict[str, int]:
    values = {name: config.model.config.get(name) for name in names}
    return {name: n for name, n in values.items() if isinstance(n, int) and n > 0}
