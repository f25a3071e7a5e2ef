"""`run_pipeline`: run the stages of a model, one process each, on torch's pipeline engine."""

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypedDict

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fxpart.errors import SpecError, nearest_names
from fxpart.execution import pipeline_job as job_files
from fxpart.execution.difference import nan_elements
from fxpart.execution.pipeline_job import PipelineJob, StageMeasurement
from fxpart.execution.stages.stage_files import save_stages
from fxpart.execution.supervise import run_stages
from fxpart.execution.unsplit_reference import (
    Reference,
    gradient_differences,
    loss_difference,
    output_difference,
    reference,
    refuse_other_results,
)
from fxpart.schedule.engine_memory import ENGINE_SCHEDULES

if TYPE_CHECKING:
    from fxpart.execution.stages.chain import Chain

__all__ = ["PipelineRun", "run_pipeline"]


@dataclass(frozen=True, eq=False, slots=True)
class PipelineRun:
    """Measurements of a pipeline run, and differences of its results from the unsplit model's."""

    schedule: str
    training: bool
    n_microbatches: int
    step_s: float
    """Median of `runs_s`."""
    runs_s: tuple[float, ...]
    """Seconds of each timed step over all microbatches, on the slowest stage, from a barrier of all
    stages. An untimed warm-up step precedes them."""
    throughput_per_s: float
    """Microbatches per second."""
    stage_peak_bytes: tuple[int, ...]
    """Peak bytes in each stage's process during a step. On a CPU: the storages of all tensors,
    including weights, gradients and received tensors, in an untimed step. On a GPU: as counted by
    torch's allocator."""
    loss: float | None
    """Mean of the microbatches' losses; None without training."""
    max_difference: float
    """Largest difference of any result, or loss, from the unsplit model's; 0.0 if bitwise equal."""
    gradient_difference: float | None
    """Largest difference of a gradient of a weight in a single stage, as a share of the elements
    around it; None without training."""
    tied_gradient_difference: float | None
    """The same for weights in several stages. Their gradients are summed over microbatches, then
    over stages, and in the opposite order in the unsplit model, so they may differ by rounding.
    None without training or such weights."""
    nan_elements: int
    """Number of NaN in results and gradients, which are equal to any other NaN in their place."""
    backend: str
    """``gloo`` or ``nccl``."""
    threads: int
    """Number of torch's threads in each process."""
    device_name: str


def run_pipeline(
    chain: "Chain",
    microbatches: Sequence[tuple[Tensor, ...]],
    *,
    training: bool,
    schedule: str = "gpipe",
    steps: int = 3,
    timeout_s: float = 120.0,
    threads: int = 1,
) -> PipelineRun:
    """Run each stage of `chain` in its own process, and compare with the unsplit model run here.

    A step runs all microbatches once: forward, and in training also backward from the mean of the
    microbatches' losses (see `fxpart.capture.training.loss`). Gradients of weights in several
    stages are summed over these stages. Weights are not updated. The processes read copies of the
    weights from files in the temporary folder, which needs room for them and is left behind only if
    this process is killed.

    On CPUs the processes communicate over gloo on the loopback interface. If `chain` is on a CUDA
    device, each stage gets its own GPU and they communicate over NCCL; if there are fewer GPUs than
    stages, stages share them, and transfers go through main memory.

    Args:
        chain: stages on real memory, not on the meta device.
        microbatches: inputs of stage 0 for each microbatch, of equal shapes; see
            ``Chain.flat_inputs``.
        training: whether a step includes the backward pass.
        schedule: ``gpipe`` or ``1f1b``; the latter needs at least as many microbatches as stages.
        steps: number of timed steps.
        timeout_s: seconds without progress of any stage after which the run is aborted. Starting or
            finishing a microbatch in any stage is progress; start-up has its own limit of 180 s.
        threads: number of torch's threads in each process.

    Raises:
        SpecError: if the arguments are out of range or inconsistent.
        CaptureError: if a stage cannot be exported to a file.
        CacheError: if the temporary folder cannot be written.
        ExecutionError: if a process ends early (reported within 2 s) or hangs, or if results, loss
            or gradients differ from the unsplit model's by more than rounding, as for a model that
            draws random numbers. No process is left running.

    """
    if not microbatches:
        raise SpecError("there are no microbatches to run; give one or more")
    job = PipelineJob(
        n_stages=len(chain.stages),
        n_microbatches=len(microbatches),
        schedule=schedule,
        training=training,
        steps=steps,
        threads=threads,
        **_backend_and_device(chain, microbatches[0]),
    )
    _check(job, chain, microbatches, timeout_s)
    microbatches = [tuple(t.detach().contiguous() for t in inputs) for inputs in microbatches]
    with tempfile.TemporaryDirectory(prefix="fxpart-pipeline-") as name:
        folder = Path(name)
        save_stages(chain, folder / job_files.STAGES, microbatches[0])
        inputs = {
            job_files.input_key(m, position): value.clone()
            for m, values in enumerate(microbatches)
            for position, value in enumerate(values)
        }
        save_file(inputs, folder / job_files.MICROBATCHES)
        job_files.write_job(folder, job)
        run_stages(folder, job.n_stages, _environments(job), timeout_s)
        measured = [job_files.read_measurement(folder, i) for i in range(job.n_stages)]
        computed = [load_file(job_files.tensors_path(folder, i)) for i in range(job.n_stages)]
    expected = reference(chain, microbatches, training=training, threads=threads)
    return _result(chain, job, measured, computed, expected)


