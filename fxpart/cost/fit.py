"""Fitting the roofline's coefficients to measured times: `calibrate`.

Least squares on the logarithm of time, each operator weighted by the square root of its time. A
weight of time itself would leave the fit to the few largest operators, and none at all to the
thousands of small ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from fxpart.core.graph import FloatArray, IntArray, OpGraph
from fxpart.cost.calibration import (
    Calibration,
    compute_keys,
    fresh_bytes,
    is_free,
    is_view,
    move_keys,
)
from fxpart.cost.profile import OperatorProfile
from fxpart.errors import SpecError

__all__ = ["calibrate"]

_STARTS = (0.1, 0.5)
"""Quantiles of what the sample achieves, from which the search starts; the best end is kept."""
_SMALLEST, _LARGEST = -70.0, 30.0
"""Bounds of the coefficients' logarithms: seconds, and seconds a FLOP or a byte."""
_FASTER = 10.0
"""How many times as fast as in any operator of the sample a rate may be: where nothing in it is
limited by memory, say, it shows no bandwidth, and any that is high enough would fit."""
_MOVES = 2
"""Place of the first kind of moving among the coefficients, after overhead and fresh bytes; rates
of computing follow."""


@dataclass(frozen=True, eq=False, slots=True)
class _Sample:
    """Operators that compute or move bytes, of all graphs together; m of them."""

    keys: tuple[str, ...]
    """Classes that there are."""
    key: IntArray
    """Class of each operator, -1 where it only moves bytes."""
    flops: FloatArray
    moves: tuple[str, ...]
    """Kinds of moving that there are; the first is that of what computes."""
    move: IntArray
    """Kind of each operator."""
    moved: FloatArray
    fresh: FloatArray
    """Bytes of large results."""
    log_s: FloatArray
    weight: FloatArray


def calibrate(samples: Sequence[tuple[OpGraph, OperatorProfile]]) -> Calibration:
    """Return the coefficients that explain the profiles of some graphs best.

    One rate for each class of computation and dtype in the sample, one memory bandwidth, one
    overhead, one cost of a view, one of a byte of large results. A last common factor lets the sums
    of whole graphs come out right on (geometric) average. Of several graphs, each is predicted from
    the others too (`Calibration.held_out_errors`). The same sample gives the same answer.

    Raises:
        SpecError: for no samples, a profile of another graph, profiles of several devices, or
            graphs that hold no operator that does anything.

    """
    _check(samples)
    calibration = _with_errors(_calibrated(samples), samples)
    return replace(calibration, held_out_errors=_held_out_errors(samples))


def _held_out_errors(samples: Sequence[tuple[OpGraph, OperatorProfile]]) -> tuple[float, ...]:
    """Return how far the sum of each graph is from what a fit to the others predicts.

    Empty where one computes in a dtype that no other does, or others do nothing.
    """
    errors = []
    for index, (graph, profile) in enumerate(samples):
        others = [*samples[:index], *samples[index + 1 :]]
        if not others:
            return ()
        try:
            predicted_s = _calibrated(others).seconds(graph).sum()
        except SpecError:
            return ()
        errors.append(float(predicted_s / profile.seconds.sum() - 1))
    return tuple(errors)


def _calibrated(samples: Sequence[tuple[OpGraph, OperatorProfile]]) -> Calibration:
    fitted, measured = _gathered(samples), [profile.seconds for _, profile in samples]
    best = min((_fit(fitted, start) for start in _starts(fitted)), key=lambda end: end[0])[1]
    calibration = _as_calibration(fitted, best, _view_s(samples), samples[0][1].device_name)
    ratios = [
        s.sum() / calibration.seconds(g).sum() for (g, _), s in zip(samples, measured, strict=True)
    ]
    factor = float(np.exp(np.mean(np.log(ratios))))
    calibration = replace(
        calibration,
        overhead_s=calibration.overhead_s * factor,
        view_s=calibration.view_s * factor,
        fresh_s_per_byte=calibration.fresh_s_per_byte * factor,
        bytes_per_s=calibration.bytes_per_s / factor,
        flops_per_s={key: rate / factor for key, rate in calibration.flops_per_s.items()},
        moves_per_s={kind: rate / factor for kind, rate in calibration.moves_per_s.items()},
    )
    return calibration


def _check(samples: Sequence[tuple[OpGraph, OperatorProfile]]) -> None:
    if not samples:
        raise SpecError("nothing to calibrate on: give at least one graph and its profile")
    for index, (graph, profile) in enumerate(samples):
        if graph.n_ops != len(profile.seconds):
            raise SpecError(
                f"sample {index} has {graph.n_ops} operators and a profile of"
                f" {len(profile.seconds)}; give the profile of that graph"
            )
    devices = list(dict.fromkeys(profile.device_name for _, profile in samples))
    if len(devices) > 1:
        raise SpecError(
            f"the profiles are of {len(devices)} devices ({'; '.join(devices)}); calibrate each"
            " device by itself"
        )


