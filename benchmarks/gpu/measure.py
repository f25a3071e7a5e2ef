"""``python -m benchmarks.gpu.measure --output FILE``: measure models on the GPU of this machine.

Each case is measured in a separate process, with random weights, as a user would run it: a forward
under ``no_grad``, one token with a static cache, or a training step with an optimizer. The JSON
file has for each case:

- ``latency_ms``: the median over synchronized calls; ``low_ms`` and ``high_ms``: the first and
  third quartile; ``issue_ms``: the time until the call returns, with the device still busy;
- ``kernels`` and ``kernel_ms``: the number of kernels and copies of one call, and the sum of their
  times, from torch's profiler; ``longest``: the longest ones by name;
- ``allocated_bytes`` and ``reserved_bytes``: peaks of torch's allocator; ``device_bytes``: memory
  in use on the device, less that in use before the process started.

``--constants`` measures the numbers of ``conf/reserve/cuda.yaml`` and of the accelerator's file, or
only the named parts of `benchmarks.gpu.constants` and `benchmarks.gpu.kernels`; ``--memory``
measures the models of `benchmarks.memory`. It needs only torch, transformers, Hydra and
nvidia-ml-py. `benchmarks.truth.single_gpu` and `single_gpu_time` read
``benchmarks/gpu/h100.json``: several such files joined and rounded, without overrides and kernel
names, and with a few kernels of the profiles under ``unaligned``.
"""

import argparse
import gc
import json
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from benchmarks.composed import composed
from benchmarks.gpu.cases import CASES, Case
from benchmarks.gpu.constants import PARTS as CONSTANTS
from benchmarks.gpu.constants import used_bytes
from benchmarks.gpu.kernels import PARTS as KERNELS
from benchmarks.memory_cuda import allocated
from benchmarks.memory_models import MID_SIZE, SMALL
from fxpart.capture.models.build import BuiltModel, build_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.core.optimizer import Optimizer
from fxpart.execution.real_step import real_optimizer, training_step
from fxpart.support.whole_file import write_whole
from runner.config.schema import Config
from runner.experiment.model_spec import model_spec
from runner.experiment.training import is_training, optimizer_of

__all__ = ["main"]

_PARTS = CONSTANTS | KERNELS
_WARM_UP = 3
_MOST_CALLS, _FEWEST_CALLS, _SECONDS = 40, 5, 3.0
_LIMIT_S = 150.0
"""A case that takes longer is stopped and recorded as an error."""
_LONGEST_KERNELS = 80  # nearly all of them


