"""One recommendation, from the composed configuration to its table, files and runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fxpart.errors import FxpartError, SpecError
from fxpart.support.host import available_cores, host_memory_bytes
from runner.cli.arguments import refuse_sweep_settings
from runner.config.read import read_config
from runner.config.schema import Config
from runner.job.identity import Choices, JobIdentity, override_values, without_elsewhere
from runner.job.job import keep_failure
from runner.plans.chosen import best_of
from runner.plans.request import VARIED, Request, Variant, variants
from runner.plans.space import KEYS
from runner.recommend.files import write_files
from runner.recommend.record import logged
from runner.recommend.request import PREFIX
from runner.recommend.table import show_outcome
from runner.sweep.composition import SweepLoad, compose_one
from runner.tracking.open_tracker import open_tracker

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["Shared", "recommended", "refuse_sweeps"]

_OF_A_SWEEP = ("-m", "--multirun")
_ALONE = ("experiment", "rerun", "execute", "serving_sweep.batches", "serving_sweep.contexts")
_BATCH = "model.batch_size"
_PROCESS_BYTES = 4 * 2**30
"""Memory of this machine for each process that searches: one with 48 large graphs takes 2 GiB."""
_MOST_PROCESSES = 4


def refuse_sweeps(arguments: Sequence[str]) -> None:
    """Raise `SpecError` for arguments that apply only to a single run or to a sweep."""
    for text in arguments:
        key, _, value = text.partition("=")
        if text in _OF_A_SWEEP:
            raise SpecError(
                f"{text} belongs to a sweep, but python -m runner.recommend tries many plans "
                "itself; run one command for each value"
            )
        if key in _ALONE and value not in ("none", "null"):
            raise SpecError(f"{text} belongs to python -m runner; leave it out of a recommendation")


@dataclass(frozen=True, eq=False, slots=True)
class Shared:
    """The settings shared by all plans of a space."""

    bases: Mapping[Variant, Config]
    """The configurations that plans vary, by their choices."""
    overrides: tuple[str, ...]
    """The overrides as typed, without settings of the space."""
    has_mode: bool
    """Whether a mode was typed, perhaps with options."""


def recommended(
    composed: "DictConfig", request: Request, request_texts: Sequence[str]
) -> str | None:
    """Recommend a plan; return the error in one line, or None.

    `request_texts` are the overrides of the `request`, as typed.
    """
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    identity = JobIdentity(
        choices=Choices.of(hydra.runtime.choices, None),
        overrides=tuple(hydra.overrides.task),
        folder=Path(hydra.runtime.output_dir),
        root=Path.cwd(),
    )
    config: Config | None = None
    try:
        config = read_config(composed)
        identity = replace(identity, choices=Choices.of(hydra.runtime.choices, config))
        _recommended(composed, config, request, identity, request_texts)
    except FxpartError as error:
        return keep_failure(config, identity, error).error
    return None


def _recommended(
    composed: "DictConfig",
    config: Config,
    request: Request,
    identity: JobIdentity,
    request_texts: Sequence[str],
) -> None:
    refuse_sweep_settings(config)
    shared, typed = _shared(composed, config, identity.overrides, request)
    tracker = open_tracker(
        config.tracking, identity.root
    )  # fail before the search if the store is unreachable
    outcome = best_of(
        shared.bases,
        request,
        typed,
        config.model.batch_size,
        prefix=PREFIX,
        mode_given=shared.has_mode,
        processes=_processes(),
    )
    command = without_elsewhere(shared.overrides)
    write_files(identity.folder, command, request, outcome)
    show_outcome(command, request, outcome, identity.folder)
    typed_texts = (*without_elsewhere(identity.overrides), *request_texts)
    logged(tracker, command, request, outcome, identity, typed_texts=typed_texts)


def _processes() -> int:
    """Return the number of processes that search."""
    return max(1, min(available_cores(), _MOST_PROCESSES, host_memory_bytes() // _PROCESS_BYTES))


def _shared(
    composed: "DictConfig", config: Config, overrides: Sequence[str], request: Request
) -> tuple[Shared, Mapping[str, object]]:
    """Return the settings shared by all plans, and the typed settings of the space, by name.

    Raises:
        SpecError: if a setting is both typed and given a list of values to try.

    """
    values = {
        **{key: getattr(config, key, None) for key in KEYS.values()},
        "mode": config.mode.name,
        "schedule": config.schedule.name,
    }
    names = {key: name for name, key in KEYS.items()}
    base_overrides: list[str] = []
    typed: dict[str, object] = {}
    for override in overrides:
        key = next(iter(override_values([override])))
        if key in names:
            if getattr(request.space, names[key]) is not None:
                raise SpecError(
                    f"{override} fixes what recommend.space.{names[key]} varies; leave out one"
                )
            if key != _BATCH:
                typed[names[key]] = values[key]
        if key in VARIED and getattr(request, key) is not None:
            raise SpecError(f"{override} fixes what recommend.{key} varies; leave out one")
        # The mode stays, as its options may have been typed too.
        if key == "mode" or key not in names:
            base_overrides.append(override)
    load = _load(composed)
    bases: dict[Variant, Config] = {}
    for variant in variants(request):
        base = compose_one(load, [*base_overrides, *variant.overrides])
        if base.config is None:
            raise SpecError(base.error or "")
        bases[variant] = base.config
    has_mode = any(override.startswith("mode=") for override in base_overrides)
    return Shared(bases, tuple(base_overrides), has_mode), typed


def _load(composed: "DictConfig") -> SweepLoad:
    """Return a loader for composing variants of the `composed` run."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    master = composed.copy()
    with open_dict(master):
        master.hydra = HydraConfig.get()
    return SweepLoad(GlobalHydra.instance().config_loader(), master)
