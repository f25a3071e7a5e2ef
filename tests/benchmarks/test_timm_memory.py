"""Which published figures are of a step, and the values fitted to them."""

from pathlib import Path

import pytest

from benchmarks.truth.row import Row
from benchmarks.truth.timm_memory import (
    PROCESS_MIB,
    Measured,
    fitted_rows,
    measured,
    process_mib,
)

FILE = "model,batch,max_gpu_memory_mib\nb,16,300\na,8,200\nb,8,100\na,16,210\n"


def test_the_file_is_read_model_by_model(tmp_path: Path) -> None:
    (tmp_path / "timm_training_memory.csv").write_text(FILE)
    models = measured(tmp_path)
    assert models == [Measured("a", {8: 200, 16: 210}), Measured("b", {16: 300, 8: 100})]
    assert measured(tmp_path, 1) in ([models[0]], [models[1]])
    assert measured(tmp_path, 5) == models
    with pytest.raises(FileNotFoundError):
        measured(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("mib", "kept"),
    [
        ({8: 10, 16: 20, 32: 40}, [8, 16, 32]),
        ({8: 10, 16: 20, 32: 12}, [8, 16]),
        ({8: 4045, 16: 4029, 32: 4045}, []),
        ({8: 20_000, 16: 36_100, 32: 40_000}, [8]),
        ({8: 9379, 16: 12361, 32: 4239}, [8, 16]),
    ],
)
def test_figures_count_while_they_grow_below_the_limit(
    mib: dict[int, int], kept: list[int]
) -> None:
    assert list(Measured("m", mib).step_figures) == kept


def test_half_of_the_models_are_held_out_independently_of_the_others() -> None:
    held_out = [Measured(f"resnet{n}", {}).is_held_out for n in range(200)]
    assert 70 < sum(held_out) < 130
    assert Measured("resnet50", {8: 1}).is_held_out == held_out[50]


def test_the_process_memory_is_the_median_of_the_remainders() -> None:
    def row(lacking: float) -> Row:
        return Row("m", 3000 - lacking, 3000, "MiB", held_out=False)

    taken = process_mib([row(0)])
    assert process_mib([row(-5), row(10), row(40)]) == taken + 10


def test_models_are_predicted_by_their_steps(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("timm")
    models = [
        Measured("test_vit", {8: 1700, 16: 1800, 32: 1900}),
        Measured("no_such_net", {8: 1700, 16: 1800}),
        Measured("test_convnext", {8: 1700, 16: 1700}),
    ]
    rows = list(fitted_rows(models, None))
    assert [row.held_out for row in rows] == [models[0].is_held_out] * 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("no_such_net is left out: ")
    assert lines[1].startswith("test_convnext is left out: no figure grows")
    assert lines[2:] == ["2 of 3 models are left out"]
    predicted = [row.predicted for row in rows]
    # The smallest model takes little besides the process, and more for a larger batch.
    assert predicted == sorted(predicted)
    assert PROCESS_MIB < predicted[0] < predicted[-1] < PROCESS_MIB * 1.2
