"""The files of one job: inputs, plan, figures, configuration and result."""

import json
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from fxpart.core.assignment import Assignment
from fxpart.core.graph import OpGraph
from fxpart.core.saved_assignment import ASSIGNMENT_FILE, assignment_path, write_assignment
from fxpart.cost.device_memory import DeviceMemory
from fxpart.errors import SpecError
from fxpart.placement.offload.plan import Offloaded
from fxpart.plan_export import (
    DeviceMap,
    Place,
    device_map,
    map_carriers,
    place_script,
    split_points,
)
from fxpart.support.regular_file import read_regular
from fxpart.support.text_files import write_json, write_text
from fxpart.support.whole_file import write_whole
from runner.config.passwords import without_password
from runner.config.schema import Config
from runner.experiment.device_memory import device_memory_rows
from runner.experiment.engines import files_for_engines
from runner.experiment.headline import INFEASIBLE, headline
from runner.experiment.memory_report import peak_rows, tensor_columns
from runner.experiment.offload import configured_tiers, offload_document, offloaded_map
from runner.experiment.result import Result
from runner.experiment.topology import cpu_devices
from runner.experiment.training import is_training
from runner.job.batch_files import write_batch_files
from runner.job.identity import JobIdentity, without_elsewhere
from runner.job.serving_files import write_serving_files
from runner.output.figures import wants_figures, wants_traces, write_figures
from runner.output.result_files import (
    Status,
    device_rows,
    schedule_document,
    write_result,
    write_table,
)
from runner.output.schedule_plot import schedule_svg
from runner.output.terminal import progress
from runner.output.trace import write_schedule_trace, write_trace
from runner.tracking.tracker import INPUTS_FOLDER

__all__ = [
    "INPUTS_TAG",
    "RESULT_FILE",
    "SHOWN_TENSORS",
    "InputFile",
    "inputs_of",
    "inputs_tag",
    "kept_name",
    "named_files",
    "read_inputs",
    "with_file",
    "write_device_map",
    "write_engine_files",
    "write_finished",
    "write_inputs",
    "write_place_script",
    "write_plan",
    "write_split_points",
    "write_unfinished",
]


# Input files named in the configuration. They are copied to `inputs/` in the job's folder and in
# its run in the tracker, each named after its key, so that the run can be repeated. A tag of the
# run holds their digests.

INPUTS_TAG = "inputs"
_ASSIGNMENT, _CALIBRATION = "mode.assignment", "latency.file"


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file named in the configuration, as it was when the job began."""

    key: str
    """The configuration key, such as ``latency.file``."""
    content: bytes

    @property
    def digest(self) -> str:
        """Its SHA-256, in hex."""
        return sha256(self.content).hexdigest()


def named_files(config: Config) -> dict[str, Path]:
    """Return the input files of `config`, by configuration key.

    Their contents are part of the job's key, see `runner.job.identity`.
    """
    files: dict[str, Path] = {}
    saved = config.mode.options.get("assignment")
    if config.mode.name == "aot_based" and isinstance(saved, str) and saved:
        files[_ASSIGNMENT] = assignment_path(saved)
    if config.latency.file:
        files[_CALIBRATION] = Path(config.latency.file)
    return files


def with_file(config: Config, key: str, place: str) -> Config:
    """Return `config` with the file under a key of `named_files` replaced."""
    if key == _CALIBRATION:
        return replace(config, latency=replace(config.latency, file=place))
    options = {**config.mode.options, "assignment": place}
    return replace(config, mode=replace(config.mode, options=options))


def read_inputs(config: Config) -> tuple[InputFile, ...]:
    """Read the `named_files`; most configurations have none.

    Unreadable files are left out: the job itself fails on them with a better message.
    """
    files = []
    for key, path in named_files(config).items():
        with suppress(OSError):
            files.append(InputFile(key, read_regular(path)))
    return tuple(files)


def kept_name(key: str) -> str:
    """Return the path of the copy for `key`, relative to the folder of the job or of its run."""
    return f"{INPUTS_FOLDER}/{key}.json"


def write_inputs(files: Sequence[InputFile], folder: Path) -> None:
    """Write `files` to a job's folder and remove copies left by an earlier attempt.

    Raises `CacheError` if the folder cannot be written.
    """
    contents = {file.key: file.content for file in files}
    for key in (_ASSIGNMENT, _CALIBRATION):
        path = folder / kept_name(key)
        if key in contents:
            write_whole(path, contents[key], str(path), "choose another output folder")
        else:
            with suppress(OSError):
                path.unlink()


def inputs_tag(files: Sequence[InputFile]) -> dict[str, str]:
    """Return the tag with the digests of a run's input files; no tag without files."""
    return {INPUTS_TAG: json.dumps({file.key: file.digest for file in files})} if files else {}


