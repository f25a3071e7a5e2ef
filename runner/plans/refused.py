"""Remember models that a capture refuses, so that the next recommendation does not build them.

A refusal is a text file in the folder of cached graphs. Its name is a hash of everything that
determines the graph, the code that captures it included.
"""

from dataclasses import asdict
from pathlib import Path

from fxpart.capture.cache import cache_key, cached_path
from fxpart.capture.captured import step_key
from fxpart.errors import NotApplicableError
from fxpart.support.digest import stable_digest
from fxpart.support.whole_file import write_whole
from runner.config.schema import Config
from runner.experiment.model_spec import model_spec
from runner.experiment.subject import Subject, shared_subject, symbols_of
from runner.experiment.training import step_options

__all__ = ["captured_subject"]


def captured_subject(config: Config) -> Subject:
    """Return the `shared_subject` of `config`; a refused capture is not repeated by later runs.

    Raises:
        NotApplicableError: if settings conflict with the model, now or in an earlier run.
        FxpartError: if the model cannot be built, captured or held in memory.

    """
    spec, path = model_spec(config), _refusal_path(config)
    if path is not None and path.is_file():
        raise NotApplicableError(path.read_text())
    try:
        return shared_subject(config, spec)
    except NotApplicableError as error:
        if path is not None:
            write_whole(path, str(error), "the refusal of a capture", "make its folder writable")
        raise


def _refusal_path(config: Config) -> Path | None:
    """Return the file of a refusal; None if graphs are not cached, or are of a user's module."""
    spec, phase = model_spec(config), config.phase
    if not config.capture.use_cache or spec.factory is not None:
        return None
    formats = {"weights": asdict(config.weights), "kv_cache": config.kv_cache}
    model = {**spec.key(), "symbols": symbols_of(config), "refused": stable_digest(formats)}
    step = step_key(phase.name, train_mode=phase.train_mode, options=step_options(config))
    key = cache_key(model, config.capture.level, phase.name, step, symbolic=True)
    return cached_path(Path(config.capture.cache_dir), key).with_suffix(".refused")
