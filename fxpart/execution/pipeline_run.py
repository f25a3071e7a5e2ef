"""`run_pipeline`: the stages of a model really run, one process each, on torch's own engine."""

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
from fxpart.execution.difference import (
    gradient_share,
    largest_magnitude,
    max_difference,
    refuse_more,
    rounding,
)
from fxpart.execution.pipeline_job import PipelineJob, StageMeasurement, gradient_key, output_key
from fxpart.execution.stages.chain import tied_parameters
from fxpart.execution.stages.stage_files import save_stages
from fxpart.execution.supervise import run_stages
from fxpart.execution.unsplit_reference import Reference, reference
from fxpart.schedule.engine_memory import ENGINE_SCHEDULES

if TYPE_CHECKING:
    from fxpart.execution.stages.chain import Chain

__all__ = [
    "PipelineRun",
    "gradient_differences",
    "loss_difference",
    "output_difference",
    "refuse_other_results",
    "run_pipeline",
]


# How far what the stages of a pipeline computed is from what the unsplit model computes.


def output_difference(computed: Mapping[str, Tensor], expected: Reference) -> float:
    """Return the largest difference of any result; see `max_difference`.

    Args:
        computed: what the last stage wrote, on the CPU.
        expected: of the same microbatches.

    """
    there = [
        tuple(computed[output_key(m, i)] for i in range(len(results)))
        for m, results in enumerate(expected.outputs)
    ]
    return max_difference(there, [tuple(t.cpu() for t in results) for results in expected.outputs])


def loss_difference(losses: Sequence[float], expected: Reference) -> float:
    """Return the largest difference of any microbatch's loss; see `max_difference`."""
    # As tensors: of plain numbers, it is only asked whether they are equal.
    return max_difference(
        torch.tensor(losses, dtype=torch.float64),
        torch.tensor(expected.losses, dtype=torch.float64),
    )


def gradient_differences(
    chain: "Chain", computed: Sequence[Mapping[str, Tensor]], expected: Reference
) -> tuple[float, float | None]:
    """Return how far gradients are off: of weights of one stage, and of those that several have.

    See `gradient_share`. A gradient that only one of both has is held against zeros: a stage adds
    up what other stages have of a weight, also where it has none itself.

    Args:
        chain: the stages.
        computed: what each stage wrote, on the CPU.
        expected: of the same microbatches.

    Returns:
        Of the second, None where no weight that is in several stages has a gradient.

    """
    shared = {
        name
        for group in tied_parameters(chain)
        if len({stage for stage, _ in group}) > 1
        for name in group
    }
    # Of weights that are in several stages, or not: gradients found, and wanted.
    kinds: dict[bool, tuple[dict[str, Tensor], dict[str, Tensor]]]
    kinds = {False: ({}, {}), True: ({}, {})}
    for stage in chain.stages:
        for name, parameter in stage.module.named_parameters(remove_duplicate=False):
            at = (stage.index, name)
            found = computed[stage.index].get(gradient_key(name))
            wanted = expected.gradients.get(at)
            present = wanted if found is None else found
            if present is None or not parameter.requires_grad:
                continue
            zeros = torch.zeros_like(present.to_dense(), device="cpu")
            all_found, all_wanted = kinds[at in shared]
            all_found[f"{stage.index}.{name}"] = zeros if found is None else found
            all_wanted[f"{stage.index}.{name}"] = zeros if wanted is None else wanted.cpu()
    tied = gradient_share(*kinds[True]) if kinds[True][0] else None
    return gradient_share(*kinds[False]), tied


def refuse_other_results(
    results_apart: float, gradients_apart: float | None, expected: Reference
) -> None:
    """Refuse what is further from the unsplit model than sums in another order may be.

    Args:
        results_apart: largest difference of a result, or of the loss of a training step: that is
            one of the results, or the mean of one, and so no larger.
        gradients_apart: largest difference of a gradient, as a share of its largest element; None
            without training.
        expected: of the same microbatches.

    Raises:
        ExecutionError: when results, loss or gradients are too far apart.

    """
    wanted = expected.outputs
    refuse_more("results", results_apart, rounding(wanted) * largest_magnitude(wanted))
    if gradients_apart is not None:
        allowed = rounding(list(expected.gradients.values()))
        refuse_more("gradients", gradients_apart, allowed, " of their largest element")


