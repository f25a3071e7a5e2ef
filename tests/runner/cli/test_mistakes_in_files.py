"""Mistakes in a user's own ``conf/``: one line with the key, the value and mostly the file."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.runner.composed import read
from tests.runner.refused import refused_line

GLOBAL = "# @package _global_\n"
POOL = "{count: 1, name: a, memory_bytes: lots, memory_bandwidth_bytes_per_s: 1e9}"


def line_for(overrides: Sequence[str]) -> str:
    return refused_line(lambda: read(*overrides))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for group in ("devices", "experiment", "model"):
        (tmp_path / "conf" / group).mkdir(parents=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"name: [a\n", "line 2, column 1: expected ',' or ']', but got '<stream end>'"),
        (b"name: a\n\tdtype: b\n", "line 2, column 1: found character '\\t' that cannot start any"),
        (b"name: a\nname: b\n", "line 2, column 1: found duplicate key name"),
        (b"name: a\n---\nname: b\n", "line 2, column 1: but found another document"),
        (b"name: *a\n", "line 1, column 7: found undefined alias 'a'"),
        (
            b"name: !foo a\n",
            "line 1, column 7: could not determine a constructor for the tag '!foo'",
        ),
        (b"name: a: b\n", "line 1, column 8: mapping values are not allowed here"),
    ],
)
def test_a_file_that_is_not_yaml(text: bytes, message: str) -> None:
    Path("conf/model/mine.yaml").write_bytes(text)
    assert line_for(["model=mine"]) == f"conf/model/mine.yaml is not valid YAML: {message}" + (
        " token" if "start any" in message else ""
    )


def test_a_file_that_is_not_utf8() -> None:
    Path("conf/model/other.yaml").write_text("name: a\n")
    Path("conf/model/mine.yaml").write_bytes(b"name: \xff\n")
    line = line_for(["model=mine"])
    assert line.startswith(
        "conf/model/mine.yaml is not UTF-8 text ('utf-8' codec can't decode byte"
    )
    assert line.endswith("; save it as UTF-8")


def test_an_unreadable_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("conf/model/mine.yaml").absolute()
    path.write_text("name: a\n")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(OmegaConf, "load", refused)
    assert line_for(["model=mine"]) == "conf/model/mine.yaml cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("42\n", "a file has a single value; write `key: value` lines"),
        ("# @package a b\nname: a\n", "Too many components in '@package a b'"),
        ("name: ${a\n", "name=${a has a reference that cannot be read (no viable alternative at"),
        ("defaults:\n- [a]\n", "Unsupported type in defaults : ListConfig"),
        ("defaults:\n- a: 3\n", "Unsupported item value in defaults : int. Supported: string or"),
        ("defaults:\n- mine\n", "a defaults list leads back to itself; leave that entry out"),
        ("defaults:\n- gpt3\n", "model=gpt3 does not exist; nearest: gpt2"),
        ("factory: a\nname: ${nowhere}\n", "model.name=${nowhere} refers to nowhere, which does"),
        ("factory: a\nname: ${nowhere}\n", "which does not exist; nearest: where"),
        ("factory: a\nname: ${oc.env:NO_SUCH}\n", "needs the environment variable NO_SUCH; set"),
        ("factory: a\nname: ${nosuch:3}\n", "asks for ${nosuch:...}, which does not exist"),
        ("factory: a\nname: ${model.name}\n", "refers to itself; write a value"),
        ("factory: ${.name}\n", "resolved (Missing mandatory value: model.name); correct it"),
        ("factory: a\nname: a\nbatch_size: ${.name}\n", "cannot be resolved (Value 'a' of type"),
    ],
)
def test_a_file_that_hydra_does_not_name(text: str, message: str) -> None:
    Path("conf/model/mine.yaml").write_text(text)
    assert message in line_for(["model=mine"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "defaults: 3\n",
            "Invalid defaults list in 'model/mine', defaults must be a list (got int)",
        ),
        ("defaults:\n- a: b\n  c: d\n", "Too many keys in default item {'a': 'b', 'c': 'd'}"),
        ("batch_size: x\n", "model.batch_size: x must be a whole number"),
        ("batch: 2\n", "model.batch does not exist; in model, nearest: batch_size"),
        ("name: [a]\n", "model.name: ['a'] must be text"),
        ("name: null\n", "model.name: null needs a value, got null"),
        ("config: 3\n", "model.config: 3 must be several values; write model.config={name: value}"),
        ("- a\n", "model: ['a'] must be several values; there are: name, library, architecture"),
        ("model: {name: a}\n", "model.model does not exist; leave out `model:`, all of the file"),
        (f"{GLOBAL}name: a\n", "name does not exist; did you mean model.name?"),
        ("defaults:\n- /nosuch: a\n", "nosuch=a does not exist; --help lists the choices"),
        ("defaults:\n- override /mode: single\n", "write `override /mode@_global_.mode: ...`"),
        ("defaults:\n- override /mod: single\n", "override mod overrides nothing; write `overrid"),
        ("defaults:\n- _self_\n- _self_\n", "Duplicate _self_ defined in model/mine"),
    ],
)
def test_a_file_with_a_wrong_value(text: str, message: str) -> None:
    Path("conf/model/mine.yaml").write_text(text)
    line = line_for(["model=mine"])
    assert line.startswith("conf/model/mine.yaml: ")
    assert message in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"pools: [{POOL}]", "memory_bytes: lots must be a whole number"),
        (
            f"pools: [{POOL.replace('lots', '16gb')}]",
            "memory_bytes: 16gb must be a whole number, such as 16000000000",
        ),
        ("pools: [{coutn: 1}]", "coutn does not exist; nearest: count"),
        ("pools: {count: 1}", "Cannot merge DictConfig with ListConfig"),
        ("pools: [3]", "devices.pools.0: 3 must be several values; there are: count, name"),
        ("nodes: [a]", "devices.nodes.0: a must be a whole number"),
        ("between_nodes: {bytes: 5}", "in devices.between_nodes, nearest: bytes_per_s"),
        ("saturate_host: often", "devices.saturate_host: often must be true or false"),
        ("saturate_host: 2", "devices.saturate_host: 2 must be true or false"),
    ],
)
def test_a_value_deep_inside(text: str, message: str) -> None:
    Path("conf/devices/mine.yaml").write_text(f"spec: mine\n{text}\n")
    line = line_for(["devices=mine"])
    assert line.startswith("conf/devices/mine.yaml: ")
    assert message in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("question: a\n", "with `# @package _global_` as its first line, its keys are those"),
        (f"{GLOBAL}mode: single\n", "is a choice; write it in defaults: `- override /mode: single"),
        (f"{GLOBAL}devices: 4x16gb\n", "in defaults: `- override /devices: 4x16gb`"),
        (
            f"{GLOBAL}model.batch_size: 3\n",
            "has a dot; in a file write model: {batch_size: ...}",
        ),
        (f"{GLOBAL}hydra: {{mode: MULTI}}\n", "hydra.mode: MULTI must be one of RUN, MULTIRUN"),
        (f"{GLOBAL}hydra: {{launcher: ray}}\n", "in defaults: `- override /hydra/launcher: joblib"),
        (
            f"{GLOBAL}hydra: {{launcher: {{jobs: 3}}}}\n",
            "hydra.launcher.jobs does not exist; --cfg",
        ),
        (f"{GLOBAL}hydra: {{run: 3}}\n", "int is not a subclass of RunDir. value: 3"),
        (
            f"{GLOBAL}defaults:\n- override model: gpt2\n",
            "write `override /GROUP: ...` for a",
        ),
        (
            f"{GLOBAL}defaults:\n- override /model: gpt2\n- /mode: single\n",
            "mine.yaml: Override 'model : gpt2' is defined before 'mode: single'; Overrides must",
        ),
    ],
)
def test_a_users_own_experiment(text: str, message: str) -> None:
    Path("conf/experiment/mine.yaml").write_text(text)
    line = line_for(["experiment=mine"])
    assert line.startswith("conf/experiment/mine.yaml: ")
    assert message in line


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("override /model: gpt9", "model=gpt9 does not exist; nearest: gp"),
        ("override /devices: 4x16", "size '16' has no unit"),
        ("override /model: ${no}", "Error resolving interpolation '${no}', possible interpolation"),
        ("override /hydra/launcher: jobli", "hydra/launcher=jobli does not exist; nearest: joblib"),
    ],
)
def test_a_choice_of_an_experiment(entry: str, message: str) -> None:
    Path("conf/experiment/mine.yaml").write_text(f"{GLOBAL}defaults:\n- {entry}\n")
    assert message in line_for(["experiment=mine"])


def test_a_typed_mistake_is_not_blamed_on_the_file() -> None:
    Path("conf/experiment/mine.yaml").write_text(f"{GLOBAL}defaults:\n- override /model: gpt2\n")
    assert line_for(["experiment=mine", "model=gpt9"]).startswith("model=gpt9 does not exist;")
    assert line_for(["experiment=mine", "model.batch_size=x"]).startswith("model.batch_size=x must")
    assert line_for(["mode=nosuch"]).startswith("mode=nosuch does not exist;")


def test_a_choice_without_override_is_a_duplicate() -> None:
    Path("conf/experiment/mine.yaml").write_text(f"{GLOBAL}defaults:\n- /model: gpt2\n")
    assert line_for(["experiment=mine"]).endswith("and in a file `- override /model: ...`")


def test_a_file_with_another_ending_is_named() -> None:
    Path("conf/model/mine.yml").write_text("name: a\n")
    assert line_for(["model=mine"]).endswith("rename conf/model/mine.yml to mine.yaml")


def test_a_password_in_a_file_is_not_shown() -> None:
    uri = "postgresql://me:geheim@host/${nowhere}"
    Path("conf/experiment/mine.yaml").write_text(f"{GLOBAL}tracking: {{uri: '{uri}'}}\n")
    line = line_for(["experiment=mine"])
    assert line.startswith("tracking.uri=postgresql://host/${nowhere} refers to nowhere")
    assert "geheim" not in line
