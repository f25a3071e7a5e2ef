"""What people compare plans by: tokens per second, MFU, and money."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.topology import Topology
from fxpart.errors import SpecError, nearest_names
from runner.config.sections import Config
from runner.config.specs import accelerator_files
from runner.output.terminal import rate_text

__all__ = ["check_prices", "model_flops_utilization", "price_per_hour", "rate_line", "rate_metrics"]

_BACKWARD = 2
"""FLOPs of a backward beside those of its forward: a product for each of the two operands."""
_BACKWARD_OF_FROZEN = 1
"""The same of a weight that is not trained, whose gradient is not computed."""
_FROZEN, _TRAINED = 1, 2
"""Weights without a gradient; one at least that has it."""


def model_flops_utilization(graph: OpGraph, topology: Topology, inputs_per_s: float) -> float:
    """Return the share of the devices' peak FLOP/s that the model's own FLOPs come to.

    Those are the matrix products, convolutions and attention of the forward, and twice as many for
    a backward, however much is computed again: Chowdhery et al.: PaLM, appendix B,
    arXiv:2204.02311. Frozen weights have no gradient, so that their backward is as many. Each
    dtype counts at its own peak, and devices that wait count too.

    Args:
        graph: what `topology` computes of one input.
        topology: the devices, or those of one replica, or one device of each group.
        inputs_per_s: inputs, or steps of training, as large as that of `graph`.

    """
    forward = ~graph.is_backward
    flops: dict[str, int] = defaultdict(int)
    counted = graph.flops * forward * (1 if forward.all() else 1 + _backward_passes(graph))
    for dtype, count in zip(graph.dtypes, counted.tolist(), strict=True):
        flops[dtype] += count
    peak = {
        dtype: sum(device.rate_for(dtype) for device in topology.devices)
        for dtype, count in flops.items()
        if count
    }
    if not peak:  # nothing that counts: a published problem, or a model of sums
        return 0.0
    return inputs_per_s * sum(flops[dtype] / rate for dtype, rate in peak.items())


def _backward_passes(graph: OpGraph) -> IntArray:
    """Return the FLOPs of the backward of each operator, in those of its forward."""
    passes = np.full(graph.n_ops, _BACKWARD)
    trained = np.isin(graph.uses, graph.gradient_weights)
    if trained.all():
        return passes
    uses = np.where(trained, _TRAINED, _FROZEN).tolist()
    producers = graph.value_producer[graph.reads].tolist()
    made: list[int] = []
    """What each operator's results are made of, where that is weights alone, as a transpose's."""
    for op, (read, use) in enumerate(
        zip(_slices(graph.read_start), _slices(graph.use_start), strict=True)
    ):
        of_reads = [made[maker] if maker >= 0 else 0 for maker in producers[read]]
        most = max(of_reads + uses[use], default=0)
        if most == _FROZEN:
            passes[op] = _BACKWARD_OF_FROZEN
        made.append(most if all(of_reads) else 0)
    return passes


def _slices(starts: IntArray) -> Iterator[slice]:
    return map(slice, starts[:-1].tolist(), starts[1:].tolist())


def check_prices(config: Config) -> None:
    """Raise `SpecError` for a price of what is no accelerator, or that is none."""
    known = {*accelerator_files(), *(pool.name for pool in config.devices.pools)}
    for name, price in config.price_per_hour.items():
        if name not in known:
            near = nearest_names(name, known)
            raise SpecError(f"price_per_hour: there is no accelerator {name!r}, {near}")
        # A mapping inside of one passes for a number in what OmegaConf reads.
        if not isinstance(price, float | int) or not 0 < price < float("inf"):
            raise SpecError(
                f"price_per_hour.{name} must be positive and finite, in USD, is {price}"
            )


def price_per_hour(config: Config) -> float | None:
    """Return what all devices cost in an hour, in USD; None where the price of one is not known."""
    total = 0.0
    for pool in config.devices.pools:
        price = config.price_per_hour.get(pool.name, pool.price_per_hour)
        if price is None:
            return None
        total += pool.count * price
    return total


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
    """Return the throughput in a few words: tokens of a decode, else examples.

    A training step has its MFU, too, and what has a price that of a million tokens, or examples.
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
