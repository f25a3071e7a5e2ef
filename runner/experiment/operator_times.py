"""Operator times: assumed, measured, or fitted to measurements."""

from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fxpart.capture.captured import step_key
from fxpart.core.few_bits import cache_share
from fxpart.core.graph import IntArray, OpGraph
from fxpart.core.topology import DeviceSpec, Topology
from fxpart.cost.async_tensor import AsyncTensorTimes
from fxpart.cost.calibration import Calibration, read_calibration
from fxpart.cost.collective_times import TimesWithCollectives
from fxpart.cost.collectives import CollectiveCurves
from fxpart.cost.curves.family import CurveFamily, family_from
from fxpart.cost.curves.model import KernelModel
from fxpart.cost.curves.tables import MeasuredTables
from fxpart.cost.dequantized import TimesDequantized, TimesWithCastInputs
from fxpart.cost.float8 import TimesInFloat8
from fxpart.cost.profile import OperatorProfile, profile_path, read_profile, write_profile
from fxpart.cost.roofline import LatencyModel
from fxpart.cost.tables import LatencySource
from fxpart.cost.trace import TraceTimes, read_trace
from fxpart.errors import NotApplicableError, SpecError, nearest_names
from runner.config.auto_latency import roofline_reason
from runner.config.schema import Config, LatencyConfig
from runner.experiment.measured_tables import check_tables, tables_of
from runner.experiment.subject import Subject, symbols_of
from runner.experiment.training import is_megatron, is_training, step_options
from runner.output.terminal import counted, progress

__all__ = [
    "MOST_MEASURED",
    "check_latency",
    "innermost",
    "is_measured",
    "operator_times",
    "ring_curves",
    "roofline_on",
    "source_note",
]

MOST_MEASURED = {"repeats": 10_000, "threads": 1024}
"""Most repeats of a measurement, and most threads, within what systems allow."""
_READ_BY = {"tables": ("kernels",), "file": ("calibrated", "trace")}
"""The sources that read each setting that names files."""
_MOST_LOST = 0.3
"""Largest share of time lost to other work. Above it, several threads are refused, and cached times
of one thread, which has its own clock, are measured again."""
_BUSY = 0.1
"""Least share of time lost to other work that is reported."""


def check_latency(config: Config) -> None:
    """Raise `SpecError` if the source of operator times is unknown or cannot be used."""
    latency = config.latency
    if latency.source not in SOURCES:
        raise SpecError(
            f"latency.source={latency.source} does not exist;"
            f" {nearest_names(latency.source, SOURCES)}"
        )
    for name, limit in MOST_MEASURED.items():
        if not 1 <= getattr(latency, name) <= limit:
            raise SpecError(
                f"latency.{name}={getattr(latency, name)} must be a number from 1 to {limit}"
            )
    for name, sources in _READ_BY.items():
        if getattr(latency, name) and latency.source not in sources:
            raise NotApplicableError(
                f"latency.{name}={getattr(latency, name)} is read with latency="
                f"{' or latency='.join(sources)}, got latency={latency.name}; leave it out, or"
                " change the source"
            )
    _roofline(latency)
    if latency.source == "kernels":
        check_tables(_kernel_model(latency).tables, config.devices.pools)
    if latency.source == "trace":
        _trace_times(latency)
    if latency.source in ("kernels", "trace") and config.capture.symbolic != "none":
        raise SpecError(
            f"latency={latency.name} has times that are not polynomials, but "
            f"capture.symbolic={config.capture.symbolic} needs formulas; use latency=roofline"
        )
    if latency.source != "roofline" and config.capture.level != "operator":
        does = {"kernels": "has curves of", "trace": "has times of"}.get(latency.source, "measures")
        raise SpecError(
            f"latency={latency.name} {does} operators, got capture.level={config.capture.level};"
            " use capture.level=operator, or latency=roofline"
        )
    if is_measured(latency):
        _check_measurable(config)


def _check_measurable(config: Config) -> None:
    """Raise `SpecError` if sizes are symbolic, or if optimizer updates would be measured."""
    if symbols_of(config):
        override = (
            f"data_parallel={config.data_parallel}"
            if config.data_parallel > 1
            else f"capture.symbolic={config.capture.symbolic}"
        )
        raise SpecError(
            f"latency={config.latency.name} measures operators at one size, but {override} "
            "captures them for all sizes; use latency=roofline, or a calibration from a file "
            "(latency.file)"
        )
    if is_training(config) and config.optimizer.name != "none":
        raise SpecError(
            f"latency={config.latency.name} measures operators of the model, not the updates of "
            f"optimizer={config.optimizer.name}; add optimizer=none, or use latency=roofline"
        )


def is_measured(latency: LatencyConfig) -> bool:
    """Return whether the model's own operators are measured on this machine."""
    return latency.source == "profiled" or (latency.source == "calibrated" and not latency.file)


def operator_times(config: Config, subject: Subject, model: Mapping[str, object]) -> LatencySource:
    """Return the source of the subject's operator times.

    `model` is the `ModelSpec.key` of the model. Measurements are cached with the captured graphs.

    Raises:
        FxpartError: if operators cannot be measured, or a calibration cannot be read.

    """
    if subject.workload is not None:
        return subject.workload
    return SOURCES[config.latency.source](config, subject, model)


