"""Mistakes that are reported before a job starts: without slow imports, leaving no files."""

from pathlib import Path

import pytest

from tests.runner.command import SMALL, run, tracked_runs

_BARE = """
import sys
from runner.__main__ import main
code = main()
print("imported:", *sorted({"torch", "transformers", "scipy.sparse"} & sys.modules.keys()))
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["model=transformers", "model.architecure=LlamaForCausalLM"],
            "model.architecure does not exist; in model, nearest: architecture",
        ),
        (["model=transformers", "model.confg.n_layer=1"], "model.confg does not exist"),
        (["model=gpt2", "model.dtype=float31"], "dtype=float31 is not known; nearest: float32"),
        (["model=gpt2", "model.batch_size=0"], "model.batch_size=0 must be a whole number"),
        (["model=gpt2", "+model.foo=1"], "model.foo does not exist"),
        (["model=transformers"], "the model has neither an architecture nor a factory"),
        (["model=gpt2", "mode.max_pases=3"], "mode kl_based has no option 'max_pases'"),
        (["model=gpt2", "devices.nodes=[0,1]"], "devices.nodes names the machines of 2 pools"),
        (["model=gpt2", "batch_sweep=0"], "batch_sweep=0 must be from 1 to"),
        (["rerun=outputs/none"], "there is no folder outputs/none; give the folder of a run"),
    ],
)
def test_a_mistake_before_the_job_leaves_no_folder(
    folder: Path, arguments: list[str], message: str
) -> None:
    done = run(folder, *arguments, "tracking=none")
    assert done.code == 2
    assert done.error.startswith(message)
    assert list((folder / "outputs").glob("runs/*")) == []


def test_nothing_slow_is_imported_for_it(folder: Path) -> None:
    arguments = ["model=transformers", "model.architecture=GPT2Model", "mode.max_pases=3"]
    done = run(folder, *arguments, "tracking=none", program=("-c", _BARE), bare=True)
    assert done.code == 2
    assert done.error.startswith("mode kl_based has no option")
    assert "imported:\n" in done.out


@pytest.mark.usefixtures("store")
def test_it_is_a_failed_run_in_the_store(folder: Path) -> None:
    done = run(folder, "model=gpt2", SMALL, "mode.max_pases=3")
    assert done.error.startswith("mode kl_based has no option")
    assert [kept.info.status for kept in tracked_runs(folder)] == ["FAILED"]
    assert list((folder / "outputs").glob("runs/*")) == []
