"""Run a function in every process of a gloo group on this machine."""

import gc
import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["run_group"]

_PRELOAD = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "fxpart.capture.models.build",
    "benchmarks.sharding.pipeline_run",
    "benchmarks.sharding.predicted",
    "tests.sharding.test_against_gloo",
]
"""What members import, so that they all do it once."""
_LIMIT_S = 300.0


def run_group(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:  # noqa: ANN401
    """Return what ``function(rank, size, *args)`` returns in each of `size` processes, by rank.

    Raises:
        RuntimeError: with the traceback of the first process that failed.

    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    workers = [
        context.Process(target=_run_member, args=(pipe[1], (rank, size, port), function, args))
        for rank, pipe in enumerate(pipes)
    ]
    try:
        for worker, (_, sender) in zip(workers, pipes, strict=True):
            worker.start()
            sender.close()
        results = []
        for rank, (receiver, _) in enumerate(pipes):
            if not receiver.poll(_LIMIT_S):
                raise RuntimeError(f"rank {rank} gave no result in {_LIMIT_S:.0f} s")
            failed, result = receiver.recv()
            if failed:
                raise RuntimeError(f"rank {rank} failed:\n{result}")
            results.append(result)
        return results
    finally:
        for worker in workers:
            worker.join(5)
            if worker.is_alive():
                worker.kill()
                worker.join()


def _run_member(
    sender: Any,  # noqa: ANN401 - a Connection
    member: tuple[int, int, int],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Join the group as `member` (rank, size, port); send back a failure flag and the result."""
    import torch
    import torch.distributed as dist

    # Members collect garbage before they count; all that is imported would be traversed each time.
    gc.freeze()
    rank, size, port = member
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=size)
        sender.send((False, function(rank, size, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        sender.send((True, traceback.format_exc()))
