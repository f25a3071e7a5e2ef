import pytest
import torch

from fxpart.errors import CaptureError
from fxpart.torch_compat.memory.tensors import storage_number


def test_views_share_a_storage_and_copies_do_not() -> None:
    tensor = torch.zeros(4)
    assert storage_number(tensor) == storage_number(tensor[1:])
    assert storage_number(tensor) != storage_number(tensor.clone())


def test_a_tensor_without_a_storage_is_refused() -> None:
    with pytest.raises(CaptureError, match="no storage to count; capture the model with dense"):
        storage_number(torch.zeros(2).to_mkldnn())
