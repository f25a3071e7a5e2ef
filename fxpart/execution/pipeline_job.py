"""The files and messages that a pipeline run and its stage processes exchange, in one folder.

    folder/job.json                 the job: a `PipelineJob`
    folder/stages/                  the stages; see `fxpart.execution.stages.stage_files`
    folder/microbatches.safetensors inputs of stage 0
    folder/rendezvous               where the processes connect
    folder/stage_<i>.json           measurements of stage i: a `StageMeasurement`
    folder/stage_<i>.safetensors    its gradients and, for the last stage, the results
    folder/stage_<i>.log            its standard streams

Does not import torch, which supervising and starting the processes does not need.
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
"""Reported once a process has read its stage and connected; silence is timed from then on."""
COMPUTING = "computing the forward of its stage"
"""Reported when a stage begins a microbatch."""
DONE = "done"
"""Reported last."""


@dataclass(frozen=True, slots=True)
class PipelineJob:
    """The job shared by all stage processes."""

    n_stages: int
    n_microbatches: int
    schedule: str
    """``gpipe`` or ``1f1b``."""
    training: bool
    steps: int
    """Number of timed steps."""
    threads: int
    """Number of torch's threads in each process."""
    backend: str
    """``gloo`` or ``nccl``."""
    on_gpu: bool
    """Whether each stage computes on the only GPU visible to its process."""


@dataclass(frozen=True, slots=True)
class StageMeasurement:
    """Measurements of one stage process."""

    runs_s: tuple[float, ...]
    """Seconds of each timed step, from a barrier to the end of this stage's part."""
    peak_bytes: int
    """Peak bytes of live tensors during a step."""
    losses: tuple[float, ...]
    """Loss of each microbatch, on the last stage in training; else empty."""
    device_name: str


def write_job(folder: Path, job: PipelineJob) -> None:
    """Write the job of the stage processes."""
    (folder / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")


def read_job(folder: Path) -> PipelineJob:
    """Return the job written by `write_job`."""
    return PipelineJob(**json.loads((folder / "job.json").read_text(encoding="utf-8")))


def write_measurement(folder: Path, stage: int, measured: StageMeasurement) -> None:
    """Write the measurements of a stage."""
    path = folder / f"stage_{stage}.json"
    path.write_text(json.dumps(asdict(measured)), encoding="utf-8")


def read_measurement(folder: Path, stage: int) -> StageMeasurement:
    """Return the measurements written by `write_measurement`."""
    values = json.loads((folder / f"stage_{stage}.json").read_text(encoding="utf-8"))
    return StageMeasurement(
        **{**values, "runs_s": tuple(values["runs_s"]), "losses": tuple(values["losses"])}
    )


def tensors_path(folder: Path, stage: int) -> Path:
    """Return the path of a stage's gradients and results."""
    return folder / f"stage_{stage}.safetensors"


def log_path(folder: Path, stage: int) -> Path:
    """Return the path of the log of a stage process's standard streams."""
    return folder / f"stage_{stage}.log"


def input_key(microbatch: int, position: int) -> str:
    """Return the key of an input of stage 0."""
    return f"{microbatch}.{position}"


def output_key(microbatch: int, position: int) -> str:
    """Return the key of a result of the last stage."""
    return f"output.{microbatch}.{position}"


def gradient_key(parameter: str) -> str:
    """Return the key of a parameter's gradient."""
    return f"gradient.{parameter}"
