"""The space that Optuna searches for the given overrides."""

import math
from typing import cast

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from fxpart.errors import SpecError
from runner.sweep.axes import Axis
from runner.sweep.optuna.space import Interval, Space, Steps, keys_of, read_space


def space(*overrides: str, params: dict[str, object] | None = None, zips: object = None) -> Space:
    return read_space(overrides, params, cast("list[object] | None", zips), None)


@pytest.mark.parametrize(
    ("override", "dimension"),
    [
        ("a=interval(1e-4,1e-1)", Interval("a", 1e-4, 1e-1)),
        ("a=tag(log, interval(1e-4,1e-1))", Interval("a", 1e-4, 1e-1, log=True)),
        ("a=interval(1,8)", Interval("a", 1, 8, whole=True)),
        ("a=interval(1.0,8)", Interval("a", 1.0, 8.0)),
        ("a=float(interval(1,8))", Interval("a", 1.0, 8.0)),
        ("a=interval(start=-1,end=8)", Interval("a", -1, 8, whole=True)),
        ("+a=tag(log,int(interval(1,64)))", Interval("+a", 1, 64, whole=True, log=True)),
        ("a=range(1,10,3)", Steps("a", ("1", "4", "7"))),
        ("a=range(9,1,-4)", Steps("a", ("5", "9"))),
        ("a=range(0.5,2,0.5)", Steps("a", ("0.5", "1.0", "1.5"))),
        ("a=x,y", Axis(("a",), (("a=x",), ("a=y",)))),
        ("a=choice(x,y)", Axis(("a",), (("a=x",), ("a=y",)))),
        ("a='range(1,2)',y", Axis(("a",), (("a='range(1,2)'",), ("a=y",)))),
    ],
)
def test_a_dimension_is_read_as_by_hydra(override: str, dimension: object) -> None:
    assert space("b=1", override) == Space(("b=1",), (dimension,))  # type: ignore[arg-type]
    assert isinstance(dimension, Interval | Steps | Axis)
    assert keys_of(dimension) == ("a",)


def test_the_command_line_takes_precedence_over_the_file() -> None:
    params: dict[str, object] = {"a": "interval(0.0,1.0)", "b": "range(3)", "c": "x,y", "d": 1}
    searched = space("a=1", "+c=interval(2.0,3.0)", "e=u,v", params=params)
    assert searched.fixed == ("d=1", "a=1")
    assert searched.dimensions == (
        Axis(("e",), (("e=u",), ("e=v",))),
        Steps("b", ("0", "1", "2")),
        Interval("+c", 2.0, 3.0),
    )


def test_zipped_choices_are_one_dimension() -> None:
    searched = space("a=1,2", "b=x,y", "c=interval(0.0,1.0)", zips=["a", "b"])
    assert searched.dimensions[0] == Axis(("a", "b"), (("a=1", "b=x"), ("a=2", "b=y")))


def test_the_size_is_the_number_of_combinations() -> None:
    assert space("a=1,2", "b=range(3)", "c=interval(1,5)").size() == 30
    assert space("a=1,2", "c=interval(1.0,5)").size() is None


def test_a_job_has_the_fixed_overrides_and_one_value_of_each_key() -> None:
    searched = space("b=1", "a=x,y", "c=range(4,8,2)", "d=interval(2,5)", "e=interval(0.0,1.0)")
    assert searched.samples() == [
        ("b=1", "a=x", "c=4", "d=2", "e=0.0"),
        ("b=1", "a=y", "c=4", "d=2", "e=0.0"),
        ("b=1", "a=x", "c=6", "d=2", "e=0.0"),
    ]
    assert searched.at([1, 1, 5, 0.25]) == ("b=1", "a=y", "c=6", "d=5", "e=0.25")


FINITE = st.floats(-1e300, 1e300)


@given(st.lists(FINITE, min_size=3, max_size=3))
def test_a_number_is_written_as_it_is_read_again(numbers: list[float]) -> None:
    low, value, high = sorted(numbers)
    text = Interval("a", low, high).override(value)
    read = OverridesParser.create().parse_override(text).value()
    assert isinstance(read, float)
    assert low <= read <= high
    assert math.isclose(read, value, rel_tol=5e-6, abs_tol=1e-320)


def test_a_number_has_few_digits() -> None:
    assert Interval("a", 0.0, 1.0).override(0.04381496240514299) == "a=0.043815"
    assert Interval("a", 0.04381496, 1.0).override(0.04381496240514299) == "a=0.043815"
    assert Interval("a", 0.0, 0.04381496).override(0.04381496) == "a=0.04381496"
    assert Interval("a", 1, 9, whole=True).override(4.0) == "a=4"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["a=1"], "hydra/sweeper=optuna needs something to search"),
        (["a=interval(2,1)"], "2.0 is more than 1.0; give the lower end first"),
        (["a=tag(log,interval(0,1))"], "a logarithmic interval needs numbers above 0"),
        (["a=tag(logg,interval(1,2))"], "there is no tag 'logg'; the only one is log"),
        (
            ["a=tag(log,range(1,9))"],
            "a range with steps cannot be logarithmic; write a=tag(log,int(",
        ),
        (["a=range(3,3)"], "this range is empty"),
    ],
)
def test_overrides_that_cannot_be_searched_are_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(SpecError) as raised:
        space(*overrides)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("zips", [["a", "b"], [["c", "d"], ["a", "b"]]])
def test_an_interval_cannot_be_zipped(zips: list[object]) -> None:
    with pytest.raises(SpecError, match="zip: a is an interval or a range"):
        space("a=interval(0.0,1.0)", "b=1,2", "c=1,2", "d=1,2", zips=zips)
