"""Work of a stage process: read the stage, connect, run steps, write the measurements."""

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

from fxpart.capture.live_bytes import LiveBytes, storage_sizes
from fxpart.capture.training.loss import training_loss
from fxpart.execution import pipeline_job as job_files
from fxpart.execution.device import device_name
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
# The parent aborts a run without progress, and names the stage.
_NEVER = timedelta(days=7)
_SETTLING_S = 0.05
"""Gloo's thread releases its tensors shortly after a collective completes."""

Report = Callable[[str], None]


@dataclass(eq=False, slots=True)
class _Running:
    """A stage that is ready to run steps."""

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


def run_stage(folder: Path, index: int, report: Report) -> None:
    """Run stage `index` of the job in `folder`; `report` receives each phase as it begins."""
    job = job_files.read_job(folder)
    torch.set_num_threads(job.threads)
    report("reading its stage")
    loaded = load_stage(folder / job_files.STAGES, index)
    report("meeting the other stages")
    dist.init_process_group(
        job.backend,
        init_method=f"file://{folder / job_files.RENDEZVOUS}",
        rank=index,
        world_size=job.n_stages,
        timeout=_NEVER,
        # Each process sees a single GPU, as cuda:0.
        device_id=torch.device("cuda", 0) if job.backend == "nccl" else None,
    )
    try:
        running = _running(job, folder, loaded, report)
        report(job_files.READY)
        _run(running, folder, report)
    finally:
        dist.destroy_process_group()


def _running(job: PipelineJob, folder: Path, loaded: LoadedStage, report: Report) -> _Running:
    """Return the stage wrapped for torch's engine."""
    compute = torch.device("cuda", 0) if job.on_gpu else torch.device("cpu")
    # Gloo sends from main memory only.
    wire = compute if job.backend == "nccl" else torch.device("cpu")
    is_last = loaded.index == job.n_stages - 1
    shell = StageShell(
        loaded.module,
        compute=compute,
        wire=wire,
        is_last=is_last,
        report=report,
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
        # Without them the engine infers shapes by running on uninitialized memory, where indices
        # would be out of range.
        input_args=_on_meta(loaded.inputs)
        if loaded.index
        else (torch.empty(1, dtype=torch.int64),),
        output_args=_on_meta(loaded.outputs),
    )
    schedule = _SCHEDULES[job.schedule](
        stage,
        job.n_microbatches,
        loss_fn=_loss if job.training else None,
        # Divided by the number of microbatches once, after the sum over stages, as in one process.
        scale_grads=False,
    )
    tied = loaded.tied if job.training else ()
    shared = shared_weights(tied, loaded.index, loaded.module)
    return _Running(job, loaded.index, shell, stage, schedule, shared, compute)


def _on_meta(shapes: Sequence[TensorShape]) -> tuple[Tensor, ...]:
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
    # The engine passes a single result without a tuple.
    return training_loss((results,) if isinstance(results, Tensor) else results)


def _run(running: _Running, folder: Path, report: Report) -> None:
    """Run all steps, and write results and measurements."""
    job = running.job
    report("warming up")
    _step(running)
    losses = tuple(float(loss.detach()) for loss in running.losses)
    report("writing what it computed")
    save_file(_computed(running), job_files.tensors_path(folder, running.index))
    running.shell.keep_no_more()
    if job.on_gpu:
        torch.cuda.reset_peak_memory_stats(running.device)
    runs_s = []
    for number in range(job.steps):
        report(f"timed step {number + 1} of {job.steps}")
        runs_s.append(_step(running))
    report("counting bytes")
    measured = StageMeasurement(
        tuple(runs_s),
        _peak_bytes(running),
        losses,
        device_name(running.device),
    )
    job_files.write_measurement(folder, running.index, measured)
    dist.barrier()


def _step(running: _Running) -> float:
    """Run one step; return the seconds from the barrier to the end of this stage's part."""
    job = running.job
    for parameter in running.shell.parameters():
        parameter.grad = None
    dist.barrier()
    begin = time.perf_counter()
    inputs = (torch.arange(job.n_microbatches),) if running.index == 0 else ()
    options: dict[str, Any] = {}
    if job.training and running.is_last:
        # The engine requires targets; the loss does not use them.
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
    """Return the tensors to write: this stage's gradients and, on the last stage, the results."""
    values = {
        job_files.output_key(m, position): result
        for m, results in enumerate(running.shell.results)
        for position, result in enumerate(results)
    }
    for name, parameter in running.shell.stage.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            values[job_files.gradient_key(name)] = parameter.grad.to_dense()
    # Safetensors requires contiguous tensors that do not share storages.
    seen_addresses, unshared = set[int](), dict[str, Tensor]()
    for name, value in values.items():
        tensor = value.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        shares = storage.data_ptr() in seen_addresses or storage.nbytes() != tensor.nbytes
        unshared[name] = tensor.clone() if shares else tensor
        seen_addresses.add(storage.data_ptr())
    return unshared


def _peak_bytes(running: _Running) -> int:
    """Return the peak bytes of a step: by torch's allocator on a GPU, by `LiveBytes` on a CPU."""
    if running.job.on_gpu:
        return int(torch.cuda.max_memory_allocated(running.device))
    for parameter in running.shell.parameters():
        parameter.grad = None
    # The engine holds the tensors of a step until the next one.
    running.stage.clear_runtime_states()
    running.losses.clear()
    gc.collect()
    time.sleep(_SETTLING_S)  # gloo does not signal when it releases its last operands
    live = LiveBytes([storage_sizes(_live_tensors())])
    with live:
        _step(running)
    return live.peak_bytes[0]


def _live_tensors() -> list[Tensor]:
    """Return the tensors in this process that own memory."""
    alive = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    # A graph keeps a meta tensor for each of its values.
    return [tensor for tensor in alive if tensor.untyped_storage().device.type != "meta"]
