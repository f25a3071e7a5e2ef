"""Which errors are the user's, and what is said of them."""

from collections.abc import Callable
from pathlib import Path

from hydra.errors import HydraException

from fxpart.errors import SpecError
from runner.cli.mistakes import explain
from tests.runner.composed import composed


def caught(act: Callable[[], object]) -> Exception:
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def _mistake() -> None:
    raise SpecError("size 3\nis odd")


def _bug_while_handling() -> None:
    try:
        _mistake()
    except SpecError:
        [].pop()


def _wrapped() -> None:
    try:
        _mistake()
    except SpecError as error:
        raise RuntimeError("no") from error


def _hydras() -> None:
    try:
        _mistake()
    except SpecError:
        raise HydraException("Error in config")  # noqa: B904 - as Hydra does


def test_a_mistake_is_said_in_one_line() -> None:
    assert explain(caught(_mistake)) == "size 3 is odd"
    assert explain(caught(_wrapped)) == "size 3 is odd"
    assert explain(caught(_hydras)) == "size 3 is odd"


def test_a_bug_is_not_the_users_whatever_was_under_way() -> None:
    assert explain(caught(_bug_while_handling)) is None


def test_a_folder_is_the_users_only_where_hydra_makes_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ours = caught((tmp_path / "file" / "x").mkdir)
    assert explain(ours) is None
    namespace: dict[str, object] = {"__name__": "hydra.core.utils", "path": tmp_path / "file" / "x"}
    hydras = caught(lambda: exec("path.mkdir()", namespace))
    assert explain(hydras) == (
        f"cannot write {tmp_path}/file/x: Not a directory; choose another folder with"
        " hydra.run.dir= or, for a sweep, hydra.sweep.dir="
    )


def test_a_value_inside_of_null_is_the_users() -> None:
    line = explain(caught(lambda: composed("devices.between_nodes.latency_s=1")))
    assert line == (
        "devices.between_nodes is null, so devices.between_nodes.latency_s cannot be set;"
        " give all of it: devices.between_nodes={latency_s: ...}"
    )


def test_a_key_that_a_launcher_does_not_have() -> None:
    line = explain(caught(lambda: composed("hydra/launcher=joblib", "hydra.launcher.jobs=2")))
    assert line == (
        "hydra.launcher.jobs does not exist; --cfg hydra --package hydra.launcher shows what does"
    )


def test_a_launcher_that_does_not_exist() -> None:
    line = explain(caught(lambda: composed("hydra/launcher=jobli")))
    assert line == "hydra/launcher=jobli does not exist; nearest: joblib"
