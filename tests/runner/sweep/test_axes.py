"""The axes of a sweep: counted by hand, and compared with Hydra's own sweeper."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from fxpart.errors import SpecError
from runner.config import choices
from runner.config import read as config
from runner.config.paths import conf_dir
from runner.sweep.axes import Axis, read_axes


@pytest.fixture(scope="module")
def loader() -> Iterator[ConfigLoader]:
    config.register()
    choices.register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def axes_of(
    *overrides: str,
    params: Mapping[str, object] | None = None,
    zips: Sequence[object] | None = None,
    loader: ConfigLoader | None = None,
) -> tuple[tuple[str, ...], tuple[Axis, ...]]:
    return read_axes(overrides, params, zips, loader)


def test_an_axis_for_each_key_with_several_values() -> None:
    fixed, axes = axes_of("mode=single,kl_based", "tracking=none", "microbatches=range(1,4)")
    assert fixed == ("tracking=none",)
    assert axes == (
        Axis(("mode",), (("mode=single",), ("mode=kl_based",))),
        Axis(("microbatches",), (("microbatches=1",), ("microbatches=2",), ("microbatches=3",))),
    )


@pytest.mark.parametrize(
    "override",
    ["model.a=[1,2]", "model.a='1,2'", "model.a={b: 1}", "~model.a", "+model.a=1", "model.a=null"],
)
def test_one_value_is_fixed_as_it_was_typed(override: str) -> None:
    assert axes_of(override) == ((override,), ())


def test_marks_and_quotes_stay_with_the_override_not_with_the_key() -> None:
    _, (added, quoted) = axes_of("+model.a=1,2", "transfer_rate='16e9',pcie4")
    assert added == Axis(("model.a",), (("+model.a=1",), ("+model.a=2",)))
    assert quoted.values == (("transfer_rate='16e9'",), ("transfer_rate=pcie4",))


@pytest.mark.parametrize(
    "overrides",
    [
        ["mode=b,a", "x=1", "y=range(0,3)", "+z.w=choice(p,q)"],
        ["mode=a,b", "x=1,2", "mode=c,d,e"],
        ["mode=a,b", "x=1,2", "mode=c"],
        ["mode=a", "x=1,2", "mode=c,b"],
        ["x='a,b',c", "y=[1,2],[3]", "z={a:1},{a:2}"],
        ["x=1"],
    ],
)
def test_the_grid_is_that_of_hydras_own_sweeper(overrides: list[str]) -> None:
    parsed = OverridesParser.create().parse_overrides(overrides)
    (hydras,) = BasicSweeper.split_arguments(parsed, None)
    fixed, axes = axes_of(*overrides)
    ours = [
        [*fixed, *itertools.chain.from_iterable(picked)]
        for picked in itertools.product(*(axis.values for axis in axes))
    ]
    # Hydra leaves fixed overrides between the others; the jobs and their order are the same.
    assert [sorted(job) for job in ours] == [sorted(job) for job in hydras]


def test_a_duplicate_value_counts_once() -> None:
    _, (axis,) = axes_of("mode=a,b,a")
    assert axis.values == (("mode=a",), ("mode=b",))


def test_a_glob_reads_the_configuration(loader: ConfigLoader) -> None:
    _, (axis,) = axes_of("schedule=glob(*,exclude=none)", loader=loader)
    assert axis.values == (("schedule=1f1b",), ("schedule=gpipe",), ("schedule=interleaved",))


def test_values_of_a_file_come_first_and_are_replaced() -> None:
    params = {
        "mode": "single,kl_based",
        "transfer_rate": "16e9,pcie4",
        "microbatches": [1, 2],
        "model.batch_size": 4,
        "devices": ["2x16gb"],
    }
    fixed, axes = axes_of("x=1,2", "mode=size_based", params=params)
    assert fixed == ("model.batch_size=4", "devices=2x16gb", "mode=size_based")
    assert axes == (
        Axis(("transfer_rate",), (("transfer_rate='16e9'",), ("transfer_rate=pcie4",))),
        Axis(("microbatches",), (("microbatches=1",), ("microbatches=2",))),
        Axis(("x",), (("x=1",), ("x=2",))),
    )


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 2.5, 1e-4, "plain", "a b", "a,b", "12", "null", "it's", [1, "b"], "4x16gb"],
)
def test_a_value_in_a_list_of_a_file_keeps_its_type(value: object) -> None:
    _, (axis,) = axes_of(params={"model.a": [value, "other"]})
    ((first,), _) = axis.values
    assert OverridesParser.create().parse_override(first).value() == value


def test_zipped_keys_advance_together_in_the_place_of_the_first() -> None:
    _, axes = axes_of("a=1,2", "b=5,6,7", "c=x,y", "d=8,9", zips=["c", "a"])
    assert axes == (
        Axis(("a", "c"), (("a=1", "c=x"), ("a=2", "c=y"))),
        Axis(("b",), (("b=5",), ("b=6",), ("b=7",))),
        Axis(("d",), (("d=8",), ("d=9",))),
    )


def test_several_zips() -> None:
    _, axes = axes_of("a=1,2", "b=3,4", "c=5,6", "d=7,8", zips=[["a", "c"], ["b", "d"], []])
    assert [axis.keys for axis in axes] == [("a", "c"), ("b", "d")]
    assert axes[1].values == (("b=3", "d=7"), ("b=4", "d=8"))


def test_only_a_complete_row_is_a_duplicate() -> None:
    _, (axis,) = axes_of("a=1,1,2,1", "b=3,4,4,3", zips=["a", "b"])
    assert axis.values == (("a=1", "b=3"), ("a=1", "b=4"), ("a=2", "b=4"))


@pytest.mark.parametrize("zips", [None, [], [[]]])
def test_nothing_to_zip(zips: list[object] | None) -> None:
    _, axes = axes_of("a=1,2", "b=3,4", zips=zips)
    assert len(axes) == 2


@pytest.mark.parametrize(
    ("overrides", "settings", "message"),
    [
        (
            ["a=interval(0,1)"],
            {},
            "a=interval(0,1): a grid needs a finite list of values, not an interval",
        ),
        (["a=range(1,1)"], {}, "a=range(1,1) has no values"),
        (["a=1,2", "+a=3,4"], {}, "a is swept twice, with + and without"),
        ([], {"params": {"a": []}}, "hydra.sweeper.params: a is an empty list"),
        ([], {"params": {"a": "[1,"}}, "hydra.sweeper.params: a=[1, cannot be read"),
        ([], {"params": {"hydra.x": "1,2"}}, "hydra.x is Hydra's own and cannot be swept"),
        (
            ["a=1,2", "b=1,2,3"],
            {"zips": ["a", "b"]},
            "zip=[a,b] needs as many values of each key; a has 2, b has 3",
        ),
        (["mode=1,2", "b=1,2"], {"zips": ["mod", "b"]}, "mod is not swept; nearest: mode"),
        (["mode=1", "b=1,2"], {"zips": ["mode", "b"]}, "zip=[mode,b]: mode is not swept"),
        (["mode=1"], {"zips": ["mode"]}, "mode is not swept; no key is"),
        (
            ["a=1,2", "b=1,2", "c=1,2"],
            {"zips": [["a", "b"], ["b", "c"]]},
            "zip=[[a,b],[b,c]]: b appears twice",
        ),
        (["a=1,2"], {"zips": ["a", "a"]}, "a appears twice"),
        (["a=1,2"], {"zips": [["a"], "b"]}, "zip=[[a],b] is neither a list of keys"),
        (["a=1,2"], {"zips": [1, 2]}, "zip=[1,2] is neither a list of keys"),
    ],
)
def test_an_invalid_sweep_is_one_line(
    overrides: list[str], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        axes_of(*overrides, **settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_glob_that_matches_nothing(loader: ConfigLoader) -> None:
    with pytest.raises(SpecError, match=r"mode=glob\(zz\*\) has no values"):
        axes_of("mode=glob(zz*)", loader=loader)
