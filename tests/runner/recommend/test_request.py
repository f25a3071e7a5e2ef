"""Possible requests for a recommendation."""

import re
import shlex
from pathlib import Path

import pytest

from fxpart.errors import SpecError
from runner.experiment.check import check_all
from runner.plans.request import Request, Space
from runner.recommend.command import refuse_sweeps
from runner.recommend.request import read_request
from tests.runner.composed import read

ROOT = Path(__file__).resolve().parents[3]


def test_the_commands_own_settings_are_removed_from_the_arguments() -> None:
    request, others = read_request(
        [
            "model=gpt2",
            "recommend.objective=latency",
            "recommend.global_batch=8",
            "recommend.space.tensor_parallel=[1,2]",
            "recommend.space.mode=pipeline",
            "recommend.limits={ttft_ms: 500}",
            "recommend.limits.tpot_ms=50",
            "devices=2x16gb",
        ]
    )
    space = Space(tensor_parallel=[1, 2], mode=["pipeline"])
    limits = {"ttft_ms": 500.0, "tpot_ms": 50.0}
    assert request == Request("latency", 8, 10, limits=limits, space=space)
    assert others == ["model=gpt2", "devices=2x16gb"]
    assert read_request([]) == (Request(), [])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "recommend.objektive=latency",
            "recommend.objektive does not exist; .*recommend.objective",
        ),
        ("recommend.space.zeros=[1]", "recommend.space.zeros does not exist; .*space.zero"),
        ("recommend.objective=speed", "recommend.objective=speed does not exist; .*throughput"),
        ("recommend.global_batch=0", "recommend.global_batch=0 must be 1 or more, or null"),
        ("recommend.global_batch=many", "recommend.global_batch=many: .*such as"),
        ("recommend.limits.tpot=5", "recommend.limits: no metric tpot gets .*; nearest: tpot_ms"),
        ("recommend.limits.tpot_ms=-1", "recommend.limits.tpot_ms=-1.0 must be a number from 0"),
        ("recommend.limits.tpot_ms=fast", "recommend.limits.tpot_ms=fast: .*such as"),
        ("recommend.limits=5", "recommend.limits=5: .*such as"),
        ("recommend.rows=0", "recommend.rows=0 must be from 1 to 1000"),
        ("recommend.space.zero=[-1]", "recommend.space.zero: -1 must be 0 or more"),
        ("recommend.space.microbatches=[0]", "recommend.space.microbatches: 0 must be 1 or more"),
        ("recommend.space.batch=[]", r"recommend.space.batch=\[\] leaves no plan"),
        ("recommend.space.batch={h100: 1}", r"space.batch=\[{.*}\] must be a list, such"),
        ("recommend.space.zero=0,1", "a list of values is written in brackets"),
        ("recommend.global_batch", "a list of values is written in brackets"),
        ("recommend.rows=[", "has an unreadable value"),
    ],
)
def test_a_meaningless_request_is_one_line(text: str, line: str) -> None:
    with pytest.raises(SpecError, match=line) as refused:
        read_request([text])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["-m", "experiment=link_speed", "execute=local", "rerun=abc"])
def test_settings_of_runs_or_sweeps_alone_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match=f"{text} belongs to"):
        refuse_sweeps(["model=gpt2", text])
    refuse_sweeps(["execute=none", "experiment=null"])


@pytest.mark.parametrize("page", ["README.md", "docs/recommend.md"])
def test_commands_of_the_docs_are_accepted(page: str) -> None:
    text = (ROOT / page).read_text().replace("\\\n", "")
    commands = re.findall(r"^ +(?:\$ )?python -m runner\.recommend (.+)$", text, re.MULTILINE)
    assert commands
    for command in commands:
        _, others = read_request(shlex.split(command, comments=True))
        refuse_sweeps(others)
        check_all(read(*others))