def _assumed(config: Config, subject: Subject, model: Mapping[str, object]) -> LatencySource:
    return _roofline(config.latency)


def _kernels(config: Config, subject: Subject, model: Mapping[str, object]) -> LatencySource:
    layout, kv_cache = config.weights.name, config.kv_cache
    share = 1.0 if kv_cache == "auto" else cache_share(subject.captured.graph, kv_cache)
    return replace(
        _kernel_model(config.latency),
        cache_share=share,
        layout="" if layout == "none" else layout,
        runs_torch=not is_megatron(config),
        is_compiled=config.runtime.name == "compiled",
    )


def _traced(config: Config, subject: Subject, model: Mapping[str, object]) -> LatencySource:
    return _trace_times(config.latency)


def _trace_times(latency: LatencyConfig) -> TraceTimes:
    if not latency.file:
        raise SpecError(
            "latency=trace needs a trace of torch.profiler; name it with latency.file=trace.json"
        )
    return TraceTimes(read_trace(Path(latency.file)), _roofline(latency))


def ring_curves(
    latency: LatencyConfig, topology: Topology, rings: IntArray
) -> CollectiveCurves | None:
    """Return the measured NCCL curves for the links of `rings`, if any.

    They apply with ``latency=kernels``, to devices of one family in one machine, on links of the
    measured rate. None means that collectives run at the rates of their links.

    Args:
        latency: the source of operator times.
        topology: all devices.
        rings: the devices of each ring, shape (rings, devices).

    """
    if latency.source != "kernels":
        return None
    members = [[topology.devices[device] for device in ring] for ring in rings.tolist()]
    if any(len({device.node for device in ring}) > 1 for ring in members):
        return None
    devices = [device for ring in members for device in ring]
    families = {device.curves for device in devices}
    model = _kernel_model(latency)
    if len(families) > 1 or not families <= set(model.families):
        return None
    if not all(model.has_curves(device) for device in devices):
        return None
    family = model.families[families.pop()]
    rates = topology.bytes_per_s[rings, np.roll(rings, -1, axis=1)]
    # A ring of one has no links: the rate of a device to itself is infinite.
    links = rates[np.isfinite(rates)]
    if family.link_bytes_per_s is None or not np.allclose(links, family.link_bytes_per_s):
        return None
    return family.collectives


_known_families = deque[tuple[Mapping[str, Any], dict[str, CurveFamily]]](maxlen=4)
"""Curves as configured, and parsed: the plans of a recommendation have the same."""


def _families(curves: Mapping[str, Any]) -> dict[str, CurveFamily]:
    for known, families in tuple(_known_families):
        if known == curves:
            return families
    families = {str(name): family_from(name, stated) for name, stated in curves.items()}
    _known_families.append((deepcopy(curves), families))
    return families


def _kernel_model(latency: LatencyConfig) -> KernelModel:
    tables = tables_of(latency)
    return KernelModel(
        _families(latency.curves), _roofline(latency), tables, carries=latency.carries_curves
    )


def roofline_on(latency: LatencyConfig, device: DeviceSpec) -> LatencyModel:
    """Return the roofline of a device, or that of its operators without a curve."""
    if latency.source == "kernels":
        return _kernel_model(latency).roofline_on(device)
    return _roofline(latency)


def _roofline(latency: LatencyConfig) -> LatencyModel:
    return LatencyModel(
        compute_efficiency=latency.compute_efficiency,
        bandwidth_efficiency=latency.bandwidth_efficiency,
        op_overhead_s=latency.op_overhead_s,
    )


def _fitted(config: Config, subject: Subject, model: Mapping[str, object]) -> LatencySource:
    """Return the calibration from a file, or one fitted to the subject's measured times."""
    if config.latency.file:
        return read_calibration(Path(config.latency.file))
    from fxpart.cost.fit import calibrate

    return calibrate([(subject.captured.graph, _profile(config, subject, model))])


def _profile(config: Config, subject: Subject, model: Mapping[str, object]) -> OperatorProfile:
    """Return the measured times of the subject's operators, from the cache if possible."""
    latency, graph = config.latency, subject.captured.graph
    cache_dir = Path(config.capture.cache_dir) if config.capture.use_cache else None
    key = {
        "model": model,
        "phase": config.phase.name,
        "step": step_key(
            config.phase.name, train_mode=config.phase.train_mode, options=step_options(config)
        ),
        "executed": subject.real is not None,
        "threads": latency.threads,
        "repeats": latency.repeats,
    }
    path = profile_path(cache_dir, key, latency.device) if cache_dir else None
    cached = read_profile(path, graph) if path else None
    if cached is not None and cached.lost_share <= _MOST_LOST:
        return cached
    with progress(f"measuring {counted(graph.n_ops, 'operator')} on {latency.device}"):
        measured = _measured(latency, subject, cache_dir)
    if path:
        write_profile(path, graph, measured)
    return measured


