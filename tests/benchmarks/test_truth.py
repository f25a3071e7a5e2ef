"""The table of `python -m benchmarks.truth`: errors by hand, and sets without files."""

import math
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.truth import __main__ as command
from benchmarks.truth import fit_kernels, timm_memory, vtrain_calibrated
from benchmarks.truth.row import Row, summary


def _row(predicted: float, measured: float, *, held_out: bool = False) -> Row:
    return Row("a", predicted, measured, "ms", held_out)


class _Set:
    NAME, SOURCE = "planted", "by hand"

    @staticmethod
    def rows(data: Path) -> Iterator[Row]:
        (data / "planted.csv").stat()
        yield _row(1.1, 1)
        yield _row(0.8, 1, held_out=True)
        yield _row(1.5, 1, held_out=True)

    @staticmethod
    def fit_note(data: Path, rows: list[Row]) -> str:
        return f"{len(rows)} rows ask for more of {data.name}"


def test_errors_are_relative_to_the_measurement() -> None:
    rows = [_row(0.8, 1), _row(1.1, 1), _row(2, 1), _row(1, 1)]
    assert summary(rows) == ["4", "15.0", "76.0", "100.0", "32.5", "25.0"]
    assert summary([])[0] == "0"


@pytest.mark.parametrize(("predicted", "measured"), [(1, 0), (float("nan"), 1), (-1, 1)])
def test_a_row_without_an_error_is_refused(predicted: float, measured: float) -> None:
    with pytest.raises(ValueError, match="predicted"):
        _row(predicted, measured)


def test_held_out_rows_have_their_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "SETS", (_Set,))
    (tmp_path / "planted.csv").touch()
    command.main(["--data", str(tmp_path), "--set", "planted", "--worst", "1"])
    printed = capsys.readouterr().out
    note = f"planted: 3 rows ask for more of {tmp_path.name}\n"
    assert note in printed
    report = printed.replace(note, "").splitlines()
    lines = [line.split() for line in report if "planted" in line]
    assert lines[1][:4] == ["planted", "all", "3", "20.0"]
    assert lines[2][:6] == ["planted", "held", "out", "2", "35.0", "47.0"]
    assert lines[3] == ["planted", "a", "1.5", "1", "ms"]


def test_the_picture_has_a_bar_of_each_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SETS", (_Set,))
    (tmp_path / "planted.csv").touch()
    path = tmp_path / "truth.svg"
    command.main(["--data", str(tmp_path), "--picture", str(path)])
    drawn = path.read_text()
    ElementTree.fromstring(drawn)
    assert "planted (3)" in drawn
    # Ratios 0.8, 1.1 and 1.5 on 460 pixels from 1/2 to 2: the median is a bar of 3 around it.
    middle = 310 + 460 * math.log(2.2) / math.log(4) - 1.5
    assert f'x="{middle:.1f}"' in drawn


def test_a_set_without_its_files_is_skipped_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # What fxpart measured itself lies beside the code and is there without a folder; so may be the
    # package of carried_curves.
    own = ("single_gpu", "own_kernels", "carried_curves")
    published = [one.NAME for one in command.SETS if not one.NAME.startswith(own)]
    command.main(["--data", str(tmp_path), "--set", *published])
    printed = capsys.readouterr().out
    assert printed.count("is skipped: there is no") == len(published) == len(command.SETS) - 4


@pytest.mark.parametrize("beside_other_data", [False, True])
def test_commands_of_one_set_say_which_file_is_missing(
    beside_other_data: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = tmp_path / "truth" if beside_other_data else tmp_path
    published.mkdir(exist_ok=True)
    output = tmp_path / "kernels.yaml"
    timm_memory.main(["--data", str(tmp_path)])
    vtrain_calibrated.main(["--data", str(tmp_path)])
    fit_kernels.main(["--data", str(tmp_path), "--output", str(output)])
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(str(published))[0] for line in printed] == [
        "timm training memory is skipped: there is no ",
        "vtrain_calibrated is skipped: there is no ",
        "fit_kernels is skipped: there is no ",
    ]
    assert not output.exists()
