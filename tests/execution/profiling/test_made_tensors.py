"""Created tensors: the requested layout, and values that operators accept."""

import pytest
import torch
from torch import Tensor

from fxpart.execution.profiling.tensors import made_value, made_weight

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]


def _like(layout: str, dtype: torch.dtype) -> Tensor:
    base = torch.empty(3, 4, dtype=dtype, device="meta")
    return {
        "dense": base,
        "transposed": base.t(),
        "expanded": base[:, None].expand(3, 5, 4),
        "empty": base[:0],
        "scalar": base[0, 0],
        "steps": base[:, ::2],
    }[layout]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["dense", "transposed", "expanded", "empty", "scalar", "steps"])
def test_layout_and_dtype_are_as_requested(layout: str, dtype: torch.dtype) -> None:
    like = _like(layout, dtype)
    for tensor in (made_value(like, CPU), made_weight(like, CPU)):
        assert tensor.shape == like.shape
        assert tensor.stride() == like.stride()
        assert tensor.dtype == dtype
        assert tensor.device == CPU


def test_values_have_usual_magnitudes_and_are_deterministic() -> None:
    like = torch.empty(1500, 1000, device="meta")  # more than one block of random numbers
    tensor = made_value(like, CPU)
    assert torch.equal(tensor, made_value(like, CPU))
    assert abs(float(tensor.mean())) < 0.01
    assert abs(float(tensor.std()) - 1) < 0.01
    assert int((tensor == 0).sum()) == 0


def test_a_matrix_preserves_the_magnitude_of_its_operand() -> None:
    weight = made_weight(torch.empty(512, 256, device="meta"), CPU)
    x = made_value(torch.empty(64, 256, device="meta"), CPU)
    assert 0.5 < float((x @ weight.t()).std()) < 2


def test_vectors_are_near_one_positions_count_and_masks_are_true() -> None:
    vector = made_weight(torch.empty(1000, device="meta"), CPU)
    assert float(vector.min()) > 0.3
    positions = made_weight(torch.empty(2, 5, dtype=torch.int64, device="meta"), CPU)
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 2
    bytes_ = made_weight(torch.empty(300, dtype=torch.int8, device="meta"), CPU)
    assert bytes_.min() >= 0
    assert made_weight(torch.empty(2, 2, dtype=torch.bool, device="meta"), CPU).all()
    whole = made_value(torch.empty(1000, dtype=torch.int64, device="meta"), CPU)
    assert int(whole.min()) >= 0
