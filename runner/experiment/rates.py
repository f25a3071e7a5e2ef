"""Rates to compare plans by: tokens per second, MFU, and cost."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np

from fxpart.core.graph import MOST_KEPT_GRAPHS, IntArray, OpGraph
from fxpart.core.topology import Topology
from fxpart.cost.roofline import rate_names
from fxpart.errors import SpecError, nearest_names
from runner.config.device_schema import PoolConfig
from runner.config.schema import Config
from runner.config.specs import accelerator_files
from runner.output.terminal import rate_text

__all__ = [
    "check_prices",
    "model_flops_utilization",
    "price_per_hour",
    "rate_line",
    "rate_metrics",
    "unpriced_line",
]

_BACKWARD = 2
"""FLOPs of a backward relative to its forward: one product for each of the two operands."""
_BACKWARD_OF_FROZEN = 1
"""The same for a frozen weight, whose gradient is not computed."""
_FROZEN, _TRAINED = 1, 2
"""An operand made of frozen weights only, or with at least one trained weight."""


def model_flops_utilization(graph: OpGraph, topology: Topology, inputs_per_s: float) -> float:
    """Return the model FLOPs utilization: the model's FLOP/s as a share of the devices' peak.

    Model FLOPs are the matrix products, convolutions and attention of the forward, and twice as
    many for the backward; recomputation does not count (Chowdhery et al.: PaLM, appendix B,
    arXiv:2204.02311). Frozen weights have no gradient, so their backward has as many FLOPs as the
    forward. Each dtype counts at its own peak, as do convolutions in TF32; idle devices count too.

    Args:
        graph: the part of one input's work that `topology` computes.
        topology: all devices, those of one replica, or one device of each group.
        inputs_per_s: inputs, or training steps, of the size of `graph`.

    """
    flops = _model_flops(graph)
    peak = {
        name: sum(device.rate_for(name) for device in topology.devices)
        for name, count in flops.items()
        if count
    }
    if not peak:  # no FLOPs: a published problem, or a model without matrix products
        return 0.0
    return inputs_per_s * sum(flops[name] / rate for name, rate in peak.items())


@lru_cache(maxsize=MOST_KEPT_GRAPHS)
def _model_flops(graph: OpGraph) -> Mapping[str, int]:
    """Return the model FLOPs of an input by the name of the peak that limits them."""
    forward = ~graph.is_backward
    flops: dict[str, int] = defaultdict(int)
    counted = graph.flops * forward * (1 if forward.all() else 1 + _backward_passes(graph))
    names, name_of = rate_names(graph)
    for index, count in zip(name_of.tolist(), counted.tolist(), strict=True):
        flops[names[index]] += count
    return flops


def _backward_passes(graph: OpGraph) -> IntArray:
    """Return the backward FLOPs of each operator, in multiples of its forward's."""
    passes = np.full(graph.n_ops, _BACKWARD)
    trained = np.isin(graph.uses, graph.gradient_weights)
    if trained.all():
        return passes
    uses = np.where(trained, _TRAINED, _FROZEN).tolist()
    producers = graph.value_producer[graph.reads].tolist()
    origin: list[int] = []
    """`_FROZEN` or `_TRAINED` for operators on weights only, such as a transpose; 0 for others."""
    for op, (read, use) in enumerate(
        zip(_slices(graph.read_start), _slices(graph.use_start), strict=True)
    ):
        read_origins = [origin[maker] if maker >= 0 else 0 for maker in producers[read]]
        origin_of_op = max(read_origins + uses[use], default=0)
        if origin_of_op == _FROZEN:
            passes[op] = _BACKWARD_OF_FROZEN
        origin.append(origin_of_op if all(read_origins) else 0)
    return passes


def _slices(starts: IntArray) -> Iterator[slice]:
    return map(slice, starts[:-1].tolist(), starts[1:].tolist())


def check_prices(config: Config) -> None:
    """Raise `SpecError` if a price is of an unknown accelerator, or not positive and finite."""
    known = {*accelerator_files(), *(pool.name for pool in config.devices.pools)}
    for name, price in config.price_per_hour.items():
        if name not in known:
            suggestion = nearest_names(name, known)
            raise SpecError(f"price_per_hour: there is no accelerator {name!r}, {suggestion}")
        # OmegaConf accepts a nested mapping in place of a number.
        if not isinstance(price, float | int) or not 0 < price < float("inf"):
            raise SpecError(
                f"price_per_hour.{name} must be positive and finite, in USD, got {price}"
            )


def price_per_hour(config: Config) -> float | None:
    """Return the price of all devices in USD per hour; None if any price is unknown."""
    total = 0.0
    for pool, price in _prices(config):
        if price is None:
            return None
        total += pool.count * price
    return total


def unpriced_line(config: Config) -> str:
    """Return which devices have no price although prices are given; empty if there are none."""
    missing = dict.fromkeys(pool.name for pool, price in _prices(config) if price is None)
    if not config.price_per_hour or not missing:
        return ""
    return f"unknown, as price_per_hour has none of {', '.join(missing)}"


def _prices(config: Config) -> list[tuple[PoolConfig, float | None]]:
    """Return each pool with the price of one of its devices in USD per hour, if known."""
    pools = config.devices.pools
    return [(pool, config.price_per_hour.get(pool.name, pool.price_per_hour)) for pool in pools]


def rate_metrics(
    examples_per_s: float | None,
    tokens_per_s: float | None,
    utilization: float,
    price: float | None,
) -> dict[str, float]:
    """Return the metrics that follow from the throughput; `price` is `price_per_hour`."""
    metrics: dict[str, float] = {}
    if tokens_per_s is not None:
        metrics["tokens_per_s"] = tokens_per_s
    if utilization:
        metrics["mfu_pct"] = utilization * 100
    if price is None:
        return metrics
    metrics["price_per_hour"] = price
    rates = {"examples": examples_per_s, "tokens": tokens_per_s}
    for noun, rate in rates.items():
        if rate:
            metrics[f"price_per_million_{noun}"] = price / 3600 / rate * 1e6
    return metrics


def rate_line(metrics: Mapping[str, float], *, trains: bool) -> str:
    """Return the throughput as text, in tokens for a decode and in examples otherwise.

    A training step adds its MFU; with a price, the cost of a million tokens or examples is added.
    """
    if "tpot_ms" in metrics:
        parts = [rate_text(metrics["tokens_per_s"], "tokens")]
    else:
        parts = [rate_text(metrics["examples_per_s"])]
    if trains and "mfu_pct" in metrics:
        parts.append(f"{metrics['mfu_pct']:.1f}% MFU")
    for noun in ("tokens", "examples"):
        if (price := metrics.get(f"price_per_million_{noun}")) is not None:
            parts.append(f"{price:,.2f} USD per million {noun}")
            break
    return ", ".join(parts)
