"""``float8=``: linear layers of a training step that multiply in 8 bits."""

from fxpart.cost.float8 import RECIPES, TimesInFloat8
from fxpart.cost.tables import LatencySource
from fxpart.errors import NotApplicableError, SpecError, nearest_names, refuse_unfitting
from runner.config.schema import Config
from runner.experiment.training import finetunes, is_megatron, is_training

__all__ = ["check_float8", "multiplies_in_float8", "with_float8"]


def multiplies_in_float8(config: Config) -> bool:
    """Return whether linear layers multiply in 8 bits."""
    return config.float8.name != "none"


def check_float8(config: Config) -> None:
    """Raise `SpecError` if the recipe is unknown, or conflicts with the rest of `config`."""
    recipe, known = config.float8.name, ("none", *RECIPES)
    if recipe not in known:
        raise SpecError(f"float8={recipe} does not exist; {nearest_names(recipe, known)}")
    if not multiplies_in_float8(config):
        if config.float8.filter_fqns:
            raise NotApplicableError(
                f"float8.filter_fqns={config.float8.filter_fqns} keeps layers in 16 bits, got"
                " float8=none, with which all are; add float8=tensorwise or leave it out"
            )
        return
    latency = config.latency
    fitting = {
        f"phase={config.phase.name}": ("phase=training", is_training(config)),
        # In eager mode a cast is a dozen kernels, and takes longer than is gained.
        f"runtime={config.runtime.name}": ("runtime=compiled", config.runtime.name == "compiled"),
        f"engine={config.engine}": ("engine=torch", not is_megatron(config)),
        f"finetune={config.finetune.name}": ("finetune=none", not finetunes(config)),
        f"execute={config.execute.name}": ("execute=none", config.execute.name == "none"),
        f"latency={latency.name}": (
            "latency=kernels or roofline",
            latency.source in ("kernels", "roofline"),
        ),
        f"capture.symbolic={config.capture.symbolic}": (
            "capture.symbolic=none",
            config.capture.symbolic == "none",
        ),
    }
    refuse_unfitting(
        f"float8={recipe} multiplies in 8 bits in a compiled training step", fitting, "float8=none"
    )


def with_float8(config: Config, times: LatencySource) -> LatencySource:
    """Return the source of times, with products in 8 bits if `config` asks for them."""
    if not multiplies_in_float8(config):
        return times
    return TimesInFloat8(times, config.float8.name, tuple(config.float8.filter_fqns))
