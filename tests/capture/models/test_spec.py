"""Refusals of a spec, and keys that distinguish models with different graphs."""

import json
import subprocess
import sys
from collections import OrderedDict
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from fxpart.capture.models.build import factory_model
from fxpart.capture.models.spec import ModelSpec
from fxpart.errors import SpecError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working directory, and forget its modules afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return tmp_path


def llama(**fields: Any) -> ModelSpec:  # noqa: ANN401
    return ModelSpec(**{"name": "m", "architecture": "LlamaForCausalLM", **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": None}, "neither is set"),
        ({"factory": "a.b:c"}, "both are set"),
        ({"batch_size": 0}, "model.batch_size=0 must be"),
        ({"batch_size": 2**63}, "model.batch_size=9223372036854775808 must be at most 922"),
        ({"batch_size": True}, "batch_size=True must be"),
        ({"batch_size": 1.5}, "batch_size=1.5 must be"),
        ({"seq_len": 0}, "seq_len=0 must be .* or null"),
        ({"dtype": "float8"}, "dtype=float8 is not known; nearest: float"),
        ({"dtype": "bf16"}, "nearest: bfloat16"),
        ({"autocast": "float32"}, "model.autocast=float32 is not known; .*float16"),
        ({"autocast": "bfloat16", "step": "decode"}, "got phase=decode; set model.dtype=bfloat16"),
        ({"autocast": "bfloat16", "engine": "megatron"}, "got engine=megatron; set"),
        ({"factory_args": {"a": 1}}, "factory_args need a factory"),
        ({"config": {"a": [1, object()]}}, r"config\.a\[1\] is a object"),
        ({"architecture": None, "factory": "a.b:c", "config": {"a": 1}}, "needs an architecture"),
        ({"depends_on": ["a"]}, "depends_on needs a factory"),
        ({"architecture": None, "factory": "a.b:c", "depends_on": "a"}, "must be a list of files"),
        ({"architecture": None, "factory": "a.b:c", "depends_on": [1]}, "must be a list of files"),
        ({"architecture": None, "factory": "a.b.c"}, "not of the form"),
        ({"architecture": None, "factory": "a..b:c"}, "not of the form"),
        ({"architecture": None, "factory": "a:"}, "not of the form"),
    ],
)
def test_invalid_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        llama(**fields)
    assert "\n" not in str(caught.value)


def test_the_key_of_an_architecture_has_every_field_and_the_version_of_transformers() -> None:
    config = OrderedDict(sizes=(1, 2), inner=MappingProxyType({"x": None}))
    assert llama(config=config, batch_size=3, seq_len=7, dtype="bfloat16").key() == {
        "architecture": "LlamaForCausalLM",
        "config": {"sizes": [1, 2], "inner": {"x": None}},
        "factory": None,
        "factory_args": {},
        "batch_size": 3,
        "seq_len": 7,
        "step": None,
        "cache_len": None,
        "loss": None,
        "dtype": "bfloat16",
        "transformers": version("transformers"),
    }


def test_a_key_survives_json() -> None:
    key = llama(config={"hidden_sizes": (1, 2), "eps": 1e-5}).key()
    assert json.loads(json.dumps(key)) == key


def test_a_spec_does_not_change_with_the_mapping_it_was_created_from() -> None:
    config = {"hidden_size": 64}
    spec = llama(config=config)
    config["hidden_size"] = 65
    assert spec.config == {"hidden_size": 64}


def test_a_key_without_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpart.capture.models.spec.installed_version", lambda _: None)
    with pytest.raises(SpecError, match="pip install transformers"):
        llama().key()


def test_the_key_of_a_factory_follows_its_source_without_running_it(folder: Path) -> None:
    source = folder / "never_run.py"
    source.write_text("raise RuntimeError('run')\n")
    spec = ModelSpec("m", factory="never_run:f")
    before = spec.key()
    assert before == spec.key()
    # The factory may use transformers; what it uses is unknown before it runs.
    assert before["transformers"] == version("transformers")
    assert before == ModelSpec("another name", factory="never_run:f").key()
    source.write_text("raise RuntimeError('run again')\n")
    assert spec.key() != before
    source.write_text("raise RuntimeError('run')\n")
    assert spec.key() == before


