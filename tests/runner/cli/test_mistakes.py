"""Which errors are the user's, and the line printed for each; errors in files are tested apart."""

from collections.abc import Callable

import pytest
from hydra.errors import ConfigCompositionException, HydraException

from fxpart.errors import SpecError
from runner.cli.mistakes import explain, unreadable_override
from tests.runner.composed import composed_by_hydra as composed
from tests.runner.refused import refused_line


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


def test_a_mistake_is_one_line() -> None:
    assert explain(caught(_mistake)) == "size 3 is odd"
    assert explain(caught(_wrapped)) == "size 3 is odd"
    assert explain(caught(_hydras)) == "size 3 is odd"


def test_a_bug_is_no_mistake_of_the_user_whatever_was_under_way() -> None:
    assert explain(caught(_bug_while_handling)) is None


def test_errors_only_hydra_words_keep_its_words() -> None:
    assert explain(HydraException("No way.\n  See http://x\n  Or so;")) == "No way; Or so"
    nothing = "Hydra refuses this; HYDRA_FULL_ERROR=1 shows where"
    assert explain(ConfigCompositionException("")) == nothing
    for text in ("", "it is odd"):
        error = ConfigCompositionException(text)
        error.__cause__ = ZeroDivisionError(text)
        line = f"ZeroDivisionError{text and ': '}{text}; HYDRA_FULL_ERROR=1 shows where"
        assert explain(error) == line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("gpt2", "gpt2 has no =; write key=value, such as mode=kl_based"),
        (
            "devices=range(1",
            "devices=range(1 cannot be read: no viable alternative at input 'range(1'; correct "
            "it, or quote it: 'devices=\"range(1\"'",
        ),
        (
            "model.config={a:[1}",
            ("cannot be read: no viable alternative at input '{a:[1}'; correct it"),
        ),
        ("mode=a)", "mode=a) cannot be read: extraneous input ')'; correct it, or quote it"),
        (
            "model.name='a",
            "model.name='a cannot be read: token recognition error at: ''a'",
        ),
        ("devices=2x16gb,,4x16gb", "cannot be read: extraneous input ','; correct it, or quote it"),
        (
            "reserve=none,",
            ("reserve=none, cannot be read: it ends too early; correct it, or quote it"),
        ),
        ("model.name=a:b=c", "cannot be read: mismatched input '='; correct it, or quote it"),
        ("model.batch_size=rang(1,3)", "there is no function rang; nearest: range"),
        ("model.batch_size=range()", "evaluating 'range()': missing a required argument: 'start'"),
        ("resume=maybe", "resume=maybe must be true or false"),
        ("sequence_parallel=2", "sequence_parallel=2 must be true or false"),
        ("devices.saturate_host=1", "devices.saturate_host=1 must be true or false"),
        ("zip=devices", "zip=devices must be a list, such as zip=[mode,devices]"),
        ("model.batch_size=x", "model.batch_size=x must be a whole number"),
        ("context_len=1e9", "=1e9 must be a whole number without point or exponent: 1000000000"),
        ("devices.pools.0.memory_bytes=2gb", "=2gb must be a whole number, such as 2000000000"),
        ("latency.op_overhead_s=x", "latency.op_overhead_s=x must be a number"),
        ("model.name=[1]", "model.name=[1] must be text"),
        ("model.batch_size=null", "model.batch_size=null needs a value, got null"),
        ("devices.nodes=[0,b]", "devices.nodes=[0,b]: b must be a whole number"),
        (
            "devices.pools=[3]",
            "devices.pools=[3]: 3 must be several values; there are: count, name",
        ),
        ("devices.pools=[{coutn: 1}]", "coutn does not exist; nearest: count"),
        ("all_reduce=3", "all_reduce=3 must be several values; there are: bucket_bytes, "),
        ("model.config=3", "must be several values; write model.config={name: value}"),
        ("hydra.mode=MULTI", "hydra.mode=MULTI must be one of RUN, MULTIRUN"),
        ("model.batch=3", "model.batch does not exist; in model, nearest: batch_size"),
        ("modle.name=a", "modle does not exist; nearest: mode, model"),
        ("saturate_host=true", "saturate_host does not exist; did you mean devices.saturate_host?"),
        ("~model.name", "~model.name cannot be deleted; set another value"),
        ("~nosuch", "~nosuch: nosuch does not exist; there are: "),
        ("~where", "Could not delete from config. 'where' does not exist"),
    ],
)
def test_a_wrong_value_or_key_is_refused(override: str, message: str) -> None:
    assert message in refused_line(lambda: composed(override))


