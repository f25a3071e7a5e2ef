"""``python -m benchmarks.host``: measure computing, copying and sending on one core.

Torch runs matrix products and copies on one thread. Two processes exchange tensors over gloo on the
loopback interface, as the stages of ``execute=pipeline`` do. The figures are those of
``conf/accelerator/cpu.yaml`` and ``conf/transfer_rate/loopback.yaml``.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from fxpart.execution.device import device_name, torch_threads

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SIDE = 1024
"""Side of the square matrices that are multiplied."""
COPIED_BYTES = 256 * 2**20
"""More than the caches hold."""
SENT_BYTES = (4, 65_536, 1_048_576, 16_777_216)
REPEATS = 30


def _median_s(work: Callable[[], object], repeats: int) -> float:
    """Return the median time of `work` after one warm-up run."""
    runs = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        runs.append(time.perf_counter() - begin)
    return median(runs[1:])


def _report_core() -> None:
    """Print FLOP/s by dtype, and the bytes per second that a copy reads and writes."""
    print(f"one core of {device_name(torch.device('cpu'))}")
    print("flops_per_s:")
    for dtype in DTYPES:
        a, b = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        time_s = _median_s(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), 7)  # type: ignore[misc]
        print(f"  {str(dtype).removeprefix('torch.')}: {2 * SIDE**3 / time_s:.2e}")
    source = torch.zeros(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    time_s = _median_s(lambda: target.copy_(source), 7)
    print(f"memory_bandwidth_bytes_per_s: {2 * COPIED_BYTES / time_s:.2e}")


def _peer(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    times = {size: _one_way_s(rank, size) for size in SENT_BYTES}
    if rank == 0:
        _report_link(times)
    dist.destroy_process_group()


def _one_way_s(rank: int, size: int) -> float:
    """Return the time of a transfer to the other process: half of a round trip."""
    tensor, runs = torch.zeros(size // 4), list[float]()
    for _ in range(REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        # A round trip needs only one clock.
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        else:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
        runs.append((time.perf_counter() - begin) / 2)
    return median(runs)


def _report_link(times: dict[int, float]) -> None:
    print("\ntwo processes over gloo on loopback")
    for size, time_s in times.items():
        print(f"{size:>12,} bytes  {time_s * 1e6:>10.1f} us  {size / time_s / 1e9:>6.2f} GB/s")
    small, large = SENT_BYTES[0], SENT_BYTES[-1]
    rate = (large - small) / (times[large] - times[small])
    print(f"bytes_per_s: {rate:.2e}\nlatency_s: {times[small]:.1e}")


def main() -> None:
    """Measure, and print the figures in the format of the two files."""
    with torch_threads(1):
        _report_core()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        spawn(_peer, args=(str(Path(folder) / "store"),), nprocs=2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
