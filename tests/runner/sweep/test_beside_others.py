"""Concurrent sweeps: other processes, other folders, workers that are killed."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from benchmarks.fork_server import fork_command
from fxpart.errors import SpecError
from runner.config.schema import TrackingConfig
from runner.sweep import session
from runner.sweep.launching import run_job_file
from tests.runner.command import COMMAND, HALVES, OWN, SMALL, run, tracked_runs
from tests.runner.sweep.launchers.driven import wait_for
from tests.runner.sweep.sweeping import sweep

OVERLAP = """
import os
from tests.runner.sweep.test_beside_others import command
import tiny

def build(batch_size, dtype):
    # Meanwhile somebody else runs the next job of this sweep, and ends.
    if not os.path.exists("overlapped"):
        open("overlapped", "w").close()
        code, _, err = command({arguments})
        assert code == 0, err
    return tiny.build(batch_size, dtype)
"""

AGAIN = """
from pathlib import Path
from tests.runner.sweep.test_beside_others import command
import tiny

def build(batch_size, dtype):
    # The very same sweep, in the middle of it.
    _, _, err = command({arguments})
    Path("said").write_text(err)
    return tiny.build(batch_size, dtype)
"""

EDITS = """
from pathlib import Path
import tiny

def build(batch_size, dtype):
    # Meanwhile the user edits the next job's model.
    source = Path("read_late.py")
    source.write_text(source.read_text().replace("width=32", "width=40"))
    return tiny.build(batch_size, dtype)
"""

# A worker whose graph is known imports no torch, and calls no factory.
DIES = (
    HALVES
    + """
import os, signal
from pathlib import Path

def dies(problem):
    if not Path("struck").exists():
        Path("struck").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return first(problem)
"""
)

LATER = """
import tiny

def build(batch_size, dtype):
    return tiny.build(batch_size, dtype, width=32)
"""

WAITS = """
import os, time
from pathlib import Path
import tiny

def build(batch_size, dtype):
    if not os.path.exists("process"):
        Path("process.tmp").write_text(str(os.getpid()))
        os.rename("process.tmp", "process")
        time.sleep(300)  # longer than any test waits: it must be killed
    return tiny.build(batch_size, dtype, width=32)
"""

STRIKES = """
import os, signal, subprocess, time
from pathlib import Path
from tests.runner.sweep.test_beside_others import begin_command
import tiny

def begin():
    # Another sweep, until it is at the job that waits.
    begin_command({arguments})
    end_s = time.monotonic() + 90
    while not Path("process").exists():
        assert time.monotonic() < end_s, "the other sweep did not come to the job that waits"
        time.sleep(0.05)  # it is not a child of this process: nobody tells

def begun_before(batch_size, dtype):
    os.kill(int(Path("process").read_text()), signal.SIGKILL)
    return tiny.build(batch_size, dtype)

def begun_after(batch_size, dtype):
    begin()
    return begun_before(batch_size, dtype)

def waited_for(batch_size, dtype):
    begin()
    # By then the next job waits for it.
    subprocess.run("(sleep 3; kill -9 $(cat process)) &", shell=True, check=True)
    return tiny.build(batch_size, dtype)
