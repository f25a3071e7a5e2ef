"""Sweeps composed in a user's folder, whose files depend on each other."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig

from runner.config import choices
from runner.config import read as config
from runner.config.paths import conf_dir
from runner.sweep.axes import read_axes
from runner.sweep.composition import Composed, Load, SweepLoad, compose_grid, compose_one

FILES = {
    # Sets what kl_based sets anyway: a comparison of values alone does not see it.
    "preset/same_passes.yaml": "# @package _global_\nmode: {max_passes: 8}\n",
    "preset/fewer_passes.yaml": "# @package _global_\nmode: {max_passes: 2}\n",
    # Of two files that choose the same option, the first wins; hiding the other's choice.
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
    "preset/cheap.yaml": "# @package _global_\nprice_per_hour: {t4: 1}\n",
    "preset/dear.yaml": "# @package _global_\nprice_per_hour: {t4: 2}\n",
    "extra/refers_to_price.yaml": "# @package _global_\nmodel: {config: '${price_per_hour}'}\n",
    "inside/extra.yaml": "# @package _global_\nmodel: {config: {n_layer: 3}}\n",
    # A choice that follows from the name of another.
    "extra/leads_on.yaml": "# @package _global_\nmicrobatches: 5\n",
    "preset/leads_on.yaml": "# @package _global_\ndefaults:\n  - /extra: ${preset}\n",
}


class CountedLoad(SweepLoad):
    """Count the jobs left to Hydra."""

    full = 0

    def in_full(self, overrides: Sequence[str]) -> tuple[DictConfig, Mapping[str, Any]]:
        self.full += 1
        return super().in_full(overrides)


class Scene:
    """A user's folder with files of their own, and Hydra in it."""

    def __init__(self, loader: ConfigLoader) -> None:
        self.loader = loader
        self.master = loader.load_configuration("config", [], RunMode.MULTIRUN)

    def load(self) -> CountedLoad:
        """Return a new sweep's composition."""
        return CountedLoad(self.loader, self.master)

    def grid(self, load: Load, *overrides: str) -> list[Composed]:
        return compose_grid(load, *read_axes(choices.quoted_overrides(overrides), None, None, None))

    def hydras(self, overrides: Sequence[str]) -> tuple[DictConfig, Mapping[str, Any]]:
        """Return a job composed on its own, by Hydra alone."""
        return self.load().in_full(overrides)


@contextmanager
def scene_in(folder: Path) -> Iterator[Scene]:
    """Let Hydra search `folder`, to which the files are written."""
    for name, text in FILES.items():
        path = folder / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config.register()
        choices.register()
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            yield Scene(GlobalHydra.instance().config_loader())


def assert_same(scene: Scene, jobs: Sequence[Composed]) -> None:
    for job in jobs:
        full = compose_one(scene.hydras, job.overrides)
        assert job.config == full.config
        assert job.choices == full.choices
        assert job.error == full.error
