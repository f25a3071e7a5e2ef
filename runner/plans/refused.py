"""Remember models that a capture refuses, so that the next plan or recommendation need not try.

A refusal is kept by this process, and is a text file in the folder of cached graphs unless it is of
a user's module. Its name is a hash of everything that determines the graph, the code that captures
it included.
"""

from pathlib import Path

from fxpart.capture.cache import cache_key, cached_path
from fxpart.capture.captured import step_key
from fxpart.capture.models.spec import ModelSpec
from fxpart.errors import CaptureError, NotApplicableError, SpecError
from fxpart.support.whole_file import write_whole
from runner.config.sections import Config
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
    spec = model_spec(config)
    if not config.capture.use_cache:
        return shared_subject(config, spec)
    path = _refusal_path(config, spec)
    if path in _refused:
        raise _refused[path]
    if spec.factory is None and path.is_file():
        raise NotApplicableError(path.read_text())
    try:
        return shared_subject(config, spec)
    except (CaptureError, SpecError) as error:
        _refused[path] = error
        if isinstance(error, NotApplicableError) and spec.factory is None:
            write_whole(path, str(error), "the refusal of a capture", "make its folder writable")
        raise


_refused: dict[Path, CaptureError | SpecError] = {}
"""Errors of captures by their files, written or not."""


def _refusal_path(config: Config, spec: ModelSpec) -> Path:
    phase = config.phase
    model = {**spec.key(), "symbols": symbols_of(config), "refused": True}
    step = step_key(phase.name, train_mode=phase.train_mode, options=step_options(config))
    key = cache_key(model, config.capture.level, phase.name, step, symbolic=True)
    return cached_path(Path(config.capture.cache_dir), key).with_suffix(".refused")
