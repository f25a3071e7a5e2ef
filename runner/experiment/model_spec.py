"""The model of a config, as the library's `ModelSpec`."""

from dataclasses import asdict
from typing import Any

from fxpart.capture.models.spec import LIBRARIES, ModelSpec, library_spec
from fxpart.core.data_parallel import share_of_batch
from fxpart.errors import SpecError, nearest_names
from runner.config.schema import Config
from runner.experiment.serving import generated_len, generates, is_serving
from runner.experiment.training import finetunes, is_training

__all__ = ["model_spec"]


def model_spec(config: Config) -> ModelSpec:
    """Return the `ModelSpec` of `config`, with the batch size of one replica."""
    model = config.model
    source: dict[str, Any] = {
        "architecture": model.architecture,
        "config": dict(model.config),
        "factory": model.factory,
        "factory_args": dict(model.factory_args),
    }
    if model.library not in LIBRARIES:
        suggestion = nearest_names(model.library, LIBRARIES)
        raise SpecError(f"model.library={model.library} is not known; {suggestion}")
    if model.library != "transformers" and model.architecture is not None:
        source = library_spec(model.library, model.architecture, dict(model.config))
    return ModelSpec(
        name=model.name,
        **source,
        batch_size=share_of_batch(model.batch_size, config.data_parallel),
        seq_len=model.seq_len,
        step=_step(config),
        cache_len=_cache_len(config),
        dtype=model.dtype,
        autocast=model.autocast,
        tensor_parallel=config.tensor_parallel,
        sequence_parallel=config.sequence_parallel,
        loss_parallel=config.loss_parallel,
        expert_parallel=config.expert_parallel,
        expert_imbalance=config.expert_imbalance,
        context_parallel=config.context_parallel,
        engine=config.engine,
        loss=model.loss if is_training(config) else None,
        lora=_lora(config),
        depends_on=tuple(model.depends_on),
    )


def _lora(config: Config) -> dict[str, object]:
    if not (finetunes(config) and is_training(config)):
        return {}
    return {name: value for name, value in asdict(config.finetune).items() if name != "name"}


def _step(config: Config) -> str | None:
    if generates(config):
        return "decode"
    return config.phase.name if is_serving(config) else None


def _cache_len(config: Config) -> int | None:
    if generates(config):
        return generated_len(config)
    return config.context_len if is_serving(config) else None
