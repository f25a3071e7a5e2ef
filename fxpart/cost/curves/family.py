"""`CurveFamily`: the curves of a family of devices, and their parsing from settings."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from fxpart.cost.collectives import CollectiveCurve, CollectiveCurves, check_collective
from fxpart.cost.curves.attention import AttentionCurve, DecodeCurve
from fxpart.cost.curves.bandwidth import KINDS, BandwidthShares
from fxpart.cost.curves.convolution import ConvolutionCurve
from fxpart.cost.curves.gemm import GemmCurve, Rates
from fxpart.errors import SpecError, nearest_names

__all__ = ["Carried", "CurveFamily", "family_from"]

_Curve = TypeVar("_Curve")


class Carried(NamedTuple):
    """Kernels written for another family of devices that also run on this one."""

    family: str
    compute_share: float
    """Share of this family's peak that these kernels reach."""


class UnalignedShares(NamedTuple):
    """Share of the peak times `CurveFamily.sustained_share` that 16-bit products reach at most.

    Libraries have only older kernels for operands whose rows do not begin at multiples of 4
    elements.
    """

    odd: float
    """If a row has an odd number of elements."""
    twice_odd: float
    """If a row has twice an odd number of elements, and none has an odd one."""


@dataclass(frozen=True, slots=True)
class CurveFamily:
    """Kernel times of one family of devices."""

    gemm: GemmCurve
    attention: AttentionCurve
    decode: DecodeCurve
    collectives: CollectiveCurves = field(default_factory=dict)
    """Collectives between devices of one machine over links of `link_bytes_per_s`."""
    link_bytes_per_s: float | None = None
    """One-way rate of the links that `collectives` were measured on; None without any."""
    measured_on: Rates | None = None
    """Rates in bfloat16 of the device that the curves were fitted to; None if unknown."""
    torch_attention: Carried | None = None
    """The kernels that torch uses instead of `attention`; None if those are as fast."""
    sustained_share: float = 1.0
    """Share of the rate of an isolated product, of at most 16 bits or in TF32, that is sustained in
    a long run, where the power limit lowers the clock."""
    float32_share: float = 1.0
    """Share of a 16-bit curve's rate that kernels of 32 and 64 bits reach. Measured in float32."""
    gemm_float32: GemmCurve | None = None
    """Products of 32 and 64 bits; None for `gemm` at `float32_share`. With a bias, k is not split.
    Single rows use `gemm`, since they are limited by memory."""
    convolution: ConvolutionCurve | None = None
    """Convolutions of any dtype; None for `gemm`."""
    bandwidth_shares: BandwidthShares | None = None
    """Shares of memory bandwidth by kind of operator; None for that of the roofline."""
    unaligned_shares: UnalignedShares | None = None
    """Rates of 16-bit products whose rows are not aligned; None if they are as fast, or unknown."""
    op_overhead_s: float | None = None
    """Time of a minimal kernel; None for the overhead of the roofline."""


_CURVES: Mapping[str, type] = {
    "gemm": GemmCurve,
    "attention": AttentionCurve,
    "decode": DecodeCurve,
    "gemm_float32": GemmCurve,
    "convolution": ConvolutionCurve,
}
_OPTIONAL = ("gemm_float32", "convolution")


