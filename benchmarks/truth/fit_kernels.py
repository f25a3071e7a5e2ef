"""Fit the curves of `fxpart.cost.curves` to tables of measured kernels and write them as YAML.

    python -m benchmarks.truth.fit_kernels --data FOLDER --output conf/latency/kernels.yaml

Half of the rows are held out; the error printed beside each curve is theirs. The same tables give
the same curves. Families in the file that have no measurements are left unchanged, among them those
of `INSTALLED_FAMILIES` where the package aiconfigurator-core is not installed.
"""

import argparse
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from benchmarks.truth.kernel_tables import (
    DEVICES,
    INSTALLED_DEVICES,
    Curve,
    Kernels,
    read_installed,
    read_kernels,
)
from benchmarks.truth.measured import add_data_argument, skipped_without_files
from benchmarks.truth.nccl_tables import (
    INSTALLED_LINK_BYTES_PER_S,
    KINDS,
    LINK_BYTES_PER_S,
    Messages,
    read_installed_messages,
    read_messages,
)
from benchmarks.truth.own_kernels import (
    bandwidth_shares,
    convolutions,
    float32_products,
    gradient_work,
    input_share,
)
from fxpart.core.graph import FloatArray
from fxpart.core.topology import DeviceSpec
from fxpart.cost.collectives import CollectiveCurve
from fxpart.cost.curves.attention import AttentionCurve, DecodeCurve
from fxpart.cost.curves.convolution import ConvolutionCurve
from fxpart.cost.curves.gemm import GemmCurve

__all__ = ["GEMM", "INSTALLED_FAMILIES", "Fitted", "family", "fit_kernels", "main"]

_Any = TypeVar("_Any")
_Curve = TypeVar("_Curve", bound=Curve)
_MOST_ROWS = 3000
"""Upper bound of the rows a curve is fitted to; more change the third digit."""
_SEED = 0


class Span(NamedTuple):
    """Start and bounds of the search for a coefficient."""

    start: float
    lower: float
    upper: float


GEMM = {
    "launch_s": Span(2e-6, 5e-7, 1e-5),
    "tile_s": Span(1e-6, 1e-8, 1e-5),
    "compute_share": Span(0.85, 0.3, 1.0),
    "tile_area": Span(1500, 1, 2e4),
    "memory_share": Span(0.85, 0.3, 1.0),
    "tail": Span(0.5, 0.01, 1.0),
    "sharpness": Span(3, 1, 20),
    "reader_share": Span(4, 0.5, 20),
    "cache_share": Span(4, 1, 40),
    "split_s": Span(1e-6, 1e-8, 1e-5),
}
_CONVOLUTION = {**GEMM, "layout_share": Span(0.6, 0.1, 1.0)}
_ATTENTION = {
    "launch_s": Span(9e-6, 1e-6, 5e-5),
    "block_s": Span(1e-6, 1e-8, 1e-5),
    "compute_share": Span(0.75, 0.1, 1.0),
    "half_size": Span(20, 1e-2, 500),
    "large_size": Span(1000, 200, 1e4),
    "memory_share": Span(0.8, 0.1, 1.0),
    "cache_share": Span(0.5, 0.05, 1.0),
    "sharpness": Span(2, 1, 6),
    "longest": Span(1, 0.2, 5),
}
_DECODE = {
    "launch_s": Span(9e-6, 1e-6, 5e-5),
    "memory_share": Span(0.85, 0.1, 1.0),
    "reader_share": Span(2, 0.1, 50),
    "sharpness": Span(2, 1, 10),
    "split_s": Span(1e-6, 1e-9, 2e-5),
    "compute_share": Span(0.3, 0.01, 1.0),
    "head_s": Span(1e-9, 1e-11, 1e-6),
    "group_s": Span(1e-7, 1e-9, 2e-5),
    "copy_s": Span(1e-7, 1e-9, 2e-5),
}
_COLLECTIVE = {
    "launch_s": Span(6e-6, 1e-7, 1e-4),
    "hop_s": Span(1e-6, 1e-9, 1e-4),
    "ramp_s": Span(1e-5, 1e-8, 1e-2),
    "share": Span(0.7, 0.1, 1.0),
}
_OWN = "h100_sxm"
"""The device whose kernels fxpart measured itself."""
_PACKS = {"a100_sxm": (0.0, 0.0), "h100_sxm": (1.0, 1.0), "b200": (0.0, 1.0), "l40s": (0.0, 0.0)}
"""`packs_groups` of prompts and of single tokens. FlashAttention 3 packs heads that share keys,
FlashAttention 2, which an L40S runs too, only those of single queries. For TensorRT-LLM's kernels
on a B200 these choices were nearer to its tables."""
INSTALLED_FAMILIES = {"b200": True, "l40s": False}
"""Accelerators whose own family is fitted to the installed package's tables, and whether their
collectives are. Those of L40S are not: without NVLink the rate of a rank falls with their number,
which no curve of one link describes."""


