"""What the process of a stage does: read it, meet the others, run steps, write what it measured."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from fxpart.capture.training.loss import training_loss
from fxpart.execution import pipeline_job as job_files
from fxpart.execution.device import device_name
from fxpart.execution.live_bytes import LiveBytes, storage_sizes
from fxpart.execution.pipeline_job import PipelineJob, StageMeasurement
from fxpart.execution.stage_shell import (
    MicrobatchFeed,
    SharedWeight,
    StageShell,
    add_tied_gradients,
    shared_weights,
)
from fxpart.execution.stages.stage_files import LoadedStage, TensorShape, load_stage

__all__ = ["run_stage"]

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
# The parent ends a run that makes no progress, and says which stage it was.
_NEVER = timedelta(days=7)

Say = Callable[[str], None]


@dataclass(eq=False, slots=True)
class _Running:
    """A stage ready to step."""

    job: PipelineJob
    index: int
    shell: StageShell
    stage: PipelineStage
    schedule: PipelineScheduleSingle
    shared: list[SharedWeight]
    device: torch.device
    losses: list[Tensor] = field(default_factory=list)

    @property
    def is_last(self) -> bool:
        return self.index == self.job.n_stages - 1


def run_stage(folder: Path, index: int, say: Say) -> None:
    """Run stage `index` of the job in `folder`; `say` is told what it is doing."""
    job = job_files.read_job(folder)
    torch.set_num_threads(job.threads)
    say("reading its stage")
    loaded = load_stage(folder / job_files.STAGES, index)
    say("meeting the other stages")
    meeting = f"file://{folder / job_files.RENDEZVOUS}"
    dist.init_process_group(
        job.backend,
        init_method=meeting,
        rank=index,
        world_size=job.n_stages,
        timeout=_NEVER,
        # Each process sees one GPU, the first.
        device_id=torch.device("cuda", 0) if job.backend == "nccl" else None,
    )
    try:
        running = _running(job, folder, loaded, say)
        say(job_files.READY)
        _run(running, folder, say)
    finally:
        dist.destroy_process_group()


def _running(job: PipelineJob, folder: Path, loaded: LoadedStage, say: Say) -> _Running:
    compute = torch.device("cuda", 0) if job.on_gpu else torch.device("cpu")
    # Gloo sends from main memory only.
    wire = compute if job.backend == "nccl" else torch.device("cpu")
    is_last = loaded.index == job.n_stages - 1
    shell = StageShell(
        loaded.module,
        compute=compute,
        wire=wire,
        is_last=is_last,
        say=say,
        keep=job.n_microbatches if is_last else 0,
    )
    entry: nn.Module = shell
    if loaded.index == 0:
        entry = MicrobatchFeed(shell, _microbatches(job, folder, len(loaded.inputs), compute))
    stage = PipelineStage(
        entry,
        loaded.index,
        job.n_stages,
        wire,
        # Else the engine finds shapes out by a run on memory as it comes: what a stage gets to
        # index with would then be any number.
        input_args=_likes(loaded.inputs) if loaded.index else (torch.empty(1, dtype=torch.int64),),
        output_args=_likes(loaded.outputs),
    )
    schedule = _SCHEDULES[job.schedule](
        stage,
        job.n_microbatches,
        loss_fn=_loss if job.training else None,
        # Divided by the microbatches after the sum over stages: once, as one process would.
        scale_grads=False,
    )
    tied = loaded.tied if job.training else ()
    shared = shared_weights(tied, loaded.index, loaded.module)
    return _Running(job, loaded.index, shell, stage, schedule, shared, compute)


def _likes(shapes: Sequence[TensorShape]) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(
            shape.shape,
            dtype=getattr(torch, shape.dtype),
            device="meta",
            requires_grad=shape.requires_grad,
        )
        for shape in shapes
    )


def _microbatches(
    job: PipelineJob, folder: Path, n_inputs: int, device: torch.device
) -> list[tuple[Tensor, ...]]:
    stored = load_file(folder / job_files.MICROBATCHES, device=str(device))
    return [
        tuple(stored[job_files.input_key(m, position)] for position in range(n_inputs))
        for m in range(job.n_microbatches)
    ]


def _loss(results: Tensor | tuple[Tensor, ...], _: Tensor) -> Tensor:
    # The engine hands over one result as such.
    return training_loss((results,) if isinstance(results, Tensor) else results)


def _run(running: _Running, folder: Path, say: Say) -> None:
    job = running.job
    say("warming up")
    _step(running)
    losses = tuple(float(loss.detach()) for loss in running.losses)
    say("writing what it computed")
    save_file(_computed(running), job_files.tensors_path(folder, running.index))
    running.shell.keep_no_more()
    if job.on_gpu:
        torch.cuda.reset_peak_memory_stats(running.device)
    runs_s = []
    for number in range(job.steps):
        say(f"timed step {number + 1} of {job.steps}")
        runs_s.append(_step(running))
    say("counting bytes")
    measured = StageMeasurement(
        tuple(runs_s),
        _peak_bytes(running),
        losses,
        device_name(running.device),
    )
    job_files.write_measurement(folder, running.index, measured)
    dist.barrier()


def _step(running: _Running) -> float:
    """Run one step; return the seconds from when all stages began to the end of this one's part."""
    job = running.job
    for parameter in running.shell.parameters():
        parameter.grad = None
    dist.barrier()
    begin = time.perf_counter()
    inputs = (torch.arange(job.n_microbatches),) if running.index == 0 else ()
    options: dict[str, Any] = {}
    if job.training and running.is_last:
        # The engine insists on targets; the loss is the model's own.
        options = {"target": torch.zeros(job.n_microbatches), "losses": running.losses}
    with torch.set_grad_enabled(job.training):
        running.schedule.step(*inputs, return_outputs=False, **options)
    add_tied_gradients(running.shared)
    for parameter in running.shell.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(job.n_microbatches)
    if job.on_gpu:
        torch.cuda.synchronize(running.device)
    return time.perf_counter() - begin


def _computed(running: _Running) -> dict[str, Tensor]:
    """Return the results of the last stage, and the gradients of this one, to be written."""
    found = {
        job_files.output_key(m, position): result
        for m, results in enumerate(running.shell.results)
        for position, result in enumerate(results)
    }
    for name, parameter in running.shell.stage.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            found[job_files.gradient_key(name)] = parameter.grad.to_dense()
    return _apart({name: value.detach().cpu().contiguous() for name, value in found.items()})


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous tensors as files hold them: each alone in its memory."""
    seen, found = set[int](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        shares = storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes
        found[name] = tensor.clone() if shares else tensor
        seen.add(storage.data_ptr())
    return found


def _peak_bytes(running: _Running) -> int:
    """Return the most bytes alive in a step: by the device's own count, or ours on a CPU."""
    if running.job.on_gpu:
        return int(torch.cuda.max_memory_allocated(running.device))
    for parameter in running.shell.parameters():
        parameter.grad = None
    # What the engine keeps of a step, it keeps until the next one.
    running.stage.clear_runtime_states()
    running.losses.clear()
    gc.collect()
    live = LiveBytes([storage_sizes(_tensors())])
    with live:
        _step(running)
    return live.peak_bytes[0]


def _tensors() -> list[Tensor]:
    """Return the tensors of this process that have memory."""
    alive = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    # A graph keeps a tensor without memory for each of its values.
    return [tensor for tensor in alive if tensor.untyped_storage().device.type != "meta"]
