"""Plan a run as ``python -m runner`` does, for sets whose rows are such runs."""

from collections.abc import Callable, Mapping

from omegaconf import OmegaConf

from benchmarks.composed import composed
from runner.config.device_schema import LinkConfig
from runner.config.paths import conf_dir
from runner.config.schema import Config
from runner.experiment.experiment import plan
from runner.experiment.model_spec import model_spec
from runner.experiment.result import Result

__all__ = ["ALSO", "planned_run", "run_config", "time_of_alike_layers_s"]

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


def _latency_s(result: Result) -> float:
    return result.evaluation.latency_s


def time_of_alike_layers_s(
    preset: str,
    changed: Mapping[str, object],
    overrides: tuple[str, ...],
    time_s: Callable[[Result], float] = _latency_s,
) -> float:
    """Return a time of a model whose layers are all alike, from runs with 2 and 4 layers.

    The model is a preset with `changed` values in its configuration. The latency is the default.

    Raises:
        FxpartError: if a run cannot be planned.

    """
    shipped = OmegaConf.load(conf_dir() / "model" / f"{preset}.yaml").config
    layers = int({**shipped, **changed}["num_hidden_layers"])

    def planned_s(n_layers: int) -> float:
        config = {**changed, "num_hidden_layers": n_layers}
        settings = (f"++model.config.{name}={value}" for name, value in config.items())
        return time_s(planned_run((f"model={preset}", *settings, *overrides)))

    few_s, more_s = planned_s(_FEW_LAYERS), planned_s(_MORE_LAYERS)
    layer_s = (more_s - few_s) / (_MORE_LAYERS - _FEW_LAYERS)
    return few_s + (layers - _FEW_LAYERS) * layer_s