class Fitted(NamedTuple, Generic[_Any]):
    """A curve, and its error on the held-out rows."""

    curve: _Any
    note: str


class _Measured(NamedTuple):
    """The curves of a family, and the device that was measured."""

    device: DeviceSpec
    link_bytes_per_s: float | None
    curves: dict[str, Fitted[Any]]


def _fit(
    spans: dict[str, Span],
    make: Callable[[dict[str, float]], _Any],
    predict: Callable[[_Any, npt.NDArray[np.intp]], FloatArray],
    seconds: FloatArray,
    held_out: npt.NDArray[np.bool_],
) -> Fitted[_Any]:
    """Return the curve nearest to the logarithms of the times, with a loss robust to outliers."""
    from scipy.optimize import least_squares

    rows = np.flatnonzero(~held_out)
    rows = np.sort(np.random.default_rng(_SEED).permutation(rows)[:_MOST_ROWS])
    bounds = np.log([[span.lower for span in spans.values()], [s.upper for s in spans.values()]])

    def curve_of(logs: FloatArray) -> _Any:
        return make(dict(_named(spans, logs)))

    def residual(logs: FloatArray) -> FloatArray:
        log_error: FloatArray = np.log(predict(curve_of(logs), rows)) - np.log(seconds[rows])
        return log_error

    solution = least_squares(
        residual,
        np.log([span.start for span in spans.values()]),
        bounds=(bounds[0], bounds[1]),
        loss="soft_l1",
        f_scale=0.1,
        diff_step=1e-3,
        max_nfev=60,
    )
    curve = make({name: float(f"{number:.4g}") for name, number in _named(spans, solution.x)})
    others = np.flatnonzero(held_out)
    error = np.abs(predict(curve, others) / seconds[others] - 1)
    note = (
        f"{len(others)} rows held out: median {100 * np.median(error):.1f} %,"
        f" p90 {100 * np.quantile(error, 0.9):.1f} %"
    )
    return Fitted(curve, note)


def _named(spans: dict[str, Span], logs: FloatArray) -> list[tuple[str, float]]:
    return list(zip(spans, np.exp(logs).tolist(), strict=True))


def fit_kernels(
    spans: dict[str, Span], kind: Callable[..., _Curve], kernels: Kernels, **fixed: float
) -> Fitted[_Curve]:
    """Return the curve of that kind nearest to the kernels, with some coefficients `fixed`."""

    def make(numbers: dict[str, float]) -> _Curve:
        return kind(**numbers, **fixed)

    def predict(curve: _Curve, rows: npt.NDArray[np.intp]) -> FloatArray:
        seconds: FloatArray = curve.seconds(kernels.calls.only(rows), kernels.rates)
        return seconds

    return _fit(spans, make, predict, kernels.seconds, kernels.held_out)


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")


def _fit_messages(messages: Messages) -> Fitted[CollectiveCurve]:
    def predict(curve: CollectiveCurve, rows: npt.NDArray[np.intp]) -> FloatArray:
        return curve.seconds(messages.wire[rows], messages.ranks[rows], messages.bytes_per_s)

    def make(numbers: dict[str, float]) -> CollectiveCurve:
        return CollectiveCurve(**numbers)

    return _fit(_COLLECTIVE, make, predict, messages.seconds, messages.held_out)


def family(data: Path, prefix: str) -> dict[str, Fitted[Any]]:
    """Return the curves of one device by their keys in the file."""
    curves = _kernel_curves(lambda kind: read_kernels(data, prefix, kind, "bfloat16"), prefix)
    if prefix == _OWN:
        curves |= _own_curves()
    return curves | _collective_curves(lambda kind: read_messages(data, prefix, kind))


