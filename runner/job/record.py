"""The name, parameters and tags with which a job's run starts in the tracker."""

import getpass
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

from fxpart.support.host import installed_version
from runner.config.schema import RECOMMEND, Config, LatencyConfig
from runner.config.tags import config_tags
from runner.job.identity import (
    Choices,
    JobIdentity,
    SweepIds,
    deciding,
    latency_settings,
    override_values,
    without_elsewhere,
)
from runner.job.locks import LOCKS_TAG, Locks

__all__ = ["RAN_KEY", "environment_tags", "job_tags", "parameters", "run_name", "sweep_title"]

RAN_KEY = "ran_key"


# Names of runs and sweeps.

_BETWEEN, _CUT = " · ", "…"
_MOST_NAME, _MOST_TITLE, _MOST_VALUE = 120, 100, 32
"""Maximum lengths in characters: tables and legends show no more."""
_MOST_LISTED = 4
"""Most values per key in the title of a sweep; of more, the title has the first and the last."""
_IN_MODEL_NAME = ("model.factory", "model.architecture")
_DECIDE_NOTHING = ("experiment", "capture.cache_dir", "capture.use_cache", "execute.timeout_s")
_NAMES = ("name", "source", "spec")
"""Last parts of keys that name a choice and affect no result."""


def run_name(choices: Choices, overrides: Sequence[str], swept: Sequence[str] = ()) -> str:
    """Return a short name that starts with what distinguishes the run from others.

    First come the values of the `swept` keys, for a job of a sweep, then the four choices, and then
    the other `overrides` that affect the result:
    ``layers=12 · cost_aware · 2x16gb · pcie4 · mine · batch_size=8``.
    """
    values = override_values(overrides)
    four = {key: asdict(choices)[key] for key in ("mode", "devices", "transfer_rate", "model")}
    varied = {key: values[key] for key in swept if key in values}
    rest = {key: text for key, text in four.items() if key not in varied}
    shown_elsewhere = (*Choices.__slots__, *_IN_MODEL_NAME, *_DECIDE_NOTHING)
    others = {
        key: text
        for key, text in override_values(deciding(overrides)).items()
        if key not in shown_elsewhere and key.rpartition(".")[2] not in _NAMES
    }
    return _cut(_BETWEEN.join(_parts({**varied, **rest, **others}, four)), _MOST_NAME)


def sweep_title(name: str, values: Mapping[str, Sequence[str]]) -> str:
    """Return `name` with the swept keys and their `values`, such as ``sweep: layers=12,24``.

    If that is too long, each key has its first and last value, or only their number.
    """
    labels, text = _labels(values), name
    for limit in (_MOST_LISTED, 2, 0):
        parts = [f"{labels[key]}{_listed(texts, limit)}" for key, texts in values.items()]
        text = f"{name}: {_BETWEEN.join(parts)}" if parts else name
        if len(text) <= _MOST_TITLE:
            break
    return _cut(text, _MOST_TITLE)


def _parts(values: Mapping[str, str], bare: Iterable[str]) -> list[str]:
    """Return the values with their labels, except for the `bare` keys."""
    labels = _labels([key for key in values if key not in bare])
    return [
        f"{labels[key]}={_value(text)}" if key in labels else _value(text)
        for key, text in values.items()
    ]


def _labels(keys: Iterable[str]) -> dict[str, str]:
    """Return a label for each key: its last part, or more parts to keep labels distinct."""
    parts = {key: key.split(".") for key in keys}
    labels = {}
    for key, path in parts.items():
        others = [other for name, other in parts.items() if name != key]
        # A bare number, the index of a list item, is no label.
        count = 2 if path[-1].isdigit() else 1
        while count < len(path) and any(other[-count:] == path[-count:] for other in others):
            count += 1
        labels[key] = ".".join(path[-count:])
    return labels