def test_only_a_whole_number_is_written_out_in_digits() -> None:
    line = refused_line(lambda: composed("sequence_parallel=1.0"))
    assert line.endswith("sequence_parallel=1.0 must be true or false")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "+batch_sweep=3",
            "An item is already at 'batch_sweep'; Either remove + prefix: 'batch_sw",
        ),
        ("+model=gpt2", "model is chosen twice; write model=..., without +, and in a file"),
        ("++model=gpt2", "force-add of config groups is not supported: '++model=gpt2'"),
        ("~model", "~model: a run needs one; choose another, model=..."),
        ("model=[gpt2]", "model=[gpt2]: choose one, not a list; write model=gpt2"),
        ("mode=[", "mode=[: choose one, not a list; give a name, which --help lists"),
        ("model=null", "model=null names nothing; give a name, which --help lists"),
        (f"latency.op_overhead_s=1{'0' * 400}", "an integer is larger than 1.8e308, the largest"),
        (f"latency.op_overhead_s=1{'0' * 5000}", "an integer is larger than 1.8e308, the largest"),
        ("mode@x=single", "Could not override 'mode@x'; Did you mean to override mode?"),
        ("devices=${no}", "Error resolving interpolation '${no}', possible interpolation keys: "),
        ("mode=single,kl_based", "mode=single,kl_based has several values; add -m for a sweep"),
        ("model.batch_size=range(1,3)", "range(1,3) has several values; add -m for a sweep"),
        ("hydra/launcher=jobli", "hydra/launcher=jobli does not exist; nearest: joblib"),
        ("hydra.launcher.jobs=2", "does not exist; --cfg hydra --package hydra.launcher shows"),
        ("hydra.searchpath=x", "hydra.searchpath must be a list of strings. Got: x"),
        (
            "hydra.job.env_copy=[NO_SUCH]",
            "the environment has no NO_SUCH, which hydra.job.env_copy",
        ),
    ],
)
def test_a_wrong_choice_or_setting_is_refused(override: str, message: str) -> None:
    assert message in refused_line(lambda: composed(override))


@pytest.mark.parametrize("override", ["latency_s=1", "latency_s=x"])
def test_null_sections_are_set_another_way(override: str) -> None:
    key, _, value = override.partition("=")
    for typed in (f"between_nodes.{override}", f"between_nodes={{{key}: {value}}}"):
        line = refused_line(lambda typed=typed: composed(f"devices.{typed}"))  # type: ignore[misc]
        assert line.startswith("a section that is null has no values to set; set them in a file")
    far = composed("devices=2x_dgx_h100", "devices.between_nodes.latency_s=1").devices.between_nodes
    assert far.latency_s == 1


def test_a_password_is_not_shown() -> None:
    override = "tracking.uri=postgresql://me:wo#rd@host/runs"
    line = unreadable_override(override, "LexerNoViableAltException: ...\nerror at: 'me:wo#rd'")
    assert line.startswith(
        "tracking.uri=postgresql://host/runs cannot be read; correct it, or quote"
    )
    assert "rd@" not in line
    assert "wo#" not in line


@pytest.mark.parametrize(
    "value",
    ["sort({uri},1)", "int({uri})", "range({uri},2)", "[{uri}]", "{uri}:(", "'{uri}${{no}}'"],
)
def test_a_password_in_a_value_is_not_shown(value: str) -> None:
    override = f"tracking.uri={value.format(uri='postgresql://me:geheim@host/runs')}"

    def read_uri() -> str:
        return str(composed(override).tracking.uri)

    line = refused_line(read_uri)
    assert "geheim" not in line
    assert "tracking.uri" in line