def _collective_curves(read: Callable[[str], Messages]) -> dict[str, Fitted[Any]]:
    return {f"collectives.{kind}": _fit_messages(read(kind)) for kind in KINDS.values()}


def _kernel_curves(read: Callable[[str], Kernels], device: str) -> dict[str, Fitted[Any]]:
    """Return the curves of the kernels of each kind; `device` is a key of `_PACKS`."""
    gemm = fit_kernels(GEMM, GemmCurve, read("gemm"))
    (packs_prompts, packs_tokens), launch_s = _PACKS[device], gemm.curve.launch_s
    prompts, tokens = read("context_attention"), read("generation_attention")
    return {
        "gemm": gemm,
        "attention": fit_kernels(
            _ATTENTION,
            AttentionCurve,
            prompts,
            cache_launch_s=launch_s,
            packs_groups=packs_prompts,
        ),
        "decode": fit_kernels(
            _DECODE, DecodeCurve, tokens, cache_launch_s=launch_s, packs_groups=packs_tokens
        ),
    }


def _installed_families() -> dict[str, _Measured]:
    """Return the families of the installed package's tables."""
    families = {}
    for accelerator, has_collectives in INSTALLED_FAMILIES.items():
        link_bytes_per_s = None
        curves = _kernel_curves(partial(read_installed, accelerator), accelerator)
        if has_collectives:
            curves |= _collective_curves(partial(read_installed_messages, accelerator))
            link_bytes_per_s = INSTALLED_LINK_BYTES_PER_S[accelerator]
        device = INSTALLED_DEVICES[accelerator]
        families[accelerator] = _Measured(device, link_bytes_per_s, curves)
    return families


def _own_curves() -> dict[str, Fitted[Any]]:
    """Return the curves of kernels that fxpart measured itself."""
    fixed = {"input_share": _rounded(input_share()), "gradient_work": _rounded(gradient_work())}
    products, convolved = float32_products(), convolutions()
    return {
        "gemm_float32": _fit(
            GEMM,
            lambda numbers: GemmCurve(**numbers),
            products.predicted_s,
            products.seconds,
            products.held_out,
        ),
        "convolution": _fit(
            _CONVOLUTION,
            lambda numbers: ConvolutionCurve(**numbers, **fixed),
            convolved.predicted_s,
            convolved.seconds,
            convolved.held_out,
        ),
    }


_HEAD = """\
# Times of kernels by shape, dtype and device: curves with a few coefficients per kind of kernel,
# fitted to measurements, scaled to other devices by peaks and multiprocessors (fxpart/cost/curves).
# Operators and devices without a curve use the roofline's coefficients below.
# Written by python -m benchmarks.truth.fit_kernels --data FOLDER --output this file, which leaves
# families without measurements unchanged. Curves of collectives hold on links of link_bytes_per_s.
# Measured: ai-dynamo/aiconfigurator, systems data (Apache-2.0), bfloat16: A100 and H100 SXM, and
# B200 and L40S from the package aiconfigurator-core 0.12.0 (vLLM 0.24.0; collectives of B200: NCCL
# 2.29.2). An L40S was measured with operands in its cache: only rows that hardly depend on it count
# (fxpart/cost/curves/tables.py).
# sustained_share: kernels were measured one by one, at clocks that the power limit does not allow
# in a long run of 16-bit products. A100: loops reach 271.2 TFLOP/s (stas00/ml-engineering, MAMF
# table, CC BY-SA), the curve 284.6. H100: 687 after seconds at 700 W, the curve 821
# (benchmarks/gpu/h100.json, "sustained"). B200: fitted to six of Megatron-LM's 24 training steps in
# benchmarks/truth/megatron_b200_time.py. L40S: not measured.
# float32_share: share of the 16-bit attention curve's rate for float32; products of float32 have
# their own curve, gemm_float32. H100: 51.7 of 56.3 TFLOP/s.
# gemm_float32, convolution, bandwidth_shares (of operators that only move data, in 32 and 16 bits):
# measured by fxpart (benchmarks/gpu/h100_kernels.json).
# unaligned_shares: share of the 16-bit peak times sustained_share, for rows whose length is odd or
# twice odd. H100: the vocabularies of GPT-2 (50,257) and BERT (30,522), forward and backward, from
# torch's profiler in the runs of that file ("unaligned").
# torch_attention: null if torch's attention is as fast as the curve, as with cuDNN on an H100 (same
# file, "attention"). Older versions ran FlashAttention-2 with Ampere's instructions:
# {family: a100, compute_share: 0.629} (Luo et al.: Dissecting the Nvidia Hopper GPU architecture,
# arXiv:2402.13499).
name: kernels
source: kernels
# Shares of the peaks, without a curve and without bandwidth_shares. null: 0.7 and 0.8 on devices
# with curves, and on others what their files state (roofline.yaml).
compute_efficiency: null
bandwidth_efficiency: null
op_overhead_s: 2.0e-6  # device time of an almost empty kernel; views cost nothing
# tables: measured kernels to interpolate, a folder of files such as h100_sxm_gemm.parquet, or the
# installed package aiconfigurator.
tables: null
curves:
"""