def _measured(latency: LatencyConfig, subject: Subject, cache_dir: Path | None) -> OperatorProfile:
    from fxpart.execution.device import torch_threads
    from fxpart.execution.profiling.api import profile_operators

    with torch_threads(latency.threads):
        return profile_operators(
            subject.program(),
            subject.captured.graph,
            device=latency.device,
            cache_dir=cache_dir,
            repeats=latency.repeats,
            most_lost=_MOST_LOST,
        )


SOURCES: Mapping[str, Callable[[Config, Subject, Mapping[str, object]], LatencySource]] = {
    "roofline": _assumed,
    "kernels": _kernels,
    "profiled": _profile,
    "calibrated": _fitted,
    "trace": _traced,
}
"""The values of ``latency.source``."""


def innermost(times: LatencySource) -> LatencySource:
    """Return the source of times of kernels alone, without what a plan adds to them.

    That is collectives, products in 8 bits, and copies of dequantized weights.
    """
    added = (
        TimesWithCollectives
        | AsyncTensorTimes
        | TimesInFloat8
        | TimesDequantized
        | TimesWithCastInputs
    )
    while isinstance(times, added):
        times = times.others
    return times


def source_note(config: Config, times: LatencySource, graph: OpGraph) -> str:
    """Return a note on the source of times; empty for an undisturbed profile and a roofline."""
    if isinstance(times, KernelModel):
        return _curves_note(config, times, graph)
    if isinstance(times, LatencyModel):
        return _roofline_note(config)
    if isinstance(times, TraceTimes):
        covered = times.coverage(graph).sentence()
        return f"of {config.latency.file}, the same for every device: {covered}"
    notes = []
    if isinstance(times, Calibration):
        notes.append(_calibration_note(config.latency.file, times))
    if isinstance(times, Calibration | OperatorProfile):
        notes.append(busy_note(times))
    return "; ".join(filter(None, notes))


def _calibration_note(file: str | None, times: Calibration) -> str:
    """Return the origin of a fit, and how far it is off what it was not fitted to."""
    source = f"of {file}" if file else "fitted to this model's operators"
    errors = times.held_out_errors
    if not errors:
        return f"{source}, error on other operators unknown"
    if len(errors) == 1:
        return f"{source}, error on held-out operators {errors[0]:+.1%} in total"
    worst = max(errors, key=abs)
    return f"{source}, worst error of {len(errors)} held-out models {worst:+.1%}"


def busy_note(times: Calibration | OperatorProfile) -> str:
    """Return a note on other work during a measurement; empty if there was little."""
    if times.lost_share <= _BUSY:
        return ""
    return (
        f"other processes used the processor for {times.lost_share:.0%} of the measurement; "
        "operators are charged for their own processor time"
    )


def _curves_note(config: Config, times: KernelModel, graph: OpGraph) -> str:
    """Return what tables cover, which devices use curves, and what lacks both."""
    notes = []
    if times.tables:
        notes += _table_notes(config, times, times.tables, graph)
    if not times.carries:
        pools = config.devices.pools
        has_own = {pool.name: bool(pool.curves and pool.own_curves) for pool in pools}
        with_curves, without = (
            ", ".join(name for name, owns in has_own.items() if owns is is_own)
            for is_own in (True, False)
        )
        if not times.tables:
            notes.append(f"of curves of {with_curves}")
        if without:
            notes.append(f"a roofline of {without}")
    if times.layout:
        notes.append(
            f"{'' if notes else 'of curves, but '}a roofline for products of weights in "
            f"{times.layout}, which no curve describes"
        )
    if config.execute.name != "none":
        notes.append(f"{'' if notes else 'of curves, '}{_NOT_HERE}")
    return ", ".join(notes)


def _table_notes(
    config: Config, times: KernelModel, tables: MeasuredTables, graph: OpGraph
) -> list[str]:
    """Return what tables cover, once for each that devices take."""
    notes = {}
    for pool in config.devices.pools:
        if not pool.curves or not (times.carries or pool.own_curves):
            continue
        label = tables.label(pool.name, pool.curves)
        if not label:
            notes[pool.name] = f"of curves of {pool.name}, of which {tables} has no tables"
        elif label not in notes:
            covered, total = times.table_coverage(graph, pool.name, pool.curves)
            limit = "" if covered else " (which must be of 16 bits)"
            notes[label] = (
                f"of {tables} ({label}) for {covered} of {total} products and attention calls"
                f"{limit}, of curves for the others"
            )
    return list(notes.values())


_NOT_HERE = (
    "not of this machine, on which the plan is run; latency=profiled measures its operators here"
)


def _roofline_note(config: Config) -> str:
    """Return why curves are not used, or that a plan run here is predicted for other devices."""
    names = ", ".join(dict.fromkeys(pool.name for pool in config.devices.pools))
    notes = []
    reason = roofline_reason(config)
    has_own = any(pool.own_curves for pool in config.devices.pools)
    if reason and has_own and not config.latency.carries_curves:
        notes.append(f"since {reason} uses no curves")
    if config.execute.name != "none":
        notes.append(_NOT_HERE)
    return f"of a roofline of {names}, {', '.join(notes)}" if notes else ""
