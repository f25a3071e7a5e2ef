"""A real single-node Slurm on this machine, in one folder: no accounts, no munge, no cgroups."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["NoSlurmError", "slurm_here"]

_START_S = 30.0
_LOOK_S = 0.1
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "sinfo")
_CONFIGURATION = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}
SlurmdSpoolDir={folder}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurmError(Exception):
    """Slurm is not installed here or does not start."""


@contextmanager
def slurm_here(folder: Path, cores: int = 2) -> Iterator[dict[str, str]]:
    """Start Slurm, yield the environment variables of its commands, and stop it at the end.

    Raises:
        NoSlurmError: with the reason.

    """
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        raise NoSlurmError(f"no {', '.join(missing)} on PATH")
    configuration = folder / "slurm.conf"
    configuration.write_text(
        _CONFIGURATION.format(
            folder=folder,
            host=socket.gethostname().partition(".")[0],
            ports=_free_ports(),
            user=getpass.getuser(),
            cores=cores,
        )
    )
    variables = {"SLURM_CONF": str(configuration)}
    with ExitStack() as stack:
        daemons = [
            stack.enter_context(_running(command, variables))
            for command in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "one"])
        ]
        _wait_until_ready(daemons, variables, folder)
        yield variables


@contextmanager
def _running(command: list[str], variables: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    silent = subprocess.DEVNULL
    process = subprocess.Popen(
        command, env={**os.environ, **variables}, stdin=silent, stdout=silent, stderr=silent
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=_START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]


def _wait_until_ready(
    daemons: list["subprocess.Popen[bytes]"], variables: dict[str, str], folder: Path
) -> None:
    """Return when the node is ready: there is no other sign that both daemons are connected."""
    deadline_s = time.monotonic() + _START_S
    # slurmd exits at once unless started by root.
    while time.monotonic() < deadline_s and all(daemon.poll() is None for daemon in daemons):
        state = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=_START_S,
            check=False,
        )
        if state.stdout.strip() == "idle":
            return
        time.sleep(_LOOK_S)  # polling: the node sends no signal when it is ready
    last_lines = [
        path.read_text().splitlines()[-1:]
        for path in (folder / "slurmctld.log", folder / "slurmd.log")
        if path.exists()
    ]
    raise NoSlurmError(f"Slurm did not start: {last_lines}")