def family_from(name: str, settings: Mapping[str, Any]) -> CurveFamily:
    """Parse the curves in ``latency.curves.<name>``.

    Raises:
        SpecError: if a curve or coefficient is missing, unknown or out of range, or collectives are
            given without the rate of their links.

    """
    path = f"latency.curves.{name}"
    parsers: dict[str, Callable[[str, Any], Any]] = {
        "link_bytes_per_s": _number,
        "measured_on": partial(_curve, make=Rates),
        "torch_attention": _carried,
        "sustained_share": _share,
        "float32_share": _share,
        "unaligned_shares": _unaligned,
        "bandwidth_shares": _bandwidth,
        "op_overhead_s": partial(_number, may_be_0=True),
    }
    parsers |= {kind: partial(_curve, make=make) for kind, make in _CURVES.items()}
    _refuse_others(path, settings, (*parsers, "collectives"))
    stated = {
        key: parse(f"{path}.{key}", settings.get(key))
        for key, parse in parsers.items()
        if settings.get(key) is not None or (key in _CURVES and key not in _OPTIONAL)
    }
    collectives = _collectives(path, settings.get("collectives") or {})
    if collectives and "link_bytes_per_s" not in stated:
        raise SpecError(
            f"{path}.collectives are of one kind of link; state its rate one way, such as"
            f" {path}.link_bytes_per_s=300e9"
        )
    return CurveFamily(**stated, collectives=collectives)


def _collectives(path: str, stated: Mapping[str, Any]) -> CollectiveCurves:
    for kind in stated:
        check_collective(kind)
    return {
        kind: _curve(f"{path}.collectives.{kind}", numbers, CollectiveCurve)
        for kind, numbers in stated.items()
    }


def _carried(path: str, settings: object) -> Carried:
    if not isinstance(settings, Mapping) or set(settings) != set(Carried._fields):
        raise SpecError(f"{path} states {', '.join(Carried._fields)}, is {settings}")
    share = _share(f"{path}.compute_share", settings["compute_share"])
    return Carried(str(settings["family"]), share)


def _unaligned(path: str, settings: object) -> UnalignedShares:
    if not isinstance(settings, Mapping) or set(settings) != set(UnalignedShares._fields):
        raise SpecError(f"{path} states {', '.join(UnalignedShares._fields)}, is {settings}")
    return UnalignedShares(**{k: _share(f"{path}.{k}", v) for k, v in settings.items()})


def _bandwidth(path: str, settings: object) -> BandwidthShares:
    if not isinstance(settings, Mapping) or "pointwise" not in settings:
        raise SpecError(f"{path} states pointwise: [32 bits, 16 bits] and other kinds")
    _refuse_others(path, settings, KINDS)
    shares = {}
    for kind, pair in settings.items():
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise SpecError(f"{path}.{kind} states two shares, for 32 and 16 bits, is {pair}")
        of_32_bits, of_16_bits = (_share(f"{path}.{kind}", share) for share in pair)
        shares[kind] = (of_32_bits, of_16_bits)
    return shares


def _share(path: str, number: object) -> float:
    share = _number(path, number)
    if share > 1:
        raise SpecError(f"{path} must be at most 1, is {share}")
    return share


def _curve(path: str, settings: object, make: Callable[..., _Curve]) -> _Curve:
    names = list(inspect.signature(make).parameters)
    if not isinstance(settings, Mapping):
        raise SpecError(f"{path} is missing; it states {', '.join(names)}")
    _refuse_others(path, settings, names)
    numbers: dict[str, float] = {}
    for name in names:
        is_time = name.endswith("_s") and not name.endswith("per_s")
        may_be_0 = is_time or name == "packs_groups"
        numbers[name] = _number(f"{path}.{name}", settings.get(name), may_be_0=may_be_0)
    return make(**numbers)


def _number(path: str, number: object, *, may_be_0: bool = False) -> float:
    plain = isinstance(number, int | float) and not isinstance(number, bool)
    # Compared before it is converted: an integer may be too large for a float.
    if not plain or not 0 <= number <= sys.float_info.max:  # type: ignore[operator]
        raise SpecError(f"{path} must be a number from 0 to 1.8e308, got {number!r:.40}")
    if number == 0 and not may_be_0:
        raise SpecError(f"{path} must be more than 0")
    return float(number)  # type: ignore[arg-type]


def _refuse_others(path: str, settings: Mapping[str, Any], known: Any) -> None:  # noqa: ANN401
    for name in settings:
        if name not in known:
            raise SpecError(f"{path}.{name} is not a setting; {nearest_names(str(name), known)}")
