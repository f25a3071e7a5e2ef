"""``python -m benchmarks.loopback``: what a transfer between two processes of this machine costs.

Tensors are sent over gloo on the loopback interface, as the stages of ``execute=pipeline`` do. The
figures are those of ``conf/transfer_rate/loopback.yaml``.
"""

import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

SIZES = (4, 65_536, 1_048_576, 16_777_216)
REPEATS = 30


def _peer(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    times: dict[int, float] = {}
    for size in SIZES:
        tensor, runs = torch.zeros(size // 4), list[float]()
        for _ in range(REPEATS):
            dist.barrier()
            begin = time.perf_counter()
            # There and back again: one clock, two transfers.
            if rank == 0:
                dist.send(tensor, 1)
                dist.recv(tensor, 1)
            else:
                dist.recv(tensor, 0)
                dist.send(tensor, 0)
            runs.append((time.perf_counter() - begin) / 2)
        times[size] = median(runs)
    if rank == 0:
        _report(times)
    dist.destroy_process_group()


def _report(times: dict[int, float]) -> None:
    for size, time_s in times.items():
        print(f"{size:>12,} bytes  {time_s * 1e6:>10.1f} us  {size / time_s / 1e9:>6.2f} GB/s")
    small, large = SIZES[0], SIZES[-1]
    rate = (large - small) / (times[large] - times[small])
    print(f"bytes_per_s: {rate:.2e}\nlatency_s: {times[small]:.1e}")


def main() -> None:
    """Measure both ways between two processes and print times and the two coefficients."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        spawn(_peer, args=(str(Path(folder) / "store"),), nprocs=2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