@dataclass(frozen=True, eq=False, slots=True)
class PipelineRun:
    """What a run of a pipeline measured, and how far it is from the model in one process."""

    schedule: str
    training: bool
    n_microbatches: int
    step_s: float
    """Median of `runs_s`."""
    runs_s: tuple[float, ...]
    """Seconds of each timed step: all microbatches, on the stage that took longest, from a barrier
    of all stages. One step that is not timed went before."""
    throughput_per_s: float
    """Microbatches a second."""
    stage_peak_bytes: tuple[int, ...]
    """The most bytes alive in each stage's process during a step. On a CPU: of all storages of
    tensors, weights, gradients and received tensors included, in a step of its own, as counting
    takes time. On a GPU: what torch's allocator says."""
    loss: float | None
    """Mean of the microbatches' losses; None without training."""
    max_difference: float
    """Largest difference of any result, or loss, from those of the unsplit model in this process;
    0.0 is bit for bit the same."""
    gradient_difference: float | None
    """The same of the gradients of weights that one stage has, as a share of the largest element of
    each; None without training."""
    tied_gradient_difference: float | None
    """The same of weights that several stages have. They are summed over microbatches first and
    over stages then, the unsplit model's in the other order, so that they may differ by rounding.
    None without training or such weights."""
    backend: str
    """``gloo`` or ``nccl``."""
    threads: int
    """Threads that torch computed with in each process."""
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
    """Run the stages of `chain` in a process each, and compare with the unsplit model here.

    A step is all microbatches once: forward, and in training also backward, with the mean of the
    microbatches' losses (see `fxpart.capture.training.loss`). Gradients of weights that several
    stages have are summed over these stages. Weights are not updated, those of `chain` not even
    read by the other processes: they get copies, as files in the temporary folder, which needs
    room for them and is left behind only if this process is killed.

    On CPUs the processes talk over gloo on the loopback interface. Where `chain` lies on a CUDA
    device, every stage gets a GPU of its own and they talk over NCCL; with fewer GPUs, they share
    them, and what is handed on goes through main memory.

    Args:
        chain: stages on real memory, not on the meta device.
        microbatches: for each the inputs of stage 0, of equal shapes; see ``Chain.flat_inputs``.
        training: whether a step has a backward.
        schedule: ``gpipe`` or ``1f1b``; the latter needs a microbatch for every stage.
        steps: how many steps are timed.
        timeout_s: seconds without progress of any stage after which the run ends. A microbatch
            begun or ended in any stage is progress; starting up has its own limit of 180 s.
        threads: that torch computes with in each process.

    Raises:
        SpecError: for arguments that do not fit each other.
        CaptureError: for a stage that cannot be exported into a file.
        CacheError: when the temporary folder cannot be written.
        ExecutionError: when a process ends early, within 2 s of that, or hangs, and when results,
            loss or gradients are further from the unsplit model's than rounding, as those of a
            model that draws random numbers are. No process is left.

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
        **_devices(chain, microbatches[0]),
    )
    _check(job, microbatches, timeout_s)
    _refuse_empty_boundaries(chain)
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


class _Devices(TypedDict):
    backend: str
    on_gpu: bool


def _devices(chain: "Chain", inputs: Sequence[Tensor]) -> _Devices:
    """Return where stages compute, and what they talk over."""
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


def _check(job: PipelineJob, microbatches: Sequence[Sequence[Tensor]], timeout_s: float) -> None:
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


def _refuse_empty_boundaries(chain: "Chain") -> None:
    empty = next((stage.index for stage in chain.stages if not stage.outputs), None)
    if empty is not None:
        raise SpecError(
            f"stage {empty} of {len(chain.stages)} hands on no tensor, and torch's engine passes at"
            " least one; join it with the stage beside it"
        )


def _environments(job: PipelineJob) -> list[Mapping[str, str]]:
    threads = str(job.threads)
    common = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo"}
    if not job.on_gpu:
        return [common] * job.n_stages
    # A process sees its GPU only, as cuda:0, which is what the files of its stage say.
    stated = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    known = stated.split(",") if stated else [str(i) for i in range(torch.cuda.device_count())]
    return [
        {**common, "CUDA_VISIBLE_DEVICES": known[stage % len(known)]}
        for stage in range(job.n_stages)
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
    own, tied = gradient_differences(chain, computed, expected) if job.training else (None, None)
    apart = max(output_difference(computed[-1], expected), loss_difference(losses, expected))
    shares = [share for share in (own, tied) if share is not None]
    refuse_other_results(apart, max(shares, default=None), expected)
    return PipelineRun(
        schedule=job.schedule,
        training=job.training,
        n_microbatches=job.n_microbatches,
        step_s=step_s,
        runs_s=runs_s,
        throughput_per_s=job.n_microbatches / step_s,
        stage_peak_bytes=tuple(m.peak_bytes for m in measured),
        loss=sum(losses) / len(losses) if losses else None,
        max_difference=apart,
        gradient_difference=own,
        tied_gradient_difference=tied,
        backend=job.backend,
        threads=job.threads,
        device_name=measured[0].device_name,
    )
