"""The table of memory: its models, predictions for one of them, and its rows."""

from collections import Counter

import pytest
import torch

from benchmarks.memory import HEADS, Case, row, summary
from benchmarks.memory_case import Counted, Predicted, counted, predicted
from benchmarks.memory_cuda import Allocated, allocated
from benchmarks.memory_models import MID_SIZE, SMALL
from fxpart.capture.models.build import build_model
from fxpart.core.optimizer import Optimizer
from fxpart.core.phases import StepOptions
from fxpart.execution.real_step import StepPeak

SPECS = {spec.name: spec for spec in SMALL}


def _case(measured: Allocated | None = None) -> Case:
    prediction = Predicted(1_000_000, 2_000_000, 2_060_000, 4_500_000)
    seen = Counted(2_000_000, 2_000_000, StepPeak(3_000_000, 5_000_000, 4_000_000, 2_000_000))
    return Case("mlp small", prediction, seen, 6_000_000 if measured else None, measured)


def test_each_architecture_has_a_small_and_a_larger_size() -> None:
    assert len(SPECS) >= 8
    assert Counter(s.architecture for s in SMALL) == Counter(s.architecture for s in MID_SIZE)
    for small, larger in zip(SMALL, MID_SIZE, strict=True):
        few, many = (
            sum(p.nbytes for p in dict.fromkeys(build_model(spec).module.parameters()))
            for spec in (small, larger)
        )
        assert few < 15e6
        assert 50e6 < many < 330e6


@pytest.mark.parametrize("name", ["mlp", "dlrm"])
def test_predictions_for_a_small_model_equal_the_counts(name: str) -> None:
    optimizer = Optimizer("adamw")
    prediction = predicted(
        SPECS[name], optimizer, StepOptions(fused_attention=False, fused_dropout=False)
    )
    seen = counted(SPECS[name], optimizer)
    assert prediction.graph_bytes == pytest.approx(seen.graph_bytes, rel=0.02)
    assert prediction.eager_bytes == pytest.approx(seen.eager_bytes, rel=0.02)
    assert prediction.step_bytes == pytest.approx(seen.step.peak_bytes, rel=0.05)
    assert seen.step.resident_bytes > 3 * prediction.weight_bytes


def test_a_row_has_a_cell_for_each_head() -> None:
    cells = dict(zip(HEADS, row(_case()), strict=False))
    assert len(row(_case())) == len(HEADS)
    assert (cells["model"], cells["weights MB"], cells["peak in"]) == (
        "mlp small",
        "1.00",
        "backward",
    )
    assert row(_case())[2:12] == [
        *("2.00", "2.00", "+0.00%", "2.06", "2.00", "+3.00%", "4.50", "5.00", "-10.00%"),
        "backward",
    ]
    assert row(_case())[-4:] == ["-"] * 4


def test_cuda_allocations_fill_the_last_columns() -> None:
    # cuBLAS's 32 MiB for the thread of the backward, and 500,000 bytes that the forward has too.
    measured = Allocated(3_000_000, 32 * 2**20 + 5_500_000, 32 * 2**20 + 500_000)
    assert row(_case(measured))[-4:] == ["2.50", "-17.60%", "5.00", "+20.00%"]
    lines = summary([_case(measured)]).splitlines()[-3:]
    assert lines == [
        "CUDA forward: 0 of 1 within 2%, largest error -17.60%",
        "CUDA step: 0 of 1 within 5%, largest error +20.00%",
        "CUDA: library workspaces of up to 34.05 MB are left out",
    ]


def test_the_summary_counts_predictions_within_the_targets() -> None:
    assert summary([_case()]).splitlines() == [
        "graph: 1 of 1 within 2%, largest error +0.00%",
        "eager: 0 of 1 within 2%, largest error +3.00%",
        "step: 0 of 1 within 5%, largest error -10.00%",
        "CUDA: not measured",
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_allocations_are_close_to_the_prediction() -> None:
    optimizer = Optimizer("adamw", implementation="foreach")
    prediction = predicted(SPECS["mlp"], optimizer, StepOptions())
    measured = allocated(SPECS["mlp"], optimizer, torch.device("cuda"))
    assert measured.forward_bytes - measured.kept_bytes == pytest.approx(
        prediction.eager_bytes, rel=0.1
    )
    assert measured.step_bytes - measured.kept_bytes == pytest.approx(
        prediction.step_bytes, rel=0.1
    )
