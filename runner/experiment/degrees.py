"""Parallel degrees allowed by the heads, experts and devices that a configuration states.

Counts left to the model's defaults are checked when the model is split.
"""

from collections.abc import Sequence
from math import gcd

from fxpart.core.tensor_groups import refused_count
from fxpart.errors import NotApplicableError, nearest_degrees
from runner.config.schema import Config
from runner.experiment.training import is_training

__all__ = [
    "check_expert_degree",
    "check_tensor_degree",
    "device_count",
    "devices_of_a_head",
    "expert_degrees",
    "stated_experts",
]

_HEADS, _KEY_HEADS = ("num_attention_heads", "n_head"), ("num_key_value_heads",)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def device_count(config: Config) -> int:
    """Return the number of devices."""
    return sum(pool.count for pool in config.devices.pools)


def check_tensor_degree(config: Config, degree: int, n_devices: int) -> None:
    """Raise `NotApplicableError` if `degree` does not divide the heads and the devices.

    Outside training, several devices may have the same head of keys and values. The message
    suggests degrees that suit the heads, and those that divide the devices too.
    """
    heads, copied = (
        {f"model.config.{name}={n}": n for name, n in _stated(config, names).items()}
        for names in (_HEADS, _KEY_HEADS)
    )
    if not heads and not copied:
        return  # only devices count, which is checked when they are grouped
    if is_training(config):
        heads, copied = heads | copied, {}
    counts = {**heads, f"the number of devices, there are {n_devices}": n_devices}
    if requirement := refused_count(degree, counts, copied):
        hint = nearest_degrees(degree, counts.values(), copied.values())
        of_heads = nearest_degrees(degree, (heads or copied).values(), copied.values())
        if hint != of_heads and refused_count(degree, heads, copied):
            hint = f"{of_heads} on a multiple of that many devices, or {hint} on {n_devices}"
        raise NotApplicableError(f"tensor_parallel={degree} must {requirement}; use {hint}")


def devices_of_a_head(config: Config) -> int:
    """Return the number of devices of a group that hold the same head of keys and values."""
    heads = min(_stated(config, _KEY_HEADS).values(), default=config.tensor_parallel)
    return max(1, config.tensor_parallel // heads)


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
