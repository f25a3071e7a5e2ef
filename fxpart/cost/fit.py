"""Fit the roofline's coefficients to measured times: `calibrate`.

Least squares on the logarithm of time, with each operator weighted by the square root of its time.
Weighting by time itself would let the few largest operators decide the fit, and no weighting the
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
"""Quantiles of the sample's achieved costs used as starting points; the best fit wins."""
_SMALLEST, _LARGEST = -70.0, 30.0
"""Bounds of the logarithms of coefficients, in s, s per FLOP or s per byte."""
_FASTER = 10.0
"""Limit of a rate, as a multiple of the fastest operator of the sample. If nothing in it is
memory-bound, for example, the bandwidth is undetermined and any high enough value would fit."""
_PARTS = 4
"""Parts of a single graph's operators, each predicted by a fit to the others."""
_MOVES = 2
"""Index of the first memory rate among the coefficients, after overhead and fresh bytes; compute
rates follow."""


@dataclass(frozen=True, eq=False, slots=True)
class _Sample:
    """The m operators of all graphs that compute or move bytes."""

    keys: tuple[str, ...]
    """Compute classes in the sample."""
    key: IntArray
    """Compute class of each operator, -1 if it only moves bytes."""
    flops: FloatArray
    moves: tuple[str, ...]
    """Kinds of memory traffic in the sample; operators with FLOPs have the first."""
    move: IntArray
    """Kind of memory traffic of each operator."""
    moved: FloatArray
    fresh: FloatArray
    """Bytes of large results."""
    log_s: FloatArray
    weight: FloatArray


def calibrate(samples: Sequence[tuple[OpGraph, OperatorProfile]]) -> Calibration:
    """Fit a calibration to the profiles of some graphs.

    There is one rate per compute class and dtype in the sample, one memory bandwidth per kind, an
    overhead, a cost of a view, and one of a byte of large results. A final common factor makes the
    totals of whole graphs right on (geometric) average. Each graph is also predicted from the
    others, or the operators of a single one by parts (`Calibration.held_out_errors`). Operators
    without a measured time are left out. The result is deterministic.

    Raises:
        SpecError: if there are no samples, a profile belongs to another graph, profiles are from
            several devices, or no operator computes or moves anything.

    """
    _check(samples)
    calibration = _with_errors(_calibrated(samples), samples)
    lost_share = max(profile.lost_share for _, profile in samples)
    return replace(calibration, held_out_errors=_held_out_errors(samples), lost_share=lost_share)


def _held_out_errors(samples: Sequence[tuple[OpGraph, OperatorProfile]]) -> tuple[float, ...]:
    """Return the leave-one-out error of the total time of each graph, or that of one by parts.

    Empty if a graph computes in a dtype that no other does, or the others do nothing.
    """
    errors = []
    try:
        if len(samples) == 1:
            return _error_by_parts(*samples[0])
        for index, (graph, profile) in enumerate(samples):
            others = _calibrated([*samples[:index], *samples[index + 1 :]])
            predicted_s = _predicted_s(others, graph, profile)
            errors.append(float(predicted_s.sum() / profile.seconds.sum() - 1))
    except SpecError:
        return ()
    return tuple(errors)


def _error_by_parts(graph: OpGraph, profile: OperatorProfile) -> tuple[float, ...]:
    """Return the relative error of the operators' total, each part predicted from the others.

    Operators of the same kind and sizes share a part. A kind with a single size is always fitted
    and never predicted; empty if no other kind exists.
    """
    fitted = np.flatnonzero(~is_view(graph) & ~is_free(graph) & (profile.seconds > 0))
    kinds = np.unique(np.array(_kinds(graph))[fitted], return_inverse=True)[1]
    sizes = (graph.flops, graph.moved_bytes, fresh_bytes(graph))
    works = np.stack([kinds, *(size[fitted] for size in sizes)])
    distinct, work_of = np.unique(works, axis=1, return_inverse=True)
    is_alone = np.bincount(distinct[0])[kinds] == 1
    part_of = np.full(graph.n_ops, -1)
    part_of[fitted] = np.where(is_alone, -1, work_of.ravel() % _PARTS)
    predicted_s, measured_s = 0.0, float(profile.seconds[part_of >= 0].sum())
    if not measured_s:
        return ()
    for part in range(_PARTS):
        in_part = part_of == part
        others = replace(profile, seconds=np.where(in_part, 0.0, profile.seconds))
        predicted_s += float(_calibrated([(graph, others)]).seconds(graph)[in_part].sum())
    return (predicted_s / measured_s - 1,)


def _predicted_s(calibration: Calibration, graph: OpGraph, profile: OperatorProfile) -> FloatArray:
    """Return the predicted times, 0 for operators without a measured one. Shape (n,)."""
    return np.where(profile.seconds > 0, calibration.seconds(graph), 0.0)


def _calibrated(samples: Sequence[tuple[OpGraph, OperatorProfile]]) -> Calibration:
    fitted = _gathered(samples)
    best = min((_fit(fitted, start) for start in _starts(fitted)), key=lambda end: end[0])[1]
    calibration = _as_calibration(fitted, best, _view_s(samples), samples[0][1].device_name)
    ratios = [p.seconds.sum() / _predicted_s(calibration, g, p).sum() for g, p in samples]
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
    """Return all operators that compute or move bytes and took a positive time."""
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
    known_keys, known_moves = tuple(sorted(set(labels) - {""})), tuple(sorted({"", *kinds}))
    time_s = np.concatenate(seconds)
    return _Sample(
        known_keys,
        np.array([known_keys.index(label) if label else -1 for label in labels], dtype=np.int64),
        np.concatenate(flops).astype(np.float64),
        known_moves,
        np.array([known_moves.index(kind) for kind in kinds], dtype=np.int64),
        np.concatenate(moved).astype(np.float64),
        np.concatenate(fresh).astype(np.float64),
        np.log(time_s),
        time_s**0.25,  # the squared residual is then weighted by the square root of time
    )


