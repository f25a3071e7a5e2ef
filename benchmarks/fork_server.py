"""Run commands in their own processes without importing everything again.

A command in a test spends nearly all its time importing torch, MLflow and Hydra. One server process
for each test worker, and for `benchmarks.fuzz`, forks itself for each command: the child gets the
folder, environment and arguments of the command, runs it as ``python -m runner`` would, and ends
the same way, with its own exit code or signal; only the teardown of modules is skipped, which takes
as long as a short command. The server starts with what most children import, their loops compiled
and their configuration parsed; whatever else a child had to import, the server imports before the
next one. Tests that depend on a bare start or a real exit use a new interpreter
(`tests/test_layers.py`, `run(..., bare=True)`, `tests/runner/cli/test_ending.py`).

Within `shared_imports`, as in the workers of one run of tests, the servers are themselves forks of
a process that imports once for all of them, when the first is asked for.
"""

import atexit
import gc
import json
import math
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import IO, NoReturn

from benchmarks.parsed_files import keep_parsed_files
from fxpart.support.garbage import collect_rarely

__all__ = ["fork_command", "shared_imports"]

_ROOT = Path(__file__).resolve().parents[1]
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
"""What a run of the command imports, and what that imports."""


_GIVE_UP = signal.SIGUSR1
"""Tells the server to kill the running command."""
_PING = '"answer"'
"""A request that the server echoes."""


_SHARED = "FXPART_FORK_SERVER"
"""The variable that names the socket of the process whose imports servers share."""


@dataclass
class _Server:
    """Where a server takes requests and gives answers."""

    requests: IO[str]
    answers: IO[str]
    pid: int
    started: subprocess.Popen[str] | None = None
    """The server, if this process started it."""

    def end(self) -> None:
        """Close the requests, at whose end the server exits, and wait for it."""
        with suppress(BrokenPipeError):
            self.requests.close()
        self.answers.close()
        if self.started is not None:
            # A child that was forked meanwhile may keep the requests open.
            with suppress(subprocess.TimeoutExpired):
                self.started.wait(timeout=5)
            self.started.kill()
            self.started.wait()


@cache
def _server() -> _Server:
    """Return this process's server, started with the first command."""
    if _SHARED in os.environ:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.environ[_SHARED])
            # These keep the connection.
            requests, answers = connection.makefile("w"), connection.makefile("r")
        server = _Server(requests, answers, int(answers.readline()))
    else:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fork_server"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        server = _Server(process.stdin, process.stdout, process.pid, process)
    atexit.register(server.end)
    return server


@contextmanager
def shared_imports() -> Iterator[None]:
    """Let the servers of this process's children share one process's imports, meanwhile."""
    with TemporaryDirectory(prefix="fork") as folder:
        path = f"{folder}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fork_server", str(listener.fileno())],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
            )
        os.environ[_SHARED] = path
        try:
            yield
        finally:
            del os.environ[_SHARED]
            process.communicate()  # it ends with its input


@cache
def _modules_file() -> Path:
    """Return the file in which the last child names its modules."""
    return Path(mkdtemp()) / "modules.txt"


def fork_command(
    folder: Path,
    program: tuple[str, str],
    arguments: Sequence[str],
    timeout_s: float,
    cpu_limit_s: float | None = None,
) -> tuple[int, str, str]:
    """Run ``python PROGRAM ARGUMENTS`` in `folder`; return its code, as Popen has it, and its text.

    `program` is ``("-m", module)`` or ``("-c", code)``.

    Raises:
        subprocess.TimeoutExpired: when it takes longer than `timeout_s`, or more than `cpu_limit_s`
            of CPU with the processes that it waits for; it is killed.

    """
    server = _server()
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
        server.requests.write(json.dumps(request) + "\n")
        server.requests.flush()
        try:
            answer = server.answers.readline()
        except BaseException:
            # The next request would read this answer as its own. The answer may have been read
            # already and lost to the exception: the echo of a ping marks the end of the answers.
            os.kill(server.pid, _GIVE_UP)
            with suppress(BrokenPipeError):
                server.requests.write(f"{_PING}\n")
                server.requests.flush()
            answer = server.answers.readline()
            while answer not in ("", f"{_PING}\n"):
                answer = server.answers.readline()
            if not answer:  # the server had not started yet
                _server.cache_clear()
            raise
        code = json.loads(answer)
        if code is None:
            raise subprocess.TimeoutExpired([*program, *arguments], timeout_s, err.read_text())
        return code, out.read_text(), err.read_text()


def _preload() -> None:
    collect_rarely()
    for name in _PRELOADED:
        import_module(name)
    import_module("tests.precompile").run_modes(("size_based", "kl_based"))
    keep_parsed_files()
    import_module("tests.runner.composed").composed_by_hydra("devices=2x16gb")  # parses them


def _serve_alone() -> None:
    """Serve requests on stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    _preload()
    _serve(sys.stdin, answers)


def _fork_servers(listener: socket.socket) -> None:
    """Fork a server for each connection, until the end of stdin."""
    os.dup2(2, 1)
    imported = False
    while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
        connection, _ = listener.accept()
        if not imported:
            _preload()
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for servers
            imported = True
        gc.freeze()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            requests, answers = connection.makefile("r"), connection.makefile("w")
            connection.close()  # but for those two
            answers.write(f"{os.getpid()}\n")
            answers.flush()
            _serve(requests, answers)
            os._exit(0)
        connection.close()


def _serve(requests: IO[str], answers: IO[str]) -> None:
    """Fork for each request; answer with the exit code."""
    for line in requests:
        request = json.loads(line)
        if not isinstance(request, dict):
            answers.write(line)
            answers.flush()
            continue
        # A child's collections would touch, and so copy, all that has been imported here.
        gc.freeze()
        child = os.fork()
        if child == 0:
            # Those inherited from this server take most of the time of a short command.
            for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
                finalizer.atexit = False
            answers.close()
            if requests is not sys.stdin:  # whose number `_become` replaces
                requests.close()
            try:
                _become(request)
            except SystemExit as end:
                if end.code is not None and not isinstance(end.code, int):
                    raise  # Python prints it
                _end(end.code or 0)
            _end(0)
        code = _code_of(child, request["timeout_s"], request["cpu_limit_s"])
        answers.write(json.dumps(code) + "\n")
        answers.flush()
        _import_as(Path(request["modules"]))


def _end(code: int) -> NoReturn:
    """End this process as Python does, up to where it would take its modules apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _import_as(modules: Path) -> None:
    """Import the modules that a child left the names of; one that was killed left none."""
    if not modules.exists():
        return
    for name in modules.read_text().split():
        with suppress(Exception):  # the command will say what is wrong with it
            import_module(name)


def _leave_names(modules: Path, known: Set[str]) -> None:
    """Write the names of the modules imported since `known`, except those of a test's folder."""
    homes = (sys.prefix, sys.base_prefix, str(_ROOT))
    names = [
        name
        for name, module in list(sys.modules.items())
        if name not in known and (getattr(module, "__file__", None) or "").startswith(homes)
    ]
    with suppress(OSError):  # such as no room, which the command may have been started with
        modules.write_text("\n".join(names))


def _code_of(child: int, timeout_s: float, cpu_limit_s: float | None) -> int | None:
    """Return how a child ended, None if it had to be killed for its time."""
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


def _become(request: dict[str, object]) -> None:
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
    atexit.register(_leave_names, Path(str(request["modules"])), frozenset(sys.modules))
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
    if len(sys.argv) > 1:
        _fork_servers(socket.socket(fileno=int(sys.argv[1])))
    else:
        _serve_alone()
