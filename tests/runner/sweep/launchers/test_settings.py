"""How a launcher reads its settings, and which it refuses; nothing is started here."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hypothesis import given
from hypothesis import strategies as st

from fxpart.errors import SpecError
from runner.sweep.launchers import ray_address
from runner.sweep.launchers.joblib_workers import worker_count
from runner.sweep.launchers.ray_address import answers_http2, check_address
from runner.sweep.launchers.ray_tasks import over_ray
from runner.sweep.launchers.submitit_jobs import deal, over_local, over_slurm
from runner.sweep.launchers.tickets import Ticket, Work, needs, prefer_own_launchers
from runner.sweep.launchers.worker import environment, thread_counts
from tests.runner.sweep.launchers.driven import settings

WORK = Work("digest", b"", "/", "host", 1)
TICKETS = (Ticket(0, ()),)


@given(
    jobs=st.integers(1, 50),
    processes=st.integers(1, 12),
    each=st.none() | st.integers(1, 12),
)
def test_every_job_is_dealt_once_and_evenly(jobs: int, processes: int, each: int | None) -> None:
    tickets = [Ticket(index, ()) for index in range(jobs)]
    bundles = deal(tickets, processes, each)
    assert sorted(ticket.index for bundle in bundles for ticket in bundle) == list(range(jobs))
    sizes = [len(bundle) for bundle in bundles]
    assert max(sizes) - min(sizes) <= 1
    if each is None:
        assert len(bundles) <= processes
    else:
        assert max(sizes) <= each


def test_neighbours_are_dealt_to_different_processes() -> None:
    bundles = deal([Ticket(index, ()) for index in range(5)], 2, None)
    assert [[ticket.index for ticket in bundle] for bundle in bundles] == [[0, 2, 4], [1, 3]]


@pytest.mark.parametrize(("n_jobs", "count"), [(3, 3), (-1, 8), (-2, 7), (-8, 1), (20, 20)])
def test_number_of_processes(n_jobs: int, count: int) -> None:
    assert worker_count(n_jobs, 8) == count


@pytest.mark.parametrize("n_jobs", [0, -9])
def test_no_process_at_all(n_jobs: int) -> None:
    with pytest.raises(SpecError) as caught:
        worker_count(n_jobs, 8)
    assert str(caught.value) == (
        f"hydra.launcher.n_jobs={n_jobs} leaves no process on 8 cores; write the number of "
        "processes, or -1 for all cores"
    )


def test_all_processes_together_have_a_thread_for_each_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "5")
    assert thread_counts(8, 2)["OMP_NUM_THREADS"] == "4"
    assert thread_counts(2, 3)["OMP_NUM_THREADS"] == "1"
    assert thread_counts(8, 2)["MKL_NUM_THREADS"] == "5"


def test_an_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THERE", "before")
    monkeypatch.delenv("NEW", raising=False)
    with environment({"THERE": "inside", "NEW": "inside"}):
        assert (os.environ["THERE"], os.environ["NEW"]) == ("inside", "inside")
    assert os.environ["THERE"] == "before"
    assert "NEW" not in os.environ


def test_an_extra_that_is_not_installed() -> None:
    with pytest.raises(SpecError) as caught, needs("ray", "no_such_package", "ray"):
        import no_such_package.inside  # type: ignore[import-not-found]  # noqa: F401
    assert str(caught.value) == (
        "hydra/launcher=ray needs no_such_package; pip install 'fxpart[ray]'"
    )


def test_an_error_inside_an_extra_is_not_taken_for_its_absence() -> None:
    with pytest.raises(ModuleNotFoundError), needs("ray", "ray", "ray"):
        import no_such_package  # noqa: F401


def test_launchers_of_other_packages_are_replaced() -> None:
    store = ConfigStore.instance()
    store.store(group="hydra/launcher", name="joblib", node={"_target_": "other"})
    store.store(group="hydra/launcher", name="another", node={"_target_": "another"})
    prefer_own_launchers()
    known = store.repo["hydra"]["launcher"]
    del_another = known.pop("another.yaml")
    assert del_another.node["_target_"] == "another"
    assert "joblib.yaml" not in known


@contextmanager
def _server(answer: bytes | None) -> Iterator[int]:
    """Yield the port of a server that answers like this, or not at all."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                if answer is not None:
                    connection.sendall(answer)
                done.wait(10)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            done.set()
            thread.join()


def test_a_server_that_speaks_http2() -> None:
    with _server(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))) as port:
        assert answers_http2("127.0.0.1", port) is None
    with _server(b"HTTP/1.1 400 Bad Request\r\n") as port:
        assert answers_http2("127.0.0.1", port) == "a service other than Ray answers there"


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_address, "_CONNECT_S", 0.1)
    with _server(None) as port:
        assert answers_http2("127.0.0.1", port) == "timed out"


def test_a_missing_ray_cluster() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    init = {"address": f"127.0.0.1:{port}", "num_cpus": 2}
    with pytest.raises(SpecError) as caught:
        list(over_ray(WORK, TICKETS, init, {}, print))
    assert str(caught.value) == (
        f"no Ray cluster at 127.0.0.1:{port}: Connection refused; start one with `ray start"
        " --head`, or leave hydra.launcher.init.address out to have one started here"
    )


def test_an_invalid_address() -> None:
    with pytest.raises(SpecError) as caught:
        list(over_ray(WORK, TICKETS, {"address": "somewhere"}, {}, print))
    assert str(caught.value) == (
        "hydra.launcher.init.address=somewhere is not an address; write host:6379, "
        "ray://host:10001, auto or local"
    )


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.sweep.launchers.ray_address.find_spec", lambda _: None)
    with pytest.raises(SpecError, match=r"ray://h:1 needs Ray's client, which is not installed; "):
        check_address("ray://h:1")


@pytest.mark.parametrize("address", ["http://127.0.0.1:80", "h:0", "h:65536", "127.0.0.1"])
def test_other_invalid_addresses(address: str) -> None:
    with pytest.raises(SpecError, match="is not an address; write host:6379"):
        check_address(address)


def test_missing_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SpecError) as caught:
        list(over_slurm(WORK, TICKETS, settings("submitit_slurm", tmp_path)))
    assert "there is no Slurm here" in str(caught.value)
    assert str(caught.value).endswith("or try it with hydra/launcher=submitit_local")


def test_settings_refused_by_slurm(
    slurm: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changed = {**settings("submitit_slurm", tmp_path), "partition": "nowhere"}
    with environment(slurm), pytest.raises(SpecError) as caught:
        list(over_slurm(WORK, TICKETS, changed))
    assert str(caught.value) == (
        "Slurm did not take the jobs: invalid partition specified: nowhere; Batch job submission"
        " failed: Invalid partition name specified"
    )
    assert capfd.readouterr() == ("", "")


def test_a_setting_that_submitit_does_not_know(tmp_path: Path) -> None:
    changed = {**settings("submitit_local", tmp_path), "memory": 3}
    with pytest.raises(SpecError, match=r"^hydra\.launcher: .*memory"):
        list(over_local(WORK, TICKETS, changed))
    # The data sent to the jobs may hold a password.
    assert (tmp_path / "submitit").stat().st_mode & 0o777 == 0o700
