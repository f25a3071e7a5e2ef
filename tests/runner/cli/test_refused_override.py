"""Overrides that Hydra or OmegaConf refuses, in one line of ours."""

import pytest

from runner.cli.refused_override import refused_value, unreadable
from tests.runner.composed import composed
from tests.runner.refused import refused_line


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("gpt2", "gpt2 has no =; write key=value, such as mode=kl_based"),
        (
            "devices=range(1",
            "devices=range(1 cannot be read: ( is not closed; mend it, or quote it:"
            " 'devices=\"range(1\"'",
        ),
        ("devices=glob(", "devices=glob( cannot be read: ( is not closed"),
        ("model.config={a:[1}", "cannot be read: } closes nothing"),
        ("mode=a)", "mode=a) cannot be read: ) closes nothing"),
        ("model.name='a", "model.name='a cannot be read: ' is not closed; mend it"),
        ("devices=2x16gb,,4x16gb", "cannot be read: a value is missing beside a comma"),
        ("reserve=none,", "cannot be read: a value is missing at its end"),
        ("model.name=a:b=c", "cannot be read: = has no place there"),
        ("model.dtype=a#b", "cannot be read: # has no place there"),
        ("model.batch_size=rang(1,3)", "there is no function rang; nearest: range"),
        (
            "model.batch_size=range()",
            "range() means nothing (missing a required argument: 'start'); write range(1,9) or",
        ),
        ("model.batch_size=tag(a,b)", "write tag(log,interval(1,8))"),
        ("resume=maybe", "resume=maybe must be true or false"),
        ("zip=devices", "zip=devices must be a list, such as zip=[mode,devices]"),
        ("model.batch_size=x", "model.batch_size=x must be a whole number"),
        ("latency.op_overhead_s=x", "latency.op_overhead_s=x must be a number"),
        ("model.name=[1]", "model.name=[1] must be text"),
        ("model.batch_size=null", "model.batch_size=null needs a value, null is none"),
        ("devices.nodes=[0,b]", "devices.nodes=[0,b]: b must be a whole number"),
        ("devices.pools=[3]", "devices.pools=[3] must be a list of {name: value}"),
        ("all_reduce=3", "must be several values; set one of all_reduce.bucket_bytes, "),
        ("model.config=3", "must be several values; write model.config={name: value}"),
    ],
)
def test_an_override_that_is_refused(override: str, said: str) -> None:
    assert said in refused_line(lambda: composed(override))


def test_a_password_is_not_said() -> None:
    override = "tracking.uri=postgresql://me:wo#rd@host/runs"
    said = "LexerNoViableAltException: ...\ntoken recognition error at: '#'"
    line = unreadable(override, said)
    assert line.startswith("tracking.uri=postgresql://host/runs cannot be read: # has no place")
    assert "rd@" not in line
    assert "wo#" not in line


@pytest.mark.parametrize("call", ["sort({uri},1)", "int({uri})", "range({uri},2)"])
def test_a_password_in_a_call_is_not_said(call: str) -> None:
    override = f"tracking.uri={call.format(uri='postgresql://me:geheim@host/runs')}"
    assert "geheim" not in refused_line(lambda: composed(override))


def test_what_is_not_about_the_value_is_left_to_others() -> None:
    assert refused_value("a=1", "Key 'a' is not in struct") is None
