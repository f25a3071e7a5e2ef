"""The files and messages that a pipeline run and its stage processes exchange, in one folder.

    folder/job.json                 the job: a `PipelineJob`
    folder/stages/                  the stages; see `fxpart.execution.stages.stage_files`
    folder/microbatches.safetensors inputs of stage 0
    folder/rendezvous               where the processes connect
    folder/stage_<i>.json           measurements of stage i: a `StageMeasurement`
    folder/stage_<i>.safetensors    its gradients and, for the last stage, the results
    folder/stage_<i>.log            its standard streams

Imports no torch: supervising the processes and starting one need none.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = [
    "COMPUTING",
    "DONE",
    "MICROBATCHES",
    "READY",
    "RENDEZVOUS",
    "STAGES",
    "PipelineJob",
    "StageMeasurement",
    "gradient_key",
    "input_key",
    "log_path",
    "output_key",
    "read_job",
    "read_measurement",
    "tensors_path",
    "write_job",
    "write_measurement",
]

STAGES = "stages"
MICROBATCHES = "microbatches.safetensors"
RENDEZVOUS = "rendezvous"

READY = "ready"
"""Reported when a process has read its stage and is connected; silence counts from here on."""
COMPUTING = "computing the forward of its stage"
"""Reported when a stage begins a microbatch."""
DONE = "done"
"""Reported last."""


@dataclass(frozen=True, slots=True)
class PipelineJob:
    """The job of every stage process."""

    n_stages: int
    n_microbatches: int
    schedule: str
    """``gpipe`` or ``1f1b``."""
    training: bool
    steps: int
    """Number of timed steps."""
    threads: int
    """Threads that torch computes with in each process."""
    backend: str
    """``gloo`` or ``nccl``."""
    on_gpu: bool
    """Whether each stage computes on the one GPU that its process sees."""


@dataclass(frozen=True, slots=True)
class StageMeasurement:
    """Measurements of one stage process."""

    runs_s: tuple[float, ...]
    """Seconds of each timed step, from a barrier to the end of this stage's part."""
    peak_bytes: int
    """Peak bytes of live tensors during a step."""
    losses: tuple[float, ...]
    """Of each microbatch, on the last stage in training; else empty."""
    device_name: str


def write_job(folder: Path, job: PipelineJob) -> None:
    """Write the job of the processes."""
    (folder / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")


def read_job(folder: Path) -> PipelineJob:
    """Return the job that `write_job` wrote."""
    return PipelineJob(**json.loads((folder / "job.json").read_text(encoding="utf-8")))


def write_measurement(folder: Path, stage: int, measured: StageMeasurement) -> None:
    """Write the measurements of a stage."""
    path = folder / f"stage_{stage}.json"
    path.write_text(json.dumps(asdict(measured)), encoding="utf-8")


def read_measurement(folder: Path, stage: int) -> StageMeasurement:
    """Return the measurements that `write_measurement` wrote."""
    values = json.loads((folder / f"stage_{stage}.json").read_text(encoding="utf-8"))
    return StageMeasurement(
        **{**values, "runs_s": tuple(values["runs_s"]), "losses": tuple(values["losses"])}
    )


def tensors_path(folder: Path, stage: int) -> Path:
    """Return the file of a stage's gradients and results."""
    return folder / f"stage_{stage}.safetensors"


def log_path(folder: Path, stage: int) -> Path:
    """Return the file of the standard streams of a stage's process."""
    return folder / f"stage_{stage}.log"


def input_key(microbatch: int, position: int) -> str:
    """Return the key under which an input of stage 0 is stored."""
    return f"{microbatch}.{position}"


def output_key(microbatch: int, position: int) -> str:
    """Return the key under which a result of the last stage is stored."""
    return f"output.{microbatch}.{position}"


def gradient_key(parameter: str) -> str:
    """Return the key under which the gradient of a parameter is stored."""
    return f"gradient.{parameter}"