"""


def command(arguments: list[str]) -> tuple[int, str, str]:
    """Run the command in this folder, as another process."""
    return fork_command(Path.cwd(), COMMAND, arguments, 300)


def begin_command(arguments: list[str]) -> None:
    """Start the command; the test that does this waits for `_ended`, and starts no other."""
    _begun.append(Thread(target=command, args=(arguments,)))
    _begun[-1].start()


_begun: list[Thread] = []


@pytest.fixture
def _ended() -> Iterator[None]:
    yield
    while _begun:
        _begun.pop().join()


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.usefixtures("store")
def test_a_job_completed_by_another_sweep_meanwhile_is_not_run_again(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["model=custom", "model.name=tiny", "reserve=none", SMALL]
    other = ["-m", *common, "model.factory=tiny:nested", "mode=kl_based"]
    (here / "overlap.py").write_text(OVERLAP.replace("{arguments}", repr(other)))
    assert sweep(*common, "mode=kl_based", "model.factory=overlap:build,tiny:nested") == 0
    shown, err = capsys.readouterr()
    assert "2 of 2 jobs done (1 before)" in err
    assert "2 runs" in shown
    keys = Counter(
        logged.data.tags["config_key"] for logged in tracked_runs(here, "tags.kind = 'run'")
    )
    assert sorted(keys.values()) == [1, 1]


@pytest.mark.usefixtures("store")
def test_a_model_edited_before_it_is_read_is_no_result_of_the_old_one(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("edits_next.py", EDITS), ("read_late.py", LATER)):
        (here / name).write_text(text)
    swept = ["model=custom", "model.name=tiny", "reserve=none", "devices=1x1mb,1x0.001mb"]
    swept += ["model.factory=edits_next:build,read_late:build"]
    assert sweep(*swept) == 2
    assert "source file of the model" in "".join(capsys.readouterr())
    outcomes = Counter(
        logged.data.tags["outcome"] for logged in tracked_runs(here, "tags.kind = 'run'")
    )
    # Neither the one that fits nor the one that does not.
    assert outcomes == {"finished": 1, "infeasible": 1, "failed": 2}
    assert sweep(*swept) == 0


@pytest.mark.usefixtures("store", "_ended")
@pytest.mark.parametrize("when", ["begun_before", "begun_after", "waited_for"])
def test_a_job_whose_process_dies_before_its_turn_here_is_shown_once(here: Path, when: str) -> None:
    # The model that waits is built in each of these tests, although another may have built it.
    common = ["model=custom", "model.name=tiny", "reserve=none", SMALL, "capture.use_cache=false"]
    arguments = ["-m", *common, "model.factory=waits:build", "mode=kl_based,single"]
    (here / "waits.py").write_text(WAITS)
    (here / "strikes.py").write_text(STRIKES.replace("{arguments}", repr(arguments)))
    if when == "begun_before":
        begin_command(arguments)
        wait_for([here / "process"])
    factories = f"model.factory=strikes:{when},waits:build"
    assert sweep(*common, factories, "mode=kl_based") == 0
    runs = tracked_runs(here, "tags.kind = 'run'")
    assert Counter(logged.info.status for logged in runs) == {"FINISHED": 2}
    (dead,) = tracked_runs(here, "tags.kind = 'cut_off'")
    assert dead.info.status == "KILLED"
    # The sweep that died is started again: it has the result, too, and closes its own run.
    assert sweep(*arguments[1:]) == 0
    runs = tracked_runs(here, "tags.kind = 'run'")
    assert sorted(len(logged.data.tags["sweeps"].split()) for logged in runs) == [1, 1, 2]
    parents = tracked_runs(here, "tags.kind = 'sweep'")
    assert [logged.info.status for logged in parents] == ["FINISHED"] * 2


@pytest.mark.usefixtures("store")
def test_a_lost_job_completed_by_another_sweep_meanwhile_is_not_lost(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    swept = [*OWN, SMALL, "mode=single,size_based", "devices=1x1mb"]
    goes = []

    # Real workers cannot be made to complete it between two reads of the store.
    def loses_all(*_: object) -> str:
        goes.append(1)
        if len(goes) == 2:
            assert run(here, "-m", *swept, "mode=size_based,single,kl_based").code == 0
        return "they are gone"

    monkeypatch.setattr(session, "launch", loses_all)
    assert sweep(*swept, "hydra/launcher=joblib") == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith("2 of 2 jobs done (2 before)")
    assert len(tracked_runs(here, "tags.kind = 'run'")) == 3


@pytest.mark.usefixtures("store")
def test_a_job_of_a_killed_worker_is_run_by_another_despite_an_earlier_result(
    folder: Path,
) -> None:
    (folder / "dies.py").write_text(DIES)
    swept = ["-m", *OWN, SMALL, "mode=custom", "mode.function=dies:first,dies:dies,dies:last"]
    (folder / "struck").touch()
    assert run(folder, *swept).code == 0
    (folder / "struck").unlink()
    # No earlier result replaces a lost one that is to be new.
    in_a_worker = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=1")
    done = run(folder, *swept, *in_a_worker, "resume=false")
    assert done.code == 0, done.err
    assert "of the jobs were lost: " in done.err
    assert "3 runs" in done.out
    kinds = Counter(logged.data.tags["kind"] for logged in tracked_runs(folder))
    assert (kinds["sweep"], kinds["run"]) == (2, 6)
    assert kinds["cut_off"] == 1
    # As a cluster does that starts a job once more.
    (job, *_) = sorted(folder.rglob("job.json"))
    assert run_job_file(job, TrackingConfig()) == "finished"
    runs = tracked_runs(folder, "tags.kind = 'run'")
    assert sorted(Counter(logged.data.tags["sweeps"] for logged in runs).values()) == [3, 3]
    keys = Counter(logged.data.tags["config_key"] for logged in runs)
    assert sorted(keys.values()) == [2, 2, 2]


@pytest.mark.usefixtures("here", "store")
def test_a_sweep_repeats_no_single_run() -> None:
    with pytest.raises(SpecError, match="rerun=abc repeats one run, but this is a sweep"):
        sweep(*OWN, SMALL, "mode=single,size_based", "rerun=abc")


@pytest.mark.usefixtures("store")
def test_a_second_run_of_the_same_sweep_is_refused(here: Path) -> None:
    # During the sweep the same command is given again.
    common = ["model=custom", "model.name=tiny", "reserve=none", SMALL, "model.factory=again:build"]
    again = ["-m", *common, "mode=kl_based,size_based"]
    text = AGAIN.replace("{arguments}", repr(again))
    (here / "again.py").write_text(text)
    assert sweep(*common, "mode=kl_based,size_based") == 0
    assert "another process is running this sweep" in (here / "said").read_text()
    assert "again" in sys.modules
