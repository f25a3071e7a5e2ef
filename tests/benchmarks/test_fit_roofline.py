"""Shares of the roofline, fitted to planted kernels."""

import numpy as np
import pytest

from benchmarks.truth.fit_roofline import (
    Measured,
    Shares,
    fitted_share,
    lines_of,
    share_of_least_error,
)
from benchmarks.truth.kernel_tables import DEVICES, FAMILIES
from fxpart.core.graph import FloatArray

_DEVICE = DEVICES["a100_sxm"]
_OVERHEAD_S = 5e-6


def _planted(kind: str, compute: float, memory: float, **changed: FloatArray) -> Measured:
    """Return kernels that take the time of a roofline, but short ones twice as long."""
    draw = np.random.default_rng(0)
    flops, moved_bytes = 10 ** draw.uniform(9, 13, 400), 10 ** draw.uniform(5, 9.5, 400)
    held_out, computed = draw.random(400) < 0.5, changed.pop("computed", np.ones(400))
    measured = Measured(
        _DEVICE,
        kind,
        "bfloat16",
        (True, False),
        flops=flops,
        computed=computed,
        moved_bytes=moved_bytes,
        seconds=np.ones(400),
        held_out=held_out,
    )
    computing_s, moving_s = measured.ideal_s
    seconds = _OVERHEAD_S + np.maximum(computing_s / compute, moving_s / memory)
    seconds *= np.where(measured.is_long, 1.0, 2.0)
    return measured._replace(seconds=seconds)


def test_long_kernels_decide_the_planted_shares() -> None:
    measured = _planted("gemm", 0.6, 0.6)
    for computes in (True, False):
        share, n_rows = fitted_share(measured, computes=computes)
        assert share == pytest.approx(0.6)
        assert 20 < n_rows < 200
    errors = Shares(0.6, 0.6).errors(measured)
    assert np.abs(errors[measured.is_long]).max() < 1e-12
    assert errors[~measured.is_long].tolist() == pytest.approx([-0.5] * (~measured.is_long).sum())


def test_masked_scores_are_not_computed() -> None:
    measured = _planted("attention", 0.6, 0.6, computed=np.full(400, 0.5))
    share, _ = fitted_share(measured, computes=True)
    assert share == pytest.approx(0.6)
    every = measured._replace(computed=np.ones(400))
    assert fitted_share(every, computes=True)[0] > 1  # as if all were


def test_the_share_is_the_median_weighted_by_time() -> None:
    # Three long products that reach 0.2, 0.4 and 0.5 of the peak, the last held out.
    peak, shares = _DEVICE.rate_for("bfloat16"), np.array([0.2, 0.4, 0.5])
    seconds = np.array([1.0, 9.0, 100.0]) + _OVERHEAD_S
    held_out = np.array([False, False, True])
    flops = shares * peak * (seconds - _OVERHEAD_S)
    one = np.ones(3)
    measured = Measured(_DEVICE, "gemm", "bfloat16", (True,), flops, one, one, seconds, held_out)
    share, n_rows = fitted_share(measured, computes=True)
    assert (round(share, 9), n_rows) == (0.4, 2)


def test_the_share_of_least_error_is_the_planted_one() -> None:
    measured = _planted("convolution", 0.4, 0.8)
    only_long = measured.only(measured.is_long)
    share, n_rows = share_of_least_error(only_long, 0.8)
    assert share == pytest.approx(0.4)
    assert n_rows == (~only_long.held_out).sum()


def test_a_line_states_what_long_runs_sustain() -> None:
    tokens = _planted("attention", 0.7, 0.5)._replace(fits=(False,))
    prompts = _planted("attention", 0.6, 0.5)._replace(fits=(True,))
    lines = list(lines_of([_planted("gemm", 0.6, 0.6), prompts, tokens]))
    sustained = FAMILIES["a100"].sustained_share
    assert [line[:3] for line in lines] == [
        ["a100_80gb", "gemm", "bfloat16"],
        ["a100_80gb", "gemm", "memory"],
        ["a100_80gb", "attention", "bfloat16"],
        ["a100_80gb", "attention", "memory"],
    ]
    assert lines[0][4:7] == ["0.600", f"{sustained:.3f}", f"{0.6 * sustained:.2f}"]
    assert [line[4] for line in lines] == ["0.600", "0.600", "0.600", "0.500"]
    assert lines[3][5:7] == ["1.000", "0.50"]
    assert [line[8] for line in lines[:2]] == ["0.0", "0.0"]  # of held-out long rows
    assert all(float(line[9]) > 5.0 for line in lines[:2])  # 0.7 of FLOP/s, 0.8 of bandwidth
