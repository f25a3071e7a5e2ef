"""A temporary PostgreSQL server, if its programs are installed."""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["PASSWORD", "free_port", "new_database", "postgres", "postgres_programs"]

PASSWORD = "a secret word"


def postgres_programs() -> Path | None:
    """Return the folder of `initdb` and `pg_ctl`, None if they are not installed."""
    on_path = shutil.which("initdb")
    if on_path:
        return Path(on_path).parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


@contextmanager
def postgres(programs: Path) -> Iterator[str]:
    """Start a server on loopback; yield its URI without the name of a database.

    Nothing is synced to disk, and all files are removed in the end.
    """
    # The server user needs access to the folder, which not every temporary folder allows.
    folder = Path(tempfile.mkdtemp(prefix="fxpart-postgres-"))
    as_user: dict[str, Any] = {"cwd": folder}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        shutil.chown(folder, "postgres")
        as_user["user"] = "postgres"
    port, data = free_port(), folder / "data"
    password_file = folder / "password"
    password_file.write_text(PASSWORD)
    serve = [str(programs / "pg_ctl"), "-D", str(data), "-l", str(folder / "log"), "-s"]
    serve += ["-o", f"-p {port} -h 127.0.0.1 -k {folder} -F"]
    init = [str(programs / "initdb"), "-D", str(data), "-U", "me", "--no-sync"]
    init += ["-A", "scram-sha-256", f"--pwfile={password_file}"]
    try:
        subprocess.run(init, check=True, stdout=subprocess.DEVNULL, **as_user)
        subprocess.run([*serve, "-w", "start"], check=True, **as_user)
        try:
            yield f"postgresql+psycopg2://me:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{port}"
        finally:
            subprocess.run([*serve, "-m", "immediate", "stop"], check=True, **as_user)
    finally:
        shutil.rmtree(folder)


def new_database(server: str, name: str) -> str:
    """Create an empty database and return its URI."""
    from sqlalchemy import NullPool, create_engine, text

    engine = create_engine(f"{server}/postgres", isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    return f"{server}/{name}"


def free_port() -> int:
    """Return a free loopback port between the ranges of Ray's workers and of ephemeral ports.

    No connection of others takes it until it is used, or while a server restarts.
    """
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