def _view_s(samples: Sequence[tuple[OpGraph, OperatorProfile]]) -> float:
    """Return the least-squares cost of a view; 0 if the sample has none."""
    chosen = [is_view(g) & ~is_free(g) & (p.seconds > 0) for g, p in samples]
    of_views = [p.seconds[views] for (_, p), views in zip(samples, chosen, strict=True)]
    time_s = np.concatenate(of_views)
    if not len(time_s):
        return 0.0
    return float(np.exp(np.average(np.log(time_s), weights=np.sqrt(time_s))))


def _starts(sample: _Sample) -> list[FloatArray]:
    """Return starting points: logs of overhead, and seconds per fresh byte, byte and FLOP."""
    time_s = np.exp(sample.log_s)
    moves, starts = sample.moved > 0, []
    for small, quick in product(_STARTS, _STARTS):
        s_per_byte = _quantile(time_s[moves] / sample.moved[moves], quick)
        costs = [_quantile(time_s, small), s_per_byte]
        for move in range(len(sample.moves)):
            of_move = moves & (sample.move == move)
            costs_per_byte = time_s[of_move] / sample.moved[of_move]
            costs.append(_quantile(costs_per_byte, quick) if len(costs_per_byte) else s_per_byte)
        for key in range(len(sample.keys)):
            of_key = sample.key == key
            costs.append(_quantile(time_s[of_key] / sample.flops[of_key], quick))
        starts.append(np.clip(np.log(costs), _SMALLEST + 1, _LARGEST - 1))
    return starts


def _least(sample: _Sample) -> FloatArray:
    """Return the lower bounds of the coefficients."""
    time_s, moves = np.exp(sample.log_s), sample.moved > 0
    first_rate = _MOVES + len(sample.moves)
    lower = np.full(first_rate + len(sample.keys), _SMALLEST)
    for move in range(len(sample.moves)):
        of_move = moves & (sample.move == move)
        if of_move.any():
            lower[_MOVES + move] = np.log(np.min(time_s[of_move] / sample.moved[of_move]) / _FASTER)
    for key in range(len(sample.keys)):
        of_key = sample.key == key
        lower[first_rate + key] = np.log(np.min(time_s[of_key] / sample.flops[of_key]) / _FASTER)
    lower[:] = np.maximum(lower, _SMALLEST)
    return lower


def _quantile(costs: FloatArray, share: float) -> float:
    return float(np.quantile(costs, share)) if len(costs) else 1.0


def _parts(sample: _Sample, logs: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the time of each operator for computing, and for moving bytes."""
    costs = np.append(np.exp(logs[_MOVES:]), 0.0)  # the last is for class -1
    rates = costs[len(sample.moves) :]
    return sample.flops * rates[sample.key], sample.moved * costs[sample.move]


def _fit(sample: _Sample, start: FloatArray) -> tuple[float, FloatArray]:
    """Return the residual cost and the coefficients of the fit from `start`."""
    from scipy.optimize import least_squares

    def residual(logs: FloatArray) -> FloatArray:
        fixed_s = np.exp(logs[0]) + sample.fresh * np.exp(logs[1])
        predicted = np.log(fixed_s + sum(_parts(sample, logs)))
        residuals: FloatArray = sample.weight * (predicted - sample.log_s)
        return residuals

    def jacobian(logs: FloatArray) -> FloatArray:
        computing_s, moving_s = _parts(sample, logs)
        overhead_s, fresh_s = np.exp(logs[0]), sample.fresh * np.exp(logs[1])
        share = sample.weight / (overhead_s + fresh_s + computing_s + moving_s)
        columns = [share * overhead_s, share * fresh_s]
        columns += [share * moving_s * (sample.move == m) for m in range(len(sample.moves))]
        columns += [share * computing_s * (sample.key == k) for k in range(len(sample.keys))]
        return np.stack(columns, axis=1)

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
    """Return `calibration` with its errors on the sample."""
    predicted = [_predicted_s(calibration, graph, profile) for graph, profile in samples]
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
    """Return the compute class and dtype of each operator, or else its kind of memory traffic."""
    moves = move_keys(graph)
    return [key or move or "move" for key, move in zip(compute_keys(graph), moves, strict=True)]


def _spread(
    kinds: npt.NDArray[np.str_], predicted: FloatArray, measured: FloatArray
) -> dict[str, float]:
    """Return the typical factor between predicted and measured times by kind (RMS of logs)."""
    is_positive = (predicted > 0) & (measured > 0)
    spread = {}
    for kind in sorted(set(kinds[is_positive].tolist())):
        of_kind = is_positive & (kinds == kind)
        squares = np.log(predicted[of_kind] / measured[of_kind]) ** 2
        mean = np.average(squares, weights=np.sqrt(measured[of_kind]))
        spread[kind] = float(np.exp(np.sqrt(mean)))
    return spread


def _spearman(a: FloatArray, b: FloatArray) -> float:
    """Return the rank correlation of two samples; 0 if either is constant."""
    first, second = _ranks(a), _ranks(b)
    spread = float(first.std() * second.std())
    if spread == 0:
        return 0.0
    return float(np.mean((first - first.mean()) * (second - second.mean())) / spread)


def _ranks(values: FloatArray) -> FloatArray:
    """Return the rank of each value; ties share their mean rank."""
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    after = np.cumsum(sizes)
    ranks: FloatArray = (after - (sizes - 1) / 2.0)[group]
    return ranks