def _listed(texts: Sequence[str], max_shown: int) -> str:
    """Return the text after a key in a title: up to `max_shown` values, or their number if 0."""
    shown = [_value(text) for text in texts]
    if len(shown) > max_shown:
        if not max_shown:
            return f" ({len(shown)})"
        shown = [*shown[: max_shown // 2], _CUT, shown[-1]]
    return f"={','.join(shown)}"


def _value(text: str) -> str:
    """Return `text`, shortened in the middle: paths may differ at either end."""
    text = " ".join(text.split())
    if len(text) <= _MOST_VALUE:
        return text
    end = _MOST_VALUE // 2
    return f"{text[: _MOST_VALUE - end - 1]}{_CUT}{text[-end:]}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip(" ·") + _CUT


def parameters(config: Config, choices: Choices, overrides: Sequence[str]) -> dict[str, object]:
    """Return the parameters to log: the four choices by name, other settings by dotted key.

    Settings that follow from a choice, such as the memory of a named device, are left out: a
    comparison would show them as more columns that differ. Overridden settings are always logged,
    except those of tracking, which may hold a password.
    """
    settings = asdict(config)
    params: dict[str, object] = {**asdict(choices)}
    if config.model.path is not None:
        params["model.path"] = config.model.path
    model = settings["model"]
    from_model = ("batch_size", "seq_len", "dtype", "config", "factory", "factory_args")
    open_choices: dict[str, object] = {
        "model": {k: model[k] for k in from_model},
        "mode": settings["mode"]["options"],
        "latency": _latency_parameters(config.latency),
        "capture": {"level": config.capture.level},
    }
    params.update(_flat(open_choices))
    params.update(_chosen(config))
    if choices.mode == RECOMMEND:  # the plan chosen
        params["plan.mode"] = config.mode.name
        if config.mode.name != RECOMMEND:  # unless no plan fits
            params["plan"] = _plan_text(config)
    for key, value in override_values(overrides).items():
        # A mapping, such as model.config={a: 1}, is already logged key by key.
        known = any(name == key or name.startswith(f"{key}.") for name in params)
        is_aside = key.startswith("tracking.") or key == "model.name"  # logged as `model`
        if "." in key and not known and not is_aside:
            params[key] = value
    return params


def _latency_parameters(latency: LatencyConfig) -> dict[str, object]:
    """Return the latency settings, without curves: hundreds of coefficients that nobody chose."""
    settings = latency_settings(latency)
    if not latency.carries_curves:  # of latency=auto
        settings.pop("curves", None)
    return settings


def _plan_text(config: Config) -> str:
    """Return the mode and degrees of a plan: ``pipeline data_parallel=2 microbatches=32``."""
    is_training = config.phase.name == "training"
    settings: dict[str, tuple[object, object]] = {
        "tensor_parallel": (config.tensor_parallel, 1),
        "sequence_parallel": (str(config.sequence_parallel).lower(), "false"),
        "data_parallel": (config.data_parallel, 1),
        "context_parallel": (config.context_parallel, 1),
        "expert_parallel": (config.expert_parallel, 1),
        "zero": (config.zero, 0),
        "schedule": (config.schedule.name, "none"),
        "microbatches": (config.microbatches, 1),
        "checkpointing": (config.checkpointing if is_training else "none", "none"),
    }
    degrees = [f"{key}={value}" for key, (value, usual) in settings.items() if value != usual]
    return " ".join([config.mode.name, *degrees])


def _chosen(config: Config) -> dict[str, object]:
    """Return the other choices, most of them only if not at their defaults.

    Otherwise they would be columns with a single value.
    """
    params: dict[str, object] = {}
    params["granularity"] = config.granularity
    params["latency"] = config.latency.name
    params["phase"] = config.phase.name
    if config.phase.name == "training":
        params["optimizer"], params["checkpointing"] = config.optimizer.name, config.checkpointing
        if config.backward_order != "autograd":
            params["backward_order"] = config.backward_order
    is_training = config.phase.name == "training"
    unusual: dict[str, tuple[object, object]] = {
        "weights": (config.weights.name, "none"),
        "kv_cache": (config.kv_cache, "auto"),
        "latent_attention": (config.latent_attention, "expanded"),
        "finetune": (config.finetune.name, "none"),
        "float8": (config.float8.name, "none"),
        "context_len": (config.context_len, None),
        "prompt_len": (config.prompt_len, None),
        "output_len": (config.output_len, None),
        "prefill_batch": (config.prefill_batch, None),
        "data_parallel": (config.data_parallel, 1),
        "zero": (config.zero, 0),
        "reduce_dtype": (config.reduce_dtype, None),
        "tensor_parallel": (config.tensor_parallel, 1),
        "sequence_parallel": (config.sequence_parallel, False),
        "async_tensor_parallel": (config.async_tensor_parallel, False),
        "loss_parallel": (config.loss_parallel, False),
        "expert_parallel": (config.expert_parallel, 1),
        "expert_imbalance": (config.expert_imbalance, 1.0),
        "context_parallel": (config.context_parallel, 1),
        "engine": (config.engine, "torch"),
        "objective": (config.objective, "latency"),
        "runtime": (config.runtime.name, "eager"),
        "runtime.regional": (config.runtime.regional, False),
        "runtime.compiled_loss": (config.runtime.compiled_loss, False),
        "model.autocast": (config.model.autocast, None),
        "model.loss": (config.model.loss if is_training else "own", "own"),
        "capture.symbolic": (config.capture.symbolic, "none"),
    }
    params.update({key: value for key, (value, usual) in unusual.items() if value != usual})
    params["reserve"] = config.reserve.name
    if config.schedule.name != "none":
        params["schedule"], params["microbatches"] = config.schedule.name, config.microbatches
    if config.execute.name != "none":
        params["execute"] = config.execute.name
        execute = {k: v for k, v in asdict(config.execute).items() if k != "name"}
        params.update(_flat({"execute": execute}))
    return params


def _flat(nested: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


_PACKAGES = ("fxpart", "torch", "transformers", "mlflow")
_GIT_S = 2.0


def environment_tags() -> dict[str, str]:
    """Return the environment as tags: versions, user, command, and the git state of the directory.

    Unknown values are left out. Git is queried once per process, so its state is that of the
    running code.
    """
    tags = {
        "mlflow.source.name": _command(),
        "mlflow.source.type": "LOCAL",
        "python_version": platform.python_version(),
    }
    for package in _PACKAGES:
        version = installed_version(package)
        if version:
            tags[f"{package}_version"] = version
    with suppress(KeyError, OSError):  # a container may have no such user
        tags["mlflow.user"] = getpass.getuser()
    return tags | _git_tags(Path.cwd())


def _command() -> str:
    """Return the command of this process, short enough for a column."""
    program = Path(sys.argv[0] or "python")
    if program.name == "__main__.py":
        return f"python -m {program.parent.name}"
    return shlex.quote(program.name)


@cache
def _git_tags(root: Path) -> dict[str, str]:
    state = _git(root, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if state is None:
        return {}
    tags: dict[str, str] = {}
    changed = False
    for line in state.splitlines():
        match line.split(" ", 2):
            case ["#", "branch.oid", oid] if oid != "(initial)":
                tags["mlflow.source.git.commit"] = oid
            case ["#", "branch.head", branch] if branch != "(detached)":
                tags["mlflow.source.git.branch"] = branch
            case ["#", *_]:
                continue
            case _:
                changed = True
    return {**tags, "git_dirty": str(changed).lower()} if tags else {}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        completed = subprocess.run(
            ["git", "-C", str(root), "--no-optional-locks", *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout


def job_tags(config: Config | None, identity: JobIdentity) -> Mapping[str, str]:
    """Return the tags of a job, set at its start so that a job that is cut off has them too.

    `identity` comes from `identified`, with its key. A job whose `config` was decided from another,
    such as by a recommendation, has the key of what it ran in the tag `RAN_KEY`.
    """
    return {
        "kind": "run",
        **({"config_key": identity.key} if identity.key else {}),
        **({RAN_KEY: identity.ran_key} if identity.ran_key else {}),
        **(_sweep_tags(identity.sweep, identity.root) if identity.sweep else {}),
        "overrides": json.dumps(without_elsewhere(identity.overrides)),
        **(config_tags(config) if config else {}),
        **environment_tags(),
    }


def _sweep_tags(sweep: SweepIds, root: Path) -> dict[str, str]:
    """Return the tags of the job's sweep, and of the locks that show whether it is running."""
    return {"sweeps": f" {sweep.sweep} ", LOCKS_TAG: Locks(root).name}