def _gathered(samples: Sequence[tuple[OpGraph, OperatorProfile]]) -> _Sample:
    """Return all operators that do something and took a time that has a logarithm."""
    labels: list[str] = []
    kinds: list[str] = []
    flops, moved, fresh, seconds = [], [], [], []
    for graph, profile in samples:
        chosen = np.flatnonzero(~is_view(graph) & ~is_free(graph) & (profile.seconds > 0))
        keys, moves = compute_keys(graph), move_keys(graph)
        labels += [keys[op] for op in chosen.tolist()]
        kinds += [moves[op] for op in chosen.tolist()]
        flops.append(graph.flops[chosen])
        moved.append(graph.moved_bytes[chosen])
        fresh.append(fresh_bytes(graph)[chosen])
        seconds.append(profile.seconds[chosen])
    if not labels:
        raise SpecError(
            "nothing to calibrate on: no operator of the sample computes or moves bytes; give the"
            " profile of a whole model"
        )
    known, known_moves = tuple(sorted(set(labels) - {""})), tuple(sorted({"", *kinds}))
    time_s = np.concatenate(seconds)
    return _Sample(
        known,
        np.array([known.index(label) if label else -1 for label in labels], dtype=np.int64),
        np.concatenate(flops).astype(np.float64),
        known_moves,
        np.array([known_moves.index(kind) for kind in kinds], dtype=np.int64),
        np.concatenate(moved).astype(np.float64),
        np.concatenate(fresh).astype(np.float64),
        np.log(time_s),
        time_s**0.25,  # of the residual: its square then counts by the square root of time
    )


def _view_s(samples: Sequence[tuple[OpGraph, OperatorProfile]]) -> float:
    """Return the least-squares cost of a view; 0 where the sample has none."""
    chosen = [is_view(g) & ~is_free(g) & (p.seconds > 0) for g, p in samples]
    of_views = [p.seconds[views] for (_, p), views in zip(samples, chosen, strict=True)]
    time_s = np.concatenate(of_views)
    if not len(time_s):
        return 0.0
    return float(np.exp(np.average(np.log(time_s), weights=np.sqrt(time_s))))


def _starts(sample: _Sample) -> list[FloatArray]:
    """Return coefficients to start from: logs of overhead, and seconds a byte, fresh byte, FLOP."""
    time_s = np.exp(sample.log_s)
    moves, starts = sample.moved > 0, []
    for small, quick in product(_STARTS, _STARTS):
        every_s = _quantile(time_s[moves] / sample.moved[moves], quick)
        costs = [_quantile(time_s, small), every_s]
        for move in range(len(sample.moves)):
            of_move = moves & (sample.move == move)
            some = time_s[of_move] / sample.moved[of_move]
            costs.append(_quantile(some, quick) if len(some) else every_s)
        for key in range(len(sample.keys)):
            of_key = sample.key == key
            costs.append(_quantile(time_s[of_key] / sample.flops[of_key], quick))
        starts.append(np.clip(np.log(costs), _SMALLEST + 1, _LARGEST - 1))
    return starts


def _least(sample: _Sample) -> FloatArray:
    """Return the smallest coefficients that the search may find."""
    time_s, moves = np.exp(sample.log_s), sample.moved > 0
    first_rate = _MOVES + len(sample.moves)
    least = np.full(first_rate + len(sample.keys), _SMALLEST)
    for move in range(len(sample.moves)):
        of_move = moves & (sample.move == move)
        if of_move.any():
            least[_MOVES + move] = np.log(np.min(time_s[of_move] / sample.moved[of_move]) / _FASTER)
    for key in range(len(sample.keys)):
        of_key = sample.key == key
        least[first_rate + key] = np.log(np.min(time_s[of_key] / sample.flops[of_key]) / _FASTER)
    least[:] = np.maximum(least, _SMALLEST)
    return least


def _quantile(costs: FloatArray, share: float) -> float:
    return float(np.quantile(costs, share)) if len(costs) else 1.0