def main() -> None:
    """Measure the cases and write the file after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.measure")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="cases whose label contains one of these")
    parser.add_argument("--skip", nargs="+", default=[], help="cases to skip, likewise")
    parser.add_argument("--constants", nargs="*", choices=_PARTS)
    parser.add_argument("--memory", action="store_true", help="models of benchmarks.memory")
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="start no case after this time"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; run it where there is one")
    begin = time.perf_counter()
    results: dict[str, Any] = {"cases": {}, "constants": {}, "memory": {}}
    for name in _PARTS if options.constants == [] else options.constants or ():
        results["constants"][name] = _in_process(_PARTS[name])
        _show(name, results["constants"][name], begin)
    sized = [("small", spec) for spec in SMALL] + [("mid-size", spec) for spec in MID_SIZE]
    for size, spec in sized if options.memory else ():
        name = f"{spec.name} {size}"
        results["memory"][name] = _in_process(_memory, spec)
        _show(name, results["memory"][name], begin)
    for case in CASES:
        is_named = not options.only or any(part in case.label for part in options.only)
        if not is_named or any(part in case.label for part in options.skip):
            continue
        if time.perf_counter() - begin > options.limit_s:
            print(f"not started: {case.label}", flush=True)
            continue
        results["cases"][case.label] = _in_process(_case, case)
        _show(case.label, results["cases"][case.label], begin)
        _write(options.output, results)
    results["machine"] = _in_process(_machine)
    _write(options.output, results)


def _show(label: str, result: dict[str, Any], begin: float) -> None:
    text = json.dumps({k: v for k, v in result.items() if k not in ("longest", "traceback")})
    print(f"{time.perf_counter() - begin:6.1f} s  {label}: {text[:600]}", flush=True)


def _write(path: Path, results: dict[str, Any]) -> None:
    text = json.dumps(results, indent=1) + "\n"
    write_whole(path, text, "measurements", "choose another --output")


def _in_process(work: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
    """Run `work` in a new process, so that its CUDA context ends with it, and return the result."""
    context = multiprocessing.get_context("fork")  # safe without CUDA here; imports are shared
    mine, other = context.Pipe()
    process = context.Process(target=_answer, args=(other, work, used_bytes(), *arguments))
    process.start()
    other.close()
    try:
        result: dict[str, Any] = mine.recv() if mine.poll(_LIMIT_S) else {"error": "time limit"}
    except EOFError:
        result = {"error": "the process ended without an answer"}
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()
    return result


def _answer(answers: Connection, work: Callable[..., dict[str, Any]], *arguments: object) -> None:
    try:
        answers.send(work(*arguments))
    except Exception as error:  # a case that fails must not end the others
        answers.send({"error": f"{error}"[:500], "traceback": traceback.format_exc()[-2000:]})


def _machine(_: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
    }


def _memory(_: int, spec: ModelSpec) -> dict[str, Any]:
    optimizer = Optimizer("adamw", implementation="foreach")
    return asdict(allocated(spec, optimizer, torch.device("cuda")))


def _case(used_before_bytes: int, case: Case) -> dict[str, Any]:
    config = composed(*case.overrides)
    call = _call(config)
    for _ in range(_WARM_UP):
        call()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    latencies_ms, issues_ms = _timed(call)
    low, median, high = statistics.quantiles(latencies_ms, n=4)
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    device_bytes = used_bytes() - used_before_bytes
    kernels = _kernels(call)
    return {
        "overrides": list(case.overrides),
        "latency_ms": median,
        "low_ms": low,
        "high_ms": high,
        "issue_ms": statistics.median(issues_ms),
        "calls": len(latencies_ms),
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "device_bytes": device_bytes,
        **kernels,
    }


def _call(config: Config) -> Callable[[], None]:
    """Return a function that runs a forward, a decode or a training step of `config`."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    # Casts are PyTorch's own here; `ModelSpec.autocast` imitates them without a GPU.
    built = build_model(replace(model_spec(config), autocast=None), device)
    gc.collect()
    torch.cuda.empty_cache()
    module = built.module
    if config.model.autocast is not None:
        dtype: torch.dtype = getattr(torch, config.model.autocast)
        module.forward = torch.autocast("cuda", dtype)(module.forward)
    if not is_training(config):
        return _forward(_compiled(config, module), built)
    module.train()
    if config.checkpointing != "none":
        transformers_model: Any = module
        transformers_model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer_spec = optimizer_of(config)
    optimizer = real_optimizer(
        optimizer_spec.name, module.parameters(), optimizer_spec.implementation
    )
    run = _compiled(config, module)
    return lambda: training_step(run, built.args, built.kwargs, optimizer)


def _forward(run: Any, built: BuiltModel) -> Callable[[], None]:  # noqa: ANN401 - a module
    """Return a function that runs a forward, or decodes the last token that fits in the cache."""
    counts = {name: t.clone() for name, t in built.kwargs.items() if not t.is_floating_point()}

    def forward() -> None:
        # A decode advances the counters in its inputs; reset them.
        for name, count in counts.items():
            built.kwargs[name].copy_(count)
        with torch.no_grad():
            run(*built.args, **built.kwargs)

    return forward


def _compiled(config: Config, module: torch.nn.Module) -> Any:  # noqa: ANN401 - as torch returns
    return torch.compile(module) if config.runtime.name == "compiled" else module


def _timed(call: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Return the times of calls in ms, until the device is done and until the call returns."""
    latencies_ms: list[float] = []
    issues_ms: list[float] = []
    while len(latencies_ms) < _FEWEST_CALLS or (
        len(latencies_ms) < _MOST_CALLS and sum(latencies_ms) < _SECONDS * 1e3
    ):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        issues_ms.append((time.perf_counter() - begin) * 1e3)
        torch.cuda.synchronize()
        latencies_ms.append((time.perf_counter() - begin) * 1e3)
    return latencies_ms, issues_ms


def _kernels(call: Callable[[], None]) -> dict[str, Any]:
    """Return the kernels of one call, and their times."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    return {
        "kernels": sum(event.count for event in events),
        "kernel_ms": sum(event.self_device_time_total for event in events) / 1e3,
        "longest": [
            [event.key[:160], event.count, event.self_device_time_total / 1e3]
            for event in events[:_LONGEST_KERNELS]
        ],
    }


if __name__ == "__main__":
    main()
