"""``latency=auto``: measured kernel curves on devices that have them, and a roofline otherwise."""

from dataclasses import replace
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from runner.config.paths import conf_dir
from runner.config.schema import Config

__all__ = ["roofline_reason", "with_decided_latency"]


def with_decided_latency(config: Config) -> Config:
    """Return `config` with ``latency.source=auto`` resolved to ``kernels`` or ``roofline``.

    ``kernels`` is chosen if a device has its own curves. Devices without curves next to it use the
    roofline, with the same coefficients as in a machine without such a device.
    """
    if config.latency.source != "auto":
        return config
    names = {pool.curves for pool in config.devices.pools if pool.own_curves and pool.curves}
    if not names or roofline_reason(config):
        return replace(config, latency=replace(config.latency, source="roofline"))
    shipped = _shipped()
    overhead_s, curves = shipped["op_overhead_s"], shipped["curves"]
    if names - curves.keys():  # rejected with the known families when times are computed
        names = set(curves)
    families = {
        name: {"op_overhead_s": overhead_s, **family}
        for name, family in curves.items()
        if name in names
    }
    return replace(config, latency=replace(config.latency, source="kernels", curves=families))


def roofline_reason(config: Config) -> str:
    """Return the choice that requires a roofline on every device; empty if there is none."""
    for choice, needs_it in (
        (f"capture.symbolic={config.capture.symbolic}", config.capture.symbolic != "none"),
        (f"capture.level={config.capture.level}", config.capture.level != "operator"),
        (f"model={config.model.name}", config.model.path is not None),
    ):
        if needs_it:
            return choice
    return ""


@cache
def _shipped() -> dict[str, Any]:
    """Return the content of the shipped ``latency=kernels`` file."""
    settings = OmegaConf.to_container(OmegaConf.load(conf_dir() / "latency" / "kernels.yaml"))
    assert isinstance(settings, dict)
    return {str(name): value for name, value in settings.items()}
