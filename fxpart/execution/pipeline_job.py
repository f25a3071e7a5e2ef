"""What a pipeline run and its stage processes tell each other: files in one folder, and messages.

    folder/job.json                 what is to be run
    folder/stages/                  the stages; see `fxpart.execution.stages.stage_files`
    folder/microbatches.safetensors inputs of stage 0
    folder/rendezvous               where the processes meet
    folder/stage_<i>.json           what stage i measured
    folder/stage_<i>.safetensors    its gradients and, of the last stage, the results
    folder/stage_<i>.log            what it wrote to the standard streams

No torch here: the parent of the processes and their first moments need none.
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
"""Said when a process has read its stage and met the others; from here on silence is counted."""
COMPUTING = "computing the forward of its stage"
"""Said when a stage begins a microbatch."""
DONE = "done"
"""Said last."""


@dataclass(frozen=True, slots=True)
class PipelineJob:
    """What every stage process is told."""

    n_stages: int
    n_microbatches: int
    schedule: str
    """``gpipe`` or ``1f1b``."""
    training: bool
    steps: int
    """Steps that are timed."""
    threads: int
    """Threads that torch computes with in each process."""
    backend: str
    """``gloo`` or ``nccl``."""
    on_gpu: bool
    """Whether stages compute on the one GPU that their process sees."""


@dataclass(frozen=True, slots=True)
class StageMeasurement:
    """What one stage process measured."""

    runs_s: tuple[float, ...]
    """Seconds of each timed step, from a barrier to the end of this stage's part."""
    peak_bytes: int
    """The most bytes of live tensors at any time of a step."""
    losses: tuple[float, ...]
    """Of each microbatch; empty but on the last stage of a training step."""
    device_name: str


def write_job(folder: Path, job: PipelineJob) -> None:
    """Write what the processes are to do."""
    (folder / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")


def read_job(folder: Path) -> PipelineJob:
    """Return what `write_job` wrote."""
    return PipelineJob(**json.loads((folder / "job.json").read_text(encoding="utf-8")))


def write_measurement(folder: Path, stage: int, measured: StageMeasurement) -> None:
    """Write what a stage measured."""
    path = folder / f"stage_{stage}.json"
    path.write_text(json.dumps(asdict(measured)), encoding="utf-8")


def read_measurement(folder: Path, stage: int) -> StageMeasurement:
    """Return what `write_measurement` wrote."""
    said = json.loads((folder / f"stage_{stage}.json").read_text(encoding="utf-8"))
    return StageMeasurement(
        **{**said, "runs_s": tuple(said["runs_s"]), "losses": tuple(said["losses"])}
    )


def tensors_path(folder: Path, stage: int) -> Path:
    """Return the file of a stage's gradients and results."""
    return folder / f"stage_{stage}.safetensors"


def log_path(folder: Path, stage: int) -> Path:
    """Return the file of what a stage's process wrote to its standard streams."""
    return folder / f"stage_{stage}.log"


def input_key(microbatch: int, position: int) -> str:
    """Return under which name an input of stage 0 is stored."""
    return f"{microbatch}.{position}"


def output_key(microbatch: int, position: int) -> str:
    """Return under which name a result of the last stage is stored."""
    return f"output.{microbatch}.{position}"


def gradient_key(parameter: str) -> str:
    """Return under which name the gradient of a parameter is stored."""
    return f"gradient.{parameter}"
