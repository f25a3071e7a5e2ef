"""Plan a run as ``python -m runner`` does, for sets whose rows are such runs."""

from collections.abc import Mapping

from omegaconf import OmegaConf

from benchmarks.composed import composed
from runner.config.device_sections import LinkConfig
from runner.config.paths import conf_dir
from runner.config.sections import Config
from runner.experiment.experiment import plan
from runner.experiment.model_spec import model_spec
from runner.experiment.result import Result

__all__ = ["ALSO", "latency_of_alike_layers_s", "planned_run", "run_config"]

_FEW_LAYERS, _MORE_LAYERS = 2, 4
"""Layers of the models that are planned in place of deep ones."""
ALSO: list[str] = []
"""Overrides appended to those of each run: ``python -m benchmarks.truth --override``."""


def run_config(overrides: tuple[str, ...]) -> Config:
    """Return the configuration of the run with `overrides` and those of all runs."""
    if any(override.startswith("latency=") for override in ALSO):
        # Settings of the set's own latency may not exist in another.
        overrides = tuple(o for o in overrides if not o.startswith("latency."))
    return composed(*overrides, *ALSO)


def planned_run(overrides: tuple[str, ...], between: LinkConfig | None = None) -> Result:
    """Return the plan of ``python -m runner`` with `overrides` and a link between machines.

    Raises:
        FxpartError: if the run cannot be planned.

    """
    config = run_config(overrides)
    if between:
        config.devices.between_nodes = between
    return plan(config, model_spec(config))


def latency_of_alike_layers_s(
    preset: str, changed: Mapping[str, object], overrides: tuple[str, ...]
) -> float:
    """Return the latency of a model whose layers are all alike, from runs with 2 and 4 layers.

    The model is a preset with `changed` values in its configuration.

    Raises:
        FxpartError: if a run cannot be planned.

    """
    shipped = OmegaConf.load(conf_dir() / "model" / f"{preset}.yaml").config
    layers = int({**shipped, **changed}["num_hidden_layers"])

    def latency_s(n_layers: int) -> float:
        config = {**changed, "num_hidden_layers": n_layers}
        settings = (f"++model.config.{name}={value}" for name, value in config.items())
        return planned_run((f"model={preset}", *settings, *overrides)).evaluation.latency_s

    few_s, more_s = latency_s(_FEW_LAYERS), latency_s(_MORE_LAYERS)
    layer_s = (more_s - few_s) / (_MORE_LAYERS - _FEW_LAYERS)
    return few_s + (layers - _FEW_LAYERS) * layer_s
