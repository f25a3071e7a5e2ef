"""The files of one job: its plan, its figures, its configuration, and what came of it."""

import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.saved_assignment import ASSIGNMENT_FILE
from fxpart.errors import SpecError
from fxpart.plan_export import device_map, split_points
from runner.config.passwords import without_password
from runner.config.sections import Config
from runner.experiment.batch_files import write_batch_files
from runner.experiment.experiment import Result
from runner.experiment.headline import INFEASIBLE, headline
from runner.experiment.memory_report import peak_rows, tensor_columns
from runner.job.files_read import job_files_read
from runner.job.identity import without_elsewhere
from runner.job.job_identity import JobIdentity
from runner.output.figures import wants_figures, wants_traces, write_figures
from runner.output.result_files import (
    Status,
    device_rows,
    schedule_document,
    write_assignment,
    write_result,
    write_table,
)
from runner.output.schedule_plot import schedule_svg
from runner.output.terminal import progress
from runner.output.text_files import write_json, write_text
from runner.output.trace import write_schedule_trace, write_trace

__all__ = [
    "RESULT_FILE",
    "SHOWN_TENSORS",
    "write_finished",
    "write_plan",
    "write_plan_files",
    "write_unfinished",
]


# The plan in the words of other tools: `device_map.json` and `split_points.json`.


def write_plan_files(folder: Path, graph: OpGraph, assignment: Assignment) -> None:
    """Write what other tools can carry out of the plan; what they cannot is left out.

    ``device_map.json`` is for Hugging Face accelerate; ``device_map_notes.json`` says how far it is
    the plan. ``split_points.json`` is for ``torch.distributed.pipelining``, and only for stages
    that begin where a module begins or ends. Neither is there for a plan with replicas, nor the
    second for a training step, whose forward torch cuts by itself.

    Raises `CacheError` when the place cannot be written.
    """
    if assignment.replicas > 1:
        return
    found = device_map(graph, assignment)
    computing = int((~graph.is_check).sum())
    # As it is: what reads it takes paths and devices alone.
    write_json(folder / "device_map.json", found.entries)
    notes = {
        "main_device": found.main_device,
        "weight_bytes": {str(device): size for device, size in found.weight_bytes.items()},
        "operators": computing,
        "operators_elsewhere": len(found.moved),
        "divided_modules": found.torn,
    }
    write_json(folder / "device_map_notes.json", notes)
    if assignment.n_partitions < 2 or bool(np.any(graph.is_backward)):
        return
    with suppress(SpecError):  # most plans cut inside of modules: then there are no such points
        write_json(folder / "split_points.json", split_points(graph, assignment))


RESULT_FILE = "result.json"
SHOWN_TENSORS = 10
"""The largest tensors of each device in `result.json` and in MLflow's table."""


def write_plan(
    config: Config, identity: JobIdentity, result: Result, model: Mapping[str, object]
) -> None:
    """Write what was decided; `model` is the `ModelSpec.key` of the model.

    Raises `CacheError` when the folder cannot be written.
    """
    graph, folder = result.captured.graph, identity.folder
    placed, evaluation = result.assignment, result.evaluation
    named = {"name": identity.choices.model, **model}
    with progress("writing files"):
        write_assignment(folder / ASSIGNMENT_FILE, graph, result.problem.topology, placed, named)
        write_table(folder / "largest_tensors.csv", tensor_columns(result.peaks))
        write_plan_files(folder, graph, placed)
        if result.batches:
            write_batch_files(folder, result.batches, result.problem.topology)
        in_sweep = identity.sweep is not None
        if wants_figures(config.figures, graph.n_ops, in_sweep=in_sweep):
            # Of what was placed: there sizes are as the allocator rounds them.
            write_figures(folder, result.problem.graph, placed, evaluation)
            if result.schedule:
                write_text(folder / "schedule.svg", schedule_svg(result.schedule))
        if wants_traces(config.figures, in_sweep=in_sweep):
            write_trace(folder / "trace.json", graph, placed, evaluation)
            if result.schedule:
                write_schedule_trace(folder / "schedule_trace.json", result.schedule)
        _write_config(config, identity)


def write_finished(
    config: Config | None,
    identity: JobIdentity,
    result: Result,
    *,
    key: str | None,
    error: str | None = None,
) -> None:
    """Write `result.json` of a job that has a `result`; `error` says why it was not recorded.

    Raises `CacheError` when the folder cannot be written.
    """
    write_result(
        identity.folder / RESULT_FILE,
        status="finished",
        config=_described(config, identity),
        metrics=headline(result),
        devices=device_rows(result.evaluation),
        peaks=peak_rows(result.peaks, SHOWN_TENSORS),
        schedule=schedule_document(result.schedule) if result.schedule else None,
        measured=asdict(result.measured) if result.measured else None,
        error=error,
        sweep_id=identity.sweep.sweep if identity.sweep else None,
        key=key,
        files_read=job_files_read(config, identity.root),
    )


def write_unfinished(
    config: Config | None, identity: JobIdentity, status: Status, error: str, key: str | None
) -> None:
    """Write `result.json` of a job without a result; `config` is None if it made no sense.

    Raises `CacheError` when the folder cannot be written.
    """
    write_result(
        identity.folder / RESULT_FILE,
        status=status,
        config=_described(config, identity),
        metrics=INFEASIBLE if status == "infeasible" else {},
        error=error,
        sweep_id=identity.sweep.sweep if identity.sweep else None,
        key=key,
        files_read=job_files_read(config, identity.root),
    )


def _described(config: Config | None, identity: JobIdentity) -> dict[str, object]:
    return {
        "choices": asdict(identity.choices),
        "overrides": without_elsewhere(identity.overrides),
        "resolved": asdict(_public(config)) if config else None,
    }


def _write_config(config: Config, identity: JobIdentity) -> None:
    folder = identity.folder / "config"
    sections = asdict(_public(config)).items()
    # A value is not hashable, what it is pickled as is.
    text = "".join(_section_yaml(key, pickle.dumps(value)) for key, value in sections)
    write_text(folder / "resolved.yaml", text)
    overrides = "".join(f"{override}\n" for override in without_elsewhere(identity.overrides))
    write_text(folder / "overrides.txt", overrides)


@lru_cache(maxsize=256)
def _section_yaml(key: str, pickled: bytes) -> str:
    """Return one section as YAML. Jobs of a sweep share most of theirs, and all take 7 ms."""
    from omegaconf import OmegaConf

    return str(OmegaConf.to_yaml({key: pickle.loads(pickled)}))


def _public(config: Config) -> Config:
    """Return `config` without a password."""
    tracking = config.tracking
    if not tracking.uri:
        return config
    return replace(config, tracking=replace(tracking, uri=without_password(tracking.uri)))
