"""Conditions on jobs: known answers, Python as the reference, and a refusal for each mistake."""

import ast
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.errors import SpecError
from runner.config.device_schema import DevicesConfig, LinkConfig, PoolConfig
from runner.config.schema import Config, ModeConfig, ModelConfig, ScheduleConfig
from runner.job.identity import Choices
from runner.sweep.job_values import open_names
from runner.sweep.where import parse_where

CHOICES = Choices(model="gpt2", mode="kl_based", devices="2x80gb+4x16gb", transfer_rate="pcie4")
CONFIG = Config(
    model=ModelConfig(name="gpt2", batch_size=8, config={"n_layer": 12, "tie": True}),
    devices=DevicesConfig(
        spec="2x80gb+4x16gb",
        pools=[
            PoolConfig(count=2, name="a100_80gb", memory_bytes=80 * 10**9),
            PoolConfig(count=4, name="rtx_a4000", memory_bytes=16 * 10**9),
        ],
    ),
    transfer_rate=LinkConfig(name="pcie4", bytes_per_s=31.5e9),
    mode=ModeConfig("kl_based", {"max_passes": 8, "min_gain": 1e-4}),
    schedule=ScheduleConfig("gpipe"),
    microbatches=4,
)


def holds(text: str) -> bool:
    return parse_where(text).holds(CONFIG, CHOICES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('mode == "kl_based"', True),
        ("mode != 'kl_based'", False),
        ('mode in ["single", "kl_based"]', True),
        ('mode not in ("single", "size_based")', True),
        ('"16gb" in devices', True),
        ('"h100" not in devices', True),
        ('transfer_rate == "pcie4" and schedule == "gpipe"', True),
        ("n_devices == 6", True),
        ("memory_bytes == 224_000_000_000", True),
        ("memory_gb == 224", True),
        ("200 < memory_gb <= 224 < 300", True),
        ("200 < memory_gb <= 223", False),
        ("model.batch_size * microbatches <= 32", True),
        ("model.batch_size * microbatches < 32", False),
        ("n_devices % 4 == 2 and n_devices // 4 == 1 and n_devices / 4 == 1.5", True),
        ("-n_devices + 1 == -(5)", True),
        ("not n_devices > 6", True),
        ('mode == "single" or microbatches - 3 >= 1', True),
        ("model.config.n_layer == 12", True),
        ("model.config.tie == true", True),
        ("model.config.tie", True),
        ("not model.config.tie", False),
        ("devices.saturate_host == false", True),
        ("mode.max_passes >= 8 and mode.name == mode", True),
        ("transfer_rate.bytes_per_s >= 16e9", True),
        ('devices.spec == devices and model == "gpt2"', True),
        ("mode == 'single'\nor n_devices > 2  # lines, as in a file", True),
        ("True and not False", True),
    ],
)
def test_known_answers(text: str, expected: bool) -> None:
    assert holds(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # kl_based has no such option, the model no such field.
        ("mode.stages == null", True),
        ("mode.stages == None", True),
        ("mode.stages != null", False),
        ("mode.stages == 4", False),
        ("mode.stages != 4", True),
        ("mode.stages > 4", False),
        ("mode.stages <= 4", False),
        ("mode.stages * 2 > 4", False),
        ("-mode.stages < 4", False),
        ("mode.stages in [2, 4]", False),
        ("mode.stages in [2, null]", True),
        ("4 in mode.cut_after", False),
        ("4 not in mode.cut_after", False),
        ('mode.schedule in "gpipe"', False),
        ("model.config.tie.deeper == null", True),
        ("model.config.__class__ == null", True),
        ("model.config.tie.__class__ == null", True),
        ("model.factory_args.width > 1", False),
        ("devices.between_nodes.bytes_per_s > 1", False),
        ("mode.stages", False),
        ("not mode.stages", True),
    ],
)
def test_values_that_a_job_lacks_are_null(text: str, expected: bool) -> None:
    assert holds(text) is expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mod == 'single'", "mod does not exist; nearest: mode, model"),
        ("model.batchsize > 1", "model.batchsize does not exist; nearest: model.batch_size"),
        ("mode.stage > 1", "mode.stage is not an option of any mode; nearest: stages"),
        ("devices.pools.count > 1", "devices.pools.count does not exist"),
        ("model.name.__class__ == 1", "model.name.__class__ does not exist"),
        ("tracking == 'none'", "tracking does not exist"),
        ("(mode + 1).x == 2", "does not exist"),
        ("mode = 'single'", "mode = 'single': invalid syntax"),
        ("mode == ", "write comparisons, and, or, not"),
        ("mode == 'a' && mode == 'b'", "invalid syntax"),
        ("n_devices > 2 \0", "write comparisons"),
        ("len(mode) > 2", "len(mode) is not allowed"),
        ("__import__('os').system('x') == 0", "is not allowed"),
        ("[x for x in mode] == 1", "is not allowed"),
        ("(lambda: 1) == 1", "is not allowed"),
        ("mode[0] == 'k'", "mode[0] is not allowed"),
        ("f'{mode}' == 'a'", "is not allowed"),
        ("mode if true else mode", "is not allowed"),
        ("(x := 3) == 3", "is not allowed"),
        ("{1: 2} == 1", "is not allowed"),
        ("mode == ...", "... is not allowed"),
        ("mode == b'a'", "b'a' is not allowed"),
        ("n_devices == 1j", "1j is not allowed"),
        ("n_devices ** 9 > 1", "this operator is not allowed"),
        ("mode is null", "this operator is not allowed"),
        ("~n_devices == 1", "this operator is not allowed"),
        ("  ", "where= has 2 characters; write 1 to 2000"),
        ("n_devices > 1 or " * 200 + "true", "write 1 to 2000"),
        ("not " * 60 + "true", "more than 50 nested levels"),
        ("-" * 1900 + "1 == 1", "where=---"),
    ],
)
def test_an_invalid_condition_is_refused_at_once(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_where(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers > 40", "layers does not exist; did you mean model.factory_args.layers?"),
        (
            "model.layers > 4",
            "model.layers does not exist; did you mean model.factory_args.layers?",
        ),
        (
            "mode.layers > 4",
            "is not an option of any mode; did you mean model.factory_args.la",
        ),
        ("batch_size > 1", "batch_size does not exist; did you mean model.batch_size?"),
        ("deeper == 1", "did you mean model.config.rope.deeper?"),
        ("stages > 1", "did you mean mode.stages?"),
        ("layer > 40", "layer does not exist; nearest: latency"),
    ],
)
def test_a_key_is_suggested_by_its_last_part(text: str, message: str) -> None:
    model = ModelConfig(factory_args={"layers": 12}, config={"rope": {"deeper": 1}})
    with pytest.raises(SpecError) as caught:
        parse_where(text, open_names([CONFIG, replace(CONFIG, model=model)]))
    assert message in str(caught.value)


