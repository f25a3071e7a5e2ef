"""A missing Ray cluster is reported before anything of a sweep is stored."""

import socket
from pathlib import Path

import pytest

from tests.runner.command import OWN, SMALL, run


def test_an_address_without_an_answer_leaves_no_run(folder: Path) -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ray = ["hydra/launcher=ray", f"hydra.launcher.init.address=127.0.0.1:{port}"]
    done = run(folder, "-m", *OWN, SMALL, "mode=kl_based,size_based", *ray)
    assert done.code == 2
    assert done.error.startswith(f"no Ray cluster at 127.0.0.1:{port}: Connection refused; start")
    assert " jobs done" not in done.err
    assert not (folder / "outputs").exists()
