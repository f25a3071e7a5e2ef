"""Kernels measured on an H100, beside the shipped curves that are fitted to half of them."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.truth import own_kernels
from benchmarks.truth.kernel_tables import FAMILIES
from fxpart.cost.curves.gemm import Rates


def test_held_out_kernels_are_predicted() -> None:
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in own_kernels.rows(Path()):
        if row.held_out:
            errors[row.label.startswith("convolution")].append(abs(row.error))
    assert len(errors[False]) > 150
    assert np.median(errors[False]) < 0.06
    assert len(errors[True]) > 50
    assert np.median(errors[True]) < 0.2


def test_products_of_float32_are_slower_than_a_share_of_those_of_16_bits() -> None:
    """512 tokens of BERT-Large: 128 tiles of 64 x 64 leave most of an H100 idle."""
    family = FAMILIES["h100"]
    products = own_kernels.float32_products()
    (row,) = (
        i for i, label in enumerate(products.labels) if label.endswith("linear 1 512 1024 1024")
    )
    assert family.gemm_float32 is not None
    predicted_s = products.predicted_s(family.gemm_float32, np.array([row]))[0]
    assert predicted_s == pytest.approx(products.seconds[row], rel=0.25)
    alone = type(products.products)(*(column[[row]] for column in products.products))
    rates = Rates(67e12 * family.float32_share, 3.35e12, 132)
    assert family.gemm.seconds(alone, rates)[0] < 0.6 * products.seconds[row]


def test_shipped_shares_of_bandwidth_are_those_measured() -> None:
    shipped = FAMILIES["h100"].bandwidth_shares
    assert shipped is not None
    measured = own_kernels.bandwidth_shares()
    assert list(shipped) == list(measured)
    for kind, shares in measured.items():
        assert shipped[kind] == pytest.approx(shares, rel=5e-3)
    # ReLU in float32: 2 GiB in 715 us, of 3.35 TB/s.
    assert shipped["pointwise"][0] == pytest.approx(2 * 2**30 / 715e-6 / 3.35e12, rel=0.01)


def test_a_gradient_of_a_convolution_takes_longer_than_its_forward() -> None:
    curve = FAMILIES["h100"].convolution
    assert curve is not None
    assert curve.gradient_work == pytest.approx(own_kernels.gradient_work(), rel=5e-3)
    assert 1 < curve.gradient_work < 1.5
