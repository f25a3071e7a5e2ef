import pytest

from runner.arguments import hydra_arguments


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        (["mode=single"], ["mode=single"]),
        (["mode=a,b", "-m", "devices=4x16gb"], ["-m", "mode=a,b", "devices=4x16gb"]),
        (["--multirun", "mode=a,b"], ["--multirun", "mode=a,b"]),
        (["mode=a,b", "-v", "-m"], ["-m", "mode=a,b", "verbose=true"]),
        (["--verbose"], ["verbose=true"]),
        (["--cfg", "job", "mode=single"], ["--cfg", "job", "mode=single"]),
        (["rerun=abc", "hydra.run.dir=x"], ["rerun=abc", "hydra.run.dir=x"]),
    ],
)
def test_flags_stand_anywhere(typed: list[str], given: list[str]) -> None:
    assert hydra_arguments(typed) == given


def test_a_rerun_gets_a_folder_that_says_so() -> None:
    *_, folder = hydra_arguments(["rerun=0123456789abcdef"])
    assert folder.startswith("hydra.run.dir=outputs/runs/${now:")
    assert folder.endswith("_rerun_01234567")
