"""The command that fits one calibration to several models, measured here."""

import subprocess
import sys
from pathlib import Path

import pytest

from fxpart.cost.calibration import read_calibration
from runner import calibrate
from tests.runner.command import OWN, Done, run

COMMAND = ("-m", "runner.calibrate")
TINY = ["custom", *OWN[1:]]
QUICK = ["--repeats", "1"]


def test_a_calibration_is_written_and_can_be_used(folder: Path) -> None:
    done = run(folder, "made/here.json", *TINY, *QUICK, program=COMMAND)
    assert done.code == 0, done.err
    written = read_calibration(folder / "made" / "here.json")
    assert list((folder / "made").iterdir()) == [folder / "made" / "here.json"]
    # A scale makes the sums of whole graphs correct: there is one.
    assert written.total_errors == pytest.approx([0.0])
    assert set(written.flops_per_s) == {"gemm float32"}
    assert written.device_name in done.out
    (row,) = [line.split() for line in done.out.splitlines() if line.split()[:1] == ["tiny"]]
    name, operators, measured, fitted, error = row
    assert (name, operators) == ("tiny", "12")
    assert float(measured) == pytest.approx(float(fitted), abs=0.011)
    assert abs(float(error)) < 0.06
    used = "latency=calibrated latency.file=made/here.json"
    assert done.out.splitlines()[-1] == f"use it: {used}"
    again = run(folder, *OWN, *used.split(), "devices=2x16gb", "mode=single", "tracking=none")
    assert again.code == 0, again.err


def _main(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["calibrate", *arguments])
    return calibrate.main()


def test_models_are_fitted_together_and_measurements_shared(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    presets = folder / "conf" / "model"
    presets.mkdir(parents=True)
    for width in (64, 256):
        text = f"name: wide{width}\nfactory: tiny:build\nfactory_args: {{width: {width}}}\n"
        (presets / f"wide{width}.yaml").write_text(text)
    arguments = [
        "wide64",
        "wide256",
        *QUICK,
        f"capture.cache_dir={folder}/cache",
        "model.batch_size=8",
    ]
    # Whatever else the machine does meanwhile.
    monkeypatch.setattr("runner.experiment.operator_times._MOST_LOST", 1.0)
    assert _main(["a.json", *arguments], monkeypatch) == 0
    first = capsys.readouterr().out
    named = [line.split()[0] for line in first.splitlines() if line.split()]
    assert [name for name in named if name.startswith("wide")] == ["wide64", "wide256"]
    written = read_calibration(folder / "a.json")
    assert len(written.total_errors) == len(written.held_out_errors) == 2
    worst = max(map(abs, written.held_out_errors))
    assert f"in the median, {worst:.0%} at worst" in first
    # Nothing is measured now: the cached measurements of the main command are read.
    monkeypatch.setattr("fxpart.execution.profiling.api.profile_operators", None)
    assert _main(["b.json", *arguments], monkeypatch) == 0
    assert capsys.readouterr().out == first.replace("a.json", "b.json")
    assert (folder / "a.json").read_bytes() == (folder / "b.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: file, preset; see python -m runner.calibrate --help"),
        (["gpt2", "bert"], "the file comes first, got gpt2; give one that ends in .json"),
        (["a.json", "phase=training"], "no model to measure"),
        (["a.json", "gpt2", "--thread", "x"], "invalid int value"),
        (["a.json", "gpt2", "--fast"], "unrecognized arguments: --fast"),
        (["a.json", "gpt2", "model=bert"], "name the presets without model="),
        (["a.json", "gpt2", "latency=roofline"], "use --device"),
        (["a.json", "gpt3"], "model=gpt3 does not exist; nearest: gpt2"),
        (
            ["a.json", "gpt2", "--repeats", "0"],
            "latency.repeats=0 must be a number from 1",
        ),
        (["a.json", "gpt2", "latency.source=roofline"], "measures nothing"),
        (["a.json", "gpt2", "capture.level=module"], "use capture.level=operator"),
        (["a.json", "gpt2", "modle.batch_size=2"], "modle"),
        (["folder.json", "gpt2"], "folder.json is a folder"),
        (["/proc/here.json", "gpt2"], "cannot write /proc/here.json: No such file"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.json").mkdir()
    code = _main(arguments, monkeypatch)
    done = Done(code, *capsys.readouterr())
    assert (done.code, done.out) == (2, "")
    assert message in done.error
    assert [path.name for path in tmp_path.iterdir()] == ["folder.json"]


def test_a_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(calibrate, "parsed", broken)
    with pytest.raises(ZeroDivisionError):
        calibrate.main()


def test_options_and_overrides_may_come_in_any_order() -> None:
    arguments = [
        "a.json",
        "gpt2",
        "x=1",
        "--threads",
        "2",
        "bert",
        "~y",
        "gpt2",
        "--device",
        "cuda",
    ]
    options = calibrate.parsed(arguments)
    assert options.presets == ("gpt2", "bert")
    assert options.overrides == (
        "latency=profiled",
        "latency.device=cuda",
        "latency.threads=2",
        "latency.repeats=5",
        "x=1",
        "~y",
    )


def test_help_needs_no_torch() -> None:
    code = (
        "import runpy, sys\nsys.argv = ['calibrate', '--help']\n"
        "try:\n    runpy.run_module('runner.calibrate', run_name='__main__')\n"
        "except SystemExit:\n    pass\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    usage, loaded = done.stdout.splitlines()[0], done.stdout.splitlines()[-1]
    assert "FILE PRESET" in usage
    assert "'torch'" not in loaded
    assert "'fxpart'" in loaded