class _BackendAndDevice(TypedDict):
    backend: str
    on_gpu: bool


def _backend_and_device(chain: "Chain", inputs: Sequence[Tensor]) -> _BackendAndDevice:
    """Return the backend of the stages, and whether they compute on GPUs."""
    weights = [w for s in chain.stages for w in (*s.module.parameters(), *s.module.buffers())]
    tensors = [*weights, *inputs]
    if any(tensor.is_meta for tensor in tensors):
        raise SpecError(
            "the model is on the meta device, where nothing can be run; make it with weights, as"
            " fxpart.execution.real_model does"
        )
    if any(tensor.device.index for tensor in tensors):
        raise SpecError("the model is on another GPU than the first; put all of it on cuda:0")
    on_gpu = any(tensor.is_cuda for tensor in tensors)
    enough = on_gpu and torch.cuda.device_count() >= len(chain.stages)
    return {"backend": "nccl" if enough else "gloo", "on_gpu": on_gpu}


def _check(
    job: PipelineJob, chain: "Chain", microbatches: Sequence[Sequence[Tensor]], timeout_s: float
) -> None:
    if job.schedule not in ENGINE_SCHEDULES:
        near = nearest_names(job.schedule, ENGINE_SCHEDULES)
        raise SpecError(f"schedule {job.schedule!r} cannot be run on torch's engine; {near}")
    if job.steps < 1 or job.threads < 1 or not 0 < timeout_s < math.inf:
        raise SpecError(
            f"steps={job.steps}, threads={job.threads}, timeout_s={timeout_s}: each must be"
            " positive and finite"
        )
    if job.schedule == "1f1b" and job.n_microbatches < job.n_stages:
        raise SpecError(
            f"schedule=1f1b needs a microbatch for each of {job.n_stages} stages, there are"
            f" {job.n_microbatches}; give more, or use schedule=gpipe"
        )
    first = [(value.shape, value.dtype) for value in microbatches[0]]
    for number, inputs in enumerate(microbatches):
        if [(value.shape, value.dtype) for value in inputs] != first:
            raise SpecError(
                f"microbatch {number} has other shapes or dtypes than microbatch 0; make them equal"
            )
    empty = next((stage.index for stage in chain.stages if not stage.outputs), None)
    if empty is not None:
        raise SpecError(
            f"stage {empty} of {len(chain.stages)} passes on no tensor, but torch's engine passes "
            "at least one; join it with the stage beside it"
        )


def _environments(job: PipelineJob) -> list[Mapping[str, str]]:
    threads = str(job.threads)
    common = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo"}
    if not job.on_gpu:
        return [common] * job.n_stages
    # Each process sees only its own GPU, as cuda:0, the device named in the files of its stage.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return [
        {**common, "CUDA_VISIBLE_DEVICES": gpus[stage % len(gpus)]} for stage in range(job.n_stages)
    ]


def _result(
    chain: "Chain",
    job: PipelineJob,
    measured: Sequence[StageMeasurement],
    computed: Sequence[Mapping[str, Tensor]],
    expected: Reference,
) -> PipelineRun:
    runs_s = tuple(max(times) for times in zip(*(m.runs_s for m in measured), strict=True))
    step_s, losses = median(runs_s), measured[-1].losses
    untied, tied = gradient_differences(chain, computed, expected) if job.training else (None, None)
    difference = max(output_difference(computed[-1], expected), loss_difference(losses, expected))
    shares = [share for share in (untied, tied) if share is not None]
    refuse_other_results(computed[-1], losses, max(shares, default=None), expected)
    return PipelineRun(
        schedule=job.schedule,
        training=job.training,
        n_microbatches=job.n_microbatches,
        step_s=step_s,
        runs_s=runs_s,
        throughput_per_s=job.n_microbatches / step_s,
        stage_peak_bytes=tuple(m.peak_bytes for m in measured),
        loss=sum(losses) / len(losses) if losses else None,
        max_difference=difference,
        gradient_difference=untied,
        tied_gradient_difference=tied,
        nan_elements=nan_elements((expected.outputs, list(expected.gradients.values()))),
        backend=job.backend,
        threads=job.threads,
        device_name=measured[0].device_name,
    )
