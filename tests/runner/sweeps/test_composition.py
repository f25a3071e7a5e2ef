"""All jobs at once: the same as Hydra makes of each, job by job, for much less."""

from collections.abc import Iterator, Sequence
from itertools import chain, product
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra._internal import defaults_list as hydras
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from runner import config, specs
from runner.paths import conf_dir
from runner.sweeps.axes import read_axes
from runner.sweeps.composition import Composed, Load, compose_grid, compose_one
from runner.sweeps.loading import SweepLoad

FILES = {
    # Says what kl_based says anyway: whoever compares values alone does not see it.
    "preset/same_passes.yaml": "# @package _global_\nmode: {max_passes: 8}\n",
    "preset/fewer_passes.yaml": "# @package _global_\nmode: {max_passes: 2}\n",
    # Of two files that choose the same thing, the first wins; hiding the other's choice.
    "preset/own_link.yaml": "# @package _global_\ndefaults:\n  - override /transfer_rate: pcie4\n",
    "preset/links.yaml": (
        "# @package _global_\ndefaults:\n  - override /transfer_rate: nvlink3\n"
        "  - override /schedule: gpipe\nmicrobatches: 8\nmodel: {batch_size: 2}\n"
        "hydra: {job: {name: mine}}\n"
    ),
    "preset/refers.yaml": (
        "# @package _global_\nmicrobatches: ${model.batch_size}\n"
        "model: {seq_len: '${.batch_size}', config: '${model.factory_args}'}\n"
    ),
    "devices/boxes.yaml": (
        "defaults:\n  - 2xh100+2xa10\n  - override /transfer_rate@_global_.transfer_rate: pcie5\n"
        "  - _self_\nspec: boxes\nnodes: [0, 1]\n"
    ),
    "model/sub/tiny.yaml": "name: ${oc.select:.factory,tiny}\nfactory: tiny:build\n",
    # A choice that follows from the name of another.
    "extra/leads_on.yaml": "# @package _global_\nmicrobatches: 5\n",
    "preset/leads_on.yaml": "# @package _global_\ndefaults:\n  - /extra: ${preset}\n",
}


class CountedLoad(SweepLoad):
    """Counts what is left to Hydra."""

    full = 0

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        self.full += 1
        return super().__call__(overrides)


class Scene:
    """A user's folder with files of their own, and Hydra in it."""

    def __init__(self, loader: ConfigLoader) -> None:
        self.loader = loader
        self.master = loader.load_configuration("config", [], RunMode.MULTIRUN)

    def load(self) -> CountedLoad:
        """Return a new sweep's composition."""
        return CountedLoad(self.loader, self.master)

    def grid(self, load: Load, *overrides: str) -> list[Composed]:
        return compose_grid(load, *read_axes(specs.quote_numbers(overrides), None, None, None))

    def hydras(self, overrides: Sequence[str]) -> DictConfig:
        """Return a job composed on its own, by Hydra alone."""
        return self.load()(overrides)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("user")
    for name, text in FILES.items():
        path = folder / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config.register()
        specs.register()
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            yield Scene(GlobalHydra.instance().config_loader())


def assert_same(scene: Scene, jobs: Sequence[Composed]) -> None:
    for job in jobs:
        full = compose_one(scene.hydras, job.overrides)
        assert job.config == full.config
        assert job.choices == full.choices
        assert job.error == full.error


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


REFUSALS = (HydraException, AssertionError)  # the latter is OmegaConf's, inside of nothing


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
    fixed, axes = read_axes(specs.quote_numbers(overrides), None, None, None)
    try:
        jobs = compose_grid(load, fixed, axes)
    except REFUSALS as refused:
        # Then Hydra refuses a job on its own, in the same words.
        wanted = [(*fixed, *chain(*picked)) for picked in product(*(a.values for a in axes))]
        wrong = next(one for one in wanted if _refusal(scene.load(), one))
        said = _refusal(scene.hydras, wrong)
        assert said == str(refused)  # noqa: PT017  (it is compared, not looked into)
        return
    assert load.is_exact is not False
    assert_same(scene, [data.draw(st.sampled_from(jobs))])


