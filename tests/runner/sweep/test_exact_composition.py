"""Random sweeps over files that depend on each other: each job is as Hydra composes it."""

from collections.abc import Iterator, Sequence
from itertools import chain, product

import pytest
from hydra.errors import HydraException
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.config import choices
from runner.sweep.axes import read_axes
from runner.sweep.composition import Load, compose_grid, compose_one
from tests.runner.sweep.composing import Scene, assert_same, scene_in


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene_in(tmp_path_factory.mktemp("user")) as opened:
        yield opened


POOL = (
    "mode=single,kl_based,pipeline,cost_aware",
    "devices=boxes,2x16gb,dgx_h100,4xh100",
    "transfer_rate=nvlink4,16e9,pcie4",
    "schedule=none,gpipe,1f1b",
    "microbatches=2,4,none",
    "model.batch_size=1,2,-3",
    "model=gpt2,sub/tiny,transformers",
    "phase=inference,training",
    "optimizer=none,adam",
    "+preset=same_passes,own_link,links,refers,leads_on",
    "devices.between_nodes.latency_s=1,2",
    "mode.max_passes=3,8",
    "mode.stages=2,null",
    "+model.config={a: 1},{a: {b: 2}}",
    "latency.op_overhead_s=0,1e-6",
    "data_parallel=${microbatches},2",
    "~mode.min_gain",
    "reserve=none",
)


@st.composite
def sweeps(draw: st.DrawFn) -> list[str]:
    """Return some of the pool, each with some of its values in any order."""
    chosen = draw(st.lists(st.sampled_from(POOL), min_size=2, max_size=4, unique=True))
    overrides = []
    for override in chosen:
        key, equals, text = override.partition("=")
        values = text.split(",") if equals else [text]
        kept = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True))
        overrides.append(f"{key}{equals}{','.join(kept)}")
    return overrides


REFUSALS = (HydraException, AssertionError)  # the latter is OmegaConf's, for the top level


def _refusal(load: Load, overrides: Sequence[str]) -> str | None:
    try:
        compose_one(load, overrides)
    except REFUSALS as refused:
        return str(refused)
    return None


@settings(max_examples=4, deadline=None)
@given(sweeps(), st.data())
def test_each_job_is_what_hydra_composes(
    scene: Scene, overrides: list[str], data: st.DataObject
) -> None:
    load = scene.load()
    fixed, axes = read_axes(choices.quoted_overrides(overrides), None, None, None)
    try:
        jobs = compose_grid(load, fixed, axes)
    except REFUSALS as refused:
        # Then Hydra refuses a job on its own, in the same words.
        wanted = [(*fixed, *chain(*picked)) for picked in product(*(a.values for a in axes))]
        wrong = next(typed for typed in wanted if _refusal(scene.load(), typed))
        message = _refusal(scene.hydras, wrong)
        assert message == str(refused)  # noqa: PT017  (it is compared, not looked into)
        return
    assert_same(scene, [data.draw(st.sampled_from(jobs))])