def inputs_of(run_id: str, tags: Mapping[str, str]) -> dict[str, str]:
    """Return the digests in the `inputs_tag`, by key; none for runs from before the tag existed.

    Raises:
        SpecError: if the tag is not a JSON mapping.

    """
    text = tags.get(INPUTS_TAG, "{}")
    try:
        return {str(key): str(digest) for key, digest in json.loads(text).items()}
    except (ValueError, AttributeError) as error:
        raise SpecError(
            f"the tag {INPUTS_TAG} of run {run_id} is damaged ({text[:40]!r}), so the files that it"
            " read are not known; run it again from its overrides"
        ) from error


# The plan.

SHOWN_TENSORS = 10
"""Number of largest tensors per device in `result.json` and in MLflow's table."""


def write_plan(
    config: Config, identity: JobIdentity, result: Result, model: Mapping[str, object]
) -> None:
    """Write the files of the plan; `model` is the `ModelSpec.key` of the model.

    Raises `CacheError` if the folder cannot be written.
    """
    graph, folder = result.captured.graph, identity.folder
    placed, evaluation = result.assignment, result.evaluation
    entry = {"name": identity.choices.model, **model}
    with progress("writing files"):
        write_assignment(folder / ASSIGNMENT_FILE, graph, result.problem.topology, placed, entry)
        write_table(folder / "largest_tensors.csv", tensor_columns(result.peaks))
        _write_maps(config, folder, result)
        write_engine_files(
            folder, config, graph, placed, needs=result.device_needs, offloaded=result.offloaded
        )
        if result.batches:
            write_batch_files(folder, result.batches, result.problem.topology, result.subject_line)
        if result.other_sizes:
            write_serving_files(folder, result.other_sizes, result.subject_line)
        in_sweep = identity.sweep is not None
        if wants_figures(config.figures, graph.n_ops, in_sweep=in_sweep):
            # The graph that was placed has its sizes rounded as the allocator rounds them.
            write_figures(folder, result.problem.graph, placed, evaluation, result.subject_line)
            if result.schedule:
                svg = schedule_svg(result.schedule, result.subject_line)
                write_text(folder / "schedule.svg", svg)
        if wants_traces(config.figures, in_sweep=in_sweep):
            write_trace(folder / "trace.json", graph, placed, evaluation)
            if result.schedule:
                write_schedule_trace(folder / "schedule_trace.json", result.schedule)
        _write_config(config, identity)


def _write_maps(config: Config, folder: Path, result: Result) -> None:
    """Write the maps of a plan from modules to devices or tiers, unless it splits layers."""
    graph, offloaded = result.captured.graph, result.offloaded
    if offloaded:
        write_json(folder / "offload.json", offload_document(offloaded))
    if result.split is not None or result.shards is not None:  # readers of maps split no layers
        return
    if result.assignment.replicas > 1:
        return
    hosts = cpu_devices(config, result.problem.topology)
    if offloaded:
        mapped = offloaded_map(offloaded, graph)
    else:
        mapped = device_map(graph, result.assignment, hosts=hosts)
        write_split_points(folder, graph, result.assignment)
    write_device_map(folder, graph, mapped, _max_memory(config, result, mapped, hosts))
    write_place_script(folder, config, graph, mapped)


def write_split_points(folder: Path, graph: OpGraph, assignment: Assignment) -> None:
    """Write the plan for ``torch.distributed.pipelining``, if all stages begin between modules.

    A training step has the split points of its forward, since torch splits the forward itself.

    Raises `CacheError` if the folder cannot be written.
    """
    if assignment.n_partitions > 1:
        with suppress(SpecError):  # most plans cut inside modules and have no split points
            write_json(folder / "split_points.json", split_points(graph, assignment))


def _max_memory(
    config: Config, result: Result, mapped: DeviceMap, hosts: Sequence[int]
) -> dict[Place, int]:
    """Return the bytes that weights may take in each place, beside all else that the plan needs."""
    tiers = configured_tiers(config)
    most: dict[Place, int] = {}
    for need in result.device_needs:
        if need.device in hosts:
            most["cpu"] = need.total_bytes
            continue
        place = need.device - sum(host < need.device for host in hosts)
        weights = mapped.weight_bytes.get(place, 0) + result.copy_rooms.get(need.device, 0)
        most[place] = max(0, need.total_bytes - need.needed.expected + weights)
    return most | ({"cpu": tiers.host.memory_bytes} if tiers else {})


