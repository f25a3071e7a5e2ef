"""What users change in a shipped weight format: modules that keep their 16 bits, bits, groups."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from omegaconf import OmegaConf

from fxpart.capture.models.spec import ModelSpec
from fxpart.core.few_bits import check_activations
from fxpart.core.graph import OpGraph
from fxpart.errors import NotApplicableError, SpecError, nearest_names
from runner.config.paths import conf_dir
from runner.config.schema import Config
from runner.experiment.training import is_training

__all__ = ["check_format", "check_kept", "format_text", "has_shipped_format"]

_STANDARD = "mxfp4"
"""The format whose standard has one size of groups."""


def check_format(config: Config) -> None:
    """Refuse a group size that a format does not have, and inputs in 8 bits where none are cast.

    Raises:
        SpecError: if the size is another than the format's, or there are no weights in 8 bits.
        NotApplicableError: if a training step has inputs in 8 bits.

    """
    chosen = config.weights
    if chosen.activations is not None:
        check_activations(chosen.name, chosen.activations)
        if is_training(config):
            raise NotApplicableError(
                f"weights.activations={chosen.activations} casts the inputs of products in"
                " inference, got phase=training; leave it out"
            )
    if chosen.name != _STANDARD:
        return
    block = _shipped(_STANDARD)["group_size"]
    if chosen.group_size != block:
        raise SpecError(
            f"weights.group_size={chosen.group_size} does not go with weights={chosen.name}, whose"
            f" blocks have {block} numbers; leave out weights.group_size, or use weights=int4"
        )


def check_kept(config: Config, spec: ModelSpec, graph: OpGraph) -> None:
    """Refuse a name in ``weights.keep`` of no module of the model in `graph`.

    Names of the shipped format may be those of other models. Modules that do not run in this step
    are found by building the model.

    Raises:
        SpecError: if a name is unknown; the message has the nearest ones.

    """
    shipped, known = _shipped(config.weights.name).get("keep", ()), _names(graph.modules)
    typed = [name for name in config.weights.keep if name not in shipped]
    if not set(typed) - known:
        return
    from fxpart.capture.models.build import build_model

    known |= _names(path for path, _ in build_model(spec).module.named_modules())
    for name in typed:
        if name in known:
            continue
        words = {part for part in known if not part.isdigit()}
        if "." in name:
            last = name.rpartition(".")[2]
            change = f"write {last}" if last in words else nearest_names(last, words)
            raise SpecError(
                f"weights.keep has {name}, a path, but single names of modules are matched, in all"
                f" layers; {change}"
            )
        raise SpecError(
            f"weights.keep has {name}, which is no module of {spec.architecture or spec.name};"
            f" {nearest_names(name, words)}"
        )


def format_text(config: Config, graph: OpGraph) -> str:
    """Return the format in words, such as ``int4 in groups of 128 except lm_head``."""
    chosen = config.weights
    bits = "" if chosen.bits == _shipped(chosen.name).get("bits") else f" of {chosen.bits} bits"
    groups = f" in groups of {chosen.group_size}" if chosen.group_size else ""
    names = _names(graph.modules)
    kept = " and ".join(name for name in chosen.keep if name in names)
    inputs = f" with inputs in {chosen.activations}" if chosen.activations else ""
    return f"{chosen.name}{bits}{groups}" + (f" except {kept}" if kept else "") + inputs


def has_shipped_format(config: Config) -> bool:
    """Return whether bits, and modules that keep theirs, are those of the shipped format."""
    chosen, shipped = config.weights, _shipped(config.weights.name)
    return all(getattr(chosen, name) == shipped.get(name) for name in ("bits", "keep"))


def _names(paths: Iterable[str]) -> set[str]:
    """Return the names of all modules on the way to these paths."""
    return {name for path in set(paths) for name in path.split(".") if name}


@lru_cache(maxsize=32)
def _shipped(name: str) -> dict[str, Any]:
    """Return the shipped format of this name; empty if there is none."""
    path = conf_dir() / "weights" / f"{name}.yaml"
    values = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