def _busy(sample: _Sample, logs: FloatArray) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Return how long each operator computes or moves bytes, and which of them compute longer."""
    costs = np.append(np.exp(logs[_MOVES:]), 0.0)  # the last is that of class -1
    rates = costs[len(sample.moves) :]
    computes, moves = sample.flops * rates[sample.key], sample.moved * costs[sample.move]
    return np.maximum(computes, moves), computes > moves


def _fit(sample: _Sample, start: FloatArray) -> tuple[float, FloatArray]:
    """Return the remaining cost, and the coefficients, that the search from `start` ends at."""
    from scipy.optimize import least_squares

    def residual(logs: FloatArray) -> FloatArray:
        fixed_s = np.exp(logs[0]) + sample.fresh * np.exp(logs[1])
        predicted = np.log(fixed_s + _busy(sample, logs)[0])
        residuals: FloatArray = sample.weight * (predicted - sample.log_s)
        return residuals

    def jacobian(logs: FloatArray) -> FloatArray:
        busy, computes = _busy(sample, logs)
        overhead_s, fresh_s = np.exp(logs[0]), sample.fresh * np.exp(logs[1])
        share = sample.weight / (overhead_s + fresh_s + busy)
        columns = np.zeros((len(busy), len(logs)))
        columns[:, 0] = share * overhead_s
        columns[:, 1] = share * fresh_s
        limits = [~computes & (sample.move == move) for move in range(len(sample.moves))]
        limits += [computes & (sample.key == key) for key in range(len(sample.keys))]
        for place, limited in enumerate(limits, _MOVES):
            columns[:, place] = share * np.where(limited, busy, 0.0)
        return columns

    end = least_squares(
        residual,
        start,
        jacobian,
        bounds=(_least(sample), _LARGEST),
        xtol=1e-15,
        ftol=1e-15,
        gtol=1e-15,
    )
    return float(end.cost), np.asarray(end.x, dtype=np.float64)


def _as_calibration(
    sample: _Sample, logs: FloatArray, view_s: float, device_name: str
) -> Calibration:
    kinds = [*sample.moves, *sample.keys]
    rate_of = dict(zip(kinds, np.exp(-logs[_MOVES:]).tolist(), strict=True))
    return Calibration(
        overhead_s=float(np.exp(logs[0])),
        view_s=view_s,
        bytes_per_s=rate_of[""],
        flops_per_s={key: rate_of[key] for key in sample.keys},
        device_name=device_name,
        fresh_s_per_byte=float(np.exp(logs[1])) if sample.fresh.any() else 0.0,
        moves_per_s={kind: rate_of[kind] for kind in sample.moves if kind},
    )


def _with_errors(
    calibration: Calibration, samples: Sequence[tuple[OpGraph, OperatorProfile]]
) -> Calibration:
    """Return `calibration` with how far it is from what it was fitted to."""
    predicted = [calibration.seconds(graph) for graph, _ in samples]
    measured = [profile.seconds for _, profile in samples]
    working = np.concatenate([~is_view(graph) & ~is_free(graph) for graph, _ in samples])
    kinds = np.array([kind for graph, _ in samples for kind in _kinds(graph)])
    all_predicted, all_measured = np.concatenate(predicted), np.concatenate(measured)
    return replace(
        calibration,
        total_errors=tuple(
            float(p.sum() / m.sum() - 1) for p, m in zip(predicted, measured, strict=True)
        ),
        op_error=float(np.abs(all_predicted - all_measured).sum() / all_measured.sum()),
        spearman=_spearman(all_predicted[working], all_measured[working]),
        spread=_spread(kinds[working], all_predicted[working], all_measured[working]),
    )


def _kinds(graph: OpGraph) -> list[str]:
    """Return the class and dtype of what computes, and the kind of what moves bytes."""
    moves = move_keys(graph)
    return [key or move or "move" for key, move in zip(compute_keys(graph), moves, strict=True)]


def _spread(
    kinds: npt.NDArray[np.str_], predicted: FloatArray, measured: FloatArray
) -> dict[str, float]:
    """Return by kind the root mean square of the logarithm of predicted / measured, as a factor."""
    takes = (predicted > 0) & (measured > 0)
    spread = {}
    for kind in sorted(set(kinds[takes].tolist())):
        of_kind = takes & (kinds == kind)
        squares = np.log(predicted[of_kind] / measured[of_kind]) ** 2
        mean = np.average(squares, weights=np.sqrt(measured[of_kind]))
        spread[kind] = float(np.exp(np.sqrt(mean)))
    return spread


def _spearman(a: FloatArray, b: FloatArray) -> float:
    """Return the rank correlation of two samples; 0 where one of them is constant."""
    first, second = _ranks(a), _ranks(b)
    spread = float(first.std() * second.std())
    if spread == 0:
        return 0.0
    return float(np.mean((first - first.mean()) * (second - second.mean())) / spread)


def _ranks(values: FloatArray) -> FloatArray:
    """Return the rank of each value, equal ones sharing the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    after = np.cumsum(count)
    ranks: FloatArray = (after - (count - 1) / 2.0)[place]
    return ranks