def write_device_map(
    folder: Path, graph: OpGraph, mapped: DeviceMap, max_memory: Mapping[Place, int]
) -> None:
    """Write a device map for accelerate, and notes on where it deviates from the plan.

    Raises `CacheError` if the folder cannot be written.
    """
    # No notes in this file: accelerate accepts only paths and devices.
    write_json(folder / "device_map.json", mapped.entries)
    notes = {
        "main_device": mapped.main_device,
        "weight_bytes": {str(place): size for place, size in mapped.weight_bytes.items()},
        "max_memory": {str(place): size for place, size in max_memory.items()},
        "operators": int((~graph.is_check).sum()),
        "operators_elsewhere": len(mapped.moved),
        "divided_modules": mapped.torn,
    }
    write_json(folder / "device_map_notes.json", notes)


def write_place_script(folder: Path, config: Config, graph: OpGraph, mapped: DeviceMap) -> None:
    """Write `place.py`, which loads a checkpoint by the device map, if accelerate can run the plan.

    Raises `CacheError` if the folder cannot be written.
    """
    model = config.model
    runs = not is_training(config) and config.schedule.name == "none"
    loads = model.library == "transformers" and config.weights.name == "none"
    if model.architecture and runs and loads and map_carriers(graph, mapped).accelerate:
        write_text(folder / "place.py", place_script(model.architecture, model.dtype))


def write_engine_files(
    folder: Path,
    config: Config,
    graph: OpGraph,
    assignment: Assignment,
    *,
    needs: Sequence[DeviceMemory] = (),
    offloaded: Offloaded | None = None,
) -> None:
    """Write launch files for the engines that can execute the plan, each in its own format.

    Raises `CacheError` if the folder cannot be written.
    """
    files = files_for_engines(config, graph, assignment, needs=needs, offloaded=offloaded)
    for engine, text in files.texts.items() if files else ():
        write_text(folder / engine.file, text)


def _write_config(config: Config, identity: JobIdentity) -> None:
    folder = identity.folder / "config"
    sections = asdict(_public(config)).items()
    # Section values are not hashable, but their pickles are.
    text = "".join(_section_yaml(key, pickle.dumps(value)) for key, value in sections)
    write_text(folder / "resolved.yaml", text)
    overrides = "".join(f"{override}\n" for override in without_elsewhere(identity.overrides))
    write_text(folder / "overrides.txt", overrides)


@lru_cache(maxsize=256)
def _section_yaml(key: str, pickled: bytes) -> str:
    """Return one section as YAML, cached: jobs of a sweep share most, and all of one take 7 ms."""
    from omegaconf import OmegaConf

    return str(OmegaConf.to_yaml({key: pickle.loads(pickled)}))


def _public(config: Config) -> Config:
    """Return `config` without the password of the tracking store."""
    tracking = config.tracking
    if not tracking.uri:
        return config
    return replace(config, tracking=replace(tracking, uri=without_password(tracking.uri)))


# The result.

RESULT_FILE = "result.json"


def write_finished(
    config: Config | None,
    identity: JobIdentity,
    result: Result,
    *,
    key: str | None,
    error: str | None = None,
) -> None:
    """Write the `result.json` of a job with a `result`; `error` says why it was not recorded.

    Raises `CacheError` if the folder cannot be written.
    """
    write_result(
        identity.folder / RESULT_FILE,
        status="finished",
        config=_described(config, identity),
        metrics=headline(result),
        devices=device_rows(result.evaluation),
        peaks=peak_rows(result.peaks, SHOWN_TENSORS),
        device_memory=device_memory_rows(result.device_memory),
        schedule=schedule_document(result.schedule) if result.schedule else None,
        measured=asdict(result.measured) if result.measured else None,
        error=error,
        sweep=identity.sweep.sweep if identity.sweep else None,
        key=key,
    )


def write_unfinished(
    config: Config | None, identity: JobIdentity, status: Status, error: str, key: str | None
) -> None:
    """Write the `result.json` of a job without a result; `config` is None if it is invalid.

    Raises `CacheError` if the folder cannot be written.
    """
    write_result(
        identity.folder / RESULT_FILE,
        status=status,
        config=_described(config, identity),
        metrics=INFEASIBLE if status == "infeasible" else {},
        error=error,
        sweep=identity.sweep.sweep if identity.sweep else None,
        key=key,
    )


def _described(config: Config | None, identity: JobIdentity) -> dict[str, object]:
    return {
        "choices": asdict(identity.choices),
        "overrides": without_elsewhere(identity.overrides),
        "resolved": asdict(_public(config)) if config else None,
    }