def test_of_many_keys_with_one_last_part_some_are_suggested() -> None:
    with pytest.raises(SpecError, match=r"did you mean (\S+ or ){3}\.\.\.\?$"):
        parse_where("name == 'a'")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices == 4", "devices (text) and 4 (a number) cannot be compared"),
        ("n_devices == 'four'", "n_devices (a number) and 'four' (text) cannot be compared"),
        ("n_devices > '4'", "cannot be compared"),
        ("n_devices == true", "(true or false) cannot be compared"),
        ("true < false", "cannot be compared"),
        ("[1] < [2]", "(a list) cannot be compared"),
        ("mode in [1, 2]", "cannot be compared"),
        ("4 in devices", "cannot be compared"),
        ("4 in n_devices", "cannot be compared"),
        ("model.config == 1", "model.config does not exist"),
        ("1 < n_devices < 'x'", "n_devices (a number) and 'x' (text)"),
        ("n_devices", "n_devices is a number, neither true nor false; compare it"),
        ("mode == 'single' or 'kl'", "'kl' is text, neither true nor false"),
        ("[]", "[] is a list, neither"),
        ("not mode", "mode is text, neither true nor false"),
        ("mode + 1 > 2", "mode is text, but a number is needed"),
        ("-mode == 1", "mode is text, but a number is needed"),
        ("n_devices + true == 1", "true is true or false, but a number is needed"),
        ("n_devices / (n_devices - 6) > 1", "n_devices / (n_devices - 6) cannot be computed"),
        ("n_devices % 0 == 1", "cannot be computed"),
        ("1e308 * 10 // 0 == 1", "cannot be computed"),
    ],
)
def test_a_meaningless_comparison_is_one_line(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        holds(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("where=")
    assert "\n" not in str(caught.value)


NUMBERS = st.integers(-9, 9).map(str) | st.sampled_from(["n_devices", "microbatches", "2.5"])


def _joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    signs = st.sampled_from(["+", "-", "*"])
    return st.tuples(inner, signs, inner).map(lambda p: f"({p[0]} {p[1]} {p[2]})")


def _combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    both = st.tuples(inner, st.sampled_from(["and", "or"]), inner)
    return both.map(lambda p: f"({p[0]} {p[1]} {p[2]})") | inner.map(lambda p: f"(not {p})")


ARITHMETIC = st.recursive(NUMBERS, _joined, max_leaves=4)
COMPARISONS = st.tuples(
    ARITHMETIC,
    st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
    ARITHMETIC,
    st.sampled_from(["", "< 7", "!= 3"]),
).map(" ".join)


@given(st.recursive(COMPARISONS, _combined, max_leaves=6))
def test_a_condition_has_its_meaning_in_python(text: str) -> None:
    names = {"n_devices": 6, "microbatches": 4}
    expected = eval(compile(ast.parse(text, mode="eval"), "", "eval"), {}, names)
    assert holds(text) is expected
