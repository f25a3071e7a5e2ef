"""All jobs composed at once: the same as Hydra composes each, in much less time."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra._internal import defaults_list as hydras
from hydra.errors import HydraException

from runner.sweep.composition import SweepLoad, compose_one
from tests.runner.sweep.composing import Scene, assert_same, scene_in


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene_in(tmp_path_factory.mktemp("user")) as opened:
        yield opened


@pytest.mark.parametrize(
    ("overrides", "index", "path", "value"),
    [
        # The key that the pipeline refers to is swept: neither the first nor the last job shows it.
        (
            ["mode=single,pipeline,kl_based", "schedule=none,gpipe"],
            3,
            "mode.options.schedule",
            "gpipe",
        ),
        (["+preset=refers", "model.batch_size=1,2"], 1, "microbatches", 2),
        # A value set inside a reference is set at once in its target.
        (
            ["+preset=refers", "model.factory_args={a: 1},{a: 2}", "+model.config.b=3"],
            1,
            "model.factory_args.a",
            2,
        ),
        (
            ["devices.between_nodes=${transfer_rate}", "transfer_rate=pcie4,nvlink4"],
            1,
            "devices.between_nodes.name",
            "nvlink4",
        ),
        # A file that sets what holds anyway sets it for the other mode, too.
        (
            ["+preset=fewer_passes,same_passes", "mode=kl_based,cost_aware,single"],
            4,
            "mode.options.max_passes",
            8,
        ),
        # The first file decides the link; the other decides where the first does not.
        (
            ["devices=2x16gb,boxes,4x16gb", "+preset=links,fewer_passes"],
            2,
            "transfer_rate.name",
            "nvlink3",
        ),
        (
            ["devices=2x16gb,boxes,4x16gb", "+preset=links,fewer_passes"],
            3,
            "transfer_rate.name",
            "pcie5",
        ),
        # A choice that follows from another.
        (["+preset=links,leads_on", "mode=single"], 1, "microbatches", 5),
        (["model=gpt2,sub/tiny,bert_large", "model.batch_size=1,2"], 2, "model.name", "tiny:build"),
    ],
)
def test_dependent_values_stay_together(
    scene: Scene, overrides: list[str], index: int, path: str, value: object
) -> None:
    job = scene.grid(scene.load(), *overrides)[index]
    part: object = job.config
    for key in path.split("."):
        part = part[key] if isinstance(part, dict) else getattr(part, key)
    assert part == value
    assert_same(scene, [job])


@pytest.mark.parametrize(
    ("choices", "count"),
    [
        (
            [
                "mode=single,pipeline,kl_based,custom",
                "model=gpt2,transformers,sub/tiny,mixtral_8x7b",
                "schedule=none,gpipe",
            ],
            128,
        ),
        (
            [
                "mode=custom,pipeline",
                "devices=2x16gb,boxes,dgx_h100,2xa10+host64gb",
                "transfer_rate=pcie3,16gb",
            ],
            64,
        ),
    ],
    ids=["models", "devices"],
)
def test_a_grid_of_choices_is_composed_from_sections_as_hydra_composes_each_job(
    scene: Scene, choices: list[str], count: int
) -> None:
    load = scene.load()
    jobs = scene.grid(load, *choices, "+preset=same_passes,links,refers,leads_on")
    assert len(jobs) == count
    assert load.full == 0
    assert_same(scene, random.Random(0).sample(jobs, 6))


def test_a_section_that_refers_to_another_is_merged_with_it(scene: Scene) -> None:
    load = scene.load()
    # The last file sets a key inside a section to which the file before it only refers.
    jobs = [
        compose_one(load, [f"+preset={preset}", "+extra=refers_to_price", "+inside=extra"])
        for preset in ("cheap", "dear", "cheap")
    ]
    assert load.full == 0
    assert [job.config.model.config["t4"] for job in jobs if job.config] == [1, 2, 1]
    assert_same(scene, jobs)


def test_jobs_need_no_composition_by_hydra(scene: Scene) -> None:
    load = scene.load()
    modes, rates = "mode=single,kl_based,pipeline", "transfer_rate=1e9,2e9,3e9,4e9,nvlink4"
    jobs = scene.grid(load, "tracking=none", modes, "devices=1x16gb,2x16gb,boxes", rates)
    assert len(jobs) == 45
    assert load.full == 0
    # The last varies fastest.
    assert jobs[16].overrides == (
        "tracking=none",
        "mode=kl_based",
        "devices=1x16gb",
        "transfer_rate='2e9'",
    )
    choices = jobs[16].choices
    assert (choices.model, choices.mode) == ("llama2_13b", "kl_based")
    assert (choices.devices, choices.transfer_rate) == ("1x16gb", "2e9")


def test_the_name_of_the_model_is_the_interpolated_one(scene: Scene) -> None:
    (job,) = scene.grid(scene.load(), "model=transformers", "model.architecture=ViTModel")
    assert job.choices.model == "ViTModel"


def test_jobs_share_no_mutable_values(scene: Scene) -> None:
    first, second = scene.grid(scene.load(), "mode=kl_based,cost_aware")
    assert first.config is not None
    assert second.config is not None
    assert first.config.devices == second.config.devices
    first.config.devices.pools[0].flops_per_s["float32"] = 1.0
    first.config.model.config["n_layer"] = 1
    assert first.config.devices != second.config.devices
    assert first.config.model != second.config.model


def test_a_section_is_read_anew_where_a_job_changes_it(scene: Scene) -> None:
    load = scene.load()
    some = ("", "reserve.rounding_bytes=1024", "")
    jobs = [
        compose_one(load, ["mode=kl_based", *filter(None, [override])]) for override in some * 2
    ]
    usual, changed, *_ = [job.config.reserve.rounding_bytes for job in jobs if job.config]
    assert [job.config.reserve.rounding_bytes for job in jobs if job.config] == [
        *(usual, changed, usual) * 2
    ]
    assert (load.full, changed) == (0, 1024)


def test_a_change_below_a_reference_reaches_no_other_job(scene: Scene) -> None:
    load = scene.load()
    jobs = [
        compose_one(load, ["+preset=cheap", *overrides])
        for overrides in (
            (),
            ("+extra=refers_to_price", "model.config.t4=3"),
            ("+extra=refers_to_price",),
            ("model.config=${price_per_hour}", "+model.config.a100=4"),
            ("microbatches=2",),
            (),
        )
    ]
    prices = [dict(job.config.price_per_hour) for job in jobs if job.config]
    assert (prices[0], prices[2], prices[4:]) == ({"t4": 1}, {"t4": 1}, [{"t4": 1}] * 2)
    assert_same(scene, jobs)


def test_meaningless_values_are_an_error_of_their_jobs(scene: Scene) -> None:
    load = scene.load()
    jobs = scene.grid(load, "model=custom,gpt2", "mode=single,kl_based", "+model.extra=1")
    errors = [job.error for job in jobs]
    assert errors[0] == errors[1]
    assert str(errors[0]).startswith("the model has neither an architecture nor a factory")
    assert errors[2] == errors[3]
    assert str(errors[2]).startswith("model.extra does not exist")
    assert all(job.config is None for job in jobs)
    assert jobs[2].choices.model == "gpt2"
    assert_same(scene, jobs[1:3])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mode=single,kl_basd", "mode=kl_basd does not exist; nearest: kl_based"),
        ("devices=2x16gb,4x16", "devices=4x16: size '16' has no unit"),
        ("+microbatches=2,3", "Could not append to config"),
        ("sequence_parallel=choice(0,2)", "Error merging override sequence_parallel=0"),
        ("nonsense=1,2", "Could not override 'nonsense'"),
    ],
)
def test_overrides_refused_by_hydra_are_refused_before_the_sweep(
    scene: Scene, override: str, message: str
) -> None:
    with pytest.raises(HydraException) as caught:
        scene.grid(scene.load(), override, "transfer_rate=pcie3,pcie4")
    assert message in str(caught.value)


def test_another_version_of_hydra_costs_time_and_not_the_sweep(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def renamed(*_: object, **__: object) -> None:
        raise AttributeError("no attribute '_load_single_config'")

    load = scene.load()
    monkeypatch.setattr(SweepLoad, "_part", renamed)
    jobs = scene.grid(load, "mode=single,kl_based")
    assert load.full == 2
    hydras_jobs = scene.grid(scene.hydras, "mode=single,kl_based")
    assert [job.config for job in jobs] == [job.config for job in hydras_jobs]


def test_any_composition_is_accepted(scene: Scene) -> None:
    load = scene.load()
    quick = scene.grid(load, "mode=single,kl_based")
    slow = scene.grid(scene.hydras, "mode=single,kl_based")
    assert [job.config for job in quick] == [job.config for job in slow]


def test_files_are_read_once_in_a_sweep(scene: Scene) -> None:
    path = Path("conf/preset/later.yaml")
    path.write_text("# @package _global_\nmicrobatches: 7\n")
    load = scene.load()
    before = compose_one(load, ["+preset=later", "mode=single"])
    path.write_text("# @package _global_\nmicrobatches: 8\n")
    after = compose_one(load, ["+preset=later", "mode=kl_based"])
    assert [job.config.microbatches for job in (before, after) if job.config] == [7, 7]
    path.unlink()


def test_hydra_is_left_unchanged(scene: Scene) -> None:
    make_map = hydras._create_interpolation_map
    scene.grid(scene.load(), "mode=single,kl_based")
    assert hydras._create_interpolation_map is make_map