_NOT_FITTED = {
    "b200": ("    sustained_share: 0.63  # of 1710 TFLOP/s",),
    "a100": ("    sustained_share: 0.953  # 271.2 of 284.6 TFLOP/s",),
    "h100": (
        "    sustained_share: 0.837  # 687 of 821 TFLOP/s",
        "    float32_share: 0.918  # 51.7 of 56.3 TFLOP/s",
        "    torch_attention: null",
        "    unaligned_shares: {odd: 0.147, twice_odd: 0.302}  # 122 and 250 of 828 TFLOP/s",
    ),
}
"""Entries that are not fitted to kernels, by family."""


def _yaml(families: Mapping[str, _Measured]) -> str:
    lines = [_HEAD.rstrip("\n")]
    for name, family in families.items():
        lines.append(f"  {name}:")
        rates = ", ".join(f"{kind}: {rate:.4g}" for kind, rate in _rates(family.device).items())
        lines.append(f"    measured_on: {{{rates}}}")
        if family.link_bytes_per_s:
            lines.append(f"    link_bytes_per_s: {family.link_bytes_per_s:.4g}")
        lines += _NOT_FITTED.get(name, ())
        if name == DEVICES[_OWN].curves:
            lines.append("    bandwidth_shares:")
            lines += [
                f"      {kind}: [{of_32_bits:.3g}, {of_16_bits:.3g}]"
                for kind, (of_32_bits, of_16_bits) in bandwidth_shares().items()
            ]
        within = ""
        for place, fitted in family.curves.items():
            group, _, kind = place.rpartition(".")
            if group and group != within:
                lines.append(f"    {group}:")
            within, indent = group, "      " if group else "    "
            lines.append(f"{indent}{kind}:  # {fitted.note}")
            lines += [f"{indent}  {name}: {value}" for name, value in asdict(fitted.curve).items()]
    return "\n".join(lines) + "\n"


def _other_families(text: str, measured: Container[str]) -> str:
    """Return the lines of the file's families that are not `measured`, with comments above them."""
    text_of_others, pending, is_kept = "", "", False
    for line in text.partition("\ncurves:\n")[2].splitlines(keepends=True):
        if line.startswith("  #"):
            pending += line
            continue
        if not line.startswith("   "):
            is_kept = line.strip().rstrip(":") not in measured
        text_of_others, pending = text_of_others + (pending + line if is_kept else ""), ""
    return text_of_others


def _rates(device: DeviceSpec) -> dict[str, float]:
    return {
        "flops_per_s": device.rate_for("bfloat16"),
        "bytes_per_s": device.memory_bandwidth_bytes_per_s,
        "multiprocessors": device.multiprocessors,
    }


@skipped_without_files("fit_kernels")
def main(arguments: Sequence[str] | None = None) -> None:
    """Fit all curves and write them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.truth.fit_kernels")
    add_data_argument(parser)
    parser.add_argument("--output", type=Path, required=True, help="the YAML file to write")
    options = parser.parse_args(arguments)
    families: dict[str, _Measured] = {}
    for prefix, device in DEVICES.items():
        curves = family(options.data, prefix)
        families[device.curves] = _Measured(device, LINK_BYTES_PER_S[prefix], curves)
    with skipped_without_files(", ".join(INSTALLED_FAMILIES)):
        families |= _installed_families()
    for name, measured in families.items():
        for place, fitted in measured.curves.items():
            print(f"{name} {place}: {fitted.note}")
    before = options.output.read_text() if options.output.exists() else ""
    options.output.write_text(_yaml(families) + _other_families(before, families))


if __name__ == "__main__":
    main()
