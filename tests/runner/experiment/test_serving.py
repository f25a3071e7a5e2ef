"""What goes with weights and caches of few bits, and why something does not."""

import pytest

from fxpart.errors import NotApplicableError
from runner.experiment.serving import check_serving
from tests.runner.composed import read


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ("phase=training", "int8 is planned for serving, and for frozen weights of finetune=lora"),
        ("data_parallel=2", "one replica, others serve texts of their own; leave out data_par"),
        ("tensor_parallel=2", "whole layers, whose scales are not split; leave out tensor_par"),
        ("latency=profiled", "a roofline, no kernels of few bits are measured; leave out latency="),
        ("execute=local", "drawn weights are of the model's dtype; leave out execute=local"),
    ],
)
def test_each_refusal_has_its_own_reason(other: str, why: str) -> None:
    with pytest.raises(NotApplicableError, match=why):
        check_serving(read("weights=int8", other))
