"""Run commands in their own processes without importing everything again.

A command in a test spends nearly all its time importing torch, MLflow and Hydra. One server process
for each test worker, and for `benchmarks.fuzz`, forks itself for each command: the child gets the
folder, environment and arguments of the command, runs it as ``python -m runner`` would, and ends
the same way, with its own exit code or signal; only the teardown of modules is skipped, which takes
as long as a short command. The server starts with what most children import and with their loops
compiled; whatever else a child had to import, the server imports before the next one. Tests that
depend on a bare start or a real exit use a new interpreter (`tests/test_layers.py`,
`run(..., bare=True)`, `tests/runner/cli/test_ending.py`).
"""

import atexit
import gc
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import NoReturn

from fxpart.support.garbage import collect_rarely

__all__ = ["fork_command"]

_PRELOADED = (
    "torch.export",
    "torch._dynamo",
    "mlflow.store.tracking.sqlalchemy_store",
    "alembic.command",
    "networkx",
    "fxpart.capture.api",
    "fxpart.capture.models.architecture",
    "runner.app",
    "runner.experiment.experiment",
    "runner.job.job",
    "runner.sweep.session",
    "runner.tracking.mlflow_tracker",
)
"""The modules that a run of the command imports, with all that they import."""


_GIVE_UP = signal.SIGUSR1
"""Tells the server to kill the running command."""
_PING = '"answer"'
"""A request that the server echoes."""


@cache
def _server() -> "subprocess.Popen[str]":
    """Return the server of this process, started on the first call."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fork_server"],
        cwd=Path(__file__).resolve().parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@cache
def _modules_file() -> Path:
    """Return the file to which the last child writes the names of its modules."""
    return Path(mkdtemp()) / "modules.txt"


def fork_command(
    folder: Path,
    program: tuple[str, str],
    arguments: Sequence[str],
    timeout_s: float,
    cpu_limit_s: float | None = None,
) -> tuple[int, str, str]:
    """Run ``python PROGRAM ARGUMENTS`` in `folder`; return its code, as Popen does, and output.

    `program` is ``("-m", module)`` or ``("-c", code)``.

    Raises:
        subprocess.TimeoutExpired: if it takes longer than `timeout_s`, or more CPU time than
            `cpu_limit_s` including the processes it waits for; it is killed.

    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with TemporaryDirectory() as texts:
        out, err = (Path(texts) / name for name in ("out", "err"))
        request = {
            "folder": str(folder),
            "environment": dict(os.environ),
            "program": program,
            "arguments": list(arguments),
            "out": str(out),
            "err": str(err),
            "modules": str(_modules_file()),
            "timeout_s": timeout_s,
            "cpu_limit_s": cpu_limit_s,
        }
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        try:
            answer = server.stdout.readline()
        except BaseException:
            # The next request would read this answer as its own. The answer may have been read
            # already and lost to the exception: the echo of a ping marks the end of the answers.
            server.send_signal(_GIVE_UP)
            with suppress(BrokenPipeError):
                server.stdin.write(f"{_PING}\n")
                server.stdin.flush()
            answer = server.stdout.readline()
            while answer not in ("", f"{_PING}\n"):
                answer = server.stdout.readline()
            if not answer:  # the server had not started yet
                _server.cache_clear()
            raise
        code = json.loads(answer)
        if code is None:
            raise subprocess.TimeoutExpired([*program, *arguments], timeout_s, err.read_text())
        return code, out.read_text(), err.read_text()


def _serve() -> None:
    """Fork for each request on stdin; answer with the exit code on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not reach the answers
    collect_rarely()
    for name in _PRELOADED:
        import_module(name)
    import_module("tests.precompile").run_modes(("size_based", "kl_based"))
    for line in sys.stdin:
        request = json.loads(line)
        if not isinstance(request, dict):
            answers.write(line)
            answers.flush()
            continue
        # Garbage collection in a child would touch, and so copy, everything imported here.
        gc.freeze()
        child = os.fork()
        if child == 0:
            answers.close()
            try:
                _run_request(request)
            except SystemExit as end:
                if end.code is not None and not isinstance(end.code, int):
                    raise  # Python prints the message
                _end(end.code or 0)
            _end(0)
        code = _wait_for_code(child, request["timeout_s"], request["cpu_limit_s"])
        answers.write(json.dumps(code) + "\n")
        answers.flush()
        _import_modules(Path(request["modules"]))


def _end(code: int) -> NoReturn:
    """End this process as Python does, without the teardown of modules."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _import_modules(modules: Path) -> None:
    """Import the modules that the last child listed; a killed child listed none."""
    if not modules.exists():
        return
    for name in modules.read_text().split():
        with suppress(Exception):  # the command itself reports the error
            import_module(name)


def _write_module_names(modules: Path) -> None:
    """Write the names of the modules imported here, except those that belong to a test."""
    homes = (sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[1]))
    names = [
        name
        for name, module in list(sys.modules.items())
        if (getattr(module, "__file__", None) or "").startswith(homes) and name != "__main__"
    ]
    with suppress(OSError):  # such as a full disk, which a test may simulate
        modules.write_text("\n".join(names))


def _wait_for_code(child: int, timeout_s: float, cpu_limit_s: float | None) -> int | None:
    """Return the exit code of a child, None if it exceeded its time and was killed."""
    expired = []

    def kill(*_: object) -> None:
        expired.append(True)
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.signal(_GIVE_UP, kill)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    _, status, usage = os.wait4(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(_GIVE_UP, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(status)
    cpu_s = usage.ru_utime + usage.ru_stime
    if cpu_limit_s is not None and (code == -signal.SIGXCPU or cpu_s >= cpu_limit_s):
        return None
    return None if expired else code


def _run_request(request: dict[str, object]) -> None:
    """Run the requested program in this process, as a new interpreter would."""
    import runpy

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(_GIVE_UP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, target in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open(str(target), flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(str(request["folder"]))
    limit_s = request["cpu_limit_s"]
    if isinstance(limit_s, int | float):
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s), math.ceil(limit_s) + 5))
    environment = request["environment"]
    assert isinstance(environment, dict)
    os.environ.clear()
    os.environ.update(environment)
    atexit.register(_write_module_names, Path(str(request["modules"])))
    program, arguments = request["program"], request["arguments"]
    assert isinstance(program, list)
    assert isinstance(arguments, list)
    kind, text = program
    sys.path[0] = str(Path.cwd()) if kind == "-m" else ""
    sys.argv = ["-c" if kind == "-c" else text, *arguments]
    if kind == "-m":
        runpy.run_module(text, run_name="__main__", alter_sys=True)
    else:
        exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    _serve()