def test_comments_and_docstrings_of_a_factory_are_ignored(folder: Path) -> None:
    source = folder / "annotated.py"
    source.write_text("def f(batch_size, dtype):\n    return 1\n")
    spec = ModelSpec("m", factory="annotated:f")
    before = spec.key()
    source.write_text(
        '"""Models."""\n# of mine\n'
        'def f(batch_size,\n      dtype):\n    """Return 1."""\n    return 1\n'
    )
    assert spec.key() == before
    source.write_text("def f(batch_size, dtype):\n    return 2\n")
    assert spec.key() != before


def test_the_key_of_a_factory_follows_the_files_that_it_depends_on(folder: Path) -> None:
    for name, text in (("nets.py", ""), ("a.json", "1"), ("b.json", "2"), ("other.json", "1")):
        (folder / name).write_text(text)
    (folder / "plugin.py").write_text("WIDTH = 1\n")

    def key(*files: str) -> dict[str, object]:
        return ModelSpec("m", factory="nets:f", depends_on=files).key()

    before = key("a.json", "plugin.py")
    assert before == key(str(folder / "a.json"), "plugin.py") == key("other.json", "plugin.py")
    others = [key(), key("a.json"), key("a.json", "b.json"), key("b.json", "a.json")]
    (folder / "plugin.py").write_text("WIDTH = 1  # of each layer\n")
    assert key("a.json", "plugin.py") == before
    (folder / "plugin.py").write_text("WIDTH = 2\n")
    others.append(key("a.json", "plugin.py"))
    (folder / "a.json").write_text("3")
    others.append(key("a.json", "plugin.py"))
    assert len({str(other["factory_sha256"]) for other in [before, *others]}) == 7


def test_a_module_may_keep_the_content_of_a_file_at_its_import(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "keeps.py").write_text(
        "from pathlib import Path\nfrom torch import nn\nWIDTH = int(Path('width').read_text())\n"
        "def f(batch_size, dtype):\n    return nn.Linear(WIDTH, 1), ()\n"
    )
    (folder / "width").write_text("4")
    spec = ModelSpec("m", factory="keeps:f", depends_on=("width",))
    first = spec.key()
    factory_model(spec)
    assert spec.key() == first
    (folder / "width").write_text("8")
    mixed = spec.key()
    monkeypatch.delitem(sys.modules, "keeps")
    assert len({str(key["factory_sha256"]) for key in (first, mixed, spec.key())}) == 3


@pytest.mark.parametrize(("name", "why"), [("gone.json", "No such file"), ("data", "Is a dir")])
def test_an_unreadable_file_is_reported_in_one_line(folder: Path, name: str, why: str) -> None:
    (folder / "nets.py").touch()
    (folder / "data").mkdir()
    with pytest.raises(
        SpecError, match=rf"model\.depends_on: cannot read {name} \({why}.*\)"
    ) as error:
        ModelSpec("m", factory="nets:f", depends_on=(name,)).key()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("files", "factory", "message"),
    [
        (["my_model.py"], "my_modle:f", "no module my_modle; nearest: my_model; "),
        ([], "nowhere_at_all:f", "no module nowhere_at_all; start from the folder"),
        (["pkg_a/__init__.py", "pkg_a/nets.py"], "pkg_a.net:f", "pkg_a.net; nearest: nets"),
        (["pkg_b.py"], "pkg_b.net:f", "no module pkg_b.net"),
        ([], "sys:f", "module sys has no source file"),
    ],
)
def test_a_missing_module_is_refused(
    folder: Path, files: list[str], factory: str, message: str
) -> None:
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).touch()
    with pytest.raises(SpecError, match=message) as caught:
        ModelSpec("m", factory=factory).key()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("package", "source", "message"),
    [
        ("broken_a", "import no_such_dependency", "No module named 'no_such_dependency'"),
        ("broken_b", "1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_package_that_does_not_import_is_refused(
    folder: Path, package: str, source: str, message: str
) -> None:
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(source)
    (folder / package / "net.py").touch()
    with pytest.raises(
        SpecError, match=rf"importing it fails \({package}/__init__\.py:1\): .*{message}"
    ):
        ModelSpec("m", factory=f"{package}.net:f").key()


def test_a_key_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from fxpart.capture.models.spec import ModelSpec\n"
        "ModelSpec('m', architecture='LlamaForCausalLM').key()\n"
        "ModelSpec('m', factory='fxpart.capture.models.dlrm:dlrm').key()\n"
        "print({'torch', 'transformers', 'hydra', 'mlflow'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")
