"""Checks of a config before a model is captured. Each check lives with the code it concerns."""

from fxpart.capture.models.misspelt import refuse_misspelt
from fxpart.core.granularity import check_level, depth_of
from fxpart.core.phases import check_phase
from fxpart.errors import SpecError
from runner.config.schema import RECOMMEND, Config
from runner.experiment.carry_out import check_execute
from runner.experiment.float8 import check_float8
from runner.experiment.mesh import check_mesh
from runner.experiment.model_spec import model_spec
from runner.experiment.objective import check_objective
from runner.experiment.offload import check_offload
from runner.experiment.operator_times import check_latency
from runner.experiment.pipeline_schedule import check_schedule
from runner.experiment.rates import check_prices
from runner.experiment.replicas import check_replicas
from runner.experiment.runtime import check_runtime
from runner.experiment.serving import check_serving
from runner.experiment.subject import symbols_of
from runner.experiment.tensor_split import check_split
from runner.experiment.topology import build_topology
from runner.experiment.training import check_training
from runner.experiment.user_mode import chosen_mode
from runner.experiment.zero import check_zero
from runner.output.figures import check_figures

_MOST_BATCHES = 2**14
"""Most batch sizes in a sweep, each a row of its table."""


def check(config: Config) -> None:
    """Check everything that can be checked without a model.

    Raises:
        SpecError: if a choice is unknown or conflicts with another; the message says what to use.

    """
    if config.model.library == "transformers" and config.model.architecture is not None:
        refuse_misspelt(config.model.architecture, config.model.config)
    depth_of(config.granularity)
    check_level(config.capture.level)
    check_phase(config.phase.name, config.capture.level)
    check_runtime(config)
    check_schedule(config)
    check_figures(config.figures)
    check_objective(config)
    check_training(config)
    check_float8(config)
    check_serving(config)
    check_offload(config)
    check_replicas(config)
    check_split(config)
    check_mesh(config)
    check_zero(config)
    check_prices(config)
    symbols_of(config)
    if not 1 <= config.batch_sweep <= _MOST_BATCHES:
        raise SpecError(f"batch_sweep={config.batch_sweep} must be from 1 to {_MOST_BATCHES}")
    # Before the latency, whose device and threads default to those of `execute`.
    check_execute(config)
    check_latency(config)


def check_all(config: Config) -> None:
    """Run all checks that `plan` does before it needs the model: choices, mode and devices.

    Raises:
        FxpartError: if a choice is unknown or conflicts with another.

    """
    check(config)
    model_spec(config)
    if config.mode.name != RECOMMEND:  # checks its options itself
        chosen_mode(config)
    build_topology(config.devices, config.transfer_rate, config.reserve)
