"""Mistakes in a user's own ``conf/``: one line that names the file, the key and the value."""

from collections.abc import Sequence
from pathlib import Path

import pytest

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
    ("text", "said"),
    [
        (b"name: [a\n", "is not valid YAML: line 2, column 1: a bracket or quote is not closed"),
        (b"name: a\n\tdtype: b\n", "is not valid YAML: line 2, column 1: a tab; indent with"),
        (b"name: a\nname: b\n", "is not valid YAML: line 2, column 1: key name is there twice"),
        (b"name: a\n---\nname: b\n", "line 2, column 1: a second document begins (---)"),
        (b"name: *a\n", "undefined alias 'a'; put what begins with * in quotes"),
        (b"name: !foo a\n", "line 1, column 7: '!foo' is no tag; leave it out"),
        (b"name: a: b\n", "line 1, column 8: a `: ` where none can stand; mend the"),
        (b"name: \xff\n", "is not UTF-8 text: byte 6 is 0xff; save it as UTF-8"),
        (b"42\n", "holds a single value; write `key: value` lines"),
        (b"# @package a b\nname: a\n", "'@package a b'; write one package, such as"),
        (b"name: ${a\n", "has a reference that cannot be read: no viable"),
        (b"defaults: 3\n", "defaults must be a list, of entries such as `- override /model: gpt2`"),
        (b"defaults:\n- [a]\n", "an entry of defaults must be text or such as"),
        (b"defaults:\n- a: b\n  c: d\n", "must be one choice, such as `- override /model: gpt2`"),
        (b"defaults:\n- a: 3\n", "defaults must name choices as text, got int; put it in quotes"),
    ],
)
def test_a_file_that_cannot_be_read(text: bytes, said: str) -> None:
    Path("conf/model/mine.yaml").write_bytes(text)
    line = line_for(["model=mine"])
    assert line.startswith("conf/model/mine.yaml ")
    assert said in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch_size: x\n", "model.batch_size: x must be a whole number"),
        ("batch: 2\n", "model.batch does not exist; in model, nearest: batch_size"),
        ("name: [a]\n", "model.name: ['a'] must be text"),
        ("name: null\n", "model.name needs a value, null is none"),
        ("config: 3\n", "model.config: 3 must be several values; write config: {name: value}"),
        ("- a\n", "model: ['a'] must be several values; there are: name, architecture"),
        ("model: {name: a}\n", "model.model does not exist; leave out `model:`, all of the file"),
        (f"{GLOBAL}name: a\n", "name does not exist; did you mean model.name?"),
        ("defaults:\n- gpt3\n", "model=gpt3 does not exist; nearest: gpt2"),
        ("defaults:\n- /nosuch: a\n", "/nosuch: a does not exist; what can be chosen, "),
        (
            "defaults:\n- override /mode: single\n",
            "write `override /mode@_global_.mode: ...`",
        ),
        ("defaults:\n- override /mod: single\n", "override /mod overrides nothing; what can be"),
        ("defaults:\n- mine\n", "leads back to itself: model/mine > model/mine"),
        ("defaults:\n- _self_\n- _self_\n", "defaults have _self_ twice; leave one out"),
        ("factory: a\nname: ${nowhere}\n", "model.name=${nowhere} refers to nowhere, which does"),
        ("factory: a\nname: ${oc.env:NO_SUCH}\n", "needs the environment variable NO_SUCH; set"),
        ("factory: a\nname: ${nosuch:3}\n", "asks for ${nosuch:...}, which there is not"),
        ("factory: a\nname: ${model.name}\n", "refers to itself; write a value"),
    ],
)
def test_a_file_with_a_wrong_value(text: str, said: str) -> None:
    Path("conf/model/mine.yaml").write_text(text)
    line = line_for(["model=mine"])
    assert line.startswith("conf/model/mine.yaml: ")
    assert said in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"pools: [{POOL}]", "devices.pools.0.memory_bytes: lots must be a whole number"),
        (
            f"pools: [{POOL.replace('lots', '16gb')}]",
            "memory_bytes: 16gb must be a whole number, such as 16000000000",
        ),
        ("pools: [{coutn: 1}]", "devices.pools.0.coutn does not exist; in devices.pools.0, near"),
        ("pools: {count: 1}", "devices.pools: {'count': 1} must be a list"),
        ("pools: [3]", "devices.pools.0: 3 must be several values; there are: count, name"),
        ("nodes: [a]", "devices.nodes.0: a must be a whole number"),
        ("between_nodes: {bytes: 5}", "in devices.between_nodes, nearest: bytes_per_s"),
        ("saturate_host: often", "devices.saturate_host: often must be true or false"),
    ],
)
def test_a_value_deep_inside(text: str, said: str) -> None:
    Path("conf/devices/mine.yaml").write_text(f"spec: mine\n{text}\n")
    line = line_for(["devices=mine"])
    assert line.startswith("conf/devices/mine.yaml: devices.")
    assert said in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("question: a\n", "with `# @package _global_` as its first line, its keys are those"),
        (f"{GLOBAL}mode: single\n", "is a choice; write it in defaults: `- override /mode: single"),
        (f"{GLOBAL}devices: 4x16gb\n", "in defaults: `- override /devices: 4x16gb`"),
        (f"{GLOBAL}model.batch_size: 3\n", "has a dot; in a file write model: {batch_size: 3}"),
        (f"{GLOBAL}hydra: {{mode: MULTI}}\n", "hydra.mode: MULTI must be RUN or MULTIRUN"),
        (f"{GLOBAL}hydra: {{launcher: ray}}\n", "in defaults: `- override /hydra/launcher: ray`"),
        (f"{GLOBAL}hydra: {{run: 3}}\n", "hydra.run: 3 must be several values; there are: dir"),
        (f"{GLOBAL}defaults:\n- override model: gpt2\n", "write `override /model: ...`"),
        (f"{GLOBAL}defaults:\n- override /model: gpt9\n", "model=gpt9 does not exist; nearest: gp"),
        (f"{GLOBAL}defaults:\n- override /devices: 4x16\n", "size '16' has no unit"),
        (
            f"{GLOBAL}defaults:\n- override /model: gpt2\n- /mode: single\n",
            "must have `override /model: gpt2` after `mode: single`",
        ),
        (
            f"{GLOBAL}defaults:\n- override /model: ${{no}}\n",
            "defaults refer to ${no}, which is no",
        ),
    ],
)
def test_an_experiment_of_ones_own(text: str, said: str) -> None:
    Path("conf/experiment/mine.yaml").write_text(text)
    line = line_for(["experiment=mine"])
    assert line.startswith("conf/experiment/mine.yaml: ")
    assert said in line