@pytest.mark.parametrize(
    ("overrides", "index", "path", "value"),
    [
        # What the pipeline refers to is swept: neither the first nor the last job shows it.
        (
            ["mode=single,pipeline,kl_based", "schedule=none,gpipe"],
            3,
            "mode.options.schedule",
            "gpipe",
        ),
        (["+preset=refers", "model.batch_size=1,2"], 1, "microbatches", 2),
        # What is set inside of a reference is set in what it refers to, there and then.
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
        # A file that says what is so anyway says it of the other mode, too.
        (
            ["+preset=fewer_passes,same_passes", "mode=kl_based,cost_aware,single"],
            4,
            "mode.options.max_passes",
            8,
        ),
        # The file that comes first decides the link; the other decides where the first does not.
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
        # A choice that follows from another one.
        (["+preset=links,leads_on", "mode=single"], 1, "microbatches", 5),
        (["model=gpt2,sub/tiny,bert_large", "model.batch_size=1,2"], 2, "model.name", "tiny:build"),
    ],
)
def test_what_hangs_together_stays_together(
    scene: Scene, overrides: list[str], index: int, path: str, value: object
) -> None:
    job = scene.grid(scene.load(), *overrides)[index]
    found: object = job.config
    for key in path.split("."):
        found = found[key] if isinstance(found, dict) else getattr(found, key)
    assert found == value
    assert_same(scene, [job])


def test_most_jobs_cost_hydra_nothing(scene: Scene) -> None:
    load = scene.load()
    modes, rates = "mode=single,kl_based,pipeline", "transfer_rate=1e9,2e9,3e9,4e9,nvlink4"
    jobs = scene.grid(load, "tracking=none", modes, "devices=1x16gb,2x16gb,boxes", rates)
    assert len(jobs) == 45
    assert load.full == 2  # the first and the last, to compare
    assert load.is_exact
    # The last turns fastest.
    assert jobs[16].overrides == (
        "tracking=none",
        "mode=kl_based",
        "devices=1x16gb",
        "transfer_rate='2e9'",
    )
    choices = jobs[16].choices
    assert (choices.model, choices.mode) == ("llama2_13b", "kl_based")
    assert (choices.devices, choices.transfer_rate) == ("1x16gb", "2e9")


def test_the_model_is_called_what_it_was_filled_with(scene: Scene) -> None:
    (job,) = scene.grid(scene.load(), "model=transformers", "model.architecture=ViTModel")
    assert job.choices.model == "ViTModel"


def test_jobs_share_nothing_that_could_be_changed(scene: Scene) -> None:
    one, other = scene.grid(scene.load(), "mode=kl_based,cost_aware")
    assert one.config is not None
    assert other.config is not None
    assert one.config.devices == other.config.devices
    one.config.devices.pools[0].flops_per_s["float32"] = 1.0
    one.config.model.config["n_layer"] = 1
    assert one.config.devices != other.config.devices
    assert one.config.model != other.config.model


def test_values_that_make_no_sense_are_an_error_of_their_jobs(scene: Scene) -> None:
    load = scene.load()
    jobs = scene.grid(load, "model=custom,gpt2", "mode=single,kl_based", "+model.extra=1")
    said = [job.error for job in jobs]
    assert said[0] == said[1]
    assert str(said[0]).startswith("the model has neither an architecture nor a factory")
    assert said[2] == said[3]
    assert str(said[2]).startswith("model.extra does not exist")
    assert all(job.config is None for job in jobs)
    assert jobs[2].choices.model == "gpt2"
    assert_same(scene, jobs[1:3])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("mode=single,kl_basd", "mode=kl_basd does not exist; nearest: kl_based"),
        ("devices=2x16gb,4x16", "devices=4x16: size '16' has no unit"),
        ("+microbatches=2,3", "Could not append to config"),
        ("nonsense=1,2", "Could not override 'nonsense'"),
    ],
)
def test_what_hydra_refuses_it_refuses_before_the_sweep(
    scene: Scene, override: str, said: str
) -> None:
    with pytest.raises(HydraException) as caught:
        scene.grid(scene.load(), override, "transfer_rate=pcie3,pcie4")
    assert said in str(caught.value)


class _Liar(CountedLoad):
    """Changes what it composes where the last job differs from the first."""

    def quick(self, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, object]] | None:
        found = super().quick(overrides)
        if found and "mode=cost_aware" in overrides:
            found[0].microbatches = 99
        return found


@pytest.mark.parametrize("modes", ["single,kl_based,cost_aware", "cost_aware,kl_based,single"])
def test_where_hydra_disagrees_hydra_is_right(scene: Scene, modes: str) -> None:
    load = _Liar(scene.loader, scene.master)
    jobs = scene.grid(load, f"mode={modes}")
    assert load.is_exact is False
    assert [job.config.microbatches for job in jobs if job.config] == [1, 1, 1]
    # Each, and what was compared: the first, and the last where the first was the same.
    assert load.full == (5 if modes.startswith("single") else 4)


def test_any_composition_will_do(scene: Scene) -> None:
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


def test_hydra_is_left_as_it_was(scene: Scene) -> None:
    make_map = hydras._create_interpolation_map
    scene.grid(scene.load(), "mode=single,kl_based")
    assert hydras._create_interpolation_map is make_map