def test_what_was_typed_is_not_the_files() -> None:
    Path("conf/experiment/mine.yaml").write_text(f"{GLOBAL}defaults:\n- override /model: gpt2\n")
    assert line_for(["experiment=mine", "model=gpt9"]).startswith("model=gpt9 does not exist;")
    assert line_for(["mode=nosuch"]).startswith("mode=nosuch does not exist;")


def test_a_choice_without_override_is_one_too_many() -> None:
    Path("conf/experiment/mine.yaml").write_text(f"{GLOBAL}defaults:\n- /model: gpt2\n")
    assert line_for(["experiment=mine"]).endswith("and in a file `- override /model: ...`")


def test_a_file_of_another_ending_is_named() -> None:
    Path("conf/model/mine.yml").write_text("name: a\n")
    assert line_for(["model=mine"]).endswith("rename conf/model/mine.yml to mine.yaml")


def test_a_password_in_a_file_is_not_said() -> None:
    uri = "postgresql://me:geheim@host/${nowhere}"
    Path("conf/experiment/mine.yaml").write_text(f"{GLOBAL}tracking: {{uri: '{uri}'}}\n")
    line = line_for(["experiment=mine"])
    assert "tracking.uri=postgresql://host/${nowhere} refers to nowhere" in line
    assert "geheim" not in line
